"""Execution of a search: batches, candidates, checks, files."""
