r"""The chunked engine: any linear-time recurrence as a few matrix products per chunk of tokens.

A token decays the state S [key, value], corrects it, adds to it (a `Rule` of `rule.py`) and reads
it. Linear attention adds; Mamba-2 and gated linear attention decay and add; delta rules decay and
correct with e = w = k; RWKV-7 corrects by what it read before the decay, and adds. Over a chunk of
C tokens that enters with state S, with P(r, w) the decayed scores of `decays.py` (strictly below
the diagonal for e) and E, X the decays from the chunk's entry and to its exit,

    T  = (I + beta P(e, w))^-1
    N  = T (beta (U - (E * e) S) - P(e, k) V)           what is really written under w
    O  = (E * q) S + P(q, w) N + P(q, k) V
    S' = Diag(E_C) S + (X * w)^T N + (X * k)^T V

T and P(e, k) do not depend on the state: they are computed before the scan.

There are two ways through a chunk. For values alone, the state is read once, for q and e together,
and P(q, .) too is computed before the scan. The other way can be differentiated any number of times
in both modes, without a hand-written backward pass; reverse mode recomputes a chunk from T, N and
the state it entered with.

Arrays here are [chunks, rows, C, ...], where a row is one head of one sequence.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from toolkit.attention.execution.precision import precise_einsum, product_precision
from toolkit.attention.linear.engine.decays import (
    Decays,
    Documents,
    chunk_decays,
    decayed_scores,
    within_documents,
)
from toolkit.attention.linear.engine.inverse import SOLUTION, solve, unit_lower_inverse
from toolkit.attention.linear.engine.rule import Action, Correction, Rule, act


class Gates(NamedTuple):
    """What decays are computed from."""

    g: Float[Array, "*chunks C channels"]  # log-decay; `channels` is 1 or key
    documents: Documents | None  # where the state must not pass


class Chunks(NamedTuple):
    """Sequences cut into chunks."""

    tokens: tuple[Float[Array, "chunks rows C *size"], ...]  # the arrays of `Rule.action`
    decays: Decays | Gates  # gates where each chunk is to compute its own


class Erasure(NamedTuple):
    """What corrections read of their own chunk, computed before the state is known."""

    inverse: Float[Array, "*chunks C C"]  # T
    added: Float[Array, "*chunks C C"] | None  # P(e, k), when the rule adds too
    scores: Float[Array, "*chunks C writers C"] | None  # P(q, w), P(q, k), for values alone


def _writers(action: Action) -> Float[Array, "*chunks writers C key"]:
    """The keys that are written under: of the correction, then of the addition."""
    correction, addition = action.correction, action.addition
    keys = ([correction.write] if correction else []) + ([addition.key] if addition else [])
    return keys[0][..., None, :, :] if len(keys) == 1 else jnp.stack(keys, axis=-3)


def _strength(correction: Correction) -> Array | float:
    return 1.0 if correction.strength is None else correction.strength[..., None]


def _erase_scores(rule: Rule, decays: Decays, erase: Array, writers: Array, precision) -> Array:
    """How strongly each token's correction reads what the tokens before it wrote."""
    if rule.erases_before_decay:
        # Reading before the decay is reading as the previous token would.
        scores = decayed_scores(_later(erase), writers, decays, precision)
        past = jnp.zeros_like(scores[..., :1, :, :])
        scores = jnp.concatenate([past, scores[..., :-1, :, :]], axis=-3)
    else:
        scores = decayed_scores(erase, writers, decays, precision)
        past = np.tri(erase.shape[-2], k=-1, dtype=bool)
        scores = jnp.where(past[:, None], scores, 0)
    return within_documents(scores, decays.documents)


def _read_scores(action: Action, decays: Decays, precision) -> Array:
    """How strongly each token's query reads what the tokens up to it wrote."""
    scores = decayed_scores(action.query, _writers(action), decays, precision)
    return within_documents(scores, decays.documents)


def _later(x: Array) -> Array:
    """Shift the tokens of a chunk by one: each gets the next one's entry; the last gets 0."""
    return jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)


def _erase_entry(rule: Rule, decays: Decays) -> Array:
    """Decay from the chunk's entry to the reads of its corrections."""
    if not rule.erases_before_decay:
        return decays.entry
    entry = jnp.concatenate(
        [jnp.ones_like(decays.entry[..., :1, :]), decays.entry[..., :-1, :]], -2
    )
    if decays.documents is None:
        return entry
    own = decays.documents.token == decays.documents.incoming[..., None]
    return jnp.where(own[..., None], entry, 0)


def _erasures(rule: Rule, dtype: jnp.dtype, alone: bool, inputs: Chunks) -> Erasure | None:
    """Erasures of all chunks: at once, or one by one where the channels' factors fill a cache."""
    erasure = partial(_erasure, rule, dtype, alone)
    return erasure(inputs) if isinstance(inputs.decays, Decays) else lax.map(erasure, inputs)


def _decays(inputs: Chunks) -> Decays:
    return inputs.decays if isinstance(inputs.decays, Decays) else chunk_decays(*inputs.decays)


def _erasure(rule: Rule, dtype: jnp.dtype, alone: bool, inputs: Chunks) -> Erasure | None:
    action = act(rule, dtype, inputs.tokens)
    correction = action.correction
    if correction is None:
        return None
    decays = _decays(inputs)
    precision = product_precision(inputs.tokens[0].dtype)
    scores = _erase_scores(rule, decays, correction.erase, _writers(action), precision)
    inverse = unit_lower_inverse(_strength(correction) * scores[..., 0, :])
    added = scores[..., 1, :] if action.addition else None
    return Erasure(inverse, added, _read_scores(action, decays, precision) if alone else None)


@jax.custom_jvp
def _known(value: Array, again: Array) -> Array:
    """A precomputed value, whose derivatives recompute it."""
    return value


@_known.defjvp
def _known_jvp(primals, tangents):
    return _known(*primals), tangents[1]


def _run_chunk(rule, alone, state, xs):
    inputs, erasure = xs
    action = act(rule, state.dtype, inputs.tokens)
    correction, addition = action.correction, action.addition
    decays = _decays(inputs)
    precision = product_precision(inputs.tokens[0].dtype)
    einsum = partial(precise_einsum, precision=precision)
    readers = [decays.entry * action.query]
    if correction:
        readers.append(_erase_entry(rule, decays) * correction.erase)

    if alone:
        # After a single product nothing reads the state, and XLA writes over it: no copy.
        reads = einsum("rik,rkv->riv", jnp.concatenate(readers, axis=-2), state)
        out, *erased = jnp.split(reads, len(readers), axis=-2)
    else:
        out, *erased = (einsum("rik,rkv->riv", reader, state) for reader in readers)
    is_known = alone and correction
    scores = erasure.scores if is_known else _read_scores(action, decays, precision)
    new_state = decays.through * state
    if correction:
        # Their values are known, so the compiler drops this; only their derivatives are computed
        # here, a chunk at a time with the other scores.
        erase_scores = _erase_scores(rule, decays, correction.erase, _writers(action), precision)
        (residual,) = erased
        residual = -residual if correction.value is None else correction.value - residual
        residual *= _strength(correction)
        if addition:
            added = _known(erasure.added, erase_scores[..., 1, :])
            residual -= einsum("rij,rjv->riv", added, addition.value)
        system = _strength(correction) * erase_scores[..., 0, :]
        written = solve(erasure.inverse, system, residual)
        out += einsum("rij,rjv->riv", scores[:, :, 0], written)
        new_state += einsum("rik,riv->rkv", decays.exit * correction.write, written)
    if addition:
        out += einsum("rij,rjv->riv", scores[:, :, -1], addition.value)
        new_state += einsum("rik,riv->rkv", decays.exit * addition.key, addition.value)
    return new_state, out


def chunked(
    rule: Rule, alone: bool, inputs: Chunks, initial_state: Float[Array, "rows key value"]
) -> tuple[Float[Array, "chunks rows C value"], Float[Array, "rows key value"]]:
    """Run a rule over chunks, one after another, padded to whole ones with zeros.

    With `alone`, only values are wanted: derivatives are still right, but slow.

    Multiply-adds per chunk and row: to read and write the state, 2 C K V, and C K V more with a
    correction; scores C^2 K for every pair of a reader and a writer, and C^2 V to use them; the
    inverse at most C^3 / 2, and a decay that channels share at most C^3. Backward about 2.3 times
    as many. Kept for the backward pass: the inputs, a K x V state per chunk, T and N of a
    correction, and where all channels share a decay C x C of them.

    On a CPU the walk takes little longer than its products. For values alone and chunks of 16,
    Gated DeltaNet's walk is two thirds (heads of 64) or four fifths (heads of 128) of the whole,
    and its products are three quarters of the walk: the one that reads the state runs at the rate
    of large products, the one that writes it at half (64) or 0.7 (128) of that rate.

    Source: Yang, Wang, Shen, Panda, Kim (arXiv:2312.06635), section 4, for decaying and adding;
    Yang, Kautz, Hatamizadeh (arXiv:2412.06464), section 3.3, for correcting.
    """
    if isinstance(inputs.decays, Gates) and inputs.decays.g.shape[-1] == 1:
        # Small enough to be kept: the walk and its way back would compute them again, and each
        # again is kernels to compile (`softmax/tiles.py`).
        inputs = inputs._replace(decays=_decays(inputs))
    erasure = _erasures(rule, initial_state.dtype, alone, inputs)
    run_chunk = partial(_run_chunk, rule, alone)
    if not alone:
        run_chunk = jax.checkpoint(
            run_chunk,
            prevent_cse=False,
            policy=jax.checkpoint_policies.save_only_these_names(SOLUTION),
        )
    final_state, out = lax.scan(run_chunk, initial_state, (inputs, erasure))
    return out, final_state
