"""Drafts that need no second model, and caches of layers that cannot drop their last tokens.

A looped model drafts with its first loops, which share weights and caches with the whole; n-grams
propose what followed the same few tokens before. A target whose layers keep a state, or only a
window, reads the tokens to be verified one by one in these layers alone and keeps each state, so
that the rejected ones can be taken back; all other layers read them at once.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention._caches import Rows
from toolkit.looped.config import LoopedConfig
from toolkit.looped.decoding.cache import LoopedCache
from toolkit.looped.decoding.layer_parallel import ParallelLayers
from toolkit.looped.decoding.steps import append
from toolkit.looped.mixing import LAYERS
from toolkit.looped.mixing.in_turn import InTurn
from toolkit.looped.model import LoopedLM

MOST_DRAFTS = 64
REWINDABLE = ("full", "nope", "mla", "grouped_latent", "mlra", "grouped_tied", "dsa")
"""Layers whose cache is a row of tokens, so that the last ones can be dropped."""


@register_dataclass
@dataclass(frozen=True)
class History(Rows):
    """The tokens of every row, prompt included: what n-grams are looked up in."""

    tokens: Int[Array, "batch room"]
    length: Int[Array, "batch"]

    @classmethod
    def of(cls, prompt: Array, lengths: Array | None, room: int, drafts: int = 0) -> "History":
        """The prompts, which stand at the end of their rows, moved to the beginning."""
        batch, time = prompt.shape
        # A copy, because every round donates its state.
        lengths = jnp.full(batch, time) if lengths is None else jnp.array(lengths)
        place = jnp.arange(room)[None] + (time - lengths)[:, None]
        tokens = jnp.take_along_axis(jnp.asarray(prompt), place.clip(0, time - 1), axis=1)
        return cls(tokens.astype(jnp.int32), lengths.astype(jnp.int32))


@functools.cache
def ngram_draft(size: int, vocabulary: int) -> Callable[..., tuple[Array, History]]:
    """A draft that proposes what followed the last `size` tokens where they stood last.

    Where they never stood, it repeats the last token.

    Source: Saxena, "Prompt lookup decoding", 2023.
    """

    def draft(model: Any, token: Int[Array, "batch"], cache: History) -> tuple[Array, History]:
        rows = jnp.arange(len(token))
        tokens = cache.tokens.at[rows, cache.length].set(token, mode="drop")
        length = cache.length + 1
        place = jnp.arange(tokens.shape[1])
        # Place i follows an occurrence if tokens i - size to i - 1 are the last ones.
        follows = (place >= size) & (place < length[:, None])
        for back in range(1, size + 1):
            last = jnp.take_along_axis(tokens, (length - back).clip(0)[:, None], axis=1)
            follows &= jnp.roll(tokens, back, axis=1) == last
        found = jnp.where(follows, place, -1).max(axis=1)
        next_token = jnp.where(found >= 0, tokens[rows, found], token)
        logits = jnp.where(jnp.arange(vocabulary) == next_token[:, None], 0.0, -jnp.inf)
        return logits, replace(cache, tokens=tokens, length=length)

    return draft


@functools.cache
def loops_draft(loops: int) -> Callable[..., tuple[Array, LoopedCache]]:
    """A draft that stops after some loops and reads their part of the cache."""

    def draft(model: Any, token: Int[Array, "batch"], cache: LoopedCache):
        return append(model, token, replace(cache, loops=cache.loops[:loops]))

    return draft


def verify_all(model: Any, tokens: Array, cache: LoopedCache) -> tuple[Array, LoopedCache]:
    """Read all tokens at once; the cache can be truncated to any of them."""
    return append(model, tokens, _recording(model.config, cache), every=True)


class _Wrap(NamedTuple):
    start: Array

    def __call__(self, word: str, window: int | None, cache: Any) -> Any:
        if word in REWINDABLE and window is None:
            return cache
        return InTurn((cache,), self.start)


def _recording(config: LoopedConfig, cache: LoopedCache) -> LoopedCache:
    """The cache with those layers marked that cannot drop tokens."""
    wrap = _Wrap(cache.length)

    def outside(words: tuple[str, ...], caches: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(wrap, words, (None,) * len(words), caches))

    return LoopedCache(
        tuple(
            tuple(map(wrap, config.layers, windows, caches))
            for windows, caches in zip(config.loop_windows, cache.loops, strict=True)
        ),
        outside(config.prelude_layers, cache.prelude),
        outside(config.coda_layers, cache.coda),
    )


def drafting(model: LoopedLM, draft: Any, shares_cache: bool) -> tuple[Any, Any, bool, Any]:
    """What proposes tokens, its model, whether it shares the cache, and what makes its own."""
    if isinstance(draft, ParallelLayers):
        return draft.propose(), draft.model, False, draft.cache
    if not isinstance(draft, str):
        return append, draft, shares_cache, None
    kind, _, number = draft.partition(":")
    count = int(number) if number.isdecimal() else 0
    if kind == "loops" and 1 <= count < model.config.loops:
        return loops_draft(count), model, True, None
    if kind == "ngram" and 1 <= count <= MOST_DRAFTS and not shares_cache:
        return ngram_draft(count, model.config.vocabulary), model, False, History.of
    raise ValueError(
        f"draft: got {draft!r}, wanted a model, 'loops:n' with n below the model's "
        f"{model.config.loops} loops, or 'ngram:n' with its own cache"
    )


def check_draft(model: LoopedLM, draft: LoopedLM, shares_cache: bool) -> None:
    """Refuse a draft of another vocabulary, or whose cache cannot take tokens back."""
    if draft.config.vocabulary != model.config.vocabulary:
        raise ValueError(
            f"draft has a vocabulary of {draft.config.vocabulary}; the model's is "
            f"{model.config.vocabulary}."
        )
    if draft.config.recursion:
        raise ValueError("recursion: caches that lack tokens cannot go back to a length.")
    # A draft with its own cache keeps the states to which it may return.
    states = () if shares_cache else (word for word, x in LAYERS.items() if x.is_recurrent)
    words = {*draft.config.layers, *draft.config.prelude_layers, *draft.config.coda_layers}
    taken = (*REWINDABLE, "nsa", "moba", *states)
    other = sorted(words - {*taken})
    if other or any(w is not None for windows in draft.config.loop_windows for w in windows):
        what = f"layers {other[0]!r}" if other else "windows"
        raise ValueError(
            f"draft has {what}, whose cache cannot take tokens back; want layers out of "
            f"{', '.join(taken)} without windows."
        )
