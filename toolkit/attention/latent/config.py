"""Sizes of a layer of latent attention, its rotary frequencies, and those of published models."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from toolkit._checks import check_fields

MOST = 2**24
"""No size of a layer reaches this."""


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """How rotary frequencies are stretched for contexts longer than those of training.

        f_i = theta^(-2i/d);   f_i <- f_i/factor ramp_i + f_i (1 - ramp_i)

    The ramp goes from 0 to 1 between the channels that turn `beta_fast` and `beta_slow` times in
    `original_length` tokens; scores are sharpened by (0.1 mscale_all_dim ln(factor) + 1)^2.

    Attributes:
        factor: how many times longer the context became.
        original_length: tokens of the context before.
        beta_fast: turns from which on a channel keeps its frequency.
        beta_slow: turns up to which its frequency is divided by `factor`.
        mscale: sharpening of queries and keys, relative to `mscale_all_dim`.
        mscale_all_dim: sharpening of all scores.
        truncate: round the ends of the ramp to whole channels.

    Source: Peng et al. (2023), arXiv:2309.00071; DeepSeek-V2 (2024), arXiv:2405.04434.

    Example:
        >>> Yarn(factor=32.0).original_length
        4096
    """

    factor: float = 40.0
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        check_fields(self)
        for name in ("factor", "original_length", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}.")
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}.")

    def sharpening(self, mscale: float) -> float:
        """0.1 mscale ln(factor) + 1, or 1 where nothing is stretched."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The frequencies of a longer context."""
        size = 2 * len(frequencies)

        def channel(turns):
            wavelength = self.original_length / (turns * 2 * math.pi)
            return size * math.log(wavelength) / (2 * math.log(theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low if high != low else 0.001
        ramp = np.clip((np.arange(size // 2) - low) / width, 0, 1)
        return frequencies * (ramp / self.factor + 1 - ramp)


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention (MLA).

    Attributes:
        width: size of the residual stream.
        heads: query heads.
        latent_size: numbers that a token caches for all heads (DeepSeek: kv_lora_rank).
        key_size: size of a head's query and key without position (qk_nope_head_dim).
        rope_size: size of the rotary key that all heads share, even (qk_rope_head_dim).
        value_size: size of a head's value (v_head_dim).
        query_latent_size: numbers from which queries are made (q_lora_rank); None: from the stream.
        rope_theta: base of the rotary wavelengths.
        rotary: whether the rotary channels turn; False leaves them as they are, without positions.
        yarn: how the wavelengths are stretched; None: not at all.
        epsilon: added to the mean square in the RMSNorm of latents.
        layers: layers of the model that this is one of, for plans.

    Source: DeepSeek-V2 (2024), arXiv:2405.04434, section 2.1.

    Example:
        >>> config = LatentConfig(
        ...     width=64, heads=4, latent_size=32, key_size=16, rope_size=8, value_size=16
        ... )
        >>> config.cache_size, round(config.scale**-2)
        (40, 24)
    """

    width: int
    heads: int
    latent_size: int
    key_size: int
    rope_size: int
    value_size: int
    query_latent_size: int | None = None
    rope_theta: float = 10_000.0
    rotary: bool = True
    yarn: Yarn | None = None
    epsilon: float = 1e-6
    layers: int = 1

    def __post_init__(self):
        check_fields(self)
        for field in fields(self):
            size = getattr(self, field.name)
            if field.type in (int, int | None) and size is not None and not 1 <= size <= MOST:
                raise ValueError(f"{field.name} must lie in [1, {MOST:,}]; got {size}.")
        if self.rope_size % 2:
            raise ValueError(
                f"rope_size must be even, for it turns in pairs; got {self.rope_size}."
            )
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta must be above 1; got {self.rope_theta}.")
        if self.yarn is not None and not self.rotary:
            raise ValueError("yarn stretches rotary wavelengths, and rotary is False.")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0; got {self.epsilon}.")

    @property
    def scale(self) -> float:
        """Factor of the scores: (key_size + rope_size)^-1/2, sharpened under YaRN."""
        sharpening = 1.0 if self.yarn is None else self.yarn.sharpening(self.yarn.mscale_all_dim)
        return (self.key_size + self.rope_size) ** -0.5 * sharpening**2

    @property
    def cache_size(self) -> int:
        """Numbers that a token occupies in the cache."""
        return self.latent_size + self.rope_size

    @property
    def frequencies(self) -> np.ndarray:
        """Radians per token of every pair of rotary channels [rope_size / 2], float64."""
        pairs = np.arange(0, self.rope_size, 2) / self.rope_size
        frequencies = self.rope_theta**-pairs
        return (
            frequencies if self.yarn is None else self.yarn.stretched(frequencies, self.rope_theta)
        )

    @property
    def rotary_factor(self) -> float:
        """What rotated channels are multiplied by."""
        if self.yarn is None:
            return 1.0
        own, all_dim = map(self.yarn.sharpening, (self.yarn.mscale, self.yarn.mscale_all_dim))
        return own / all_dim

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers in each projection, by the field of `LatentWeights`."""
        query = self.query_latent_size or self.width
        return {
            "query_down": 0 if self.query_latent_size is None else self.width * query,
            "query_up": query * self.heads * (self.key_size + self.rope_size),
            "latent_down": self.width * self.latent_size,
            "rope_key": self.width * self.rope_size,
            "key_up": self.latent_size * self.heads * self.key_size,
            "value_up": self.latent_size * self.heads * self.value_size,
            "output": self.heads * self.value_size * self.width,
        }


_DEEPSEEK_V3 = LatentConfig(
    width=7168,
    heads=128,
    latent_size=512,
    key_size=128,
    rope_size=64,
    value_size=128,
    query_latent_size=1536,
    yarn=Yarn(),
    layers=61,
)
_MSCALE = Yarn(mscale=0.707, mscale_all_dim=0.707)

PRESETS: dict[str, LatentConfig] = {
    "deepseek_v2_lite": replace(
        _DEEPSEEK_V3, width=2048, heads=16, query_latent_size=None, yarn=_MSCALE, layers=27
    ),
    "deepseek_v2": replace(_DEEPSEEK_V3, width=5120, yarn=_MSCALE, layers=60),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": replace(
        _DEEPSEEK_V3, heads=64, rope_theta=50_000.0, yarn=Yarn(factor=32.0, beta_fast=1.0)
    ),
}
"""Attention of published models, as their config.json files say."""
