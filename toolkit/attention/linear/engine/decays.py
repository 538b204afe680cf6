r"""How much survives between two tokens of a chunk, without overflow and without C x C x K numbers.

Between a token j that writes and a later one i that reads, the state decays by the product of the
decays in between: e^(G_i - G_j) with running sums G of the log-decay g. One decay for all
channels makes that a C x C matrix. With one decay per channel it has to be taken apart into a
factor of the reader and a factor of the writer:

* From the chunk's entry, e^(G_i) and 1 / e^(G_j): one exponential per number and one matrix
  product, as long as no channel decays by more than e^`LEAST_SUM` within the chunk.
* By halves, for any decay: what the second half of a block reads in its first half passes the
  border between them, so (decay from j to the border) times (decay from the border to i), both
  at most 1. Doubling a block multiplies both by what survives its other half. A decay of zero
  (g = -inf) clears the state exactly.

The first holds for nearly every chunk of a trained model; which one is needed is decided while
the program runs, for the chunks computed together.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention._precision import precise_einsum

LEAST_SUM = -64.0  # e^64 times any sensible key is far from the largest float32


class Documents(NamedTuple):
    """Which document each token belongs to, and which one the incoming state belongs to."""

    token: Int[Array, "*chunks C"]
    incoming: Int[Array, "*chunks"]


class Decays(NamedTuple):
    """How much survives between places of a chunk; 0 where a document ends in between."""

    g: Float[Array, "*chunks C channels"]
    running: Float[Array, "*chunks C channels"]  # G
    since_entry: Float[Array, "*chunks C channels"]  # e^G, across documents too
    entry: Float[Array, "*chunks C channels"]  # from the incoming state to token i
    exit: Float[Array, "*chunks C channels"]  # from token j to the outgoing state
    through: Float[Array, "*chunks channels 1"]  # from the incoming to the outgoing state
    documents: Documents | None


def chunk_decays(
    g: Float[Array, "*chunks C channels"], documents: Documents | None = None
) -> Decays:
    """Decays inside chunks of C tokens, a power of two, from their log-decays."""
    # Finite, so that differences are defined; e^g below the smallest normal number is zero.
    running = jnp.cumsum(jnp.maximum(g, jnp.log(jnp.finfo(g.dtype).tiny).astype(g.dtype)), axis=-2)
    last = running[..., -1:, :]
    entry = since_entry = jnp.exp(running)
    leaving, through = jnp.exp(last - running), since_entry[..., -1:, :]
    if documents is not None:
        token, incoming = documents.token, documents.incoming[..., None]
        outgoing = token[..., -1:]
        entry = jnp.where((token == incoming)[..., None], entry, 0)
        leaving = jnp.where((token == outgoing)[..., None], leaving, 0)
        through = jnp.where((incoming == outgoing)[..., None], through, 0)
    through = jnp.swapaxes(through, -1, -2)
    return Decays(g, running, since_entry, entry, leaving, through, documents)


def decayed_scores(
    readers: Float[Array, "*chunks C key"],
    writers: Float[Array, "*chunks writers C key"],
    decays: Decays,
) -> Float[Array, "*chunks C writers C"]:
    r"""How strongly each reader reads what each writer left: 0 above the diagonal.

    P_ij = sum_c r_ic w_jc a_(j+1)c ... a_ic   for j <= i
    """
    channels = decays.g.shape[-1]
    if channels == 1:
        between = decays.running - jnp.swapaxes(decays.running, -1, -2)
        causal = jnp.tril(jnp.ones_like(between, dtype=bool))
        # Masked before exp: the other half would overflow.
        between = jnp.exp(jnp.where(causal, between, -jnp.inf))
        scores = precise_einsum("...ik,...wjk->...iwj", readers, writers)
        return scores * between[..., :, None, :]
    return _channel_scores(readers, writers, decays.g, decays.running)


def _channel_scores(readers, writers, g, running):
    is_mild = jnp.all(running[..., -1, :] > LEAST_SUM)
    return lax.cond(is_mild, _scores_from_entry, _scores_by_halves, readers, writers, g, running)


@partial(jax.checkpoint, prevent_cse=False)
def _scores_from_entry(readers, writers, g, running):
    late, early = readers * jnp.exp(running), writers * jnp.exp(-running)[..., None, :, :]
    causal = jnp.tril(jnp.ones((g.shape[-2],) * 2, bool))[:, None, :]
    return jnp.where(causal, precise_einsum("...ik,...wjk->...iwj", late, early), 0)


@partial(jax.checkpoint, prevent_cse=False)
def _scores_by_halves(readers, writers, g, running):
    """Blocks [*chunks, blocks, w, writers, w] of scores, doubled until one is left."""
    size, key = readers.shape[-2:]
    blocks = precise_einsum("...ik,...wik->...iw", readers, writers)[..., :, None, :, None]
    entry = jnp.exp(g)[..., None, :]  # of blocks of one token: [*chunks, blocks, w, channels]
    leaving = jnp.ones_like(entry)
    through = entry
    width = 1
    while width < size:
        entry_first, entry_second = entry[..., 0::2, :, :], entry[..., 1::2, :, :]
        leaving_first, leaving_second = leaving[..., 0::2, :, :], leaving[..., 1::2, :, :]
        through_first, through_second = through[..., 0::2, :, :], through[..., 1::2, :, :]
        halves = (size // (2 * width), 2, width, key)
        late = readers.reshape(*readers.shape[:-2], *halves)[..., 1, :, :]
        early = writers.reshape(*writers.shape[:-2], *halves)[..., 0, :, :]
        late, early = late * entry_second, early * leaving_first[..., None, :, :, :]
        lower = precise_einsum("...nik,...wnjk->...niwj", late, early)
        first, second = blocks[..., 0::2, :, :, :], blocks[..., 1::2, :, :, :]
        upper = jnp.concatenate([first, jnp.zeros_like(lower)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([lower, second], axis=-1)], axis=-3)
        entry = jnp.concatenate([entry_first, entry_second * through_first], axis=-2)
        leaving = jnp.concatenate([leaving_first * through_second, leaving_second], axis=-2)
        through = through_first * through_second
        width *= 2
    return blocks[..., 0, :, :, :]


def within_documents(
    scores: Float[Array, "*chunks C writers C"], documents: Documents | None
) -> Float[Array, "*chunks C writers C"]:
    """Scores that are 0 between tokens of different documents."""
    if documents is None:
        return scores
    same = documents.token[..., :, None] == documents.token[..., None, :]
    return jnp.where(same[..., :, None, :], scores, 0)
