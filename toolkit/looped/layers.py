"""Layers that flax does not provide: SwiGLU, rotary embedding, unit length.

RMSNorm, Linear and Embed are flax's own (`nnx.RMSNorm` takes its mean square in float32).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention.execution.precision import accumulator
from toolkit.attention.latent import Yarn
from toolkit.parallel.context.along import cuts_time


def linear(
    inputs: int,
    outputs: int,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
    *,
    std: float,
    has_bias: bool = False,
) -> nnx.Linear:
    """A projection with truncated-normal initial weights (three deviations, LT2) and zero bias."""
    initializer = (
        nnx.initializers.truncated_normal(std, lower=-3.0, upper=3.0)
        if std
        else nnx.initializers.zeros
    )
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=has_bias,
        kernel_init=initializer,
        dtype=dtype,
        dot_general=_project,
        rngs=rngs,
    )


def _project(x: Array, kernel: Array, _: Any, **options: Any) -> Array:
    def product(x):
        sums = ((x.ndim - 1,), (0,)), ((), ())
        return jax.lax.dot_general(x, kernel, sums, **options)

    return over_tokens(product, x)


def over_tokens(
    function: Callable[[Array], Array], x: Float[Array, "... width"]
) -> Float[Array, "... outputs"]:
    """Apply a token-wise function with batch and time merged into one axis."""
    # A weight's gradient is a sum over tokens. Over two axes, batch and time, XLA for CPUs makes a
    # transposed copy of the cotangent first, a third of a projection's time forward and backward.
    # If devices share a sequence, the axes cannot be merged.
    if cuts_time():
        return function(x)
    *leading, width = x.shape
    out = function(x.reshape(math.prod(leading), width))
    return out.reshape(*leading, out.shape[-1])


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Rotary wavelengths stretched to a longer context, as in Llama 3.1.

        f' = f (s + (1 - s) / factor)       s = clip((turns - low) / (high - low), 0, 1)

    with `turns` the turns that a pair of channels of frequency f makes in `original_length` tokens.

    Attributes:
        factor: divisor of the frequencies that turn at most `low` times.
        low, high: turns; frequencies of at least `high` turns are kept.
        original_length: context length in tokens before the stretch.
    """

    factor: float
    low: float
    high: float
    original_length: int
    amplitude: ClassVar[float] = 1.0

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


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Rotary wavelengths stretched by YaRN, and the factor of queries and keys that goes with it.

    Attributes:
        yarn: the rule.
        theta: base of the wavelengths.
    """

    yarn: Yarn
    theta: float

    def __call__(self, frequencies: Float[Array, "pairs"]) -> Float[Array, "pairs"]:
        """The frequencies of the longer context."""
        half = len(frequencies)
        own = self.yarn.stretched(self.theta ** (-np.arange(half) / half), self.theta)
        return jnp.asarray(own, frequencies.dtype)

    @property
    def amplitude(self) -> float:
        """0.1 ln(factor) + 1, of queries and keys each."""
        return self.yarn.sharpening(1.0)


def rotary_embedding(
    x: Float[Array, "... heads size"],
    positions: Int[Array, "..."],
    *,
    theta: float,
    fraction: float = 1.0,
    scaling: RotaryScaling | YarnScaling | None = None,
) -> Float[Array, "... heads size"]:
    """Turn channel pairs (x_i, x_{i + size/2}) by position * theta^(-2i/size) (RoFormer, 2021)."""
    # The half-split order of Hugging Face's Llama checkpoints; the original code pairs neighbours
    # (2i, 2i + 1), a fixed permutation. Of the channels, the first `fraction` turn (GPT-NeoX).
    # Scores depend on differences of positions only, so packed documents need no restart at 0.
    half, wide = round(fraction * x.shape[-1]) // 2, accumulator(x.dtype)
    frequencies = theta ** (-jnp.arange(half, dtype=wide) / half)
    frequencies = frequencies if scaling is None else scaling(frequencies)
    angles = positions[..., None, None].astype(wide) * frequencies
    amplitude = 1.0 if scaling is None else scaling.amplitude
    cos, sin = amplitude * jnp.cos(angles), amplitude * jnp.sin(angles)
    first, second, still = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(wide), second.astype(wide)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), still], axis=-1)


def token_positions(
    shape: tuple[int, ...],
    length: Int[Array, "batch"] | None,
    segment_ids: Int[Array, "batch time"] | None,
) -> Int[Array, "batch_or_1 time"]:
    """Positions of [batch, time] tokens, after the `length` tokens that each row's cache holds.

    With a cache, every document that begins here starts at position 0.
    """
    index = jnp.arange(shape[1], dtype=jnp.int32)[None]
    if length is None:
        return index
    if segment_ids is None:
        return index + length[:, None]
    changes = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    begins = jax.lax.cummax(jnp.where(changes, index, 0), axis=1)
    return index - begins + jnp.where(begins == 0, length[:, None], 0)
