"""A small DeepSeek with its caches cut over devices: `toolkit experiment latent`."""

from toolkit.experiments.latent.experiment import EXPERIMENT

__all__ = ["EXPERIMENT"]
