"""Parametrisations shared by several recurrent layers: initial decays and time steps, low-rank
maps, norms.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear


def log_rate(rngs: nnx.Rngs, heads: int, *, lowest: float) -> nnx.Param:
    """A_log [heads]: logarithms of decay rates uniform between `lowest` and 16 (Mamba-2's code)."""
    rate = jax.random.uniform(rngs.params(), (heads,), minval=lowest, maxval=16.0)
    return nnx.Param(jnp.log(rate))


def step_bias(rngs: nnx.Rngs, channels: int) -> nnx.Param:
    """dt_bias: softplus(dt_bias) is log-uniform between 1e-3 and 1e-1 (Mamba, section 3.6)."""
    low, high = jnp.log(1e-3), jnp.log(1e-1)
    step = jnp.exp(jax.random.uniform(rngs.params(), (channels,), minval=low, maxval=high))
    return nnx.Param(step + jnp.log(-jnp.expm1(-step)))


class LowRank(nnx.Module):
    """A low-rank map: y = activation(x W_down) W_up + bias.

    Attributes:

        bias: [outputs], or None.

    Source: Yang et al., "Gated Linear Attention", 2023, section 4.4.
    """

    def __init__(
        self, inputs: int, rank: int, outputs: int, *,
        dtype: jnp.dtype, rngs: nnx.Rngs, use_bias: bool = False, down_std: float | None = None,
        activation: Callable[[Array], Array] | None = None,
    ):  # fmt: skip
        std = inputs**-0.5 if down_std is None else down_std
        self.down = linear(inputs, rank, dtype, rngs, std=std)
        self.up = linear(rank, outputs, dtype, rngs, std=rank**-0.5)
        self.bias = nnx.Param(jnp.zeros(outputs)) if use_bias else nnx.data(None)
        self.activation = activation

    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        low = self.down(x)
        y = self.up(low if self.activation is None else self.activation(low))
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class GroupNorm(nnx.Module):
    """Normalises each group of consecutive channels, then scales every channel.

        y = (x - mean) / sqrt(variance + epsilon) * scale + bias          (centred)
        y = x / sqrt(mean of x^2 + epsilon) * scale                       (not centred)

    Attributes:
        scale: [channels], starts at 1.
        bias: [channels], starts at 0; None when not centred.

    Source: Wu and He, "Group Normalization", 2018, here over channels alone, token by token.
    """

    def __init__(
        self, channels: int, groups: int, *, epsilon: float, is_centred: bool, dtype: jnp.dtype
    ):
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels)) if is_centred else nnx.data(None)
        self.groups, self.epsilon, self.dtype = groups, epsilon, dtype

    def __call__(self, x: Float[Array, "... channels"]) -> Float[Array, "... channels"]:
        grouped = x.astype(accumulator(x.dtype)).reshape(*x.shape[:-1], self.groups, -1)
        if self.bias is not None:
            grouped -= jnp.mean(grouped, axis=-1, keepdims=True)
        square = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
        y = (grouped * jax.lax.rsqrt(square + self.epsilon)).reshape(x.shape) * self.scale[...]
        return (y if self.bias is None else y + self.bias[...]).astype(self.dtype)
