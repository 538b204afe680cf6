r"""Gated DeltaNet: a linear-time mixer whose state forgets (g) and corrects itself (beta).

The state S [key, value] is an associative memory. Each token first lets it fade, then replaces
what the memory holds under its key by its own value, by a fraction beta:

    S  <- e^g S
    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

beta = 1 with a unit key is a full overwrite; beta = 2 is a reflection (negative eigenvalue),
which lets a state follow permutations. Three forms of the same mathematics: `_reference` (the
equations above), "scan" (one token a step) and "xla" (chunks; `chunked_delta.py`).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
) -> tuple[Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]]:
    batch, time, heads, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    scale = key_size**-0.5 if scale is None else scale
    g = jnp.maximum(g.astype(dtype), jnp.log(jnp.finfo(dtype).tiny))
    beta = beta.astype(dtype)
    q = q * jnp.asarray(scale, q.dtype)
    q, k = (jnp.repeat(x, value_heads // heads, axis=2) for x in (q, k))
    if initial_state is None:
        initial_state = jnp.zeros((batch, value_heads, key_size, value_size), dtype)
    chunk = 32 if max(key_size, value_size) <= 64 else 64
    chunk = min(chunk, -(-time // 16) * 16)
    count = -(-time // chunk)

    def to_chunks(x):
        x = jnp.pad(x, [(0, 0), (0, count * chunk - time)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, count, chunk, *x.shape[2:])
        x = jnp.moveaxis(x, (1, 3), (0, 2))  # [count, batch, heads, chunk, ...]
        return x.reshape(count, batch * value_heads, *x.shape[3:])

    documents = None
    cumulative = jnp.einsum(
        "nrj,ij->nri", to_chunks(g), jnp.tril(jnp.ones((chunk, chunk), dtype)),
        precision=lax.Precision.HIGHEST,
    )
    chunks = Chunks(to_chunks(q), to_chunks(k), to_chunks(v), cumulative, to_chunks(beta))
    out, state = chunked_delta(
        chunks, documents, initial_state.reshape(-1, key_size, value_size).astype(dtype)
    )
    out = out.reshape(count, batch, value_heads, chunk, value_size)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(batch, count * chunk, value_heads, value_size)
    return out[:, :time], state.reshape(batch, value_heads, key_size, value_size)


def gated_delta_net_reference(
    q, k, v, g, beta, *, scale=None, initial_state=None, segment_ids=None
):
    batch, time, heads, key_size = q.shape
    value_heads, value_size = v.shape[2:]
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    scale = key_size**-0.5 if scale is None else scale
    q, k = (jnp.repeat(x, value_heads // heads, axis=2) for x in (q, k))
    state = jnp.zeros((batch, value_heads, key_size, value_size), dtype)
    if initial_state is not None:
        state = initial_state.astype(dtype)
    outputs = []
    for t in range(time):
        state = jnp.exp(g[:, t])[..., None, None] * state
        error = v[:, t] - jnp.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + beta[:, t][..., None, None] * k[:, t][..., None] * error[..., None, :]
        outputs.append(scale * jnp.einsum("bhk,bhkv->bhv", q[:, t], state))
    return jnp.stack(outputs, axis=1).astype(v.dtype), state
