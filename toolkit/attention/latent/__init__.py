"""Latent attention: one latent per token for all heads, and what can be cut out of it.

LatentConfig, Yarn   sizes of a layer, and how its rotary frequencies are stretched
PRESETS              those of DeepSeek-V2-Lite, V2 and V3 and of Kimi-K2
LatentWeights        the weights of a layer; from DeepSeek's tensors, or drawn
LatentCache          the latents and rotary keys of earlier tokens
mla, mla_step        multi-head latent attention, expanded or absorbed; one token of it

Another basis for the latents, in the weights
fold                 the same layer without gain, its latents in another basis
principal_basis, hadamard_basis, random_basis
                     such bases: by energy, spread evenly, at random
calibration_latents  what a layer keeps of a text, to choose a basis by

The layer cut along its latents (TPLA)
slice_latents        the weights of every slice, as LatentSlices
energy_shares        what the slices' norms need to know
tpla, tpla_step      every slice with a softmax of its own, an approximation
tpla_reference       the same as its equation
slicing_report       what that costs, as a SlicingReport
least_squares_multipliers
                     factors that bring the slices' scores nearest to the true ones
"""

from toolkit.attention.latent.bases import (
    calibration_latents,
    fold,
    hadamard_basis,
    principal_basis,
    random_basis,
)
from toolkit.attention.latent.cache import LatentCache
from toolkit.attention.latent.config import PRESETS, LatentConfig, Yarn
from toolkit.attention.latent.mla import mla, mla_step
from toolkit.attention.latent.report import SlicingReport, least_squares_multipliers, slicing_report
from toolkit.attention.latent.slices import LatentSlices, energy_shares, slice_latents
from toolkit.attention.latent.tpla import tpla, tpla_reference, tpla_step
from toolkit.attention.latent.weights import LatentWeights

__all__ = [
    "PRESETS", "LatentCache", "LatentConfig", "LatentSlices", "LatentWeights", "SlicingReport",
    "Yarn", "calibration_latents", "energy_shares", "fold", "hadamard_basis",
    "least_squares_multipliers", "mla", "mla_step", "principal_basis", "random_basis",
    "slice_latents", "slicing_report", "tpla", "tpla_reference", "tpla_step",
]  # fmt: skip
