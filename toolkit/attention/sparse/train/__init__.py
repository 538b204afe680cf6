"""Attention that is trained sparse: what selects learns with the model, one file per method."""
