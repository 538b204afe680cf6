r"""What survives inside a chunk, for one decay per token or per channel, with the gradients.

With G the running sum of the log-decay inside a chunk (C tokens; a column, or one column for
every channel of the key), both classes compute the same five things for a kernel:

    read     (e^G * R) S                     what the readers R get from the incoming state
    scores   sum_c R_ic K_jc e^(G_ic - G_jc)   what they get from earlier tokens, j <= i
    write    (e^(G_C - G) * K)^T N           what values N written under keys leave in the state
    carry    e^(G_C) S                       what is left of the incoming state

and the gradients of each. The readers are the queries, and under a delta rule also the keys,
below them in one block [2 C, key], so that one product serves both; a key reads only the tokens
before its own.

One decay per token stays outside the products, which then multiply inputs as they are. One decay
per channel sits between the two factors: e^(G_i) and e^(-G_j) alone would overflow, and e^(G_i -
G_j) for all pairs is C x C x K numbers. Instead, second halves of blocks of 16, 32, ... tokens read
the first halves through the border between them, with one product for each size: the decay up to
the border multiplies the key, the decay from there multiplies the reader. Inside tiles of 8 tokens,
the readers meet one token after another.

Every exponent is a sum of the g on its way, by a product with ones, or, for one decay per token, a
difference of sums that are exact: never positive, and exact also where a rounded G_i - G_j would
have lost it beside a large G.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from toolkit.attention.kernels.tpu.blocks import (
    TILE,
    as_column,
    as_row,
    interleave,
    rows_and_columns,
    second_halves,
    second_reads_first,
    spread_row,
)
from toolkit.attention.kernels.tpu.blocks import dot as exact_dot


def _visible(size: int, readers: int, documents: Array | None) -> Bool[Array, "readers*C C"]:
    """What a query (first C rows) and a key (next C rows) may read of the chunk's tokens."""
    i, j = rows_and_columns((size, size))
    masks = [j <= i, j < i][:readers]
    if documents is not None:
        same = as_column(documents) == documents
        masks = [mask & same for mask in masks]
    # Joined as numbers: a block of booleans has no tiles of its own.
    return jnp.concatenate([jnp.where(mask, 1.0, 0.0) for mask in masks]) > 0


def _ones(mask: Bool[Array, "C C"]) -> Float[Array, "C C"]:
    """A matrix that sums the tokens of the mask: in bfloat16, as 1 and 0 are exact there."""
    return jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)


def _masked_ends(
    total: Float[Array, "C channels"], later: Float[Array, "C channels"], documents: Array | None
) -> tuple[Array, Array, Array]:
    """What survives from the incoming state to a token, from there to the outgoing, and across."""
    entry, leaving, through = jnp.exp(total), jnp.exp(later), jnp.exp(total[-1:])
    if documents is None:
        return entry, leaving, through
    column = as_column(documents)
    last = column[-1:]
    return (
        jnp.where(column == 0.0, entry, 0.0),
        jnp.where(column == last, leaving, 0.0),
        jnp.where(last == 0.0, through, 0.0),
    )


def _widths(size: int) -> list[int]:
    """Halves of blocks of 16, 32, ... tokens."""
    return [TILE << n for n in range((size // TILE).bit_length() - 1)]


def _stack(x: Array, readers: int) -> Array:
    return x if readers == 1 else jnp.concatenate([x] * readers)


def _fold(x: Array, readers: int) -> Array:
    """The sum over the readers of each token."""
    size = x.shape[0] // readers
    return x if readers == 1 else x[:size] + x[size:]


class ScalarDecay(NamedTuple):
    """One log-decay per token."""

    between: Float[Array, "readers*C C"]  # e^(G_i - G_j), 0 where nothing may pass
    entry: Float[Array, "readers*C 1"]  # e^G
    leaving: Float[Array, "C 1"]  # e^(G_C - G)
    through: Float[Array, "1 1"]  # e^(G_C)
    readers: int  # 1 for queries alone, 2 for queries and keys
    dot: Callable[..., Array]

    @classmethod
    def of(
        cls, g: Float[Array, "1 C"], documents: Float[Array, "1 C"] | None, readers: int,
        dot: Callable[..., Array],
    ):  # fmt: skip
        """From log-decays, and document numbers that are 0 in the incoming state's document."""
        i, j = rows_and_columns((g.shape[1], g.shape[1]))
        # Sums of multiples of 1/256 are exact, and so are their differences; the rest is small.
        coarse = (256.0 * g).astype(jnp.int32).astype(jnp.float32) / 256.0
        total = log_between = 0.0
        for part in (coarse, g - coarse):
            sums = jnp.sum(jnp.where(j <= i, part, 0.0), axis=1, keepdims=True)
            total, log_between = total + sums, log_between + (sums - as_row(sums))
        between = jnp.exp(jnp.where(j <= i, log_between, 0.0))
        later = jnp.sum(jnp.where(j > i, g, 0.0), axis=1, keepdims=True)
        entry, leaving, through = _masked_ends(total, later, documents)
        visible = _visible(g.shape[1], readers, documents)
        between = jnp.where(visible, _stack(between, readers), 0.0)
        return cls(between, _stack(entry, readers), leaving, through, readers, dot)

    def scores(self, readers: Array, k: Array) -> Float[Array, "readers*C C"]:
        return self.dot(readers, k, (1, 1)) * self.between

    def scores_gradient(self, d_scores: Array, readers: Array, k: Array) -> tuple[Array, Array]:
        d_product = d_scores * self.between
        return self.dot(d_product, k), self.dot(d_product, readers, (0, 0))

    def read(self, readers: Array, state: Array) -> Float[Array, "readers*C value"]:
        return self.entry * self.dot(readers, state)

    def read_gradient(self, d_reads: Array, readers: Array, state: Array) -> tuple[Array, Array]:
        d_reads = self.entry * d_reads
        return self.dot(d_reads, state, (1, 1)), self.dot(readers, d_reads, (0, 0))

    def write(self, k: Array, written: Array) -> Float[Array, "key value"]:
        return self.dot(k, self.leaving * written.astype(jnp.float32), (0, 0))

    def write_gradient(self, d_state: Array, k: Array, written: Array) -> tuple[Array, Array]:
        d_k = self.leaving * self.dot(written, d_state, (1, 1))
        return d_k, self.leaving * self.dot(k, d_state)

    def carry(self, state: Array) -> Float[Array, "key value"]:
        return self.through * state

    def gradient(
        self, d_total: Float[Array, "C key"], d_last: Float[Array, "1 key"], carried: Array
    ) -> Float[Array, "1 C"]:
        """From gradients of G, and of G_C alone, by channels, to the gradient of g."""
        i, j = rows_and_columns((d_total.shape[0], d_total.shape[0]))
        total = jnp.sum(d_total, axis=1, keepdims=True)
        last = jnp.sum(d_last, keepdims=True) + jnp.sum(carried, keepdims=True)
        return jnp.sum(jnp.where(j <= i, total, 0.0), axis=0, keepdims=True) + last


class ChannelDecay(NamedTuple):
    """One log-decay per token and key channel."""

    g: Float[Array, "C key"]
    halves: tuple[Float[Array, "C key"], ...]  # between a token and the middle of 2 widths
    visible: Bool[Array, "readers*C C"]
    entry: Float[Array, "readers*C key"]  # e^G
    leaving: Float[Array, "C key"]  # e^(G_C - G)
    through: Float[Array, "key 1"]  # e^(G_C)
    readers: int
    dot: Callable[..., Array]

    @classmethod
    def of(
        cls, g: Float[Array, "C key"], documents: Float[Array, "1 C"] | None, readers: int,
        dot: Callable[..., Array],
    ):  # fmt: skip
        """From log-decays, and document numbers that are 0 in the incoming state's document."""
        size = g.shape[0]
        i, j = rows_and_columns((size, size))
        total, later = exact_dot(_ones(j <= i), g), exact_dot(_ones(j > i), g)
        entry, leaving, through = _masked_ends(total, later, documents)
        halves = []
        for width in _widths(size):
            own = (i & -width) == (j & -width)
            is_second = (i & width) == width
            halves.append(jnp.exp(exact_dot(_ones(own & ((j <= i) == is_second)), g)))
        visible = _visible(size, readers, documents)
        entry, through = _stack(entry, readers), as_column(through)
        return cls(g, tuple(halves), visible, entry, leaving, through, readers, dot)

    def _halves(self):
        """Widths, where second halves read the first, and what survives: to readers, to keys."""
        size = self.g.shape[0]
        for width, survives in zip(_widths(size), self.halves, strict=True):
            place = _stack(second_reads_first(size, width), self.readers)
            yield width, place, _stack(survives, self.readers), survives

    def _pairs(self):
        """Rows of a tile, their columns in the scores, and what survives from there to readers.

        Sums of g from row to reader, longest last: differences of sums from the start would lose
        what is small beside them.
        """
        i, j = rows_and_columns(self.visible.shape)
        own_column = j - (i & (self.g.shape[0] - 1) & -TILE)
        row_number = rows_and_columns(self.g.shape)[0] & (TILE - 1)
        total = jnp.zeros_like(self.g)
        for row in reversed(range(TILE)):
            yield row, own_column == row, _stack(jnp.exp(total), self.readers)
            total = jnp.where(row_number >= row, total + spread_row(self.g, TILE, row), 0.0)

    def scores(self, readers: Array, k: Array) -> Float[Array, "readers*C C"]:
        readers, k = readers.astype(jnp.float32), k.astype(jnp.float32)
        scores = jnp.zeros(self.visible.shape, jnp.float32)
        for row, place, to_readers in self._pairs():
            keys = _stack(spread_row(k, TILE, row), self.readers)
            pair = jnp.sum(readers * to_readers * keys, axis=1, keepdims=True)
            scores = jnp.where(place, pair, scores)
        for width, place, to_readers, to_keys in self._halves():
            later = second_halves(readers * to_readers, width)
            product = jnp.where(place, self.dot(later, k * to_keys, (1, 1)), 0.0)
            scores += interleave(jnp.zeros_like(product), product, width)
        return jnp.where(self.visible, scores, 0.0)

    def scores_gradient(self, d_scores: Array, readers: Array, k: Array) -> tuple[Array, Array]:
        readers, k = readers.astype(jnp.float32), k.astype(jnp.float32)
        d_scores = jnp.where(self.visible, d_scores, 0.0)
        d_readers, d_k = jnp.zeros_like(readers), jnp.zeros_like(k)
        row_number = rows_and_columns(k.shape)[0] & (TILE - 1)
        for row, place, to_readers in self._pairs():
            d_pair = jnp.sum(jnp.where(place, d_scores, 0.0), axis=1, keepdims=True) * to_readers
            d_readers += d_pair * _stack(spread_row(k, TILE, row), self.readers)
            blocks = _fold(d_pair * readers, self.readers).reshape(-1, TILE, k.shape[1])
            sums = jnp.broadcast_to(jnp.sum(blocks, axis=1, keepdims=True), blocks.shape)
            d_k += jnp.where(row_number == row, sums.reshape(k.shape), 0.0)
        for width, place, to_readers, to_keys in self._halves():
            d_product = jnp.where(place, second_halves(d_scores, width), 0.0)
            d_later = self.dot(d_product, k * to_keys)
            d_readers += to_readers * interleave(jnp.zeros_like(d_later), d_later, width)
            later = second_halves(readers * to_readers, width)
            d_k += to_keys * self.dot(d_product, later, (0, 0))
        return d_readers, d_k

    def read(self, readers: Array, state: Array) -> Float[Array, "readers*C value"]:
        return self.dot(self.entry * readers.astype(jnp.float32), state)

    def read_gradient(self, d_reads: Array, readers: Array, state: Array) -> tuple[Array, Array]:
        d_state = self.dot(self.entry * readers.astype(jnp.float32), d_reads, (0, 0))
        return self.entry * self.dot(d_reads, state, (1, 1)), d_state

    def write(self, k: Array, written: Array) -> Float[Array, "key value"]:
        return self.dot(self.leaving * k.astype(jnp.float32), written, (0, 0))

    def write_gradient(self, d_state: Array, k: Array, written: Array) -> tuple[Array, Array]:
        d_written = self.dot(self.leaving * k.astype(jnp.float32), d_state)
        return self.leaving * self.dot(written, d_state, (1, 1)), d_written

    def carry(self, state: Array) -> Float[Array, "key value"]:
        return self.through * state

    def gradient(
        self, d_total: Float[Array, "C key"], d_last: Float[Array, "1 key"], carried: Array
    ) -> Float[Array, "C key"]:
        """From gradients of G, and of G_C alone, to the gradient of g."""
        i, j = rows_and_columns((d_total.shape[0], d_total.shape[0]))
        last = d_last + as_row(jnp.sum(carried, axis=1, keepdims=True))
        return exact_dot(_ones(j >= i), d_total) + last
