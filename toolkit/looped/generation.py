"""Writing text: read the prompt in parallel, then one token at a time from the cache.

The model is a pytree and goes through `jax.jit` as an argument, so one compiled program serves
all models of a configuration. Text is written in chunks: one dispatch runs many tokens.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from toolkit.looped.blocks import run_blocks, step_blocks
from toolkit.looped.cache import LoopedCache, empty_layers, empty_loop
from toolkit.looped.model import LoopedLM, check_tokens, row_of
from toolkit.looped.sampling import sample_token

CHUNK = 32
"""Most tokens one dispatch writes."""

CAPACITY_STEP = 64
"""Cache capacities are rounded up to a multiple of this, so texts of similar length share a
compiled program."""


def prefill(
    model: LoopedLM, tokens: Int[Array, "batch time"], capacity: int
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache]:
    """Read a prompt in parallel and keep what is needed to continue it.

    Args:
        model: the model.
        tokens: the prompt, at least one token.
        capacity: tokens the cache can hold, prompt included.

    Returns:
        float32 logits of the token after the prompt, and the cache.

    Raises:
        ValueError: if tokens are malformed or do not fit into the capacity.

    Cost: that of the forward pass; the head runs for the last position only.

    Source: LT2, decode-time state.
    """
    tokens = jnp.asarray(tokens)
    check_tokens(tokens)
    if tokens.shape[1] > capacity:
        raise ValueError(f"the prompt has {tokens.shape[1]} tokens, the capacity is {capacity}.")
    return _prefill(model, tokens, capacity)


def decode_step(
    model: LoopedLM, token: Int[Array, "batch"], cache: LoopedCache
) -> tuple[Float[Array, "batch vocabulary"], LoopedCache]:
    """Append one token and predict the next.

    The cache passed in is consumed: its memory becomes the returned cache. A full-attention
    cache that overflows its capacity answers NaN.

    Args:
        model: the model.
        token: one token a sequence.
        cache: from `prefill` or an earlier step.

    Returns:
        float32 logits of the following token, and the cache with `token` in it.

    Raises:
        ValueError: if token is not a [batch] array of whole numbers.

    Cost: 2 FLOPs a parameter and loop; memory-bound: reads all parameters `loops` times
        (from the processor's cache if they fit) and the whole decode-time state.

    Source: LT2, decode-time state.
    """
    token = jnp.asarray(token)
    if token.ndim != 1 or not jnp.issubdtype(token.dtype, jnp.integer):
        raise ValueError(
            f"token is {token.dtype}{list(token.shape)}; it must be whole numbers of shape [batch]."
        )
    return _decode_step(model, token, cache)


def generate(
    model: LoopedLM,
    prompt: Int[Array, "batch time"],
    length: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
) -> Int[Array, "batch length"]:
    """Continue a prompt.

    Args:
        model: the model.
        prompt: at least one token a sequence; all prompts of a batch are equally long.
        length: tokens to write.
        temperature: 0 takes the most likely token; 1 samples from the model's distribution.
        top_k: sample among the k most likely tokens only.
        top_p: sample among the smallest set of tokens with this mass only.
        key: random key, needed unless the temperature is 0. Token i uses `fold_in(key, i)`.

    Returns:
        The `length` new tokens, int32, without the prompt.

    Raises:
        ValueError: if an argument is out of range; nothing has been compiled then.

    Cost: one `prefill` and `length` decode steps, CHUNK of them a dispatch.

    Source: see `truncated_logits` for the sampling rules.
    """
    state = _start(model, prompt, length, temperature, top_k, top_p, key)
    return jnp.concatenate(list(_chunks(model, *state, length, CHUNK)), axis=1)


def stream(
    model: LoopedLM,
    prompt: Int[Array, "batch time"],
    length: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    tokens_per_dispatch: int = 8,
) -> Iterator[np.ndarray]:
    """`generate`, token by token: the same tokens, each [batch], as soon as they are written.

    Args:
        model: the model.
        prompt: as in `generate`.
        length: as in `generate`.
        temperature: as in `generate`.
        top_k: as in `generate`.
        top_p: as in `generate`.
        key: as in `generate`.
        tokens_per_dispatch: tokens computed at a time, at most CHUNK; 1 has the least delay,
            more have less overhead.

    Returns:
        An iterator over int32 arrays [batch].

    Raises:
        ValueError: if an argument is out of range; raised by the call, not by the first token.

    Cost: see `generate`; the compiled programs are the same.
    """
    if not 1 <= tokens_per_dispatch <= CHUNK:
        raise ValueError(f"tokens_per_dispatch is {tokens_per_dispatch}; it must be 1 to {CHUNK}.")
    state = _start(model, prompt, length, temperature, top_k, top_p, key)
    chunks = _chunks(model, *state, length, tokens_per_dispatch)
    return (column for chunk in chunks for column in np.asarray(chunk).T)


def _start(model, prompt, length, temperature, top_k, top_p, key):
    """Check everything, then read the prompt: (logits, cache, key, how to sample)."""
    prompt = jnp.asarray(prompt)
    check_tokens(prompt)
    if length < 1:
        raise ValueError(f"length is {length}; at least one token must be asked for.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 or more.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must lie in (0, 1].")
    if temperature > 0 and key is None:
        raise ValueError("sampling at a temperature needs a key, e.g. key=jax.random.key(0).")
    # Values enter the program as arrays, so moving a slider does not recompile; a greedy program
    # has none of them.
    how = {}
    if temperature > 0:
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        how = {name: jnp.asarray(value) for name, value in how.items() if value is not None}
    capacity = -(-(prompt.shape[1] + length) // CAPACITY_STEP) * CAPACITY_STEP
    logits, cache = _prefill(model, prompt, capacity)
    return logits, cache, jax.random.key(0) if key is None else key, how


def _chunks(model, logits, cache, key, how, length, size):
    for start in range(0, length, size):
        count = min(size, length - start)
        tokens, logits, cache = _decode_chunk(model, logits, cache, key, how, start, count)
        yield tokens[:, :count]


@functools.partial(jax.jit, static_argnames="capacity")
def _prefill(model, tokens, capacity):
    config, batch = model.config, tokens.shape[0]
    before, after = (
        empty_layers(config, words, batch, capacity)
        for words in (config.prelude_layers, config.coda_layers)
    )
    injected, before = run_blocks(model.prelude, model.embedding(tokens), caches=before)

    def body(tau, h, row):
        empty = empty_loop(config, batch, capacity, tau)
        return model.loop(h, *row, tau=tau, injected=injected, caches=empty)

    h, loops = model.run_loops(body, model.start(injected))
    h, after = run_blocks(model.coda, h, caches=after)
    return model.head(h[:, -1]), LoopedCache(loops, before, after)


def _step(model, token, cache):
    injected, before = step_blocks(model.prelude, model.embedding(token), cache.prelude)
    h, rows, loops = model.start(injected), model.loop_rows(), []
    for tau, caches in enumerate(cache.loops):
        row = row_of(rows, tau)
        h, caches = model.loop_step(h, row.rho, caches, row.embedding, tau=tau, injected=injected)
        loops.append(caches)
    h, after = step_blocks(model.coda, h, cache.coda)
    return model.head(h), LoopedCache(tuple(loops), before, after)


_decode_step = jax.jit(_step, donate_argnames="cache")


@functools.partial(jax.jit, donate_argnames="cache")
def _decode_chunk(model, logits, cache, key, how, start, count):
    """Sample and append `count` tokens, at most CHUNK; a traced number, so compiled once."""

    def body(i, carry):
        tokens, logits, cache = carry
        token = sample_token(logits, jax.random.fold_in(key, start + i), **how)
        logits, cache = _step(model, token, cache)
        return tokens.at[:, i].set(token), logits, cache

    tokens = jnp.zeros((logits.shape[0], CHUNK), jnp.int32)
    return jax.lax.fori_loop(0, count, body, (tokens, logits, cache))
