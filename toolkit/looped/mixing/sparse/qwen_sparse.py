"""Qwen sparse attention as a layer: an indexer picks blocks of tokens by the mean of their keys."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.attention import (
    IndexedCache,
    block_pooling,
    qwen_sparse_attention,
    qwen_sparse_attention_step,
)
from toolkit.looped.layers import linear, rotary_embedding
from toolkit.looped.mixing.attention import AttentionLayer, AttentionOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.sparse.pooled import PooledCache


@dataclasses.dataclass(frozen=True)
class QSAOptions(AttentionOptions):
    """Options of "qsa" layers, beside those of attention.

    Attributes:
        block_size: tokens per block.
        selected_tokens: tokens of complete blocks that a query attends to, a multiple of
            `block_size`; those after the last complete block come in addition.
        index_heads: heads of the indexer (None: the model's `heads`).
        index_size: size of each; as many of its first channels turn as of the attention's.
    """

    block_size: int = 64
    selected_tokens: int = 2048
    index_heads: int | None = None
    index_size: int = 128

    @classmethod
    def tiny(cls) -> "QSAOptions":
        """Fewer tokens than a short text has, so that the selection matters."""
        return cls(block_size=4, selected_tokens=16, index_size=32)


class BlockIndexer(nnx.Module):
    """Queries of the index and keys of blocks.

        q^I = turn(RMSNorm(x W_q), per head);   k^I_b = turn(RMSNorm(mean of x W_k in the block))

    A block's key turns by the position of its first token. x is a constant here: the selection
    passes no gradient.

    Source: Qwen4-Exp, its modelling file in Hugging Face transformers ("qwen4_exp").
    """

    def __init__(self, config: LayerConfig, options: QSAOptions, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        heads, size = options.index_heads or config.heads, options.index_size
        norm = functools.partial(nnx.RMSNorm, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.query = linear(width, heads * size, dtype, rngs, std=std)
        self.key = linear(width, size, dtype, rngs, std=std)
        self.query_norm, self.key_norm = norm(size), norm(size)
        self.size, self.block_size = size, options.block_size

    def __call__(self, x: Any, positions: Any, turn: Any, past: dict[str, Any]) -> tuple[Any, ...]:
        """Queries [..., heads, size], keys of blocks [..., size], and the new tail."""
        x = jax.lax.stop_gradient(x)
        q = self.query_norm(self.query(x).reshape(*x.shape[:-1], -1, self.size))
        means, tail = block_pooling(self.key(x), block_size=self.block_size, **past)
        keys = turn(self.key_norm(means)[..., None, :], positions - (self.block_size - 1))
        return turn(q, positions), keys[..., 0, :], tail


class QSALayer(AttentionLayer):
    """Grouped-query attention with rotary positions to the blocks that an indexer picks.

    Source: Qwen4-Exp, its modelling file in Hugging Face transformers ("qwen4_exp").
    """

    word: ClassVar[str] = "qsa"
    Options: ClassVar[type[LayerOptions]] = QSAOptions
    starts_from_attention: ClassVar[bool] = False  # the selection needs the indexer
    can_cut_time: ClassVar[bool] = False
    has_rows: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        options = self.options_of(config)
        self.indexer = BlockIndexer(config, options, rngs=rngs)
        self.blocks = {n: getattr(options, n) for n in ("block_size", "selected_tokens")}

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        options, size = cls.options_of(config), cls.sizes_of(config).head_size
        if options.selected_tokens % options.block_size:
            raise ValueError(
                f"{cls.word}.selected_tokens {options.selected_tokens} is not a multiple of "
                f"{cls.word}.block_size {options.block_size}."
            )
        if options.rotary_fraction * size > options.index_size:
            raise ValueError(
                f"{cls.word}.index_size is {options.index_size}; it must hold the "
                f"{round(options.rotary_fraction * size)} channels that turn."
            )

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> PooledCache:
        """Keys, values and index keys for `capacity` tokens, and those of an unfinished block."""
        options, (_, heads, size) = cls.options_of(config), cls.sizes_of(config)
        dtype, index = config.compute_dtype, options.index_size
        state = IndexedCache.empty(batch, heads, size, size, index, capacity, dtype)
        return PooledCache(state, jnp.zeros((batch, options.block_size - 1, index), dtype))

    def _mix(self, x, positions, window, past):
        cache, segment_ids = past["initial_state"], past["segment_ids"]
        *index, tail = self._index(x, positions, segment_ids, cache)
        state = None if cache is None else cache.state
        how = self.blocks | {"segment_ids": segment_ids, "initial_state": state}
        out, state = qwen_sparse_attention(*self._project(x, positions), *index, **how)
        return out, None if cache is None else PooledCache(state, tail)

    def _mix_step(self, x_t, cache, window):
        *index, tail = self._index(x_t[:, None], cache.length[:, None], None, cache)
        q, k, v = self._project(x_t, cache.length)
        index_q, index_k = (array[:, 0] for array in index)
        inputs = q, k, v, index_q, index_k, cache.state
        out, state = qwen_sparse_attention_step(*inputs, **self.blocks)
        return out, PooledCache(state, tail)

    def _index(self, x, positions, segment_ids, cache):
        past = {} if cache is None else {"initial_state": cache.tail, "length": cache.length}
        return self.indexer(x, positions, self.turn_index, past | {"segment_ids": segment_ids})

    def turn_index(self, x: Any, positions: Any) -> Any:
        """As many channels as of the attention's heads turn, by the same frequencies."""
        fraction = self.rotary_fraction * self.head_size / x.shape[-1]
        how = {"theta": self.rope_theta, "scaling": self.rotary_scaling}
        return rotary_embedding(x, positions, fraction=fraction, **how)
