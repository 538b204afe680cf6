"""How rotary wavelengths are stretched for contexts longer than those of training.

RotaryScaling       Llama 3.1's ramp
YarnScaling         YaRN, with its factor of queries and keys
DividedFrequencies  linear scaling and LongRoPE
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit.attention.latent import Yarn


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Rotary wavelengths stretched to a longer context, as in Llama 3.1.

        f' = f (s + (1 - s) / factor)       s = clip((turns - low) / (high - low), 0, 1)

    with `turns` the turns that a pair of channels of frequency f makes in `original_length` tokens.
    """

    factor: float  # divisor of the frequencies that turn at most `low` times
    # low, high: turns; frequencies of at least `high` turns are kept
    low: float
    high: float
    original_length: int  # context length in tokens before the stretch

    def __post_init__(self):
        if not (self.factor >= 1 and 0 < self.low < self.high):
            raise ValueError(
                "rotary scaling wants a factor of at least 1 and 0 < low < high; got "
                f"{self.factor}, {self.low} and {self.high}."
            )

    def __call__(self, frequencies: Float[Array, "pairs"]) -> Float[Array, "pairs"]:
        """The frequencies of the longer context."""
        turns = frequencies * (self.original_length / (2 * math.pi))
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)

    @property
    def amplitude(self) -> float:
        """1: scores are not sharpened."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Rotary wavelengths stretched by YaRN, and the factor of queries and keys that goes with it.

    Attributes:
        yarn: the rule.
        theta: base of the wavelengths.
        factor: the factor of queries and keys each; None: 0.1 ln(yarn.factor) + 1.
    """

    yarn: Yarn
    theta: float
    factor: float | None = None

    def __call__(self, frequencies: Float[Array, "pairs"]) -> Float[Array, "pairs"]:
        """The frequencies of the longer context."""
        half = len(frequencies)
        own = self.yarn.stretched(self.theta ** (-np.arange(half) / half), self.theta)
        return jnp.asarray(own, frequencies.dtype)

    @property
    def amplitude(self) -> float:
        """The factor of queries and keys each."""
        return self.yarn.sharpening(1.0) if self.factor is None else self.factor


@dataclasses.dataclass(frozen=True)
class DividedFrequencies:
    """Rotary frequencies divided by given numbers: linear scaling, and LongRoPE.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional
        Interpolation", 2023; Ding et al., "LongRoPE", 2024, arXiv:2402.13753.
    """

    divisors: tuple[float, ...]  # one for all pairs of channels, or one per pair
    amplitude: float = 1.0  # factor of turned queries and keys

    def __post_init__(self):
        if not (self.divisors and min(self.divisors) > 0 and self.amplitude > 0):
            raise ValueError(
                "rotary divisors and their amplitude must be positive; got "
                f"{self.divisors} and {self.amplitude}."
            )

    def __call__(self, frequencies: Float[Array, "pairs"]) -> Float[Array, "pairs"]:
        """The frequencies of the longer context."""
        if len(self.divisors) not in (1, len(frequencies)):
            raise ValueError(
                f"rotary divisors are {len(self.divisors)} numbers, and {len(frequencies)} pairs "
                "of channels turn; wanted one number, or one per pair."
            )
        return frequencies / jnp.asarray(self.divisors, frequencies.dtype)
