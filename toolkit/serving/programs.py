"""The engine's compiled programs: read a piece of a prompt, put it into a row, take a step.

Numbers that differ from request to request are arrays, so no request compiles anything: there is
one program to read per size of piece, one to insert, one to step.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from toolkit._pytrees import register_dataclass
from toolkit.looped import LoopedLM, penalised_logits, sample_token, truncated_logits
from toolkit.looped.decoding.early_exit import append_until_exit
from toolkit.looped.decoding.steps import append
from toolkit.serving.requests import Request


@register_dataclass
@dataclass(frozen=True)
class Weights:
    """A model's arrays in a row, since to walk an nnx module takes a millisecond in every call."""

    arrays: tuple[Array, ...]
    tree: Any = field(metadata={"static": True})

    @classmethod
    def of(cls, model: LoopedLM) -> "Weights":
        arrays, tree = jax.tree.flatten(model)
        return cls(tuple(arrays), tree)

    @property
    def model(self) -> LoopedLM:
        return jax.tree.unflatten(self.tree, self.arrays)


def piece_sizes(page: int) -> list[int]:
    """Lengths in which prompts are read: a page, a quarter of it, and so on down to one token."""
    sizes = [page]
    while sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] // 4))
    return sizes


def pieces(start: int, count: int, page: int) -> list[int]:
    """The pieces in which to read `count` tokens from `start` on; none crosses a page's end.

    Example:
        >>> pieces(0, 70, page=64), pieces(60, 8, page=64)
        ([64, 4, 1, 1], [4, 4])
    """
    end, sizes, taken = start + count, piece_sizes(page), []
    while start < end:
        room = min(end - start, page - start % page)
        taken.append(next(size for size in sizes if size <= room))
        start += taken[-1]
    return taken


def works(parts: Iterable[tuple[int, int]], page: int) -> tuple[tuple[int, int], ...]:
    """(new tokens, tokens before) of every program that reads parts (start, count) of prompts."""
    found = []
    for start, count in parts:
        for size in pieces(start, count, page):
            found.append((size, start))
            start += size
    return tuple(found)


def numbers_of(requests: list[Request | None], vocabulary: int) -> dict[str, np.ndarray]:
    """The options of one request per row as arrays, with numbers that change nothing for None."""

    def column(name: str, neutral: float, dtype: Any = np.float32) -> np.ndarray:
        given = [None if request is None else getattr(request, name) for request in requests]
        return np.array([neutral if x is None else x for x in given], dtype)

    most = column("top_k", vocabulary, np.int64)
    return {
        "temperature": column("temperature", 0.0),
        "top_k": np.minimum(most, vocabulary).astype(np.int32),
        # The sum of all probabilities may round to just above 1.
        "top_p": column("top_p", 2.0),
        "min_p": column("min_p", 0.0),
        "penalty": column("repetition_penalty", 1.0),
    }


def choose(
    logits: Float[Array, "rows vocabulary"], how: dict[str, Array],
    key: UInt32[Array, "rows words"], count: Int[Array, "rows"],
    seen: Bool[Array, "rows vocabulary"],
) -> Int[Array, "rows"]:  # fmt: skip
    """The next token of every row, as `toolkit.looped.sample_token` draws it for that row alone.

    Args:
        logits: scores.
        how: from `numbers_of`.
        key: random key of each row's request, as words.
        count: tokens written before, per row.
        seen: tokens of each row's text.
    """
    numbers = {name: array[:, None] for name, array in how.items()}
    scores = penalised_logits(logits, seen, numbers.pop("penalty"))
    greedy = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    is_drawn = how["temperature"] > 0
    numbers["temperature"] = jnp.where(is_drawn[:, None], numbers["temperature"], 1.0)
    cuts = (how["top_k"] < scores.shape[1]) | (how["top_p"] <= 1)
    ranks = {name: numbers.pop(name) for name in ("top_k", "top_p")}

    def drawn():
        # Sorting the vocabulary takes longer than the rest; most rows need none.
        allowed = jax.lax.cond(
            (cuts & is_drawn).any(),
            lambda: truncated_logits(scores, **numbers, **ranks),
            lambda: truncated_logits(scores, **numbers),
        )
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key), count)
        token = jax.vmap(lambda key, row: sample_token(row[None], key, temperature=1.0)[0])
        return jnp.where(is_drawn, token(keys, allowed), greedy)

    return jax.lax.cond(is_drawn.any(), drawn, lambda: greedy)


@functools.partial(jax.jit, donate_argnames="cache")
def read(weights, tokens, cache, how, key, seen):
    """Read a piece of a prompt into the cache of one row; the token that would come next."""
    logits, cache = append(weights.model, tokens, cache)
    return choose(logits, how, key, jnp.zeros(1, jnp.int32), seen), cache


@functools.partial(jax.jit, donate_argnames=("batch", "seen"))
def insert(batch, seen, slot, cache, table, first, token, row_seen):
    """Put a prompt that has been read, and its first token, into a row."""
    row_seen = row_seen[0].at[token[0]].set(True)
    return batch.insert(slot, cache, table, first), seen.at[slot].set(row_seen)


@functools.partial(jax.jit, donate_argnames=("batch", "seen"))
def step(weights, token, batch, seen, table, position, is_active, how, key, count, rule):
    """Append a token to every row and choose the next; rows not in use are emptied."""
    view = batch.view(table)
    if rule is None:
        logits, view = append(weights.model, token, view)
    else:
        logits, view, _ = append_until_exit(weights.model, token, view, rule, has_ended=~is_active)
    # An idle row would grow past its capacity, and its NaN would slow all rows down.
    batch = batch.written(view.free(~is_active), table, position)
    token = choose(logits, how, key, count, seen)
    return token, batch, seen.at[jnp.arange(token.shape[0]), token].set(True)


@jax.jit
def load(batch, table, states):
    """The cache of one row from pages that are there, to read on after them."""
    return batch.loaded(table, states)


@jax.jit
def keep(batch, cache):
    """What to keep of a cache at the end of a page, beside the page."""
    return batch.states(cache)
