"""Learning rates: which way of choosing one is best at equal gradient evaluations."""

from toolkit.experiments.lr.experiment import EXPERIMENT

__all__ = ["EXPERIMENT"]
