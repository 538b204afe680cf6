"""Checkpoints: what is written and read, what belongs to which run, who may write."""
