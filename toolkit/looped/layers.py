"""Layers that flax does not provide: rotary embedding, projections, norms by their name.

RMSNorm, LayerNorm, Linear and Embed are flax's own, which take their means in float32.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention.execution.precision import accumulator
from toolkit.parallel.context.along import cuts_time

FEW = 64  # rows of a step of decoding


def linear(
    inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs, *,
    std: float, has_bias: bool = False,
) -> nnx.Linear:  # fmt: skip
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
        return _product(x, kernel, 0, **options)

    return over_tokens(product, x)


def _product(x: Array, table: Array, axis: int, **options: Any) -> Array:
    """Products with a table that has the channels of `x` along an axis."""
    product = partial(
        jax.lax.dot_general, dimension_numbers=(((x.ndim - 1,), (axis,)), ((), ())), **options
    )
    if x.ndim > 2 or x.shape[0] > FEW or not x.dtype == table.dtype == jnp.bfloat16:
        return product(x, table)

    # XLA for CPUs writes out all of the table in float32, five times as long as a read, unless the
    # sums are float32 and of two rows at least.
    def in_place(x: Array, table: Array) -> Array:
        rows = jnp.pad(x, ((0, max(2 - x.shape[0], 0)), (0, 0)))
        sums = product(rows, table, preferred_element_type=jnp.float32)[: x.shape[0]]
        return sums.astype(options.get("preferred_element_type") or x.dtype)

    return jax.lax.platform_dependent(x, table, cpu=in_place, default=product)


NormKind = Literal["rms", "layer", "layer_without_bias"]


def norm_layer(kind: NormKind, size: int, *, epsilon: float, dtype: Any, rngs: nnx.Rngs) -> Any:
    """`nnx.RMSNorm`, or `nnx.LayerNorm` with or without a bias."""
    how = {"epsilon": epsilon, "dtype": dtype, "rngs": rngs}
    if kind == "rms":
        return nnx.RMSNorm(size, **how)
    # The fast variance, a difference of two means, loses digits where the mean is large.
    return nnx.LayerNorm(size, use_bias=kind == "layer", use_fast_variance=False, **how)


def normalised(x: Float[Array, "... width"], epsilon: float) -> Float[Array, "... width"]:
    """RMSNorm without a scale, in at least float32."""
    x = x.astype(accumulator(x.dtype))
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


class SeparateNorms(nnx.Module):
    """A norm each of what queries, keys and values are made of."""

    def __init__(self, make: Callable[[], Any]):
        self.query, self.key, self.value = make(), make(), make()

    def __call__(self, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        """The three normalised."""
        return self.query(query), self.key(key), self.value(value)


class Embedding(nnx.Embed):
    """A table of tokens whose rows are multiplied by `scale` when they are looked up, and then
    normalised if there is a `norm`."""

    def __init__(self, *sizes: int, scale: float, norm: Any = None, **how: Any):
        super().__init__(*sizes, **how)
        self.scale, self.norm = scale, nnx.data(norm)

    def __call__(self, inputs: Int[Array, "..."]) -> Float[Array, "... width"]:
        out = super().__call__(inputs)
        out = out if self.scale == 1 else out * jnp.asarray(self.scale, out.dtype)
        return out if self.norm is None else self.norm(out)


def read_out(
    h: Float[Array, "... width"],
    table: Float[Array, "vocabulary width"],
    bias: Float[Array, "vocabulary"] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "... vocabulary"]:
    """Logits h table^T + bias in float32; with a cap c they become c tanh(logits / c)."""

    def logits(h: Array) -> Array:
        return _product(h, table, 1, preferred_element_type=accumulator(h.dtype))

    out = over_tokens(logits, h)
    out = out if bias is None else out + bias.astype(out.dtype)
    return out if soft_cap is None else soft_cap * jnp.tanh(out / soft_cap)


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


class Scaling(Protocol):
    """How rotary frequencies are stretched, see `toolkit.looped.mixing.rotary`."""

    @property
    def amplitude(self) -> float:
        """Factor of turned queries and keys."""
        ...

    def __call__(self, frequencies: Float[Array, "pairs"]) -> Float[Array, "pairs"]:
        """The frequencies of the longer context."""
        ...


def rotary_embedding(
    x: Float[Array, "... heads size"], positions: Int[Array, "..."], *,
    theta: float, fraction: float = 1.0, scaling: Scaling | None = None,
) -> Float[Array, "... heads size"]:  # fmt: skip
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
