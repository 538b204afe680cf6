"""How a learning rate is chosen from its probes: `toolkit experiment peaks`."""

from toolkit.experiments.peaks.experiment import EXPERIMENT

__all__ = ["EXPERIMENT"]
