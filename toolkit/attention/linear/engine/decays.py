r"""How much survives between two tokens of a chunk, without overflow and without C x C x K numbers.

Between a token j that writes and a later one i that reads, the state decays by the product of the
decays in between: e^(G_i - G_j) with running sums G of the log-decay g. With one decay for all
channels this is a C x C matrix. Its differences are exact, since rounding errors of G after an
abrupt gate would swamp mild gates. One decay per channel has to be split into a factor of the
reader and a factor of the writer, both products of e^g:

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
from jaxtyping import Array, Float, Int

from toolkit.attention.execution.precision import Precision, precise_einsum

LEAST_FACTOR = 1e-28  # its inverse, times any sensible key, is far from the largest float32


class Documents(NamedTuple):
    """Which document each token belongs to, and which one the incoming state belongs to."""

    token: Int[Array, "*chunks C"]
    incoming: Int[Array, "*chunks"]


class Decays(NamedTuple):
    """How much survives between places of a chunk; 0 where a document ends in between."""

    own: Float[Array, "*chunks C channels"]  # e^g
    running: tuple[Float[Array, "*chunks C channels"], ...]  # parts of G
    since_entry: Float[Array, "*chunks C channels"]  # e^G, across documents too
    until: Float[Array, "*chunks C channels"] | None  # e^-G, by channel and as far as it is finite
    entry: Float[Array, "*chunks C channels"]  # from the incoming state to token i
    exit: Float[Array, "*chunks C channels"]  # from token j to the outgoing state
    documents: Documents | None

    @property
    def through(self) -> Float[Array, "*chunks channels 1"]:
        """From the incoming to the outgoing state."""
        return jnp.swapaxes(self.entry[..., -1:, :], -1, -2)


def exact_sums(g: Float[Array, "*chunks C channels"]) -> tuple[Array, Array]:
    """Running sums of g in two parts, whose differences are exact.

    Multiples of 1/64 add up exactly in any order, and what is left of each g is small.
    """
    coarse = lax.stop_gradient(jnp.round(64 * g) / 64)  # whose derivative is 0
    return jnp.cumsum(coarse, axis=-2), jnp.cumsum(g - coarse, axis=-2)


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
    own = jnp.exp(g)
    # Finite, so that differences are defined; e^g below the smallest normal number is zero.
    g = jnp.maximum(g, jnp.log(jnp.finfo(g.dtype).tiny).astype(g.dtype))
    if g.shape[-1] == 1:
        running = exact_sums(g)
        since_entry, until = jnp.exp(sum(running)), None
        leaving = jnp.exp(sum(x[..., -1:, :] - x for x in running))
    else:
        (total,) = running = (jnp.cumsum(g, axis=-2),)
        *_, (since_entry, leaving) = _doubled_blocks(own)
        since_entry = _exponential(since_entry[..., 0, :, :], total)
        leaving = _exponential(leaving[..., 0, :, :], total[..., -1:, :] - total)
        # Finite where it is not used either. 1 / e^G without the overflow of its derivative.
        bounded = jnp.maximum(total, math.log(LEAST_FACTOR))
        rough = jnp.exp(-bounded)
        until = _exponential(rough / (rough * jnp.maximum(since_entry, LEAST_FACTOR)), -bounded)
    entry = since_entry
    if documents is not None:
        token, incoming = documents.token, documents.incoming[..., None]
        outgoing = token[..., -1:]
        entry = jnp.where((token == incoming)[..., None], entry, 0)
        leaving = jnp.where((token == outgoing)[..., None], leaving, 0)
    return Decays(own, running, since_entry, until, entry, leaving, documents)


def decayed_scores(
    readers: Float[Array, "*chunks C key"],
    writers: Float[Array, "*chunks writers C key"],
    decays: Decays,
    precision: Precision,
) -> Float[Array, "*chunks C writers C"]:
    r"""How strongly each reader reads what each writer left: 0 above the diagonal.

    P_ij = sum_c r_ic w_jc a_(j+1)c ... a_ic   for j <= i
    """
    if decays.own.shape[-1] == 1:
        between = sum(x - jnp.swapaxes(x, -1, -2) for x in decays.running)
        # Masked before exp, since the other half would overflow; by a constant that is added, since
        # a selection would be kernels of its own to compile.
        *chunks, size, _ = decays.own.shape
        later = np.where(np.tri(size, dtype=bool), 0, -np.inf).astype(decays.own.dtype)
        between = jnp.exp(between + later.reshape(*[1] * len(chunks), size, size))
        return _products(readers, writers, precision) * between[..., :, None, :]
    since_entry, until = decays.since_entry, decays.until
    is_mild = jnp.all(since_entry[..., -1, :] > LEAST_FACTOR)
    arrays = (readers, writers, decays.own, since_entry, until)
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
    same = documents.token[..., :, None] == documents.token[..., None, :]
    return jnp.where(same[..., :, None, :], scores, 0)
