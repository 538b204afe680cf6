r"""How much survives between two tokens of a chunk, without overflow and without C x C x K numbers.

Between a token j that writes and a later one i that reads, the state decays by the product of the
decays in between: e^(G_i - G_j) with running sums G of the log-decay g. With one decay for all
channels this is a C x C matrix, whose exponents are sums of the g in between, since rounding errors
of G after an abrupt gate would swamp mild gates. One decay per channel has to be split into a
factor of the reader and a factor of the writer, both products of e^g:

* From the chunk's entry, e^(G_i) and 1 / e^(G_j): one exponential per number and one matrix
  product, as long as no channel decays by more than `LEAST_FACTOR` in the chunk.
* By halves, for any decay: what the second half of a block reads in its first half passes the
  border between them, so (decay from j to the border) times (decay from the border to i), both
  at most 1. Doubling a block multiplies both by what survives its other half. A decay of zero
  (g = -inf) clears the state exactly.

The first suffices for nearly every chunk of a trained model; the program decides while it runs, for
all chunks computed together.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention.execution.precision import Precision, precise_einsum

MOST_SUMMED = 32  # tokens
LEAST_FACTOR = 1e-28  # its inverse, times any sensible key, is far from the largest float32


class Documents(NamedTuple):
    """Which document each token belongs to, and which one the incoming state belongs to."""

    token: Int[Array, "*chunks C"]
    incoming: Int[Array, "*chunks"]


class Channels(NamedTuple):
    """What survives where every channel has a decay of its own."""

    own: Float[Array, "*chunks C key"]  # e^g
    since_entry: Float[Array, "*chunks C key"]  # e^G, across documents too
    until: Float[Array, "*chunks C key"]  # e^-G, as far as it is finite
    exit: Float[Array, "*chunks C key"]


class Decays(NamedTuple):
    """How much survives between places of a chunk; 0 where a document ends in between."""

    entry: Float[Array, "*chunks C channels"]  # from the incoming state to token i
    between: Float[Array, "*chunks C C"] | Channels  # from token j to token i, for all channels
    documents: Documents | None

    @property
    def exit(self) -> Float[Array, "*chunks C channels"]:
        """From token j to the outgoing state."""
        if isinstance(self.between, Channels):
            return self.between.exit
        return jnp.swapaxes(self.between[..., -1:, :], -1, -2)

    @property
    def through(self) -> Float[Array, "*chunks channels 1"]:
        """From the incoming to the outgoing state."""
        return jnp.swapaxes(self.entry[..., -1:, :], -1, -2)


def _doubled_blocks(own: Float[Array, "*chunks C channels"]) -> Iterator[tuple[Array, Array]]:
    """Decays from a block's entry to its tokens, and from them to its exit.

    As [*chunks, blocks, w, channels], for blocks of w = 1, 2, 4, ... C tokens.
    """
    entry = through = own[..., None, :]
    leaving = jnp.ones_like(entry)
    yield entry, leaving
    while entry.shape[-3] > 1:
        (entry, late), (early, leaving), (through, last) = (
            (x[..., 0::2, :, :], x[..., 1::2, :, :]) for x in (entry, leaving, through)
        )
        entry = jnp.concatenate([entry, late * through], axis=-2)
        leaving = jnp.concatenate([early * last, leaving], axis=-2)
        through = through * last
        yield entry, leaving


@jax.custom_jvp
def _exponential(value: Array, exponent: Array) -> Array:
    """e^exponent with a more exact value, a product; it is differentiated as an exponential.

    The value too needs a right derivative, since JAX ignores this rule in second derivatives of a
    loop (it evaluates the loop's body without rules to find what does not change).
    """
    return value


@_exponential.defjvp
def _exponential_jvp(primals, tangents):
    value = _exponential(*primals)
    return value, value * tangents[1]


def chunk_decays(
    g: Float[Array, "*chunks C channels"], documents: Documents | None = None
) -> Decays:
    """Decays inside chunks of C tokens, a power of two, from their log-decays."""
    # Finite, so that differences are defined; e^g below the smallest normal number is zero.
    finite = jnp.maximum(g, jnp.log(jnp.finfo(g.dtype).tiny).astype(g.dtype))
    if g.shape[-1] == 1:
        entry, between = _one_decay(finite[..., 0])
        entry = entry[..., None]
        if documents is not None:
            between = jnp.where(_same(documents), between, 0)
    else:
        own, total = jnp.exp(g), jnp.cumsum(finite, axis=-2)
        *_, (entry, leaving) = _doubled_blocks(own)
        entry = _exponential(entry[..., 0, :, :], total)
        leaving = _exponential(leaving[..., 0, :, :], total[..., -1:, :] - total)
        # Finite where it is not used either. 1 / e^G without the overflow of its derivative.
        bounded = jnp.maximum(total, math.log(LEAST_FACTOR))
        rough = jnp.exp(-bounded)
        until = _exponential(rough / (rough * jnp.maximum(entry, LEAST_FACTOR)), -bounded)
        if documents is not None:
            is_last = documents.token == documents.token[..., -1:]
            leaving = jnp.where(is_last[..., None], leaving, 0)
        between = Channels(own, entry, until, leaving)
    if documents is not None:
        is_first = documents.token == documents.incoming[..., None]
        entry = jnp.where(is_first[..., None], entry, 0)
    return Decays(entry, between, documents)


def _one_decay(
    g: Float[Array, "*chunks C"],
) -> tuple[Float[Array, "*chunks C"], Float[Array, "*chunks C C"]]:
    """From the chunk's entry to token i, and from token j to it; 0 above the diagonal.

    All exponents are one product of g with zeros and ones, C x C^2 of them: nothing to compile, and
    C^3 multiply-adds. Of more than `MOST_SUMMED` tokens, the decays are those of both halves, and
    products of them.
    """
    size = g.shape[-1]
    if size > MOST_SUMMED:
        entries, within = _one_decay(g.reshape(*g.shape[:-1], 2, size // 2))
        (first, second), (early, late) = jnp.moveaxis(entries, -2, 0), jnp.moveaxis(within, -3, 0)
        upper = jnp.concatenate([early, jnp.zeros_like(early)], axis=-1)
        lower = jnp.concatenate([second[..., None] * early[..., -1:, :], late], axis=-1)
        entry = jnp.concatenate([first, first[..., -1:] * second], axis=-1)
        return entry, jnp.concatenate([upper, lower], axis=-2)
    place = np.arange(size)
    until = place[:, None] <= place
    after = until[:, :, None] & (place[:, None, None] > place)
    entry, between = (
        jnp.exp(precise_einsum("...m,mn->...n", g, jnp.asarray(x.reshape(size, -1), g.dtype)))
        for x in (until, after)
    )
    between = jnp.where(np.tri(size, dtype=bool).reshape(-1), between, 0)
    return entry, between.reshape(*g.shape, size)


def _same(documents: Documents) -> Bool[Array, "*chunks C C"]:
    return documents.token[..., :, None] == documents.token[..., None, :]


def decayed_scores(
    readers: Float[Array, "*chunks C key"],
    writers: Float[Array, "*chunks writers C key"],
    decays: Decays,
    precision: Precision,
) -> Float[Array, "*chunks C writers C"]:
    r"""How strongly each reader reads what each writer left: 0 above the diagonal.

    P_ij = sum_c r_ic w_jc a_(j+1)c ... a_ic   for j <= i
    """
    if not isinstance(decays.between, Channels):
        return _products(readers, writers, precision) * decays.between[..., :, None, :]
    own, since_entry, until, _ = decays.between
    is_mild = jnp.all(since_entry[..., -1, :] > LEAST_FACTOR)
    arrays = (readers, writers, own, since_entry, until)
    forms = (partial(form, precision) for form in (_scores_from_entry, _scores_by_halves))
    return lax.cond(is_mild, *forms, *arrays)


def _products(readers: Array, writers: Array, precision: Precision) -> Array:
    """r_i . w_j as [*chunks, C, writers, C]."""
    # One axis, or XLA would first copy every chunk's writers, transposed.
    rows = writers.reshape(*writers.shape[:-3], -1, writers.shape[-1])
    products = precise_einsum("...ik,...jk->...ij", readers, rows, precision=precision)
    return products.reshape(*products.shape[:-1], *writers.shape[-3:-1])


@partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _scores_from_entry(precision, readers, writers, own, since_entry, until):
    causal = np.tri(own.shape[-2], dtype=bool)[:, None, :]
    readers, writers = readers * since_entry, writers * until[..., None, :, :]
    return jnp.where(causal, _products(readers, writers, precision), 0)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _scores_by_halves(precision, readers, writers, own, since_entry, until):
    """Blocks [*chunks, blocks, w, writers, w] of scores, doubled until one is left."""
    size, key = readers.shape[-2:]
    blocks = precise_einsum("...ik,...wik->...iw", readers, writers, precision=precision)
    blocks = blocks[..., :, None, :, None]
    for entry, leaving in _doubled_blocks(own):
        width = entry.shape[-2]
        if width == size:
            break
        halves = (size // (2 * width), 2, width, key)
        late = readers.reshape(*readers.shape[:-2], *halves)[..., 1, :, :]
        early = writers.reshape(*writers.shape[:-2], *halves)[..., 0, :, :]
        late, early = late * entry[..., 1::2, :, :], early * leaving[..., None, 0::2, :, :]
        lower = precise_einsum("...nik,...wnjk->...niwj", late, early, precision=precision)
        first, second = blocks[..., 0::2, :, :, :], blocks[..., 1::2, :, :, :]
        upper = jnp.concatenate([first, jnp.zeros_like(lower)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([lower, second], axis=-1)], axis=-3)
    return blocks[..., 0, :, :, :]


def within_documents(
    scores: Float[Array, "*chunks C writers C"], documents: Documents | None
) -> Float[Array, "*chunks C writers C"]:
    """Scores that are 0 between tokens of different documents."""
    if documents is None:
        return scores
    return jnp.where(_same(documents)[..., :, None, :], scores, 0)
