"""Mamba-3 as a layer: one projection, norms and biases of B and C, a skip and a gate."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.gates import step_bias
from toolkit.looped.mixing.linear.recurrent import (
    GroupedOptions,
    Projection,
    StateSpaceLayer,
    split_heads,
)

LEAST_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Mamba3Options(GroupedOptions):
    """Options of "mamba3" layers.

    Attributes:
        heads: groups of B and C, each of which serves as many heads of x.
        value_heads: heads of x. Without it, one group of B and C serves all `heads` heads of x.
        key_size: numbers that each channel of x remembers.
        turning: share of them that turn.
    """

    key_size: int = 64
    turning: float = 0.5


class Mamba3Layer(StateSpaceLayer):
    """A state space of second order whose state turns, without a convolution.

        [z, x', B, C, dt', a, m, t] = x W_in
        dt = softplus(dt' + dt_bias);   g = -max(softplus(a), 1e-4) dt;   mix = sigmoid(m)
        q, k = RMSNorm(C) + b_C, RMSNorm(B) + b_B;   angle = pi tanh(t) dt
        y = ( (mamba3(q, k, x', g, dt, mix, angle) + D x') * silu(z) ) W_o

    x' is twice the width; b_C and b_B are each head's own, and t serves all heads.

    Attributes:
        input, output: projections.
        query_norm, key_norm: of C and of B.
        query_bias, key_bias: b_C and b_B, [heads, key], start at 1.
        step_bias: dt_bias, [heads].
        skip: D, [heads].

    Source: Lahoti et al., "Mamba-3", 2026, sections 3 and 4.
    """

    word: ClassVar[str] = "mamba3"
    Options: ClassVar[type[LayerOptions]] = Mamba3Options
    can_cut_time: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype = config.width, config.compute_dtype
        _, heads, key_size, _ = sizes = self.sizes_of(config)
        self.angles = round(self.options_of(config).turning * key_size) // 2
        inputs = 2 * sizes.values + 2 * sizes.keys + 3 * heads + self.angles
        self.input = linear(width, inputs, dtype, rngs, std=width**-0.5)
        super().__init__(config, gate=None, rngs=rngs)
        self.norm = nnx.data(None)
        self.query_norm, self.key_norm = (
            nnx.RMSNorm(key_size, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
            for _ in range(2)
        )
        self.query_bias, self.key_bias = (nnx.Param(jnp.ones((heads, key_size))) for _ in range(2))
        self.step_bias = step_bias(rngs, heads)
        self.skip = nnx.Param(jnp.ones(heads))

    def project(self, x, past, segment_ids):
        _, heads, key_size, value_size = self.sizes
        values, keys = self.sizes.values, self.sizes.keys
        ends = np.cumsum([values, values, keys, keys, heads, heads, heads]).tolist()
        z, v, k, q, step, rate, mix, turn = jnp.split(self.input(x), ends, axis=-1)
        step, rate, mix, turn = (
            raw.astype(accumulator(x.dtype)) for raw in (step, rate, mix, turn)
        )
        dt = jax.nn.softplus(step + self.step_bias[...])
        g = -jnp.maximum(jax.nn.softplus(rate), LEAST_RATE) * dt
        turn = jnp.pad(jnp.tanh(turn), ((0, 0), (0, 0), (0, key_size // 2 - self.angles)))
        angle = jnp.pi * turn[:, :, None] * dt[..., None]

        def of_heads(norm, x, bias):
            x = norm(split_heads(x, key_size))
            return jnp.repeat(x, heads // x.shape[2], axis=2) + bias[...].astype(x.dtype)

        q = of_heads(self.query_norm, q, self.query_bias)
        k = of_heads(self.key_norm, k, self.key_bias)
        v = split_heads(v, value_size)
        return Projection((q, k, v, g, dt, jax.nn.sigmoid(mix), angle), None, (z, v))

    def finish(self, x, out, aside):
        z, v = aside
        out += self.skip[...].astype(v.dtype)[:, None] * v
        return self.output(out.reshape(z.shape) * jax.nn.silu(z))
