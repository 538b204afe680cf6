"""RWKV-7's two layers: time mixing and channel mixing, both of which read the token before."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.attention import unit_length
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.short_convolution import token_before
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.convolution import LookBackLayer
from toolkit.looped.mixing.linear.gates import GroupNorm, LowRank
from toolkit.looped.mixing.linear.recurrent import (
    Projection,
    RecurrentLayer,
    RecurrentOptions,
    split_heads,
)
from toolkit.parallel.context.along import sequence_look_back

SHIFT_EXPONENTS = {"query": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}
"""Exponent of the initial token shift over the channels."""
DEPTH = 0.5
"""The paper initialises each layer by its depth; a looped layer has every depth and takes the
middle."""


@dataclasses.dataclass(frozen=True)
class RWKV7Options(RecurrentOptions):
    """Options of "rwkv7" layers.

    Attributes:
        value_residual: mix the values of the first such layer of the stack into those of the
            others, as the published models do.
        decay_rank, rate_rank, gate_rank, value_rank: ranks of the low-rank maps (None: the released
            models' rule).
        norm_epsilon: of the norm of each head's output.
    """

    value_residual: bool = False
    decay_rank: int | None = None
    rate_rank: int | None = None
    gate_rank: int | None = None
    value_rank: int | None = None
    norm_epsilon: float = 64e-5


class RWKV7Layer(RecurrentLayer):
    """RWKV-7's time mixing.

        x_* = x_t + mu_* (x_{t-1} - x_t)                         for * = r, w, k, v, a, g
        r, k', v' = x_r W_r, x_k W_k, x_v W_v
        v = v' + sigmoid(v0 + x_v V_1 V_2) (v'_first - v')       (with `value_residual`, or v')
        g = -e^(-1/2) sigmoid(w0 + tanh(x_w W_1) W_2)            (log-decay per key channel)
        a = sigmoid(a0 + x_a A_1 A_2)                            (in-context learning rate)
        kappa = k' * k_k, to unit length in each head;   k = k' (1 + (a - 1) k_a)
        o = GroupNorm(rwkv7(r, k, v, g, kappa, a)) + (sum over a head of r k r_k) v
        y = ( o * (sigmoid(x_g G_1) G_2) ) W_o

    v'_first are the values of the first such layer of the stack, in the same loop; that layer has
    no V.

    Attributes:

        shift_query, shift_decay, shift_key, shift_value, shift_rate, shift_gate: mu, [width].
        removal_scale: k_k, [keys].
        replacement: k_a, [keys].
        bonus: r_k, [keys].

    Source: Peng et al., "RWKV-7 Goose", 2025, section 4; ranks those of the released models.
    """

    word: ClassVar[str] = "rwkv7"
    Options: ClassVar[type[LayerOptions]] = RWKV7Options
    has_depth: ClassVar[bool] = True
    gate: LowRank
    shift_value: nnx.Param

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs, depth: tuple[int, int] = (0, 1)):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        sizes = self.sizes_of(config)
        keys, values = sizes.keys, sizes.values
        self.query = linear(width, keys, dtype, rngs, std=std)
        self.key = linear(width, keys, dtype, rngs, std=std)
        self.value = linear(width, values, dtype, rngs, std=std)
        options = self.options_of(config)
        rank, gate_rank = _rank(1.8 * width**0.5), _rank(0.6 * width**0.8)
        # Both start at their biases, because the first projection is zero.
        start = {"use_bias": True, "down_std": 0.0, "dtype": dtype, "rngs": rngs}
        self.decay = LowRank(width, options.decay_rank or rank, keys, activation=jnp.tanh, **start)
        ramp = jnp.linspace(0.0, 1.0, keys)
        self.decay.bias = nnx.Param(-6.5 + 5 * ramp ** (0.85 + DEPTH**0.5))
        self.rate = LowRank(width, options.rate_rank or rank, keys, **start)
        self.value_mix: Any = nnx.data(None)
        if options.value_residual and depth[0]:
            value_rank = options.value_rank or _rank(1.3 * width**0.5)
            self.value_mix = LowRank(width, value_rank, values, **start)
        how: dict[str, Any] = {"activation": jax.nn.sigmoid, "dtype": dtype, "rngs": rngs}
        gate = LowRank(width, options.gate_rank or gate_rank, values, **how)
        for name, exponent in SHIFT_EXPONENTS.items():
            shift = 1 - (jnp.arange(width) / width) ** (exponent * DEPTH)
            setattr(self, f"shift_{name}", nnx.Param(shift))
        self.removal_scale = nnx.Param(jnp.full(keys, 0.85))
        self.replacement = nnx.Param(jnp.ones(keys))
        self.bonus = nnx.Param(jnp.zeros(keys))
        super().__init__(config, gate=gate, rngs=rngs)
        epsilon = options.norm_epsilon
        self.norm = GroupNorm(values, sizes.heads, epsilon=epsilon, is_centred=True, dtype=dtype)
        self.dtype, self.shares_inputs = dtype, options.value_residual and not depth[0]

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        if not cls.options_of(config).value_residual:
            return
        for name in ("prelude_layers", "layers", "coda_layers"):
            words = list(getattr(config, name, ()))
            if "rwkv7" in words and words[0] != "rwkv7":
                raise ValueError(
                    "rwkv7.value_residual mixes in the values of the stack's first layer, which "
                    f"is {words[0]!r}; begin {' '.join(words)!r} with rwkv7, or turn it off."
                )
        for name in ("streams", "attention_residual"):
            if getattr(config, name, None):
                raise ValueError(
                    f"rwkv7.value_residual and {name} exclude each other; turn one of them off."
                )

    @classmethod
    def tail_shape(cls, config: LayerConfig) -> tuple[int, int]:
        return 1, config.width

    def shared_inputs(self, x, cache, segment_ids):
        before, _ = _token_before(x, None if cache is None else cache.tail, segment_ids)
        shifted = x + self.shift_value[...].astype(x.dtype) * (before - x)
        return {"first_values": self.value(shifted)}

    def project(self, x, past, segment_ids, *, first_values=None):
        before, tail = _token_before(x, None if past is None else past.tail, segment_ids)
        r, w, k, v, a, g = (
            x + getattr(self, f"shift_{name}")[...].astype(x.dtype) * (before - x)
            for name in SHIFT_EXPONENTS
        )
        q, k, v = self.query(r), self.key(k), self._values(v, first_values)
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

    def _values(self, x, first):
        if self.value_mix is None:
            return self.value(x) if first is None else first
        if first is None:
            raise ValueError(
                "rwkv7.value_residual: a layer that is not the first was called without the first "
                "one's values; call the stack, or configure value_residual=False."
            )
        v = self.value(x)
        return v + jax.nn.sigmoid(self.value_mix(x)) * (first - v)

    def _of(self, parameter):
        return parameter[...].astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class ChannelMixOptions(LayerOptions):
    """Options of "channel_mix" layers.

    Attributes:
        hidden: hidden size (None: four times the width).
    """

    hidden: int | None = None


class ChannelMixLayer(LookBackLayer):
    """RWKV-7's channel mixing, a feed-forward layer that also reads the token before.

        y = relu( (x_t + mu (x_{t-1} - x_t)) W_up )^2 W_down

    It is a mixer: in RWKV-7's own models it follows every "rwkv7" layer, and the blocks of both
    have no other feed-forward layer, `feed_forwards="none"`.

    Attributes:

        shift: mu, [width].

    Source: Peng et al., "RWKV-7 Goose", 2025, section 4.
    """

    word: ClassVar[str] = "channel_mix"
    Options: ClassVar[type[LayerOptions]] = ChannelMixOptions

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype = config.width, config.compute_dtype
        hidden = self.options_of(config).hidden or 4 * width
        self.shift = nnx.Param(1 - (jnp.arange(width) / width) ** DEPTH**4)
        self.up = linear(width, hidden, dtype, rngs, std=width**-0.5)
        self.down = linear(hidden, width, dtype, rngs, std=hidden**-0.5)

    @classmethod
    def tail_shape(cls, config: LayerConfig) -> tuple[int, int]:
        return 1, config.width

    def mix(self, x, tail, segment_ids):
        before, tail = _token_before(x, tail, segment_ids)
        x = x + self.shift[...].astype(x.dtype) * (before - x)
        return self.down(jnp.square(jax.nn.relu(self.up(x)))), tail


def _token_before(x, tail, segment_ids):
    how = {"segment_ids": segment_ids, "initial_state": tail}
    return sequence_look_back(token_before, x, reach=1, **how)


def _rank(exact: float) -> int:
    return max(32, 32 * round(exact / 32))
