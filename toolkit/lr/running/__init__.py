"""Runs what a search asks for: batches, candidates, what is checked before and kept on disk."""
