"""The decode-time state of a looped model: one cache for every (loop, layer) pair.

The loops share weights but not caches, because a layer sees different inputs in every loop.

Every pair has separate arrays, so that a donated cache is updated in place. One array with an axis
of loops would let a decode step scan over them and compile faster, but each loop would copy its
part out and back: with five softmax layers and four loops a step was 2.6 times slower at 256 tokens
and 7 times at 4096 (measured on a two-core CPU).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from toolkit._checks import checked
from toolkit._pytrees import check_classes, register_dataclass
from toolkit.attention import sparse
from toolkit.attention._caches import check_other, check_rows
from toolkit.looped.config import LoopedConfig
from toolkit.looped.mixing import LAYERS
from toolkit.looped.mixing.sparse.sparse_memory import SparseMemory


@register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopedCache:
    """Caches of all loops and layers.

    The first axis of every array is the batch; a row may be freed and reused for another text.

    Attributes:
        loops: `loops[tau][layer]`: keys and values of a softmax layer (the window alone for
            "window"), state and convolution tail of a recurrent one.
        prelude, coda: caches of the layers before and after the loops, one per layer.

    Source: LT2, decode-time state; vLLM's Ouro keeps the same loops * layers caches.

    Example:
        >>> config = LoopedConfig.tiny("gdn full", loops=2, width=16, heads=2)
        >>> cache = LoopedCache.empty(config, batch=1, capacity=32)
        >>> len(cache.loops), len(cache.loops[0])
        (2, 2)
    """

    loops: tuple[tuple[Any, ...], ...]
    prelude: tuple[Any, ...] = ()
    coda: tuple[Any, ...] = ()

    @property
    def length(self) -> Int[Array, "batch"]:
        """Number of tokens per row, from the layers that count them; a recurrent state does not.

        Where no layer does, all are 0.
        """
        layers = jax.tree.leaves(self, is_leaf=_is_of_a_layer)
        counts = (getattr(layer, "length", None) for layer in layers)
        batch = jax.tree.leaves(self)[0].shape[0]
        return next((n for n in counts if n is not None), jnp.zeros(batch, jnp.int32))

    def free(self, rows: Int[Array, "rows"] | Bool[Array, "batch"]) -> "LoopedCache":
        """Clear some rows, given by index or by a boolean mask."""
        return self._by_layer(lambda cache: cache.free(rows))

    def truncate(self, lengths: Int[Array, "batch"]) -> "LoopedCache":
        """Keep the first `lengths` tokens of every row, as if no others had been read.

        TypeError where a layer keeps a state or an index, which `restore` brings back. Not for
        models with `recursion`, whose loops hold different numbers of tokens.
        """
        return self._by_layer(lambda cache: cache.truncate(lengths))

    def restore(
        self, earlier: Sequence["LoopedCache"], which: Int[Array, "batch"]
    ) -> "LoopedCache":
        """Go back to an earlier state, row b to that of earlier[which[b]].

        This cache must come from those in `earlier` by reading tokens. Only their states and
        indices are used; keys and values need no copy.
        """
        return self._by_layer(lambda cache, *past: cache.restore(past, which), *earlier)

    def _by_layer(self, change: Callable[..., Any], *others: "LoopedCache") -> "LoopedCache":
        def layers(cache: LoopedCache) -> tuple[Any, ...]:
            return cache.loops, cache.prelude, cache.coda

        every = map(layers, (self, *others))
        return LoopedCache(*jax.tree.map(change, *every, is_leaf=_is_of_a_layer))

    def insert(self, rows: Int[Array, "rows"], other: "LoopedCache") -> "LoopedCache":
        """Replace some rows by those of `other`, from `prefill` with the same capacity.

        The remaining rows go on: a batch takes the next text when one of its texts ends.
        """
        check_rows(rows, jax.tree.leaves(self)[0].shape[0])
        check_other(self, rows, other)
        return jax.tree.map(lambda old, new: old.at[rows].set(new), self, other)

    @classmethod
    def empty(cls, config: LoopedConfig, batch: int, capacity: int) -> "LoopedCache":
        """A cache before the first token, for a batch of sequences of up to `capacity` tokens.

        TypeError where a layer's cache is of a class registered by
        `jax.tree_util.register_dataclass`; see `attention.register_dataclass`.
        """
        for name, number in (("batch", batch), ("capacity", capacity)):
            if number < 1:
                raise ValueError(f"{name} is {number}; a cache needs at least 1.")
        return cls(
            tuple(empty_loop(config, batch, capacity, tau) for tau in range(config.loops)),
            empty_layers(config, config.prelude_layers, batch, capacity),
            empty_layers(config, config.coda_layers, batch, capacity),
        )


def _is_of_a_layer(cache):
    return hasattr(cache, "free") and not isinstance(cache, LoopedCache)


def empty_loop(config: LoopedConfig, batch: int, capacity: int, tau: int) -> tuple[Any, ...]:
    """The caches of one loop before the first token, one per physical layer."""
    return tuple(
        _empty(config, word, batch, capacity, **({} if window is None else {"window": window}))
        for word, window in zip(config.layers, config.loop_windows[tau], strict=True)
    )


def empty_layers(
    config: LoopedConfig, words: tuple[str, ...], batch: int, capacity: int
) -> tuple[Any, ...]:
    """The caches of layers outside the loops before the first token."""
    return tuple(_empty(config, word, batch, capacity) for word in words)


def _empty(config: LoopedConfig, word: str, batch: int, capacity: int, **window: int) -> Any:
    cache = LAYERS[word].empty_cache(config, batch, capacity, **window)
    check_classes(f"cache of {word!r}", cache)
    return cache


@checked
def read_sparsely(
    config: LoopedConfig, cache: LoopedCache, words: str, *,
    dense_layers: int = 0, corrects_tail: bool = False,
) -> LoopedCache:  # fmt: skip
    """Make every further step read only a part of the keys and values.

    Args:
        config: the model's.
        cache: from `prefill`; the keys and values of its "full" attention layers are indexed, other
            layers are left as they are.
        words: a system of `attention.sparse.SELECTORS` and its budget, such as "tactic:mass=0.9".
        dense_layers: number of first softmax layers, counted over all loops, that go on reading
            everything; in many models they depend on the most tokens.
        corrects_tail: whether to add an estimate of the tokens not attended to.

    Returns:
        A cache for `decode_step` and everything that decodes with it; `sparse_reads` tells what it
        read.

    Cost: one copy of the keys and values, and the system's index of them.

    Example:
        >>> config = LoopedConfig.tiny("full", loops=2, width=16, heads=2)
        >>> cache = LoopedCache.empty(config, batch=1, capacity=32)
        >>> type(read_sparsely(config, cache, "window:16").loops[0][0]).__name__
        'SparseMemory'
    """
    choice = sparse.choose(words)
    if "full" in config.options and config.full.sinks:
        raise ValueError("full.sinks: layers with sinks are not read sparsely; wanted False")
    if config.recursion is not None:
        raise ValueError("recursion: caches that lack tokens are not read sparsely; wanted None")
    if dense_layers < 0:
        raise ValueError(f"dense_layers must be at least 0; got {dense_layers}.")
    seen = 0

    def indexed(layers, names, windows):
        nonlocal seen
        for layer, word, window in zip(layers, names, windows, strict=True):
            if word == "full" and window is None:
                seen += 1
                if seen > dense_layers:
                    layer = SparseMemory.of(layer, choice, corrects_tail)
            yield layer

    none = (None,) * max(len(config.prelude_layers), len(config.coda_layers))
    before = tuple(indexed(cache.prelude, config.prelude_layers, none[: len(cache.prelude)]))
    loops = tuple(
        tuple(indexed(layers, config.layers, windows))
        for layers, windows in zip(cache.loops, config.loop_windows, strict=True)
    )
    after = tuple(indexed(cache.coda, config.coda_layers, none[: len(cache.coda)]))
    if seen <= dense_layers:
        raise ValueError(
            f"dense_layers is {dense_layers} and the model has {seen} layers of full attention: "
            "none is left to read sparsely."
        )
    return LoopedCache(loops, before, after)


@checked
def sparse_reads(
    cache: LoopedCache,
) -> tuple[Int[Array, "layers batch"], Int[Array, "layers batch"]]:
    """What the last step read, in the layers that read sparsely.

    Args:
        cache: from `read_sparsely` and a step with it.

    Returns:
        Tokens attended to, summed over key heads, and bytes read, including those of the index:
        int32 [layers, batch], in the order in which the layers run.

    Cost: none.

    Example:
        >>> config = LoopedConfig.tiny("full", loops=2, width=16, heads=2)
        >>> cache = LoopedCache.empty(config, batch=1, capacity=32)
        >>> tokens, bytes_read = sparse_reads(read_sparsely(config, cache, "window:16"))
        >>> tokens.shape
        (2, 1)
    """
    layers = jax.tree.leaves(
        (cache.prelude, cache.loops, cache.coda), is_leaf=lambda x: isinstance(x, SparseMemory)
    )
    reads = [(x.tokens, x.bytes_read) for x in layers if isinstance(x, SparseMemory)]
    if not reads:
        raise ValueError("cache: no layer reads sparsely; see `read_sparsely`.")
    tokens, bytes_read = (jnp.stack(x).sum(axis=2) for x in zip(*reads, strict=True))
    return tokens, bytes_read


@checked
def cache_bytes_per_sequence(config: LoopedConfig, capacity: int) -> int:
    """Bytes of decode-time state per sequence; nothing is allocated.

    Softmax layers take loops * 2 * key_value_heads * head_size numbers per token; a window stops
    growing at its length; a recurrent layer never grows.

    Args:
        config: the model.
        capacity: tokens, prompt included.

    Returns:
        Bytes of keys, values, states and convolution tails (not of the length counters).

    Source: LT2, decode-time state.

    Example:
        >>> config = LoopedConfig.tiny("window", width=64, heads=4)
        >>> cache_bytes_per_sequence(config, 1000)  # 64 keys and 64 values of float32
        32768
    """
    cache = jax.eval_shape(lambda: LoopedCache.empty(config, 1, capacity))
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(cache)
        if leaf.dtype != jnp.int32  # a length
    )


@checked
def cache_bytes_per_token(config: LoopedConfig) -> int:
    """Bytes of decode-time state that every further token adds, once all windows are full.

        loops * 2 * key_value_heads * head_size numbers per softmax layer that sees everything

    Args:
        config: the model.

    Returns:
        Bytes per token and sequence; 0 for a model of windows and recurrent layers.

    Cost: shapes only.

    Source: LT2, decode-time state.

    Example:
        >>> cache_bytes_per_token(LoopedConfig.tiny("full gdn", loops=2, width=64))
        1024
    """
    # Growth is linear past every window; the lengths are some tokens apart because some caches grow
    # by blocks.
    few = 2**10
    words = (*config.layers, *config.prelude_layers, *config.coda_layers)
    longest = max(LAYERS[word].window_of(config) or 1 for word in words)
    start = -(-longest // few) * few
    growth = cache_bytes_per_sequence(config, start + few) - cache_bytes_per_sequence(config, start)
    return growth // few
