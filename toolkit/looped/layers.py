"""The small parts flax has no module for: SwiGLU, rotary embedding, unit length.

RMSNorm, Linear and Embed are flax's own (`nnx.RMSNorm` takes its mean square in float32).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def linear(
    inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs, *, std: float
) -> nnx.Linear:
    """A projection without bias, drawn from a normal distribution cut at three deviations.

    Args:
        inputs: size of the last axis of the argument.
        outputs: size of the last axis of the result.
        dtype: compute type; the kernel itself is float32.
        rngs: where the initial values come from.
        std: standard deviation before the cut; 0 starts the projection at zero.

    Returns:
        The flax module.

    Source: LT2, initialisation.
    """
    initializer = (
        nnx.initializers.truncated_normal(std, lower=-3.0, upper=3.0)
        if std
        else nnx.initializers.zeros
    )
    return nnx.Linear(
        inputs, outputs, use_bias=False, kernel_init=initializer, dtype=dtype, rngs=rngs
    )


class SwiGLU(nnx.Module):
    """Gated feed-forward layer: y = W_down( silu(W_gate x) * (W_up x) ).

    Attributes:
        gate, up: projections to the hidden size.
        down: projection back.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(
        self, width: int, hidden: int, *, down_std: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        std = width**-0.5
        self.gate = linear(width, hidden, dtype, rngs, std=std)
        self.up = linear(width, hidden, dtype, rngs, std=std)
        self.down = linear(hidden, width, dtype, rngs, std=down_std)

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def rotary_embedding(
    x: Float[Array, "... heads size"],
    positions: Int[Array, "..."],
    *,
    theta: float,
    fraction: float = 1.0,
) -> Float[Array, "... heads size"]:
    """Rotate channel pairs by an angle proportional to the position.

    Channels i and i + size/2 form the pair (x_i, x_{i + size/2}), turned by the angle
    position * theta^(-2i/size). This is the half-split order of Hugging Face's Llama checkpoints;
    the original code pairs neighbours (2i, 2i + 1), a fixed permutation of the channels.

    Scores depend on differences of positions only, so packed documents need no restart at 0.

    Args:
        x: queries or keys, size even.
        positions: position of each token, one axis fewer than heads and size.
        theta: base of the wavelengths.
        fraction: share of the channels, the first ones, that turn: their number is the size above.

    Returns:
        The rotated array, in the type of `x`; angles are float32.

    Cost: 3 FLOPs a number.

    Source: Su et al., "RoFormer", 2021, section 3.2; Black et al., "GPT-NeoX-20B", 2022, for the
        channels that stay.
    """
    half = round(fraction * x.shape[-1]) // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second, still = jnp.split(x, [half, 2 * half], axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), still], axis=-1)


def unit_length(x: Float[Array, "... size"]) -> Float[Array, "... size"]:
    """Scale the last axis to Euclidean length one: x / sqrt(sum x^2 + 1e-6), summed in float32.

    Args:
        x: any array.

    Returns:
        An array of the same shape and type.

    Source: Yang et al., "Gated Delta Networks", 2024: keys must not be longer than 1, or the
        delta rule expands the state.
    """
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)
