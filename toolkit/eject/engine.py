"""The chunked engine of linear-time mixers in one short file: what an ejected mixer runs on.

A token decays the state S [key, value], corrects it, adds to it, and reads it:

    decay      S <- Diag(e^g) S
    correct    S <- S + w beta (u - S^T e)^T
    add        S <- S + k v^T
    read       o  = S^T q

A chunk of C tokens that enters with S does the same by products of matrices. With D[i, j] the sum
of g over the tokens after j up to i, P(r, w)[i, j] = sum_k r_ik w_jk e^(D[i, j, k]) for j <= i,
E the decay from the chunk's entry and X that to its exit:

    N  = (I + beta P(e, w))^-1 beta (U - (E * e) S - P(e, k) V)     strictly before each token
    O  = (E * q) S + P(q, w) N + P(q, k) V
    S' = E_C S + (X * w)^T N + (X * k)^T V

D is summed anew for each j, so that no difference of long sums loses digits and g may be -inf.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Correction(NamedTuple):
    """Read under `erase`, write `strength` times the difference to `value` under `write`."""

    erase: jax.Array  # [key]
    write: jax.Array  # [key]
    value: jax.Array | None  # [value]; None: 0
    strength: jax.Array | None  # a number; None: 1


class Addition(NamedTuple):
    """Add `value` under `key`."""

    key: jax.Array  # [key]
    value: jax.Array  # [value]


class Action(NamedTuple):
    """What a token does to the state once it has decayed, and the query it reads it with."""

    query: jax.Array  # [key]
    correction: Correction | None
    addition: Addition | None


class Rule(NamedTuple):
    """A method: from a token's arrays (q, k, v, ...) to what it does."""

    action: object
    chunk_size: int
    erases_before_decay: bool = False
    has_kernels: bool = False


correcting_chunk_size, adding_chunk_size = 16, 32
DELTA_RULE = Rule(lambda q, k, v, beta: Action(q, Correction(k, k, v, beta), None), 16)
ADDITIVE_RULE = Rule(lambda q, k, v: Action(q, None, Addition(k, v)), 32)


class Tokens(NamedTuple):
    """A sequence, or one token: q, k, v and others, the log-decay, the scale of the outputs."""

    arrays: tuple
    g: jax.Array
    scale: float


def accumulator(dtype):
    """float32, and float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def unit_length(x):
    """x / |x| along the last axis."""
    wide = x.astype(accumulator(x.dtype))
    return (wide / jnp.sqrt(jnp.sum(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def gather_tokens(q, k, v, *others, g, scale, normalize_qk=False):
    """Give g an axis of channels, value heads their own q and k, outputs a scale."""
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    dtype, heads = accumulator(v.dtype), v.shape[-2]
    g = jnp.zeros_like(v[..., 0]) if g is None else g
    g = (g if g.ndim == v.ndim else g[..., None]).astype(dtype)
    q, k = (jnp.repeat(x, heads // x.shape[-2], axis=-2) for x in (q, k))
    arrays = tuple(x.astype(dtype) for x in (q, k, v, *others))
    return Tokens(arrays, g, q.shape[-1] ** -0.5 if scale is None else scale)


def run(rule, tokens, initial_state, segment_ids, implementation, chunk):
    """Sequences [batch, time, heads, size] through the state: outputs and the final state."""
    arrays, g, scale = tokens
    batch, time, heads, size = arrays[2].shape
    C = 1 if implementation == "scan" else chunk or min(rule.chunk_size, time)
    state = jnp.zeros((batch, heads, arrays[1].shape[-1], size), g.dtype)
    state = state if initial_state is None else initial_state.astype(g.dtype)
    document = jnp.zeros((batch, time), int)
    if segment_ids is not None:
        changes = segment_ids[:, 1:] != segment_ids[:, :-1]
        document = document.at[:, 1:].set(jnp.cumsum(changes, axis=1))
    before = jnp.concatenate([document[:, :1], document[:, :-1]], axis=1)

    def cut(x, mode="constant"):  # [batch, time, ...] -> [chunks, C, batch, ...]
        x = jnp.pad(x, [(0, 0), (0, -time % C)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x, 1, 0).reshape(-1, C, batch, *x.shape[2:])

    of_heads = jax.vmap(partial(_through, rule), (0, (1, 1, None, None)), (0, 1))
    of_batch = jax.vmap(of_heads, (0, (1, 1, 1, 1)), (0, 1))
    chunks = (tuple(map(cut, arrays)), cut(g), cut(document, "edge"), cut(before, "edge"))
    with jax.default_matmul_precision("highest"):
        state, out = jax.lax.scan(of_batch, state, chunks)
    out = jnp.moveaxis(out.reshape(-1, batch, heads, size)[:time], 0, 1)
    return (out * scale).astype(arrays[2].dtype), state


def _through(rule, S, chunk):
    """One chunk of one head of one sequence."""
    tokens, g, document, before = chunk  # [C, ...]; document of each token and the one before it
    C = len(g)
    query, correction, addition = jax.vmap(rule.action)(*tokens)
    i, j = jnp.arange(C)[:, None], jnp.arange(C)
    D = jnp.cumsum(jnp.where((i > j)[..., None], g[:, None], 0), axis=0)  # [C, C, channels]
    sees = (document[:, None] == document) & (i >= j)
    E = jnp.exp(jnp.cumsum(g, axis=0)) * (document == before[0])[:, None]
    X = jnp.exp(D[-1]) * (document == document[-1])[:, None]

    def P(r, w, D=D, sees=sees):
        decays = jnp.exp(jnp.where(sees[..., None], D, -jnp.inf))
        return jnp.einsum("ik,jk,ijk->ij", r, w, jnp.broadcast_to(decays, (C, C, r.shape[-1])))

    out, left = (E * query) @ S, (E[-1] * jnp.ones(len(S)))[:, None] * S
    if correction is not None:
        erase, write, value, beta = correction
        beta = jnp.ones(C, g.dtype) if beta is None else beta
        value = 0 if value is None else value
        D_e, E_e = D, E
        if rule.erases_before_decay:  # reads as the token before would
            D_e = jnp.concatenate([jnp.zeros_like(D[:1]), D[:-1]])
            E_e = jnp.concatenate([jnp.ones_like(E[:1]), jnp.exp(jnp.cumsum(g, axis=0))[:-1]])
            E_e = E_e * (document == before[0])[:, None]
        earlier = partial(P, erase, D=D_e, sees=sees & (i > j))
        wanted = value - (E_e * erase) @ S
        if addition is not None:
            wanted = wanted - earlier(addition.key) @ addition.value
        lower = jnp.eye(C) + beta[:, None] * earlier(write)
        N = jax.scipy.linalg.solve_triangular(
            lower, beta[:, None] * wanted, lower=True, unit_diagonal=True
        )
        out, left = out + P(query, write) @ N, left + (X * write).T @ N
    if addition is not None:
        out = out + P(query, addition.key) @ addition.value
        left = left + (X * addition.key).T @ addition.value
    return left, out


def step(rule, token, state, implementation=None, *, again=()):
    """One token [batch, heads, size]; it may correct `again`, without decay."""

    def of_head(S, arrays, g):
        query, correction, addition = rule.action(*arrays)
        old, S = S, jnp.exp(g)[:, None] * S
        if correction is not None:
            erase, write, value, beta = correction
            read = (old if rule.erases_before_decay else S).T @ erase
            beta = 1 if beta is None else beta
            S = S + beta * jnp.outer(write, (0 if value is None else value) - read)
        if addition is not None:
            S = S + jnp.outer(addition.key, addition.value)
        return S, S.T @ query

    out = None
    for arrays, g, _ in (token, *again):
        with jax.default_matmul_precision("highest"):
            state, out = jax.vmap(jax.vmap(of_head))(state.astype(g.dtype), arrays, g)
    return (out * token.scale).astype(token.arrays[2].dtype), state


def scan_tokens(token, initial_state, segment_ids, scale, normalize_qk=False, *, q, v, **others):
    """Run an equation, `token(S, q, v, ...) -> (S, o)` of one head, over sequences."""
    dtype, heads = accumulator(v.dtype), v.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = {"q": q, "v": v, **others}
    inputs = {
        name: jnp.repeat(x, heads // x.shape[2], axis=2).astype(dtype) for name, x in inputs.items()
    }
    if normalize_qk:
        inputs |= {name: unit_length(inputs[name]) for name in ("q", "k")}
    state = jnp.zeros((len(v), heads, q.shape[-1], v.shape[-1]), dtype)
    state = state if initial_state is None else initial_state.astype(dtype)
    starts = jnp.zeros(v.shape[:2], bool)
    if segment_ids is not None:
        starts = starts.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])

    def one_token(state, now):
        is_start, inputs = now
        state = jnp.where(is_start[:, None, None, None], 0, state)
        return jax.vmap(jax.vmap(lambda S, inputs: token(S, **inputs)))(state, inputs)

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (starts, inputs))
    with jax.default_matmul_precision("highest"):
        state, out = jax.lax.scan(one_token, state, by_time)
    return (scale * jnp.moveaxis(out, 0, 1)).astype(v.dtype), state
