"""Text generation: read the prompt in parallel, then sample and append token after token.

One dispatch generates a chunk of many tokens.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from toolkit._checks import checked
from toolkit.looped.decoding.cache import cache_bytes_per_token, read_sparsely
from toolkit.looped.decoding.early_exit import append_until_exit, exit_rule
from toolkit.looped.decoding.sampling import check_sampling, penalised_logits, sample_token
from toolkit.looped.decoding.steps import append, bucketed, checked_lengths, prefill
from toolkit.looped.loops.rows import check_tokens
from toolkit.looped.model import LoopedLM

CHUNK = 32
"""Most tokens per dispatch."""

CAPACITY_STEP = 64
"""Cache capacities are rounded up to a multiple of this, so texts of similar length share a
compiled program."""


@checked
def generate(
    model: LoopedLM, prompt: Int[Array, "batch time"], length: int, *,
    temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
    min_p: float | None = None, repetition_penalty: float | None = None, key: Array | None = None,
    lengths: Int[Array, "batch"] | None = None, stop_token: int | Sequence[int] | None = None,
    sparse: str | None = None, dense_layers: int = 0, exit: str | None = None,
) -> Int[Array, "batch length"]:  # fmt: skip
    """Continue a prompt.

    Args:
        model: the model.
        prompt: at least one token per sequence.
        length: tokens to write.
        temperature: 0 takes the most likely token; 1 samples from the model's distribution.
        top_k: sample among the k most likely tokens only.
        top_p: sample among the smallest set of tokens with this mass only.
        min_p: sample among tokens of at least this share of the largest probability only.
        repetition_penalty: make tokens of the prompt and of what was written less likely, also
            without sampling; see `penalised_logits`.
        key: random key, needed unless the temperature is 0. Token i uses `fold_in(key, i)`.
        lengths: tokens of each prompt, which stand at the end of its row (see `pad_prompts`);
            None if all prompts are equally long.
        stop_token: a sequence ends with this token, or with any of several, and the first of them
            fills its row up; when all have ended, no more is computed. None never stops.
        sparse: how the steps read their cache, such as "tactic:mass=0.9"; see `read_sparsely`. None
            reads everything.
        dense_layers: number of first softmax layers that read everything nevertheless.
        exit: when a token stops looping, such as "gate:0.9" or "kl:5e-4"; see `decode_until_exit`.
            The prompt is read in all loops. None runs all loops.

    Returns:
        The `length` new tokens, int32, without the prompt.

    Cost: one `prefill` and `length` decode steps, CHUNK of them per dispatch. Prompts are padded to
        `toolkit.attention.bucket_length`, so prompts of all lengths up to 2,048 share 8 programs.

    Example:
        >>> from flax import nnx
        >>> model = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
        >>> generate(model, jnp.array([[5, 3]]), length=4).shape
        (1, 4)
    """
    how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, stop_token)
    state = _start(model, prompt, length, how, key, lengths, sparse, dense_layers, exit)
    return jnp.concatenate(list(_chunks(model, *state, length, CHUNK)), axis=1)


@checked
def stream(
    model: LoopedLM, prompt: Int[Array, "batch time"], length: int | None, *,
    temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
    min_p: float | None = None, repetition_penalty: float | None = None, key: Array | None = None,
    lengths: Int[Array, "batch"] | None = None, stop_token: int | Sequence[int] | None = None,
    sparse: str | None = None, dense_layers: int = 0, exit: str | None = None,
    tokens_per_dispatch: int = 8,
) -> Iterator[np.ndarray]:  # fmt: skip
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
    how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, stop_token)
    state = _start(model, prompt, length, how, key, lengths, sparse, dense_layers, exit)
    chunks = _chunks(model, *state, length, tokens_per_dispatch)
    return (column for chunk in chunks for column in np.asarray(chunk).T)


class Sampling(NamedTuple):
    """How tokens are chosen; the arguments of `generate` with these names."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    stop_token: int | Sequence[int] | None

    def checked(self, vocabulary: int, key: Array | None) -> tuple[dict[str, Array], Array | None]:
        """The numbers as arrays, so that a changed value does not recompile, and the stop tokens;
        a greedy program takes no number of sampling."""
        *numbers, stop_token = self
        check_sampling(self.temperature or None, *numbers[1:])
        if self.temperature and key is None:
            raise ValueError("sampling at a temperature needs a key, e.g. key=jax.random.key(0).")
        stops = np.atleast_1d(np.asarray([] if stop_token is None else stop_token, np.int32))
        if stop_token is not None and (not stops.size or stops.min() < 0):
            raise ValueError(f"stop_token is {stop_token}; it must name tokens from 0 on.")
        if stops.size and stops.max() >= vocabulary:
            raise ValueError(f"stop_token is {stop_token}; it must lie in [0, {vocabulary}).")
        named: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        if self.temperature:
            most = None if self.top_k is None else min(self.top_k, vocabulary)
            named |= {"temperature": self.temperature, "top_k": most}
            named |= {"top_p": self.top_p, "min_p": self.min_p}
        how = {name: jnp.asarray(number) for name, number in named.items() if number is not None}
        return how, jnp.asarray(stops) if stops.size else None


def _start(model, prompt, length, sampling, key, lengths, sparse, dense_layers, exit):
    """Check all arguments, then read the prompt."""
    prompt, vocabulary = jnp.asarray(prompt), model.config.vocabulary
    check_tokens(prompt, vocabulary)
    if length is None:
        if cache_bytes_per_token(model.config):
            raise ValueError(
                f"length is None, and the cache of pattern {model.config.pattern!r} grows with "
                "the text; give a length, or a model of windows and recurrent layers."
            )
    elif length < 1:
        raise ValueError(f"length is {length}; at least one token must be asked for.")
    how, stop = sampling.checked(vocabulary, key)
    if exit is not None and sparse is not None:
        raise ValueError(f"exit is {exit!r} and sparse {sparse!r}; want one of them, or none.")
    rule = None if exit is None else exit_rule(exit, model.config)
    prompt, lengths = bucketed(prompt, checked_lengths(lengths, prompt))
    capacity = -(-(prompt.shape[1] + (length or 0)) // CAPACITY_STEP) * CAPACITY_STEP
    logits, cache = prefill(model, prompt, capacity, lengths=lengths)
    if sparse is not None:
        cache = read_sparsely(model.config, cache, sparse, dense_layers=dense_layers)
    has_stopped = None if stop is None else jnp.zeros(logits.shape[0], bool)
    seen = None
    if "repetition_penalty" in how:
        seen = np.zeros((len(prompt), vocabulary), bool)
        for row, tokens, count in zip(seen, *map(np.asarray, (prompt, lengths)), strict=True):
            row[tokens[-count:]] = True
        seen = jnp.asarray(seen)
    carried = logits, cache, has_stopped, seen
    return jax.random.key(0) if key is None else key, how, stop, rule, carried


def _chunks(model, key, how, stop, rule, carried, length, size):
    for start in itertools.count(0, size) if length is None else range(0, length, size):
        count = size if length is None else min(size, length - start)
        tokens, *carried = decode_chunk(model, *carried, key, how, stop, start, count, rule)
        yield tokens[:, :count]


@functools.partial(jax.jit, donate_argnames="cache")
def decode_chunk(model, logits, cache, has_stopped, seen, key, how, stop, start, count, rule=None):
    """Sample and append `count` tokens, at most CHUNK; a traced number, so compiled once."""
    # `how` holds numbers of `Sampling` as arrays; those of sampling are missing when greedy.
    how = dict(how)
    penalty = how.pop("repetition_penalty", None)
    rows = jnp.arange(logits.shape[0])

    def goes_on(carry):
        i, _, _, _, has_stopped, _ = carry
        return (i < count) if stop is None else (i < count) & ~has_stopped.all()

    def body(carry):
        i, tokens, logits, cache, has_stopped, seen = carry
        scores = logits if seen is None else penalised_logits(logits, seen, penalty)
        token = sample_token(scores, jax.random.fold_in(key, start + i), **how)
        if stop is not None:
            token = jnp.where(has_stopped, stop[0], token)
            has_stopped |= (token[:, None] == stop).any(axis=1)
        if seen is not None:
            seen = seen.at[rows, token].set(True)
        if rule is None:
            logits, cache = append(model, token, cache)
        else:
            logits, cache, _ = append_until_exit(model, token, cache, rule, has_ended=has_stopped)
        return i + 1, tokens.at[:, i].set(token), logits, cache, has_stopped, seen

    tokens = jnp.full((logits.shape[0], CHUNK), 0 if stop is None else stop[0], jnp.int32)
    start_of = (jnp.int32(0), tokens, logits, cache, has_stopped, seen)
    _, *results = jax.lax.while_loop(goes_on, body, start_of)
    return results
