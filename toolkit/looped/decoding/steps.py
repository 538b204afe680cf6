"""Reading with a cache: a prompt in parallel, more of it later, then one token at a time.

The model is an argument of the compiled program, which serves all models of a configuration.

Prompts of different lengths share a batch by left padding. The padding is a separate document,
which no layer mixes with the prompt and no cache stores. Every row has its own length: when its
text ends, `LoopedCache.insert` replaces it by the next one, read by `prefill`, without compiling.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.attention import bucket_length
from toolkit.looped.blocks import run_blocks
from toolkit.looped.decoding.cache import LoopedCache, empty_layers, empty_loop
from toolkit.looped.loops.rows import check_tokens, row_of
from toolkit.looped.model import LoopedLM
from toolkit.looped.scanned import is_scanning, scanned_layers


@checked
def prefill(
    model: LoopedLM, tokens: Int[Array, "batch time"], capacity: int, *,
    lengths: Int[Array, "batch"] | None = None,
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache]:  # fmt: skip
    """Read a prompt in parallel and return the cache that continues it.

    Args:
        model: the model.
        tokens: the prompt, at least one token.
        capacity: tokens the cache can hold, prompt included.
        lengths: length of each row's prompt, which stands at the end of the row; what precedes it
            is never seen. None for the whole row. See `pad_prompts`.

    Returns:
        float32 logits of the token after the prompt, and the cache.

    Cost: a forward pass; the head runs for the last position only.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> logits, cache = prefill(model, jnp.array([[5, 3, 8]]), capacity=8)
        >>> logits.shape
        (1, 256)
    """
    tokens = jnp.asarray(tokens)
    check_tokens(tokens, model.config.vocabulary)
    if tokens.shape[1] > capacity:
        raise ValueError(f"the prompt has {tokens.shape[1]} tokens, the capacity is {capacity}.")
    return _prefill(model, tokens, capacity, checked_lengths(lengths, tokens), is_scanning())


@checked
def extend(
    model: LoopedLM, tokens: Int[Array, "batch time"], cache: LoopedCache
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache]:
    """Read further tokens in parallel, after those in a cache: a long text in pieces, a new turn.

    The cache passed in is consumed. Reading in pieces gives the same result as reading at once and
    needs memory for one piece at a time. Each loop continues from the state of *the same loop* at
    the end of the previous piece, so no position sees a later one.

    Args:
        model: the model.
        tokens: what comes next, at least one token.
        cache: from `prefill`, `decode_step` or an earlier piece.

    Returns:
        float32 logits of the token after the last, and the cache with the tokens in it; NaN if a
        full-attention cache overflows its capacity.

    Cost: a forward pass on the piece, and one compilation per length of piece.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> _, cache = prefill(model, jnp.array([[5, 3]]), capacity=8)
        >>> logits, cache = extend(model, jnp.array([[7, 1, 4]]), cache)
        >>> logits.shape
        (1, 256)
    """
    tokens = jnp.asarray(tokens)
    check_tokens(tokens, model.config.vocabulary)
    return _append(model, tokens, cache, is_scanning())


@checked
def decode_step(
    model: LoopedLM, token: Int[Array, "batch"], cache: LoopedCache
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache]:
    """Append one token and predict the next.

    The cache passed in is consumed: its memory becomes the returned cache. The logits are NaN if a
    full-attention cache overflows its capacity.

    Args:
        model: the model.
        token: one token per sequence.
        cache: from `prefill` or an earlier step.

    Returns:
        float32 logits of the following token, and the cache with `token` in it.

    Cost: 2 FLOPs per parameter and loop; memory-bound: reads all parameters `loops` times
        (from the processor's cache if they fit) and the whole decode-time state.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> _, cache = prefill(model, jnp.array([[5, 3]]), capacity=8)
        >>> logits, cache = decode_step(model, jnp.array([7]), cache)
        >>> logits.shape
        (1, 256)
    """
    token = jnp.asarray(token)
    if token.ndim != 1 or not jnp.issubdtype(token.dtype, jnp.integer):
        raise ValueError(
            f"token is {token.dtype}{list(token.shape)}; it must be whole numbers of shape [batch]."
        )
    return _append(model, token, cache)


@checked
def pad_prompts(
    prompts: Sequence[Sequence[int]],
) -> tuple[Int[Array, "batch time"], Int[Array, "batch"]]:
    """Batch prompts of different lengths, padded on the left with token 0, to one of few widths.

        tokens, lengths = pad_prompts([b"One", b"and another"])
        logits, cache = prefill(model, tokens, capacity=64, lengths=lengths)

    Args:
        prompts: tokens of each, at least one.

    Returns:
        int32 tokens [batch, time], where time is `toolkit.attention.bucket_length` of the longest
        prompt, and lengths [batch].

    Cost: the model reads batch * time tokens, less than twice the longest prompt's.

    Example:
        >>> tokens, lengths = pad_prompts([b"One", b"and another"])
        >>> tokens.shape, lengths.tolist()
        ((2, 16), [3, 11])
    """
    rows = [np.asarray(list(prompt), np.int32) for prompt in prompts]
    empty = [number for number, row in enumerate(rows) if not len(row)]
    if not rows or empty:
        what = f"prompt {empty[0]} has no token" if rows else "there is no prompt"
        raise ValueError(f"{what}; each needs at least one.")
    lengths = np.array([len(row) for row in rows], np.int32)
    time = bucket_length(int(lengths.max()))
    padded = np.stack([np.pad(row, (time - len(row), 0)) for row in rows])
    return jnp.asarray(padded), jnp.asarray(lengths)


def bucketed(
    tokens: Int[Array, "batch time"], lengths: np.ndarray | None
) -> tuple[Int[Array, "batch bucket"], Int[Array, "batch"]]:
    """Prompts padded on the left to the length of a bucket, and the length of each."""
    batch, time = tokens.shape
    lengths = np.full(batch, time, np.int32) if lengths is None else lengths
    # On the host, because every new shape of an array of jax's compiles a program.
    pad = jnp.pad if isinstance(tokens, Tracer) else np.pad
    padded = pad(tokens, ((0, 0), (bucket_length(time) - time, 0)))
    return jnp.asarray(padded), jnp.asarray(lengths)


def checked_lengths(
    lengths: Any, tokens: Int[Array, "batch time"]
) -> Int[np.ndarray, "batch"] | None:
    """The tokens of each prompt as int32, or None; ValueError unless each lies within its row."""
    if lengths is None:
        return None
    lengths = np.asarray(lengths)
    batch, time = tokens.shape
    is_sound = lengths.shape == (batch,) and np.issubdtype(lengths.dtype, np.integer)
    if not is_sound or lengths.min() < 1 or lengths.max() > time:
        raise ValueError(
            f"lengths are {lengths.tolist()}; they must be {batch} whole numbers from 1 to {time}, "
            "the tokens of each prompt."
        )
    return lengths.astype(np.int32)


# Whether layers are scanned is an argument because each form is a program of its own.
@functools.partial(jax.jit, static_argnames=("capacity", "is_scanned"))
def _prefill(model, tokens, capacity, lengths, is_scanned):
    with scanned_layers(is_scanned):
        return _read(model, tokens, capacity, lengths)


def _read(model, tokens, capacity, lengths):
    config, (batch, time) = model.config, tokens.shape
    segment_ids = None
    if lengths is not None:
        segment_ids = (jnp.arange(time)[None] >= time - lengths[:, None]).astype(jnp.int32)
    before, after = (
        empty_layers(config, words, batch, capacity)
        for words in (config.prelude_layers, config.coda_layers)
    )
    injected, before = run_blocks(
        model.prelude,
        model.embedding(tokens),
        segment_ids=segment_ids,
        caches=before,
        tokens=tokens,
    )

    def body(tau, h, row):
        empty = empty_loop(config, batch, capacity, tau)
        how = {"segment_ids": segment_ids, "caches": empty, "tokens": tokens}
        return model.loop(h, *row, tau=tau, injected=injected, **how)

    h, loops = model.run_loops(body, model.start(injected))
    h, after = run_blocks(
        model.coda, model.leave(h, injected), segment_ids=segment_ids, caches=after, tokens=tokens
    )
    return model.head(h[:, -1]), LoopedCache(loops, before, after)


def append(
    model: LoopedLM, tokens: Int[Array, "batch *time"], cache: LoopedCache, *, every: bool = False
) -> tuple[Float[Array, "batch *time vocabulary"], LoopedCache]:
    """`decode_step` and `extend` without checks, to be called inside compiled programs.

    Logits after the last token or, with `every`, after each.
    """
    injected, before = run_blocks(
        model.prelude, model.embedding(tokens), caches=cache.prelude, tokens=tokens
    )
    length = None if model.config.recursion is None else cache.length
    h, rows, loops = model.start(injected, length=length), model.loop_rows(), []
    # Unrolled: a scan over stacked caches would copy each of them out and back.
    for tau, caches in enumerate(cache.loops):
        row = row_of(rows, tau)
        h, caches = model.loop(h, *row, caches=caches, tau=tau, injected=injected, tokens=tokens)
        loops.append(caches)
    h, after = run_blocks(model.coda, model.leave(h, injected), caches=cache.coda, tokens=tokens)
    return model.head(h if tokens.ndim == 1 or every else h[:, -1]), LoopedCache(
        tuple(loops), before, after
    )


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="is_scanned")
def _append(model, tokens, cache, is_scanned=False):
    with scanned_layers(is_scanned):
        return append(model, tokens, cache)
