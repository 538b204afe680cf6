"""RWKV-7 as a layer: token shift, low-rank decay, rate and gate, a bonus for the present token."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.attention import unit_length
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.short_convolution import token_before
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.gates import GroupNorm, LowRank
from toolkit.looped.mixing.linear.recurrent import (
    Projection,
    RecurrentLayer,
    RecurrentOptions,
    split_heads,
)
from toolkit.parallel.context.along import sequence_look_back

NORM_EPSILON = 64e-5
SHIFT_EXPONENTS = {
    "query": 0.2,
    "decay": 0.9,
    "key": 0.7,
    "value": 0.7,
    "rate": 0.9,
    "gate": 0.2,
}
"""Exponent of the initial token shift over the channels."""
DEPTH = 0.5
"""The paper initialises each layer by its depth; a looped layer has every depth and takes the
middle."""


class RWKV7Layer(RecurrentLayer):
    """RWKV-7's time mixing, without the mixing of values across layers.

        x_* = x_t + mu_* (x_{t-1} - x_t)                         for * = r, w, k, v, a, g
        r, k', v = x_r W_r, x_k W_k, x_v W_v
        g = -e^(-1/2) sigmoid(w0 + tanh(x_w W_1) W_2)            (log-decay per key channel)
        a = sigmoid(a0 + x_a A_1 A_2)                            (in-context learning rate)
        kappa = k' * k_k, to unit length in each head;   k = k' (1 + (a - 1) k_a)
        o = GroupNorm(rwkv7(r, k, v, g, kappa, a)) + (sum over a head of r k r_k) v
        y = ( o * (sigmoid(x_g G_1) G_2) ) W_o

    The mixing of values with those of the first layer is left out, because a pattern may have a
    single RWKV-7 layer.

    Attributes:

        shift_query, shift_decay, shift_key, shift_value, shift_rate, shift_gate: mu, [width].
        removal_scale: k_k, [keys].
        replacement: k_a, [keys].
        bonus: r_k, [keys].

    Source: Peng et al., "RWKV-7 Goose", 2025, section 4; ranks those of the released models.
    """

    word: ClassVar[str] = "rwkv7"
    Options: ClassVar[type[LayerOptions]] = RecurrentOptions
    gate: LowRank

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        sizes = self.sizes_of(config)
        keys, values = sizes.keys, sizes.values
        self.query = linear(width, keys, dtype, rngs, std=std)
        self.key = linear(width, keys, dtype, rngs, std=std)
        self.value = linear(width, values, dtype, rngs, std=std)
        rank, gate_rank = _rank(1.8 * width**0.5), _rank(0.6 * width**0.8)
        # Both start at their biases, because the first projection is zero.
        start = {"use_bias": True, "down_std": 0.0, "dtype": dtype, "rngs": rngs}
        self.decay = LowRank(width, rank, keys, activation=jnp.tanh, **start)
        ramp = jnp.linspace(0.0, 1.0, keys)
        self.decay.bias = nnx.Param(-6.5 + 5 * ramp ** (0.85 + DEPTH**0.5))
        self.rate = LowRank(width, rank, keys, **start)
        gate = LowRank(width, gate_rank, values, activation=jax.nn.sigmoid, dtype=dtype, rngs=rngs)
        for name, exponent in SHIFT_EXPONENTS.items():
            shift = 1 - (jnp.arange(width) / width) ** (exponent * DEPTH)
            setattr(self, f"shift_{name}", nnx.Param(shift))
        self.removal_scale = nnx.Param(jnp.full(keys, 0.85))
        self.replacement = nnx.Param(jnp.ones(keys))
        self.bonus = nnx.Param(jnp.zeros(keys))
        super().__init__(config, gate=gate, rngs=rngs)
        self.norm = GroupNorm(
            values, sizes.heads, epsilon=NORM_EPSILON, is_centred=True, dtype=dtype
        )
        self.dtype = dtype

    @classmethod
    def tail_shape(cls, config: LayerConfig) -> tuple[int, int]:
        return 1, config.width

    def project(self, x, past, segment_ids):
        start = None if past is None else past.tail
        before, tail = sequence_look_back(
            token_before, x, reach=1, segment_ids=segment_ids, initial_state=start
        )
        r, w, k, v, a, g = (
            x + getattr(self, f"shift_{name}")[...].astype(x.dtype) * (before - x)
            for name in SHIFT_EXPONENTS
        )
        q, k, v = self.query(r), self.key(k), self.value(v)
        log_decay = -np.exp(-0.5) * jax.nn.sigmoid(self.decay(w).astype(accumulator(x.dtype)))
        rate = jax.nn.sigmoid(self.rate(a))
        size = self.sizes.key_size
        removal_key = unit_length(split_heads(k * self._of(self.removal_scale), size))
        k = k * (1 + (rate - 1) * self._of(self.replacement))
        q, k, log_decay, rate = (split_heads(part, size) for part in (q, k, log_decay, rate))
        v = split_heads(v, self.sizes.value_size)
        present = jnp.sum(q * k * split_heads(self._of(self.bonus), size), axis=-1, keepdims=True)
        return Projection(
            (q, k, v, log_decay, removal_key, rate), tail, (present * v, self.gate(g))
        )

    def finish(self, x, out, aside):
        bonus, gate = aside
        out = self.norm(out.reshape(gate.shape)) + bonus.reshape(gate.shape)
        return self.output(out * gate)

    def _of(self, parameter):
        return parameter[...].astype(self.dtype)


def _rank(exact: float) -> int:
    return max(32, 32 * round(exact / 32))
