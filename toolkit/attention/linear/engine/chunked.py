r"""The chunked engine: any linear-time memory as a few matrix products per chunk of tokens.

A token decays the state S [key, value], corrects it, adds to it (a `Rule` of `rule.py`) and reads
it. Linear attention adds, Mamba-2 and gated linear attention decay and add, delta rules decay and
correct with e = w = k, RWKV-7 corrects by what it read before the decay, and adds. Over a chunk of
C tokens that enters with state S, with P(r, w) the decayed scores of `decays.py` (strictly below
the diagonal for e) and E, X the decays from the chunk's entry and to its exit,

    T  = (I + beta P(e, w))^-1
    N  = T (beta (U - (E * e) S) - P(e, k) V)           what is really written under w
    O  = (E * q) S + P(q, w) N + P(q, k) V
    S' = Diag(E_C) S + (X * w)^T N + (X * k)^T V

T and P(e, k) do not depend on the state: they are computed before the scan.

The backward pass recomputes a chunk from T, N and the state it entered with. No decay is
differentiated: every one stands between a reader r and a writer w, so with running sums G of g
the gradient of G is r dr - w dw, and the sum over v of S' dS' at the end of a chunk.

Arrays here are [chunks, rows, C, ...], where a row is one head of one sequence.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit.attention._precision import precise_einsum
from toolkit.attention.linear.engine.decays import (
    Decays,
    Documents,
    chunk_decays,
    decayed_scores,
    within_documents,
)
from toolkit.attention.linear.engine.inverse import unit_lower_inverse
from toolkit.attention.linear.engine.rule import Action, Addition, Correction, Rule, act


class Chunks(NamedTuple):
    """Sequences cut into chunks."""

    tokens: tuple[Float[Array, "chunks rows C *size"], ...]  # the arrays of `Rule.action`
    g: Float[Array, "chunks rows C channels"]  # log-decay; `channels` is 1 or key
    documents: Documents | None  # where the state must not pass


class Erasure(NamedTuple):
    """What corrections read of their own chunk, known before the state is."""

    inverse: Float[Array, "*chunks C C"]  # T
    added: Float[Array, "*chunks C C"] | None  # P(e, k), when the rule adds too


class Saved(NamedTuple):
    """What the forward pass keeps of every chunk, besides its inputs."""

    state: Float[Array, "chunks rows key value"]  # as the chunk was entered
    written: Float[Array, "chunks rows C value"] | None  # N
    erasure: Erasure | None


def _writers(action: Action) -> Float[Array, "*chunks writers C key"]:
    """The keys that are written under: of the correction, then of the addition."""
    correction, addition = action.correction, action.addition
    keys = ([correction.write] if correction else []) + ([addition.key] if addition else [])
    return keys[0][..., None, :, :] if len(keys) == 1 else jnp.stack(keys, axis=-3)


def _strength(correction: Correction) -> Array | float:
    return 1.0 if correction.strength is None else correction.strength[..., None]


def _erase_scores(rule: Rule, decays: Decays, erase: Array, writers: Array) -> Array:
    """How strongly each token's correction reads what the tokens before it wrote."""
    if rule.erases_before_decay:
        # To read before the decay is to read as the token before would.
        scores = decayed_scores(_later(erase), writers, decays)
        past = jnp.zeros_like(scores[..., :1, :, :])
        scores = jnp.concatenate([past, scores[..., :-1, :, :]], axis=-3)
    else:
        scores = decayed_scores(erase, writers, decays)
        past = jnp.tril(jnp.ones((erase.shape[-2],) * 2, bool), -1)
        scores = jnp.where(past[:, None], scores, 0)
    return within_documents(scores, decays.documents)


def _later(x: Array) -> Array:
    """Along the tokens of a chunk, what the next token has; 0 for the last."""
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


def _erasures(rule: Rule, dtype: jnp.dtype, inputs: Chunks) -> Erasure | None:
    """For all chunks: at once, or one by one where the factors of their channels fill a cache."""
    erasure = partial(_erasure, rule, dtype)
    return erasure(inputs) if inputs.g.shape[-1] == 1 else lax.map(erasure, inputs)


def _erasure(rule: Rule, dtype: jnp.dtype, inputs: Chunks) -> Erasure | None:
    action = act(rule, dtype, inputs.tokens)
    correction = action.correction
    if correction is None:
        return None
    decays = chunk_decays(inputs.g, inputs.documents)
    scores = _erase_scores(rule, decays, correction.erase, _writers(action))
    inverse = unit_lower_inverse(_strength(correction) * scores[..., 0, :])
    return Erasure(inverse, scores[..., 1, :] if action.addition else None)


def _forward_chunk(rule, state, xs):
    inputs, erasure = xs
    action = act(rule, state.dtype, inputs.tokens)
    correction, addition = action.correction, action.addition
    decays = chunk_decays(inputs.g, inputs.documents)
    scores = decayed_scores(action.query, _writers(action), decays)
    scores = within_documents(scores, inputs.documents)

    out = precise_einsum("rik,rkv->riv", decays.entry * action.query, state)
    new_state, written = decays.through * state, None
    if correction:
        erase_read = _strength(correction) * _erase_entry(rule, decays) * correction.erase
        residual = -precise_einsum("rik,rkv->riv", erase_read, state)
        if correction.value is not None:
            residual += _strength(correction) * correction.value
        if addition:
            residual -= precise_einsum("rij,rjv->riv", erasure.added, addition.value)
        written = precise_einsum("rij,rjv->riv", erasure.inverse, residual)
        out += precise_einsum("rij,rjv->riv", scores[:, :, 0], written)
        new_state += precise_einsum("rik,riv->rkv", decays.exit * correction.write, written)
    if addition:
        out += precise_einsum("rij,rjv->riv", scores[:, :, -1], addition.value)
        new_state += precise_einsum("rik,riv->rkv", decays.exit * addition.key, addition.value)
    return new_state, (out, state, written)


def _backward_chunk(rule, carry, xs):
    d_new_state, new_state = carry
    inputs, (state, written, erasure), d_out = xs
    dtype = state.dtype
    d_out = d_out.astype(dtype)
    action, pull_action = jax.vjp(lambda *x: act(rule, dtype, x), *inputs.tokens)
    correction, addition = action.correction, action.addition
    decays = chunk_decays(inputs.g, inputs.documents)
    writers = _writers(action)

    def query_scores(query, writers):
        scores = decayed_scores(query, writers, decays)
        return within_documents(scores, inputs.documents)

    scores, pull_scores = jax.vjp(query_scores, action.query, writers)
    written_values = [written] if correction else []
    written_values += [addition.value] if addition else []
    d_scores = [precise_einsum("riv,rjv->rij", d_out, value) for value in written_values]
    d_query, d_writers = pull_scores(jnp.stack(d_scores, axis=2))
    d_query += decays.entry * precise_einsum("riv,rkv->rik", d_out, state)
    d_state = decays.through * d_new_state
    d_state += precise_einsum("rik,riv->rkv", decays.entry * action.query, d_out)
    d_decay = action.query * d_query

    d_correction = d_addition = None
    d_value: Any = None
    if addition:
        d_value = precise_einsum("rij,riv->rjv", scores[:, :, -1], d_out)
        d_value += precise_einsum("rik,rkv->riv", decays.exit * addition.key, d_new_state)
    if correction:
        # Outputs and outgoing state -> values written N -> residuals R, where N = T R.
        d_written = precise_einsum("rij,riv->rjv", scores[:, :, 0], d_out)
        d_written += precise_einsum("rik,rkv->riv", decays.exit * correction.write, d_new_state)
        d_residual = precise_einsum("rji,rjv->riv", erasure.inverse, d_written)
        d_erase_scores = [-precise_einsum("riv,rjv->rij", d_residual, written)]
        if addition:
            d_erase_scores.append(-precise_einsum("riv,rjv->rij", d_residual, addition.value))
            d_value -= precise_einsum("rij,riv->rjv", erasure.added, d_residual)
        strength, entry = _strength(correction), _erase_entry(rule, decays)
        erase_scores, pull_erase_scores = jax.vjp(
            partial(_erase_scores, rule, decays), correction.erase, writers
        )
        d_a = d_erase_scores[0]
        d_erase_scores[0] = strength * d_a
        d_erase, d_writers_erased = pull_erase_scores(jnp.stack(d_erase_scores, axis=2))
        d_writers += d_writers_erased
        d_read = -entry * precise_einsum("riv,rkv->rik", d_residual, state)
        d_erase += strength * d_read
        d_state -= precise_einsum("rik,riv->rkv", strength * entry * correction.erase, d_residual)
        d_write = d_writers[:, 0] + decays.exit * precise_einsum(
            "riv,rkv->rik", written, d_new_state
        )
        d_strength = None
        if correction.strength is not None:
            d_strength = jnp.sum(d_a * erase_scores[:, :, 0], axis=-1)
            d_strength += jnp.sum(d_read * correction.erase, axis=-1)
            if correction.value is not None:
                d_strength += jnp.sum(d_residual * correction.value, axis=-1)
        d_target = None if correction.value is None else strength * d_residual
        d_correction = Correction(d_erase, d_write, d_target, d_strength)
        erasing = correction.erase * d_erase
        d_decay += _later(erasing) if rule.erases_before_decay else erasing
        d_decay -= correction.write * d_write
    if addition:
        d_key = d_writers[:, -1]
        d_key += decays.exit * precise_einsum("riv,rkv->rik", addition.value, d_new_state)
        d_addition = Addition(d_key, d_value)
        d_decay -= addition.key * d_key

    d_decay = d_decay.at[:, -1].add(jnp.sum(new_state * d_new_state, axis=-1))
    if inputs.g.shape[-1] == 1:
        d_decay = jnp.sum(d_decay, axis=-1, keepdims=True)
    d_g = lax.cumsum(d_decay, axis=1, reverse=True)
    return (d_state, state), (pull_action(Action(d_query, d_correction, d_addition)), d_g)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked(
    rule: Rule, inputs: Chunks, initial_state: Float[Array, "rows key value"]
) -> tuple[Float[Array, "chunks rows C value"], Float[Array, "rows key value"]]:
    """Run a rule over chunks, one after another, padded to whole ones with zeros.

    Multiply-adds per chunk and row: to read and write the state, 2 C K V, and C K V more with a
    correction; scores C^2 K for every pair of a reader and a writer, and C^2 V to use them; the
    inverse at most C^3 / 2. Backward about 2.3 times as many. Kept for the backward pass: the
    inputs, a K x V state per chunk, and T and N of a correction.

    Source: Yang, Wang, Shen, Panda, Kim (arXiv:2312.06635), section 4, for decaying and adding;
    Yang, Kautz, Hatamizadeh (arXiv:2412.06464), section 3.3, for correcting.
    """
    return _chunked_forward(rule, inputs, initial_state)[0]


def _chunked_forward(rule, inputs, initial_state):
    erasure = _erasures(rule, initial_state.dtype, inputs)
    final_state, (out, states, written) = lax.scan(
        partial(_forward_chunk, rule), initial_state, (inputs, erasure)
    )
    return (out, final_state), (inputs, Saved(states, written, erasure), final_state)


def _chunked_backward(rule, saved, cotangents):
    inputs, saved, final_state = saved
    d_out, d_final_state = cotangents
    (d_initial_state, _), (d_tokens, d_g) = lax.scan(
        partial(_backward_chunk, rule),
        (d_final_state, final_state),
        (inputs, saved, d_out),
        reverse=True,
    )
    return Chunks(d_tokens, d_g, None), d_initial_state


chunked.defvjp(_chunked_forward, _chunked_backward)
