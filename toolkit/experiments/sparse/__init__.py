"""Sparse attention on a model that finds needles: `toolkit experiment sparse`."""
