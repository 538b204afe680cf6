"""Text generation: read the prompt in parallel, then sample and append token after token.

One dispatch generates a chunk of many tokens.
"""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from toolkit._checks import checked
from toolkit.looped.decoding.cache import cache_bytes_per_token, read_sparsely
from toolkit.looped.decoding.sampling import check_sampling, sample_token
from toolkit.looped.decoding.steps import append, prefill
from toolkit.looped.loop_rows import check_tokens
from toolkit.looped.model import LoopedLM

CHUNK = 32
"""Most tokens per dispatch."""

CAPACITY_STEP = 64
"""Cache capacities are rounded up to a multiple of this, so texts of similar length share a
compiled program."""


@checked
def generate(
    model: LoopedLM,
    prompt: Int[Array, "batch time"],
    length: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    lengths: Int[Array, "batch"] | None = None,
    stop_token: int | None = None,
    sparse: str | None = None,
    dense_layers: int = 0,
) -> Int[Array, "batch length"]:
    """Continue a prompt.

    Args:
        model: the model.
        prompt: at least one token per sequence.
        length: tokens to write.
        temperature: 0 takes the most likely token; 1 samples from the model's distribution.
        top_k: sample among the k most likely tokens only.
        top_p: sample among the smallest set of tokens with this mass only.
        key: random key, needed unless the temperature is 0. Token i uses `fold_in(key, i)`.
        lengths: tokens of each prompt, which stand at the end of its row (see `pad_prompts`);
            None if all prompts are equally long.
        stop_token: a sequence ends with this token; when all have ended, no more is computed. None
            never stops.
        sparse: how the steps read their cache, such as "tactic:mass=0.9"; see `read_sparsely`. None
            reads everything.
        dense_layers: number of first softmax layers that read everything nevertheless.

    Returns:
        The `length` new tokens, int32, without the prompt.

    Cost: one `prefill` and `length` decode steps, CHUNK of them per dispatch.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> generate(model, jnp.array([[5, 3]]), length=4).shape
        (1, 4)
    """
    how = temperature, top_k, top_p, key, lengths, stop_token, sparse, dense_layers
    state = _start(model, prompt, length, *how)
    return jnp.concatenate(list(_chunks(model, *state, length, CHUNK)), axis=1)


@checked
def stream(
    model: LoopedLM,
    prompt: Int[Array, "batch time"],
    length: int | None,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    lengths: Int[Array, "batch"] | None = None,
    stop_token: int | None = None,
    sparse: str | None = None,
    dense_layers: int = 0,
    tokens_per_dispatch: int = 8,
) -> Iterator[np.ndarray]:
    """`generate`, token by token: the same tokens, each [batch], as soon as they are written.

    Arguments as `generate`; with length None it never ends, in constant memory, if no layer's cache
    grows with the text.

    Args:
        tokens_per_dispatch: tokens computed at a time, at most CHUNK; 1 has the least delay,
            more have less overhead.

    Returns:
        An iterator over int32 arrays [batch].

    Cost: see `generate`; the compiled programs are the same.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> len([token for token in stream(model, jnp.array([[5, 3]]), length=4)])
        4
    """
    if not 1 <= tokens_per_dispatch <= CHUNK:
        raise ValueError(f"tokens_per_dispatch is {tokens_per_dispatch}; it must be 1 to {CHUNK}.")
    how = temperature, top_k, top_p, key, lengths, stop_token, sparse, dense_layers
    state = _start(model, prompt, length, *how)
    chunks = _chunks(model, *state, length, tokens_per_dispatch)
    return (column for chunk in chunks for column in np.asarray(chunk).T)


def _start(
    model, prompt, length, temperature, top_k, top_p, key, lengths, stop_token, sparse, dense_layers
):
    """Check all arguments, then read the prompt."""
    prompt = jnp.asarray(prompt)
    check_tokens(prompt, model.config.vocabulary)
    if length is None:
        if cache_bytes_per_token(model.config):
            raise ValueError(
                f"length is None, and the cache of pattern {model.config.pattern!r} grows with "
                "the text; give a length, or a model of windows and recurrent layers."
            )
    elif length < 1:
        raise ValueError(f"length is {length}; at least one token must be asked for.")
    check_sampling(temperature or None, top_k, top_p)
    if temperature and key is None:
        raise ValueError("sampling at a temperature needs a key, e.g. key=jax.random.key(0).")
    if stop_token is not None and not 0 <= stop_token < model.config.vocabulary:
        raise ValueError(
            f"stop_token is {stop_token}; it must lie in [0, {model.config.vocabulary})."
        )
    # Values enter the program as arrays, so that a changed value does not recompile; a greedy
    # program takes none of them.
    how = {}
    if temperature:
        most = None if top_k is None else min(top_k, model.config.vocabulary)
        how = {"temperature": temperature, "top_k": most, "top_p": top_p}
        how = {name: jnp.asarray(value) for name, value in how.items() if value is not None}
    stop = None if stop_token is None else jnp.int32(stop_token)
    capacity = -(-(prompt.shape[1] + (length or 0)) // CAPACITY_STEP) * CAPACITY_STEP
    logits, cache = prefill(model, prompt, capacity, lengths=lengths)
    if sparse is not None:
        cache = read_sparsely(model.config, cache, sparse, dense_layers=dense_layers)
    return logits, cache, jax.random.key(0) if key is None else key, how, stop


def _chunks(model, logits, cache, key, how, stop, length, size):
    has_stopped = None if stop is None else jnp.zeros(logits.shape[0], bool)
    for start in itertools.count(0, size) if length is None else range(0, length, size):
        count = size if length is None else min(size, length - start)
        tokens, logits, cache, has_stopped = decode_chunk(
            model, logits, cache, key, how, stop, has_stopped, start, count
        )
        yield tokens[:, :count]


@functools.partial(jax.jit, donate_argnames="cache")
def decode_chunk(model, logits, cache, key, how, stop, has_stopped, start, count):
    """Sample and append `count` tokens, at most CHUNK; a traced number, so compiled once."""
    # `how` holds arguments of `sample_token` as arrays; it is empty for greedy decoding.

    def goes_on(carry):
        i, _, _, _, has_stopped = carry
        return (i < count) if stop is None else (i < count) & ~has_stopped.all()

    def body(carry):
        i, tokens, logits, cache, has_stopped = carry
        token = sample_token(logits, jax.random.fold_in(key, start + i), **how)
        if stop is not None:
            token = jnp.where(has_stopped, stop, token)
            has_stopped |= token == stop
        logits, cache = append(model, token, cache)
        return i + 1, tokens.at[:, i].set(token), logits, cache, has_stopped

    tokens = jnp.full((logits.shape[0], CHUNK), 0 if stop is None else stop, jnp.int32)
    start_of = (jnp.int32(0), tokens, logits, cache, has_stopped)
    _, *results = jax.lax.while_loop(goes_on, body, start_of)
    return results
