"""Mamba-2 as a layer: one projection, a biased convolution, a skip, a gate before the norm."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.convolution import ShortConvolution
from toolkit.looped.mixing.linear.gates import GroupNorm, log_rate, step_bias
from toolkit.looped.mixing.linear.recurrent import (
    GroupedOptions,
    Projection,
    StateSpaceLayer,
    split_heads,
)


@dataclasses.dataclass(frozen=True)
class Mamba2Options(GroupedOptions):
    """Options of "mamba2" layers.

    Attributes:
        heads: groups of B and C, each of which serves as many heads of x.
        value_heads: heads of x. Without it, one group of B and C serves all `heads` heads of x.
        key_size: state size per channel of x.
        convolution_size: taps of the short convolution.
        gated_norm: normalise the gated outputs; Falcon-H1 only gates them.
        shortest_step: lower bound of the time steps dt, 0 for none.
    """

    key_size: int = 64
    convolution_size: int = 4
    gated_norm: bool = True
    shortest_step: float = 0.0


class Mamba2Layer(StateSpaceLayer):
    """State-space duality: the decay and the input share one time step dt.

        [z, x', B, C, dt'] = x W_in;    [x', B, C] <- silu(conv([x', B, C]) + b)
        dt = softplus(dt' + dt_bias);   g = -exp(A_log) dt
        y = GroupNorm( (mamba2(C, B, x', g, dt) + D x') * silu(z) ) W_o

    The groups of the norm (without mean) are those of B and C. x' is twice the width.

    Attributes:

        log_rate: A_log, [heads].
        step_bias: dt_bias, [heads].
        skip: D, [heads].

    Source: Dao and Gu, "Transformers are SSMs", 2024, section 7; LT2 for the sizes.
    """

    word: ClassVar[str] = "mamba2"
    Options: ClassVar[type[LayerOptions]] = Mamba2Options

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype = config.width, config.compute_dtype
        sizes = self.sizes_of(config)
        _, channels = self.tail_shape(config)
        inputs = sizes.values + channels + sizes.value_heads
        self.input = linear(width, inputs, dtype, rngs, std=width**-0.5)
        self.convolution = ShortConvolution(
            channels,
            self.options_of(config).convolution_size,
            dtype=dtype,
            rngs=rngs,
            use_bias=True,
        )
        super().__init__(config, gate=None, rngs=rngs)
        how = {"epsilon": config.norm_epsilon, "is_centred": False, "dtype": dtype}
        is_normed = self.options_of(config).gated_norm
        norm = GroupNorm(sizes.values, sizes.heads, **how) if is_normed else None
        self.norm: Any = nnx.data(norm)
        self.log_rate = log_rate(rngs, sizes.value_heads, lowest=1.0)
        self.step_bias = step_bias(rngs, sizes.value_heads)
        self.skip = nnx.Param(jnp.ones(sizes.value_heads))
        self.shortest_step = self.options_of(config).shortest_step

    @classmethod
    def tail_shape(cls, config: LayerConfig) -> tuple[int, int]:
        sizes = cls.sizes_of(config)
        return cls.options_of(config).convolution_size - 1, sizes.values + 2 * sizes.keys

    def project(self, x, past, segment_ids):
        _, _, key_size, value_size = self.sizes
        values, keys = self.sizes.values, self.sizes.keys
        z, mixed, raw_step = jnp.split(self.input(x), [values, 2 * (values + keys)], axis=-1)
        mixed, tail = self.convolution(
            mixed, tail=None if past is None else past.tail, segment_ids=segment_ids
        )
        v, k, q = jnp.split(jax.nn.silu(mixed), [values, values + keys], axis=-1)
        q, k, v = split_heads(q, key_size), split_heads(k, key_size), split_heads(v, value_size)
        dt = jax.nn.softplus(raw_step.astype(accumulator(x.dtype)) + self.step_bias[...])
        if self.shortest_step:
            dt = jnp.maximum(dt, jnp.asarray(self.shortest_step, dt.dtype))
        return Projection((q, k, v, -jnp.exp(self.log_rate[...]) * dt, dt), tail, (z, v))

    def finish(self, x, out, aside):
        z, v = aside
        out += self.skip[...].astype(v.dtype)[:, None] * v
        out = out.reshape(z.shape) * jax.nn.silu(z)
        return self.output(out if self.norm is None else self.norm(out))
