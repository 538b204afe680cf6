"""Gradients in fewer bytes: what schemes send, who adds sparse rows, and a choice on a timeline."""
