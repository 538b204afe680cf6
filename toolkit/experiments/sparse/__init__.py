"""Sparse attention on a model that finds needles: `toolkit experiment sparse`."""

from toolkit.experiments.sparse.experiment import EXPERIMENT

__all__ = ["EXPERIMENT"]
