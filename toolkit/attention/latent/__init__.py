"""Latent attention: one latent per token for all heads, and what can be cut out of it.

LatentConfig, Yarn   sizes of a layer, and how its rotary frequencies are stretched
PRESETS              those of DeepSeek-V2-Lite, V2 and V3 and of Kimi-K2
LatentWeights        the weights of a layer; from DeepSeek's tensors, or drawn
LatentCache          the latents and rotary keys of earlier tokens
mla, mla_step        multi-head latent attention, expanded or absorbed; one token of it
"""

from toolkit.attention.latent.cache import LatentCache
from toolkit.attention.latent.config import PRESETS, LatentConfig, Yarn
from toolkit.attention.latent.mla import mla, mla_step
from toolkit.attention.latent.weights import LatentWeights

__all__ = [
    "PRESETS",
    "LatentCache",
    "LatentConfig",
    "LatentWeights",
    "Yarn",
    "mla",
    "mla_step",
]
