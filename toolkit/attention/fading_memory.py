r"""What the fading memories have in common: checks, gates, documents, and their ways to run.

Linear attention, retention, Mamba-2, gated linear attention and HGRN2 share one recurrence,

    S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

and differ in where g and k come from. A method's own file says that and calls the functions
here, which take g as [batch, time, heads, channels] with channels 1 (one decay a head) or key.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
from toolkit.attention.chunked_decay import DecayChunks, chunked_decay
from toolkit.attention.chunks import cut, cut_documents, join
from toolkit.attention.gated_delta_net import Tokens, _document_starts, _quarantine

IMPLEMENTATIONS = ("xla", "scan")
STATE_AXES = "batch value_heads key value"


def check_fading(
    q: Array,
    k: Array,
    v: Array,
    *,
    initial_state: Array | None,
    segment_ids: Array | None,
    **gates: Array,
) -> None:
    """Check inputs of a whole sequence; a gate of 4 axes has one number a key channel."""
    check_rank("q", q, "batch time heads key")
    check_shape("k", k, q.shape, "batch time heads key")
    check_rank("v", v, "batch time value_heads value")
    batch, time, heads, key = q.shape
    check_shape("v", v, (batch, time, *v.shape[2:]), "batch time value_heads value")
    check_multiple("the heads of v", v.shape[2], "the heads of q and k", heads)
    check_same_dtype(q=q, k=k, v=v)
    for name, gate in gates.items():
        check_floating(name, gate)
        if gate.ndim == 4:
            check_shape(name, gate, (*v.shape[:3], key), "batch time value_heads key")
        else:
            check_shape(name, gate, v.shape[:3], "batch time value_heads")
    if time == 0:
        raise ValueError("q, k and v must hold at least one token; got time = 0.")
    if "g" in gates:
        check_log_decay(gates["g"])
    if initial_state is not None:
        wanted = (batch, v.shape[2], key, v.shape[3])
        check_shape("initial_state", initial_state, wanted, STATE_AXES)
        check_floating("initial_state", initial_state)
    check_segment_ids(segment_ids, batch, time)


def state_dtype(x: Array) -> jnp.dtype:
    """Gates and states are float32, whatever the inputs; float64 for float64 inputs."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def constant_decay(v: Array, log_decay: Array | float) -> Array:
    """[batch, time, heads] of `log_decay`, a number or one for each head."""
    # zeros_like, so that under `jax.shard_map` the decay varies wherever the values do.
    zeros = jnp.zeros_like(v[..., 0], dtype=state_dtype(v))
    return zeros + jnp.broadcast_to(jnp.asarray(log_decay, zeros.dtype), zeros.shape)


def fading_memory(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads *channels"],
    *,
    scale: float | None,
    initial_state: Float[Array, "batch value_heads key value"] | None,
    segment_ids: Int[Array, "batch time"] | None,
    implementation: str | None,
    chunk: int | None,
) -> tuple[Array, Array]:
    """Run checked inputs in chunks ("xla") or token by token ("scan")."""
    check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    size = chunk_size(q.shape[1], q.shape[3], v.shape[3]) if chunk is None else chunk
    if size < 16 or size & (size - 1):
        raise ValueError(f"chunk must be a power of two and at least 16; got {chunk}.")
    dtype = v.dtype
    q, k, v, g, state = _prepare(q, k, v, g, scale, initial_state)
    starts = poison = None
    if segment_ids is not None:
        starts = _document_starts(q, segment_ids)
        tokens = Tokens(q, k, v, jnp.sum(g, axis=-1), jnp.zeros_like(g[..., 0]))
        (q, k, v, _, _), state, poison = _quarantine(tokens, state, starts)
        g = jnp.where(jnp.isfinite(g), g, 0)
    if implementation == "scan":
        out, state = _scan_tokens(q, k, v, g, state, starts)
    else:
        out, state = _scan_chunks(q, k, v, g, state, starts, size)
    if poison is not None:
        out = jnp.where(poison.out[..., None], jnp.nan, out)
        state = jnp.where(poison.state[:, -1, :, None, None], jnp.nan, state)
    return out.astype(dtype), state


def fading_memory_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads *channels"],
    *,
    scale: float | None,
    initial_state: Float[Array, "batch value_heads key value"] | None,
    segment_ids: Int[Array, "batch time"] | None,
) -> tuple[Array, Array]:
    """The recurrence of checked inputs, token by token: slow, and the oracle of the others."""
    dtype = v.dtype
    *tokens, state = _prepare(q, k, v, g, scale, initial_state)
    starts = _document_starts(q, segment_ids)

    def one_token(state, inputs):
        q_t, k_t, v_t, g_t, is_start = inputs
        state = jnp.where(is_start[:, None, None, None], 0, state)
        state = jnp.exp(g_t)[..., None] * state + jnp.einsum("bhk,bhv->bhkv", k_t, v_t)
        return state, jnp.einsum("bhk,bhkv->bhv", q_t, state)

    inputs = [x.astype(state.dtype) for x in tokens]
    by_time = [jnp.moveaxis(x, 1, 0) for x in (*inputs, starts)]
    state, out = lax.scan(one_token, state, by_time)
    return jnp.moveaxis(out, 0, 1).astype(dtype), state


def fading_memory_step(
    q: Float[Array, "batch 1 heads key"],
    k: Float[Array, "batch 1 heads key"],
    v: Float[Array, "batch 1 value_heads value"],
    g: Float[Array, "batch 1 value_heads *channels"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None,
) -> tuple[Array, Array]:
    """One token of checked inputs [batch, 1, ...]: one read and one write of the state."""
    dtype = v.dtype
    *tokens, state = _prepare(q, k, v, g, scale, state)
    state, out = _update(state, tuple(x[:, 0] for x in tokens))
    return out.astype(dtype), state


def add_time(**tokens: tuple[Array, str]) -> list[Array]:
    """Check the axes of one token's arrays, given as name=(array, axes), and add a time of 1."""
    for name, (array, axes) in tokens.items():
        check_rank(name, array, axes)
    return [array[:, None] for array, _ in tokens.values()]


def _prepare(q, k, v, g, scale, initial_state) -> tuple[Array, Array, Array, Array, Array]:
    """Repeat q and k for grouped values, scale q, bound g, and set the dtype of the state."""
    dtype = state_dtype(v)
    q = q.astype(dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    g = g if g.ndim == 4 else g[..., None]
    # e^g below the smallest normal number is zero, and a finite g keeps differences defined.
    g = jnp.maximum(g.astype(dtype), jnp.log(jnp.finfo(dtype).tiny).astype(dtype))
    if initial_state is None:
        # zeros_like, so that under `jax.shard_map` the state varies wherever an update does.
        faded = (k[:, 0].astype(dtype) * g[:, 0])[..., None]
        initial_state = jnp.zeros_like(faded * v[:, 0, :, None, :].astype(dtype))
    return q, k, v, g, initial_state.astype(dtype)


def _update(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
    """One token, whose output reads the new state: so a donated one is written over in place.

    Reading the old state would leave the compiler free to write first, and then it keeps a copy.
    """
    q, k, v, g = (x.astype(state.dtype) for x in token)
    state = jnp.exp(g)[..., None] * state + k[..., None] * v[..., None, :]
    return state, jnp.einsum("bhk,bhkv->bhv", q, state, precision=lax.Precision.HIGHEST)


def _scan_tokens(q, k, v, g, state: Array, starts: Array | None) -> tuple[Array, Array]:
    def body(state, inputs):
        *token, is_start = inputs
        if is_start is not None:
            state = jnp.where(is_start[:, None, None, None], 0, state)
        return _update(state, tuple(token))

    by_time = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g)]
    state, out = lax.scan(body, state, (*by_time, None if starts is None else starts.T))
    return jnp.moveaxis(out, 0, 1), state


def chunk_size(time: int, key: int, value: int) -> int:
    """Tokens a chunk, a power of two: 32, or 64 for large heads, or what a short sequence needs."""
    return min(32 if max(key, value) <= 64 else 64, max(16, 1 << (time - 1).bit_length()))


def _scan_chunks(q, k, v, g, state, starts: Array | None, size: int) -> tuple[Array, Array]:
    batch, time, heads, _ = v.shape
    documents = None if starts is None else cut_documents(starts, heads, size)
    q, k, v, g = (cut(x, size) for x in (q, k, v, g))
    chunks = DecayChunks(q, k, v, jnp.cumsum(g, axis=2))
    out, final = chunked_decay(chunks, documents, state.reshape(-1, *state.shape[2:]))
    return join(out, batch, time), final.reshape(state.shape)
