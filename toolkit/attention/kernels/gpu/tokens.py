r"""One query per head against listed tokens of a cache: a gather of rows and attention in one pass.

    out_h = sum_{i in tokens} softmax_i(q_h . k_i) v_i

For every system that ranks tokens (Tactic, HATA, PQCache, the oracle) or small pages. Written for
Triton, where a load by a vector of indices is a gather of pointers; Hopper's bulk copies, which the
other kernels use, copy only runs of rows. A row is read once, and nothing is written but
the sums of each split of the list, which are merged exactly.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from toolkit._compat import require_jax
from toolkit.attention.kernels.gpu.latent import LOG2_E, dot, merged_splits, next_softmax
from toolkit.attention.kernels.gpu.support import BF16, F32

BLOCK = 64  # tokens gathered at a time
TOGETHER = 4  # blocks of a split
HEADS = 16  # the fewest rows of a product


def attend_tokens(
    q: Float[Array, "sets group key"],
    keys: Float[Array, "slots key"],
    values: Float[Array, "slots value"],
    tokens: Int[Array, "sets listed"],
    is_asked: Bool[Array, "sets listed"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "sets group value"], Float[Array, "sets group"]]:
    """Attention of scaled queries to the tokens of a list that are asked for, per set of queries.

    2 group (key + value) FLOPs and 2 (key + value) bytes per token, which decide. Returns outputs
    and the logarithms of the sums of exponentials, in float32; 0 and -inf where nothing is asked.
    """
    sets, group, _ = q.shape
    _check(q, keys, values)
    require_jax("0.10", "The Pallas kernels for GPUs")
    padding = -tokens.shape[1] % (BLOCK * TOGETHER)
    tokens = jnp.pad(jnp.where(is_asked, tokens, -1), [(0, 0), (0, padding)], constant_values=-1)
    heads = max(HEADS, pl.next_power_of_2(group))
    q = jnp.pad(q, [(0, 0), (0, heads - group), (0, 0)])
    splits, (_, value) = tokens.shape[1] // (BLOCK * TOGETHER), values.shape
    shapes = (sets, splits, heads, value), (sets, splits, heads), (sets, splits, heads)
    whole = lambda x: pl.BlockSpec(x.shape, lambda i, j: (0, 0))  # noqa: E731
    parts = pl.pallas_call(
        _body,
        out_shape=[jax.ShapeDtypeStruct(shape, F32) for shape in shapes],
        grid=(sets, splits),
        in_specs=[
            pl.BlockSpec((None, *q.shape[1:]), lambda i, j: (i, 0, 0)),
            whole(keys),
            whole(values),
            pl.BlockSpec((None, BLOCK * TOGETHER), lambda i, j: (i, j)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, heads, value), lambda i, j: (i, j, 0, 0)),
            pl.BlockSpec((None, None, heads), lambda i, j: (i, j, 0)),
            pl.BlockSpec((None, None, heads), lambda i, j: (i, j, 0)),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=bool(interpret),
    )(q, keys, values, tokens)
    out, lse = merged_splits(*parts)
    return out[:, :group], lse[:, :group]


def _body(q_ref, keys, values, tokens, out, largest_out, total_out):
    q = q_ref[...]

    def step(block, carry):
        sums, largest, total = carry
        token = tokens[pl.ds(block * BLOCK, BLOCK)]
        is_asked, token = token >= 0, jnp.maximum(token, 0)
        k, v = (_rows(x, token) for x in (keys, values))
        v = jnp.where(is_asked[:, None], v, jnp.zeros_like(v))  # 0 * NaN is NaN
        s = jnp.where(is_asked[None], dot(q, k.T) * LOG2_E, -jnp.inf)
        p, kept, largest, total = next_softmax(s, largest, total)
        sums = sums * lax.broadcast_in_dim(kept, sums.shape, (0,))
        return sums + dot(p.astype(BF16), v), largest, total

    none = jnp.full(q.shape[:1], -jnp.inf, F32)
    carry = jnp.zeros(out.shape, F32), none, jnp.zeros_like(none)
    out[...], largest_out[...], total_out[...] = lax.fori_loop(0, TOGETHER, step, carry)


def _rows(x: Any, token: Int[Array, "block"]) -> Array:
    """Whole rows by their indices: pointers of [block, channels] elements."""
    shape = token.shape[0], x.shape[1]
    return x[lax.broadcast_in_dim(token, shape, (0,)), lax.broadcasted_iota(jnp.int32, shape, 1)]


def _check(q, keys, values):
    for name, array in (("q", q), ("keys", keys), ("values", values)):
        if array.dtype != BF16:
            raise TypeError(f"The Pallas token kernel takes bfloat16; got {name} {array.dtype}.")
        if array.shape[-1] not in (16, 32, 64, 128, 256):
            raise ValueError(
                f"The Pallas token kernel takes 16, 32, 64, 128 or 256 channels; "
                f"got {name} with {array.shape[-1]}."
            )
