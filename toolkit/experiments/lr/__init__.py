"""Learning rates: which way to come by one is best at equal gradient evaluations."""

from toolkit.experiments.lr.experiment import EXPERIMENT

__all__ = ["EXPERIMENT"]
