r"""Gated DeltaNet: a linear-time mixer whose state forgets (g) and corrects itself (beta).

The state S [key, value] is an associative memory. Each token first lets it fade, then replaces
what the memory holds under its key by its own value, to the fraction beta:

    S  <- e^g S
    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

beta = 1 with a unit key overwrites; beta = 2 reflects (a negative eigenvalue), with which a state
can follow permutations. One mathematics in four forms: `gated_delta_net_reference` is the
equations above; `gated_delta_net` runs chunks ("xla", `chunked_delta.py`) or tokens ("scan");
`gated_delta_net_step` is one token of decoding. Keys are not normalised here: give unit keys.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._checks import (
    check_choice,
    check_floating,
    check_log_decay,
    check_multiple,
    check_rank,
    check_same_dtype,
    check_segment_ids,
    check_shape,
)
from toolkit.attention.chunked_delta import Chunks, Documents, chunked_delta

IMPLEMENTATIONS = ("xla", "scan")


def gated_delta_net(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""Mix tokens through a decaying, self-correcting state, in time linear in the sequence.

        S_t = e^(g_t) S_(t-1) + beta_t k_t (v_t - e^(g_t) S_(t-1)^T k_t)^T,   o_t = scale S_t^T q_t

    Gates, states and the chunk inverse are float32 (float64 for float64 inputs).

    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads] log-decay (natural), <= 0; -inf clears the state.
        beta: [batch, time, value_heads] writing strength in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token. The state is cleared wherever the
            number changes, and values that are not finite stay within their document.
            `initial_state` belongs to the first document, the final state to the last.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token: as fast
            forward for small heads on a CPU, but its gradient keeps one state a token).
        chunk: tokens a chunk of "xla", a multiple of 16; None chooses by head size.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value]. Both have gradients.

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, a positive log-decay (of a
            concrete array), an unknown implementation, a chunk that is no multiple of 16.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 16 tokens (32 if a head exceeds 64, or beyond 4096 tokens),
        2 (3 K V + 2 C K + 2 C V) FLOPs and a little a token and value head forward, about 2.2
        times as much more backward. Reads q, k, v once.

    Source:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule"
        (arXiv:2412.06464), equation 10 and section 3.3.
    """
    _check_inputs(q, k, v, g, beta, initial_state, segment_ids)
    check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    size = chunk_size(q.shape[1], q.shape[3], v.shape[3]) if chunk is None else chunk
    if size < 1 or size % 16:
        raise ValueError(f"chunk must be a positive multiple of 16; got {chunk}.")
    tokens, state = _prepare(q, k, v, g, beta, scale, initial_state)
    run = _scan_tokens if implementation == "scan" else partial(_scan_chunks, size)
    if segment_ids is None:
        out, state = run(tokens, state, None)
        return out.astype(v.dtype), state
    starts = _document_starts(q, segment_ids)
    tokens, state, poisoned = _quarantine(tokens, state, starts)
    out, state = run(tokens, state, starts)
    out = jnp.where(poisoned.out[..., None], jnp.nan, out)
    state = jnp.where(poisoned.state[:, -1, :, None, None], jnp.nan, state)
    return out.astype(v.dtype), state


def gated_delta_net_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `gated_delta_net`, token by token: slow, and the oracle of the others.

        S <- e^g S,   S <- S + beta k (v - S^T k)^T,   o = scale S^T q

    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, value_heads, value].
        g: [batch, time, value_heads] log-decay, <= 0.
        beta: [batch, time, value_heads] in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), equation 10.
    """
    _check_inputs(q, k, v, g, beta, initial_state, segment_ids)
    tokens, state = _prepare(q, k, v, g, beta, scale, initial_state)
    starts = _document_starts(q, segment_ids)

    def one_token(state, inputs):
        q_t, k_t, v_t, g_t, beta_t, is_start = inputs
        state = jnp.where(is_start[:, None, None, None], 0, state)
        state = jnp.exp(g_t)[..., None, None] * state
        error = v_t - jnp.einsum("bhk,bhkv->bhv", k_t, state)
        state = state + jnp.einsum("bh,bhk,bhv->bhkv", beta_t, k_t, error)
        return state, jnp.einsum("bhk,bhkv->bhv", q_t, state)

    inputs = [x.astype(state.dtype) for x in tokens]
    by_time = [jnp.moveaxis(x, 1, 0) for x in (*inputs, starts)]
    state, out = lax.scan(one_token, state, by_time)
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), state


def gated_delta_net_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch value_heads value"],
    g_t: Float[Array, "batch value_heads"],
    beta_t: Float[Array, "batch value_heads"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        p = S^T k,  r = S^T q,  u = beta (v - e^g p),
        o = scale (e^g r + (q . k) u),  S <- e^g S + k u^T

    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, value_heads, value]; value_heads is a multiple of heads.
        g_t: [batch, value_heads] log-decay, <= 0.
        beta_t: [batch, value_heads] writing strength in [0, 2].
        state: [batch, value_heads, key, value], as `gated_delta_net` returns it.
        scale: multiplies the output; key**-0.5 if None.

    Returns:
        The output [batch, value_heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state a value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Source:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), equation 10.
    """
    check_rank("q_t", q_t, "batch heads key")
    check_rank("k_t", k_t, "batch heads key")
    check_rank("v_t", v_t, "batch value_heads value")
    check_rank("g_t", g_t, "batch value_heads")
    check_rank("beta_t", beta_t, "batch value_heads")
    q, k, v, g, beta = (x[:, None] for x in (q_t, k_t, v_t, g_t, beta_t))
    _check_inputs(q, k, v, g, beta, state, None)
    tokens, state = _prepare(q, k, v, g, beta, scale, state)
    state, out = _update(state, Tokens(*(x[:, 0] for x in tokens)))
    return out.astype(v_t.dtype), state


class Tokens(NamedTuple):
    """Inputs with equal heads; q scaled; q, g and beta in the dtype of the state."""

    q: Float[Array, "batch *time heads key"]
    k: Float[Array, "batch *time heads key"]
    v: Float[Array, "batch *time heads value"]
    g: Float[Array, "batch *time heads"]
    beta: Float[Array, "batch *time heads"]


class Poison(NamedTuple):
    """Where values that are not finite must show: in outputs, and in the state after a token."""

    out: Bool[Array, "batch time heads"]
    state: Bool[Array, "batch time heads"]


def _check_inputs(q, k, v, g, beta, initial_state, segment_ids) -> None:
    check_rank("q", q, "batch time heads key")
    batch, time, heads, key_size = q.shape
    check_shape("k", k, q.shape, "batch time heads key")
    check_rank("v", v, "batch time value_heads value")
    value_heads, value_size = v.shape[2:]
    check_shape("v", v, (batch, time, *v.shape[2:]), "batch time value_heads value")
    check_multiple("the heads of v", value_heads, "the heads of q and k", heads)
    check_same_dtype(q=q, k=k, v=v)
    for name, gate in (("g", g), ("beta", beta)):
        check_shape(name, gate, (batch, time, value_heads), "batch time value_heads")
        check_floating(name, gate)
    if time == 0:
        raise ValueError("q, k and v must hold at least one token; got time = 0.")
    check_log_decay(g)
    if initial_state is not None:
        wanted = (batch, value_heads, key_size, value_size)
        check_shape("initial_state", initial_state, wanted, "batch value_heads key value")
        check_floating("initial_state", initial_state)
    check_segment_ids(segment_ids, batch, time)


def _prepare(q, k, v, g, beta, scale, initial_state) -> tuple[Tokens, Array]:
    """Repeat q and k for grouped values, scale q, and set the dtype of gates and state."""
    dtype = jnp.float64 if v.dtype == jnp.float64 else jnp.float32
    q = q.astype(dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    groups = v.shape[2] // q.shape[2]
    if groups > 1:
        q, k = jnp.repeat(q, groups, axis=2), jnp.repeat(k, groups, axis=2)
    # e^g below the smallest normal number is zero, and a finite g keeps differences defined.
    g = jnp.maximum(g.astype(dtype), jnp.log(jnp.finfo(dtype).tiny).astype(dtype))
    beta = beta.astype(dtype)
    if initial_state is None:
        # zeros_like, so that under `jax.shard_map` the state varies wherever an update does.
        gates = (g[:, 0] * beta[:, 0])[..., None, None]
        update = gates * k[:, 0, :, :, None].astype(dtype) * v[:, 0, :, None, :].astype(dtype)
        initial_state = jnp.zeros_like(update)
    return Tokens(q, k, v, g, beta), initial_state.astype(dtype)


def _document_starts(q: Array, segment_ids: Array | None) -> Bool[Array, "batch time"]:
    """Where the document changes. The first token is no start: the initial state is its own."""
    if segment_ids is None:
        return jnp.zeros(q.shape[:2], bool)
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def _quarantine(tokens: Tokens, state: Array, starts: Array) -> tuple[Tokens, Array, Poison]:
    """Replace what is not finite by zero, and say where it would have reached.

    Documents share chunks, and 0 * NaN is NaN: masks alone would let one document spoil another.
    """
    finite = Tokens(*(jnp.isfinite(x) for x in tokens))
    state_finite = jnp.isfinite(state)
    keeps = jnp.all(finite.k, -1) & jnp.all(finite.v, -1) & finite.g & finite.beta
    keeps = keeps.at[:, 0].set(keeps[:, 0] & jnp.all(state_finite, (-2, -1)))
    index = jnp.broadcast_to(jnp.arange(keeps.shape[1])[None, :, None], keeps.shape)
    last_fault = lax.cummax(jnp.where(keeps, -1, index), axis=1)
    document_start = lax.cummax(jnp.where(starts[..., None], index, 0), axis=1)
    in_state = last_fault >= document_start
    poison = Poison(in_state | ~jnp.all(finite.q, -1), in_state)
    tokens = Tokens(*(jnp.where(ok, x, 0) for ok, x in zip(finite, tokens, strict=True)))
    return tokens, jnp.where(state_finite, state, 0), poison


def _update(state: Array, token: Tokens) -> tuple[Array, Array]:
    """One token of the rule, reading the state once for key and query together."""
    q, k, v = (x.astype(state.dtype) for x in token[:3])
    decay = jnp.exp(token.g)[..., None]
    reads = jnp.einsum(
        "bhrk,bhkv->bhrv", jnp.stack([k, q], axis=2), state, precision=lax.Precision.HIGHEST
    )
    update = token.beta[..., None] * (v - decay * reads[:, :, 0])
    out = decay * reads[:, :, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * update
    return decay[..., None] * state + k[..., None] * update[..., None, :], out


def _scan_tokens(tokens: Tokens, state: Array, starts: Array | None) -> tuple[Array, Array]:
    def body(state, inputs):
        token, is_start = inputs
        if is_start is not None:
            state = jnp.where(is_start[:, None, None, None], 0, state)
        return _update(state, token)

    by_time = Tokens(*(jnp.moveaxis(x, 1, 0) for x in tokens))
    state, out = lax.scan(body, state, (by_time, None if starts is None else starts.T))
    return jnp.moveaxis(out, 0, 1), state


def chunk_size(time: int, key: int, value: int) -> int:
    """Tokens a chunk, a multiple of 16, chosen by head size and length.

    Large chunks spend C^2 work a token, small ones keep a state more often. Measured on CPUs at
    2048 tokens, twice this size ties forward and backward together and takes a tenth to a
    quarter longer forward alone. At 8192 tokens, memory makes 16 a tenth slower than 32 there.
    """
    return 16 if time <= 16 or (max(key, value) <= 64 and time <= 4096) else 32


def _scan_chunks(
    size: int, tokens: Tokens, state: Array, starts: Array | None
) -> tuple[Array, Array]:
    batch, time, heads, value_size = tokens.v.shape
    count = -(-time // size)

    def cut(x: Array, padding: str = "constant") -> Array:
        """[batch, time, heads, ...] -> [count, batch * heads, size, ...], padded in time."""
        widths = [(0, 0), (0, count * size - time)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, mode=padding)
        x = x.reshape(batch, count, size, *x.shape[2:])
        x = jnp.moveaxis(x, (1, 3), (0, 2))
        return x.reshape(count, batch * heads, size, *x.shape[4:])

    documents = None
    if starts is not None:
        # Padding belongs to the last document, so that its state survives to the end.
        numbers = jnp.cumsum(starts, axis=1)[..., None]
        numbers = cut(jnp.broadcast_to(numbers, (batch, time, heads)), "edge")
        incoming = jnp.concatenate([numbers[:1, :, 0], numbers[:-1, :, -1]])
        documents = Documents(numbers, incoming)
    q, k, v, g, beta = (cut(x) for x in tokens)
    chunks = Chunks(q, k, v, jnp.cumsum(g, axis=-1), beta)
    out, state = chunked_delta(chunks, documents, state.reshape(-1, *state.shape[2:]))
    out = jnp.moveaxis(out.reshape(count, batch, heads, size, value_size), (0, 2), (1, 3))
    out = out.reshape(batch, count * size, heads, value_size)[:, :time]
    return out, state.reshape(batch, heads, *state.shape[1:])
