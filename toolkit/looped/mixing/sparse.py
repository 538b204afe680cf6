"""Attention to a selection as layers: native sparse attention and DeepSeek sparse attention."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import (
    BlockCache,
    IndexedCache,
    deepseek_sparse_attention,
    deepseek_sparse_attention_step,
    indexer_loss,
    native_sparse_attention,
    native_sparse_attention_step,
)
from toolkit.looped.config import LoopedConfig
from toolkit.looped.layers import linear, rotary_embedding
from toolkit.looped.mixing.attention import AttentionLayer

Stage = Literal["dense", "sparse"]


class NSALayer(AttentionLayer):
    """Grouped-query attention with rotary positions, to block means, selected blocks and a window.

    Projections as in `AttentionLayer`, shared by the three branches; their weights are
    sigmoid(x W_b), three a head.

    Attributes:
        branch_gate: projection of the three gates.
        block_size, selected_blocks, sparse_window: what the branches see.

    Source: Yuan et al., "Native Sparse Attention", 2025; LT2, section on mixers, for sharing keys
        and values and for pooling by the mean.
    """

    word: ClassVar[str] = "nsa"

    def __init__(self, config: LoopedConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.width
        self.branch_gate = linear(
            width, 3 * config.heads, config.compute_dtype, rngs, std=width**-0.5
        )
        self.block_size = config.sparse_block
        self.selected_blocks = config.sparse_blocks
        self.sparse_window = config.sparse_window

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the mixer."""
        return {
            "block_size": self.block_size,
            "selected_blocks": self.selected_blocks,
            "sliding_window": self.sparse_window,
        }

    @classmethod
    def empty_cache(
        cls, config: LoopedConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """Keys and values for `capacity` tokens, and the means of their blocks."""
        _, heads, size = config.attention_sizes
        dtype = config.compute_dtype
        return BlockCache.empty(
            batch, heads, size, size, capacity, dtype, block_size=config.sparse_block
        )

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
        cache: Any = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """Mix a sequence; with a cache it continues what the cache holds."""
        positions = jnp.arange(x.shape[1]) + (0 if cache is None else cache.length)
        out, cache = native_sparse_attention(
            *self._project(x, positions),
            *self._gates(x),
            **self.options,
            segment_ids=segment_ids,
            initial_state=cache,
        )
        return self._finish(x, out), cache

    def step(
        self, x_t: Float[Array, "batch width"], cache: Any, *, window: int | None = None
    ) -> tuple[Float[Array, "batch width"], Any]:
        """Mix one token and append it to the cache."""
        q_t, k_t, v_t = self._project(x_t, cache.length)
        out_t, cache = native_sparse_attention_step(
            q_t, k_t, v_t, *self._gates(x_t), cache, **self.options
        )
        return self._finish(x_t, out_t), cache

    def _gates(self, x):
        compressed, selected, window = jnp.split(jax.nn.sigmoid(self.branch_gate(x)), 3, axis=-1)
        return compressed, selected, window


class Indexer(nnx.Module):
    """What picks tokens: from hidden states to queries, keys and weights of index scores.

    "lightning": q^I = rope(x W_q), k^I = rope(LayerNorm(x W_k)), w = x W_w / sqrt(heads size), the
    first half of the channels rotated; without FP8 and the Hadamard rotation that prepares it.
    "lt2": the mean over heads of <x W_q, x W_k>, which never learns.

    x is a constant here: the indexer's loss trains the indexer and nothing else.

    Attributes:
        query, key: projections.
        key_norm, weights: of the lightning indexer, or None.

    Source: DeepSeek-V3.2 technical report, 2025, and its released inference code; LT2, released
        model code.
    """

    def __init__(self, config: LoopedConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        heads, size = config.index_heads or config.heads, config.index_size
        self.query = linear(width, heads * size, dtype, rngs, std=std)
        self.key = linear(width, size, dtype, rngs, std=std)
        is_lightning = config.indexer == "lightning"
        self.key_norm = (
            nnx.LayerNorm(size, epsilon=1e-6, dtype=dtype, rngs=rngs)
            if is_lightning
            else nnx.data(None)
        )
        self.weights = (
            linear(width, heads, dtype, rngs, std=std) if is_lightning else nnx.data(None)
        )
        self.size, self.rope_theta = size, config.rope_theta

    def __call__(
        self, x: Float[Array, "... width"], positions: Int[Array, "..."]
    ) -> tuple[Array, Array, Array]:
        """Queries [..., heads, size], keys [..., size] and weights [..., heads]."""
        x = jax.lax.stop_gradient(x)
        q, k = self.query(x).reshape(*x.shape[:-1], -1, self.size), self.key(x)
        if self.key_norm is None or self.weights is None:
            # The mean of products is the product with the mean; ReLU(s) - ReLU(-s) = s.
            q = q.mean(axis=-2, keepdims=True)
            sign = jnp.array([1, -1], q.dtype)
            return q * sign[:, None], k, jnp.broadcast_to(sign, (*x.shape[:-1], 2))
        q = self._rotate(q, positions)
        k = self._rotate(self.key_norm(k)[..., None, :], positions)[..., 0, :]
        return q, k, self.weights(x) * (q.shape[-2] * self.size) ** -0.5

    def _rotate(self, x, positions):
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate(
            [rotary_embedding(first, positions, theta=self.rope_theta), second], axis=-1
        )


class DSALayer(AttentionLayer):
    """Attention to the tokens that an indexer picks.

    With the lightning indexer: grouped-query attention with rotary positions. With LT2's: all
    heads read one key of `shared_key_size`, whose first `shared_value_size` channels are the
    value, without positions.

    Attributes:
        indexer: an `Indexer`.
        selected_tokens: how many a query attends to.
        value_size: channels of the shared key that are the value, or None.

    Source: DeepSeek-V3.2 technical report, 2025; LT2, released model code.
    """

    word: ClassVar[str] = "dsa"

    def __init__(self, config: LoopedConfig, *, rngs: nnx.Rngs):
        self.value_size = config.shared_value_size if config.indexer == "lt2" else None
        if self.value_size is None:
            super().__init__(config, rngs=rngs)
        else:
            self._share_one_key(config, self.value_size, rngs)
        self.indexer = Indexer(config, rngs=rngs)
        self.selected_tokens = config.selected_tokens

    def _share_one_key(self, config, value_size, rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        heads, self.head_size = config.heads, config.shared_key_size
        self.query = linear(width, heads * self.head_size, dtype, rngs, std=std)
        self.key = linear(width, self.head_size, dtype, rngs, std=std)
        self.output = linear(heads * value_size, width, dtype, rngs, std=std)
        self.gate = (
            linear(width, heads * value_size, dtype, rngs, std=0.0)
            if config.attention_output_gate
            else nnx.data(None)
        )

    @classmethod
    def empty_cache(
        cls, config: LoopedConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """Keys, values and index keys for `capacity` tokens."""
        _, heads, size = config.attention_sizes
        is_shared = config.indexer == "lt2"
        sizes = (1, config.shared_key_size, None) if is_shared else (heads, size, size)
        return IndexedCache.empty(batch, *sizes, config.index_size, capacity, config.compute_dtype)

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
        cache: Any = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """Mix a sequence; with a cache it continues what the cache holds."""
        positions = jnp.arange(x.shape[1]) + (0 if cache is None else cache.length)
        q, k, v = self._project(x, positions)
        index, selected = self.indexer(x, positions), self.selected_tokens
        recorder = _RECORDER.get()
        if recorder is not None:
            is_dense = recorder.stage == "dense"
            loss = indexer_loss(
                q, k, *index, selected_tokens=None if is_dense else selected,
                segment_ids=segment_ids,
            )  # fmt: skip
            recorder.losses.append(loss.mean())
            selected = x.shape[1] if is_dense else selected
        out, cache = deepseek_sparse_attention(
            q, k, v, *index, selected_tokens=selected, segment_ids=segment_ids, initial_state=cache
        )
        return self._finish(x, out), cache

    def step(
        self, x_t: Float[Array, "batch width"], cache: Any, *, window: int | None = None
    ) -> tuple[Float[Array, "batch width"], Any]:
        """Mix one token and append it to the cache."""
        inputs = (*self._project(x_t, cache.length), *self.indexer(x_t, cache.length))
        out_t, cache = deepseek_sparse_attention_step(
            *inputs, cache, selected_tokens=self.selected_tokens
        )
        return self._finish(x_t, out_t), cache

    def _project(self, x, positions):
        if self.value_size is None:
            return super()._project(x, positions)
        split = (*x.shape[:-1], -1, self.head_size)
        q, k = (project(x).reshape(split) for project in (self.query, self.key))
        return q, k, k[..., : self.value_size]


class Recorder(NamedTuple):
    """Where the DSA layers of a model that is being traced leave their indexers' losses.

    Attributes:
        stage: "dense" makes them attend to everything, and compares with that.
        losses: one scalar a layer that ran.
    """

    stage: Stage
    losses: list[Float[Array, ""]]


_RECORDER: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "recorder", default=None
)


@contextlib.contextmanager
def recording(stage: Stage) -> Iterator[list[Float[Array, ""]]]:
    """Collect the losses of the DSA layers that are called in the `with` block.

    A loss belongs to the function being traced: use the list in the one that opened the block.

    Args:
        stage: see `Recorder`.

    Returns:
        The list, filled as layers run.
    """
    recorder = Recorder(stage, [])
    token = _RECORDER.set(recorder)
    try:
        yield recorder.losses
    finally:
        _RECORDER.reset(token)
