"""Latents in slices inside a language model: `toolkit experiment latent`."""

from toolkit.experiments.latent.experiment import EXPERIMENT

__all__ = ["EXPERIMENT"]
