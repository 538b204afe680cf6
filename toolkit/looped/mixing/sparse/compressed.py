"""Attention to a window and to compressed blocks as layers, and to a window alone (DeepSeek-V4)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import (
    CompressedCache,
    KVCache,
    compressed_sparse_attention,
    compressed_sparse_attention_step,
    heavily_compressed_attention,
    heavily_compressed_attention_step,
    softmax_attention,
    softmax_attention_step,
)
from toolkit.looped.layers import linear, normalised, rotary_embedding, token_positions
from toolkit.looped.mixing.attention import AttentionSizes
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, MixingLayer
from toolkit.looped.mixing.sparse.compressed_options import CSAOptions, HCAOptions, SharedKeyOptions
from toolkit.looped.mixing.sparse.pooled import Compressor, PooledCache


class SharedWindowLayer(MixingLayer):
    """Attention to the last tokens, all heads of which share one key that is also the value.

        z = RMSNorm(x W_z);   q = turn(unit RMS of z W_q, per head);   c = turn(RMSNorm(x W_c))
        o = turn back( softmax(q . c, with a learned sink) c );   y = [o_g W_g for groups g] W_o

    Turning the outputs back, by the query's position, leaves a function of distances in the value's
    turned channels.

    Source: DeepSeek-V4 technical report (2026), section 2.3; its modelling file in Hugging Face
        transformers.
    """

    word: ClassVar[str] = "shared_window"
    mixer: ClassVar[str] = "window"
    Options: ClassVar[type[LayerOptions]] = SharedKeyOptions

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        options, width, dtype = self.options_of(config), config.width, config.compute_dtype
        heads, size = config.heads, options.head_size
        latent, groups = options.query_latent_size, options.output_groups
        inputs, outputs = heads * size // groups, options.output_latent_size

        def project(inputs: int, outputs: int) -> nnx.Linear:
            return linear(inputs, outputs, dtype, rngs, std=inputs**-0.5)

        def norm(size: int) -> nnx.RMSNorm:
            return nnx.RMSNorm(size, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)

        self.query_down, self.query_norm = project(width, latent), norm(latent)
        self.query_up = project(latent, heads * size)
        self.key, self.key_norm = project(width, size), norm(size)
        self.sinks = nnx.Param(jnp.zeros(heads))
        draw = nnx.initializers.truncated_normal(inputs**-0.5, lower=-3.0, upper=3.0)
        self.output_down = nnx.Param(draw(rngs.params(), (groups, inputs, outputs)))
        self.output_up = project(groups * outputs, width)
        self.head_size, self.dtype, self.epsilon = size, dtype, config.norm_epsilon
        self.rope_theta = options.rope_theta or config.rope_theta
        self.options = options

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> AttentionSizes:
        """Head counts and head size."""
        return AttentionSizes(config.heads, 1, cls.options_of(config).head_size)

    @classmethod
    def check(cls, config: LayerConfig) -> None:
        super().check(config)
        options, word = cls.options_of(config), cls.word
        if config.heads % options.output_groups:
            raise ValueError(
                f"{word}.output_groups {options.output_groups} does not divide heads "
                f"{config.heads}."
            )
        index_size = getattr(options, "index_size", options.rope_size)
        if options.rope_size % 2 or options.rope_size > min(options.head_size, index_size):
            raise ValueError(
                f"{word}.rope_size is {options.rope_size}; it must be even and at most the size of "
                "a head, and of a head of the index."
            )
        try:
            options.scaling(options.rope_theta or config.rope_theta)
        except ValueError as error:
            raise ValueError(f"{word}: {error}") from None

    @classmethod
    def empty_cache(cls, config: LayerConfig, batch: int, capacity: int) -> Any:
        """A ring of the window."""
        options = cls.options_of(config)
        size, window = options.head_size, options.sliding_window
        return KVCache.empty(batch, 1, size, size, window, config.compute_dtype)

    def __call__(
        self, x: Float[Array, "batch time width"], *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: Any = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:  # fmt: skip
        """Mix a sequence, after the tokens of a cache if one is given."""
        length = None if cache is None else cache.length
        positions = token_positions(x.shape[:2], length, segment_ids)
        out, cache = self._mix(x, positions, segment_ids, cache)
        return self._finish(out, positions), cache

    def step(
        self, x_t: Float[Array, "batch width"], cache: Any
    ) -> tuple[Float[Array, "batch width"], Any]:
        """Mix one token and append it to the cache."""
        positions = cache.length[:, None]
        out_t, cache = self._mix_step(x_t[:, None], positions, cache)
        return self._finish(out_t[:, None], positions)[:, 0], cache

    def _mix(self, x, positions, segment_ids, cache):
        _, q, key = self._project(x, positions)
        past = {"segment_ids": segment_ids, "initial_state": cache}
        return softmax_attention(q, key, key, **self._how(), **past)

    def _mix_step(self, x, positions, cache):
        _, q, key = (a[:, 0] for a in self._project(x, positions))
        return softmax_attention_step(q, key, key, cache, **self._how())

    def _how(self) -> dict[str, Any]:
        return {"sliding_window": self.options.sliding_window, "sinks": self.sinks[...]}

    def _project(self, x, positions):
        """The queries' latent, the queries, and the key that is also the value."""
        latent = self.query_norm(self.query_down(x))
        q = self.query_up(latent).reshape(*x.shape[:-1], -1, self.head_size)
        q = normalised(q, self.epsilon).astype(self.dtype)
        key = self.key_norm(self.key(x))[..., None, :]
        return latent, self.turn(q, positions), self.turn(key, positions)

    def turn(self, x: Float[Array, "... heads size"], positions: Int[Array, "..."]) -> Array:
        """The rotary embedding of the last channels, in pairs of neighbours."""
        count, theta = self.options.rope_size, self.rope_theta
        still, turned = jnp.split(x, [x.shape[-1] - count], axis=-1)
        pairs = turned.reshape(*x.shape[:-1], count // 2, 2).swapaxes(-1, -2)
        halves = pairs.reshape(turned.shape)
        halves = rotary_embedding(
            halves, positions, theta=theta, scaling=self.options.scaling(theta)
        )
        pairs = halves.reshape(*x.shape[:-1], 2, count // 2).swapaxes(-1, -2)
        return jnp.concatenate([still, pairs.reshape(turned.shape)], axis=-1)

    def _finish(self, out, positions):
        out = self.turn(out, -positions)
        kernel = self.output_down[...].astype(self.dtype)
        groups = out.reshape(*out.shape[:2], *kernel.shape[:2])
        latent = jnp.einsum("btgi,gio->btgo", groups, kernel)
        return self.output_up(latent.reshape(*out.shape[:2], -1))


class HCALayer(SharedWindowLayer):
    """`SharedWindowLayer` whose queries also see an entry per block before them.

    Source: DeepSeek-V4 technical report (2026), section 2.3.2.
    """

    word: ClassVar[str] = "hca"
    mixer: ClassVar[str] = ""
    Options: ClassVar[type[LayerOptions]] = HCAOptions
    series: ClassVar[int] = 1

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        block_size = self.options.block_size
        self.compressor = Compressor(config, self.head_size, block_size, self.series, rngs)

    @classmethod
    def empty_cache(cls, config: LayerConfig, batch: int, capacity: int) -> PooledCache:
        """A ring of the window, an entry per block, and the rows of an unfinished block."""
        options, dtype = cls.options_of(config), config.compute_dtype
        size, block_size = options.head_size, options.block_size
        index_size = getattr(options, "index_size", None)
        state = CompressedCache.empty(
            batch, 1, size, size, capacity, dtype, block_size=block_size,
            sliding_window=options.sliding_window, index_size=index_size,
        )  # fmt: skip
        tails = [
            Compressor.empty_tail(batch, own, block_size, cls.series, dtype)
            for own in (size, index_size)
            if own is not None
        ]
        return PooledCache(state, tuple(tails))

    def _mix(self, x, positions, segment_ids, cache):
        inputs, tails = self._inputs(x, positions, segment_ids, cache)
        how = {} if cache is None else {"initial_state": cache.state}
        out, state = self._functions()[0](*inputs, segment_ids=segment_ids, **self._how(), **how)
        return out, None if cache is None else PooledCache(state, tails)

    def _mix_step(self, x, positions, cache):
        inputs, tails = self._inputs(x, positions, None, cache)
        tokens = (array[:, 0] for array in inputs)
        out, state = self._functions()[1](*tokens, cache.state, **self._how())
        return out, PooledCache(state, tails)

    def _functions(self) -> tuple[Any, Any]:
        return heavily_compressed_attention, heavily_compressed_attention_step

    def _how(self) -> dict[str, Any]:
        return super()._how() | {"block_size": self.options.block_size}

    def _inputs(self, x, positions, segment_ids, cache):
        """Those of the mixer, and the new tails."""
        latent, q, key = self._project(x, positions)
        length = None if cache is None else cache.length
        pasts = [
            {"segment_ids": segment_ids, "initial_state": tail, "length": length}
            for tail in ((None, None) if cache is None else cache.tail)
        ]
        starts = positions - (self.options.block_size - 1)
        entries, tail = self.compressor(x, pasts[0])
        entries = self.turn(entries[..., None, :], starts)
        index, tails = self._index(x, latent, positions, starts, pasts[1:])
        return (q, key, key, entries, entries, *index), (tail, *tails)

    def _index(self, x, latent, positions, starts, pasts):
        return (), ()


class EntryIndexer(nnx.Module):
    """The indexer of "csa" layers: queries of the attention's latent, keys pooled on their own.

    Its inputs are constants: the selection passes no gradient.
    """

    def __init__(self, config: LayerConfig, options: CSAOptions, *, rngs: nnx.Rngs):
        heads, size = options.index_heads or config.heads, options.index_size
        latent, dtype = options.query_latent_size, config.compute_dtype
        self.query = linear(latent, heads * size, dtype, rngs, std=latent**-0.5)
        self.weights = linear(config.width, heads, dtype, rngs, std=config.width**-0.5)
        self.compressor = Compressor(config, size, options.block_size, 2, rngs)
        self.size = size


class CSALayer(HCALayer):
    """`SharedWindowLayer` whose queries also see the entries that an indexer picks.

        I_tb = sum_j w_tj ReLU(q^I_tj . k^I_b)      w = x W_w / sqrt(index heads * index size)

    An entry pools the rows of its block and of the block before.

    Source: DeepSeek-V4 technical report (2026), section 2.3.1.
    """

    word: ClassVar[str] = "csa"
    Options: ClassVar[type[LayerOptions]] = CSAOptions
    series: ClassVar[int] = 2

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.indexer = EntryIndexer(config, self.options, rngs=rngs)

    def _functions(self) -> tuple[Any, Any]:
        return compressed_sparse_attention, compressed_sparse_attention_step

    def _how(self) -> dict[str, Any]:
        return super()._how() | {"selected_entries": self.options.selected_entries}

    def _index(self, x, latent, positions, starts, pasts):
        own, (past,) = self.indexer, pasts
        x, latent = jax.lax.stop_gradient(x), jax.lax.stop_gradient(latent)
        q = own.query(latent).reshape(*x.shape[:-1], -1, own.size)
        keys, tail = own.compressor(x, past)
        weights = own.weights(x) * (q.shape[-2] * own.size) ** -0.5
        keys = self.turn(keys[..., None, :], starts)[..., 0, :]
        return (self.turn(q, positions), keys, weights), (tail,)
