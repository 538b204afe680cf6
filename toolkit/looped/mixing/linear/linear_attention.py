"""Layers whose state only adds and decays: linear attention, retention, GLA, HGRN2.

    S <- Diag(e^g) S + k v^T

They differ in the decay: none, one constant per head, or one number per key channel and token.
"""

from typing import ClassVar

import jax
from flax import nnx

from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear, rotary_embedding, token_positions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.gates import GroupNorm, LowRank
from toolkit.looped.mixing.linear.recurrent import (
    Projection,
    RecurrentLayer,
    RecurrentOptions,
    split_heads,
)

GATE_RANK = 16
GATE_DIVISOR = 16.0
"""GLA's decay is the sixteenth root of a sigmoid: near 1, a half-life of 16 tokens at the start."""


class QueryKeyValueLayer(RecurrentLayer):
    """The shared part: separate projections for queries, keys and values, and an optional SiLU
    gate.

    Source: Sun et al., "Retentive Network", 2023, section 2.3.
    """

    is_gated: ClassVar[bool] = True
    starts_from_attention: ClassVar[bool] = True

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        sizes = self.sizes_of(config)
        self.query = linear(width, sizes.keys, dtype, rngs, std=std)
        self.key = linear(width, sizes.keys, dtype, rngs, std=std)
        self.value = linear(width, sizes.values, dtype, rngs, std=std)
        gate = linear(width, sizes.values, dtype, rngs, std=std) if self.is_gated else None
        super().__init__(config, gate=gate, rngs=rngs)

    def project(self, x, past, segment_ids):
        size = self.sizes.key_size
        q, k = split_heads(self.query(x), size), split_heads(self.key(x), size)
        return Projection((q, k, split_heads(self.value(x), self.sizes.value_size)))


class LinearAttentionLayer(QueryKeyValueLayer):
    """Linear attention over positive features.

        q, k = 1 + elu(x W_q), 1 + elu(x W_k);   v = x W_v
        y = RMSNorm(linear_attention(q, k, v)) W_o

    The paper divides by q_t . sum_i k_i, one positive number per head and token: it cancels in the
    norm, which also keeps its gradient bounded.

    Source: Katharopoulos et al., "Transformers are RNNs", 2020, section 3; Qin et al., "The Devil
        in Linear Transformer", 2022, section 4.1 (norm instead of the divisor).
    """

    word: ClassVar[str] = "linear"
    is_gated: ClassVar[bool] = False

    def project(self, x, past, segment_ids):
        q, k, v = super().project(x, past, segment_ids).inputs
        return Projection((1 + jax.nn.elu(q), 1 + jax.nn.elu(k), v))


class RetentionLayer(QueryKeyValueLayer):
    """Multi-scale retention: rotary positions and a constant decay in every head.

        q, k = rope(x W_q), rope(x W_k);   v = x W_v, twice as wide
        y = ( RMSNorm(retention(q, k, v)) * silu(x W_g) ) W_o

    Source: Sun et al., "Retentive Network", 2023, sections 2.1 and 2.3.
    """

    word: ClassVar[str] = "retention"
    value_share: ClassVar[float] = 2.0
    has_positions: ClassVar[bool] = True

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.rope_theta = config.rope_theta

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        size = cls.sizes_of(config).key_size
        if size % 2:
            raise ValueError(
                f"{cls.word}.key_size is {size}; it must be even, since rotary embeddings turn "
                "pairs of channels."
            )

    def project(self, x, past, segment_ids):
        q, k, v = super().project(x, past, segment_ids).inputs
        length = None if past is None else past.length
        positions = token_positions(x.shape[:2], length, segment_ids)
        q = rotary_embedding(q, positions, theta=self.rope_theta)
        return Projection((q, rotary_embedding(k, positions, theta=self.rope_theta), v))


class GatedLinearAttentionLayer(QueryKeyValueLayer):
    """Gated linear attention: a decay per key channel, from a projection of low rank.

        q, k, v = x W_q, x W_k, x W_v;   g = log sigmoid(x W_1 W_2 + b) / 16
        y = ( RMSNorm(gated_linear_attention(q, k, v, g)) * silu(x W_g) ) W_o

    Source: Yang et al., "Gated Linear Attention", 2023, section 4.4.
    """

    word: ClassVar[str] = "gla"
    key_share: ClassVar[float] = 0.5

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        sizes = self.sizes
        self.decay = LowRank(
            config.width,
            GATE_RANK,
            sizes.value_heads * sizes.key_size,
            dtype=config.compute_dtype,
            rngs=rngs,
            use_bias=True,
        )

    def project(self, x, past, segment_ids):
        raw = split_heads(self.decay(x).astype(accumulator(x.dtype)), self.sizes.key_size)
        inputs = super().project(x, past, segment_ids).inputs
        return Projection((*inputs, jax.nn.log_sigmoid(raw) / GATE_DIVISOR))


class HGRN2Layer(RecurrentLayer):
    """HGRN2: the key is one minus the forget gate.

        q = silu(x W_q);   g = log sigmoid(x W_f);   v = x W_v;   k = 1 - e^g
        y = RMSNorm(hgrn2(q, v, g)) W_o                 (norm over all heads together)

    The lower bounds on the forget gate that the paper learns for its deeper layers are left out,
    as in LT2.

    Source: Qin et al., "HGRN2", 2024, section 3.
    """

    word: ClassVar[str] = "hgrn2"
    Options: ClassVar[type[LayerOptions]] = RecurrentOptions

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        sizes = self.sizes_of(config)
        self.query = linear(width, sizes.keys, dtype, rngs, std=std)
        self.forget = linear(width, sizes.keys, dtype, rngs, std=std)
        self.value = linear(width, sizes.values, dtype, rngs, std=std)
        super().__init__(config, gate=None, rngs=rngs)
        self.norm = GroupNorm(
            sizes.values, 1, epsilon=config.norm_epsilon, is_centred=False, dtype=dtype
        )

    def project(self, x, past, segment_ids):
        size = self.sizes.key_size
        g = jax.nn.log_sigmoid(split_heads(self.forget(x).astype(accumulator(x.dtype)), size))
        q = split_heads(jax.nn.silu(self.query(x)), size)
        return Projection((q, split_heads(self.value(x), self.sizes.value_size), g))

    def finish(self, x, out, aside):
        return self.output(self.norm(out.reshape(*x.shape[:-1], -1)))
