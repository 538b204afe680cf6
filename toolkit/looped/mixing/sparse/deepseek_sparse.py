"""DeepSeek sparse attention as a layer: an indexer picks tokens, softmax attends to them."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import (
    IndexedCache,
    deepseek_sparse_attention,
    deepseek_sparse_attention_step,
    indexer_loss,
)
from toolkit.looped.layers import linear, rotary_embedding
from toolkit.looped.mixing.attention import AttentionLayer, AttentionOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions

Stage = Literal["dense", "sparse"]
INDEXERS = ("lightning", "lt2")


@dataclasses.dataclass(frozen=True)
class DSAOptions(AttentionOptions):
    """Options of "dsa" layers, beside those of attention.

    Attributes:
        selected_tokens: tokens that a query attends to.
        indexer: "lightning", which `indexer_losses` trains, with grouped-query attention; or "lt2",
            random projections as released, with attention to one key of `shared_key_size` without
            positions, whose first `shared_value_size` channels are the value.
        index_heads: heads of the indexer (None: the model's `heads`).
        index_size: size of each.
        shared_key_size, shared_value_size: see `indexer`.
    """

    selected_tokens: int = 2048
    indexer: str = "lightning"
    index_heads: int | None = None
    index_size: int = 64
    shared_key_size: int = 576
    shared_value_size: int = 512

    @classmethod
    def tiny(cls) -> "DSAOptions":
        """Fewer tokens than a short text has, so that the selection matters."""
        return cls(selected_tokens=32, index_size=16, shared_key_size=72, shared_value_size=64)


class Indexer(nnx.Module):
    """The indexer: hidden states to queries, keys and weights of index scores.

    "lightning": q^I = rope(x W_q), k^I = rope(LayerNorm(x W_k)), w = x W_w / sqrt(heads size), the
    first half of the channels rotated; without FP8 and the Hadamard rotation that prepares it.
    "lt2": the mean over heads of <x W_q, x W_k>, which is not trained.

    x is a constant here, so that the indexer's loss trains only the indexer.

    Source: DeepSeek-V3.2 technical report, 2025, and its released inference code; LT2, released
        model code.
    """

    def __init__(self, config: LayerConfig, options: DSAOptions, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        heads, size = options.index_heads or config.heads, options.index_size
        self.query = linear(width, heads * size, dtype, rngs, std=std)
        self.key = linear(width, size, dtype, rngs, std=std)
        is_lightning = options.indexer == "lightning"
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
            # The mean of products is the product of means; ReLU(s) - ReLU(-s) = s.
            q = q.mean(axis=-2, keepdims=True)
            sign = jnp.array([1, -1], q.dtype)
            return q * sign[:, None], k, jnp.broadcast_to(sign, (*x.shape[:-1], 2))
        rotate = functools.partial(
            rotary_embedding, positions=positions, theta=self.rope_theta, fraction=0.5
        )
        q, k = rotate(q), rotate(self.key_norm(k)[..., None, :])[..., 0, :]
        return q, k, self.weights(x) * (q.shape[-2] * self.size) ** -0.5


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
    Options: ClassVar[type[LayerOptions]] = DSAOptions
    starts_from_attention: ClassVar[bool] = False  # the selection needs the indexer
    can_cut_time: ClassVar[bool] = False
    has_rows: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        options = self.options_of(config)
        self.value_size = options.shared_value_size if options.indexer == "lt2" else None
        if self.value_size is None:
            super().__init__(config, rngs=rngs)
        else:
            self._share_one_key(config, options, rngs)
        self.indexer = Indexer(config, options, rngs=rngs)
        self.selected_tokens = options.selected_tokens

    def _share_one_key(self, config, options, rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        heads, self.head_size = config.heads, options.shared_key_size
        value_size = options.shared_value_size
        self.longest = None  # there are no positions
        self.query = linear(width, heads * self.head_size, dtype, rngs, std=std)
        self.key = linear(width, self.head_size, dtype, rngs, std=std)
        self.output = linear(heads * value_size, width, dtype, rngs, std=std)
        self.gate = (
            linear(width, heads * value_size, dtype, rngs, std=0.0)
            if options.output_gate
            else nnx.data(None)
        )

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        options = cls.options_of(config)
        if options.indexer not in INDEXERS:
            raise ValueError(
                f"{cls.word}.indexer {options.indexer!r} is not one of {', '.join(INDEXERS)}."
            )
        if options.index_size % 4:
            raise ValueError(
                f"{cls.word}.index_size is {options.index_size}; it must be a multiple of 4: half "
                "of it rotates, in pairs."
            )
        if options.shared_value_size > options.shared_key_size:
            raise ValueError(
                f"{cls.word}.shared_value_size {options.shared_value_size} is more than "
                f"shared_key_size {options.shared_key_size}, of which the value is a part."
            )

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """Keys, values and index keys for `capacity` tokens."""
        options, (_, heads, size) = cls.options_of(config), cls.sizes_of(config)
        is_shared = options.indexer == "lt2"
        sizes = (1, options.shared_key_size, None) if is_shared else (heads, size, size)
        return IndexedCache.empty(batch, *sizes, options.index_size, capacity, config.compute_dtype)

    def _mix(self, x, positions, window, past):
        q, k, v = self._project(x, positions)
        index, selected = self.indexer(x, positions), self.selected_tokens
        recorder = _RECORDER.get()
        if recorder is not None:
            is_dense = recorder.stage == "dense"
            compared, segment_ids = None if is_dense else selected, past["segment_ids"]
            loss = indexer_loss(q, k, *index, selected_tokens=compared, segment_ids=segment_ids)
            recorder.losses.append(loss.mean())
            selected = x.shape[1] if is_dense else selected
        return deepseek_sparse_attention(q, k, v, *index, selected_tokens=selected, **past)

    def _mix_step(self, x_t, cache, window):
        inputs = (*self._project(x_t, cache.length), *self.indexer(x_t, cache.length))
        return deepseek_sparse_attention_step(*inputs, cache, selected_tokens=self.selected_tokens)

    def _project(self, x, positions):
        if self.value_size is None:
            return super()._project(x, positions)
        split = (*x.shape[:-1], -1, self.head_size)
        q, k = (project(x).reshape(split) for project in (self.query, self.key))
        return q, k, k[..., : self.value_size]


class Recorder(NamedTuple):
    """Collects the indexers' losses of a model while it is traced."""

    stage: Stage  # "dense" makes the layers attend to everything, and compares with that
    losses: list[Float[Array, ""]]  # one scalar per layer that ran


_RECORDER: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "recorder", default=None
)


@contextlib.contextmanager
def recording(stage: Stage) -> Iterator[list[Float[Array, ""]]]:
    """Collect the losses of the DSA layers that are called in the `with` block."""
    # The losses are tracers: use the list in the function that opened the block.
    recorder = Recorder(stage, [])
    token = _RECORDER.set(recorder)
    try:
        yield recorder.losses
    finally:
        _RECORDER.reset(token)
