r"""PaTH attention: positions are products of reflections that the data choose.

    o_i = sum_(j <= i) softmax_j(scale k_j^T H_(j+1) ... H_i q_i) v_j,    H_n = I - beta_n w_n w_n^T

A token's reflection turns all that is read past it, as a delta rule's does its state; `products.py`
says how the products are made.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.attention._attend import Mask, fixed_scale, packed, run_numbers
from toolkit.attention._caches import (
    Rows,
    check_room,
    continue_rows,
    cut_as_arrays_are,
    show_overflow,
    write_token,
)
from toolkit.attention._checks import check_dtype, check_sizes
from toolkit.attention.costs import STATE_BYTES, attended_pairs
from toolkit.attention.execution.cores import free_cores, over_cores
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.inputs import BETA, UNIT, Input, K, Mixer, Q, V
from toolkit.attention.softmax.positions.products import BLOCK, Path, attend_along_path

W = Input("w", K.axes, UNIT, is_gate=False)


@register_dataclass
@dataclass(frozen=True)
class PathCache(Rows):
    """Keys, values and reflections of the tokens seen so far; a pytree.

    Attributes:
        keys: [batch, key_value_heads, key, capacity].
        values: [batch, key_value_heads, value, capacity].
        directions: w [batch, key_value_heads, key, capacity]; kept, not applied to the keys, so
            that tokens can be taken back.
        strengths: beta [batch, key_value_heads, capacity], at least float32.
        length: tokens seen so far by each row, int32.

    Example:
        >>> cache = PathCache.empty(1, 2, 8, 8, capacity=16)
        >>> cache.keys.shape, cache.strengths.shape
        ((1, 2, 8, 16), (1, 2, 16))
    """

    keys: Annotated[Float[Array, "batch key_value_heads key capacity"], shapes.TOKENS]
    values: Annotated[Float[Array, "batch key_value_heads value capacity"], shapes.TOKENS]
    directions: Annotated[Float[Array, "batch key_value_heads key capacity"], shapes.TOKENS]
    strengths: Float[Array, "batch key_value_heads capacity"]
    length: Int[Array, "batch"]

    @classmethod
    def empty(
        cls, batch: int, key_value_heads: int, key_size: int, value_size: int, capacity: int,
        dtype=jnp.float32,
    ) -> "PathCache":  # fmt: skip
        """Make a cache without tokens, with room for `capacity` of them in every row."""
        check_sizes(
            "a PathCache",
            batch=batch,
            key_value_heads=key_value_heads,
            key_size=key_size,
            value_size=value_size,
            capacity=capacity,
        )
        check_dtype(dtype)
        keys = jnp.zeros((batch, key_value_heads, key_size, capacity), dtype)
        return cls(
            keys,
            jnp.zeros((batch, key_value_heads, value_size, capacity), dtype),
            jnp.zeros_like(keys),
            jnp.zeros((batch, key_value_heads, capacity), accumulator(dtype)),
            jnp.zeros(batch, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[-1]


@checked
def path_attention(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues, w: shapes.SharedKeys,
    beta: shapes.SharedStrengths, *,
    scale: float | None = None,
    segment_ids: shapes.SegmentIds | None = None, initial_state: PathCache | None = None,
    implementation: Literal["chunked"] | None = None,
) -> tuple[shapes.HeadValues, PathCache | None]:  # fmt: skip
    r"""Causal softmax attention whose scores pass through a reflection per token.

        o_i = sum_(j <= i) softmax_j(scale k_j^T H_(j+1) ... H_i q_i) v_j
        H_n = I - beta_n w_n w_n^T

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: values [batch, time, key_value_heads, value].
        w: directions [batch, time, key_value_heads, key], of length 1 in the paper; the function
            does not normalise them.
        beta: strengths [batch, time, key_value_heads] in [0, 2], else NaN; 1 removes a query's part
            along w, 2 reflects it.
        scale: factor of the products; None for key ** -0.5.
        segment_ids: document number of every token [batch, time]; equal numbers in a row are one
            document, and a token sees its own.
        initial_state: tokens before these, the first document of which these continue; they are
            seen too, and the new ones are appended.
        implementation: "chunked" (128 queries at a time, which meet the keys in blocks of 32), or
            None for it.

    Returns:
        The output [batch, time, heads, value] in q's dtype, and the new cache (None without
        `initial_state`).

    Cost:
        2 batch heads time^2 (3 key + value + 32) FLOPs, and 5/4 from 4,096 tokens on, where chunks
        of queries meet the keys in four stages; memory is linear in time, also in the gradient.

    Source: Yang, Shen, Wen, Tan, Mishra, Ren, Panda, Kim, "PaTH Attention: Position Encoding via
        Accumulating Householder Transformations" (2025), arXiv:2505.16381, sections 2 and 3.

    Example:
        >>> q = k = v = w = jnp.ones((1, 3, 2, 4)) / 2
        >>> out, _ = path_attention(q, k, v, w, jnp.ones((1, 3, 2)))
        >>> out.shape
        (1, 3, 2, 4)
    """
    q, scale = fixed_scale(q, scale)
    if initial_state is not None:
        check_room(initial_state, q.shape[1], segment_ids)
        return _continue(scale, q, k, v, w, beta, segment_ids, initial_state)
    return _spread(free_cores(), scale, q, k, v, w, beta, segment_ids), None


# Compiled as a whole, or an eager call would compile its loops anew every time.
@partial(jax.jit, static_argnums=(0, 1))
def _spread(cores, scale, *arrays):
    def share(q, *tokens):
        *tokens, segment_ids = tokens
        path = Path(*(jnp.moveaxis(x, 1, -1) for x in tokens))
        mask = Mask(documents=packed(segment_ids))
        return without_transpose(attend_along_path(q, path, mask, scale=scale))

    return over_cores(cores, share, arrays, heads=(2, 2, 2, 2, 2, None), heads_out=2)


@partial(jax.jit, static_argnums=0)
def _continue(scale, *arrays):
    *tokens, cache = arrays

    def share(q, *tokens):
        *tokens, segment_ids, cache = tokens
        arrays, mask, cache = continue_rows(
            cache, segment_ids, axis=-1, **_named(cache, (jnp.moveaxis(x, 1, -1) for x in tokens))
        )
        path = Path(*(arrays[name] for name in NAMES))
        out = without_transpose(attend_along_path(q, path, mask, scale=scale))
        return show_overflow(out, cache), cache

    return cut_as_arrays_are(share, tokens, cache, heads=(2, 2, 2, 2, 2, None), heads_out=(2,))


NAMES = "keys", "values", "directions", "strengths"


def _named(cache: PathCache, tokens: Any) -> dict[str, Any]:
    """What tokens bring, by its name in the cache and in its dtype."""
    return {
        name: x.astype(getattr(cache, name).dtype) for name, x in zip(NAMES, tokens, strict=True)
    }


@checked
def path_attention_reference(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues, w: shapes.SharedKeys,
    beta: shapes.SharedStrengths, *,
    scale: float | None = None,
    segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.HeadValues, None]:  # fmt: skip
    r"""The equation of `path_attention`, token by token: slow, and the oracle.

        k_j <- H_i k_j for all earlier tokens,    o_i = sum_j softmax_j(scale q_i . k_j) v_j

    Arguments as `path_attention`.
    """
    group, dtype, time = q.shape[2] // k.shape[2], q.dtype, q.shape[1]
    precise = accumulator(dtype)
    q, k, v, w, beta = (x.astype(precise) for x in (q, k, v, w, beta))
    k, v, w, beta = (jnp.repeat(x, group, axis=2) for x in (k, v, w, beta))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    document = jnp.zeros(q.shape[:2], jnp.int32)
    if segment_ids is not None:
        document = run_numbers(segment_ids)
    token = jnp.arange(time, dtype=jnp.int32)

    def attend(keys, i):
        along = beta[:, i, None] * jnp.einsum("bshk,bhk->bsh", keys, w[:, i])
        reflected = keys - along[..., None] * w[:, i, None]
        keys = jnp.where((token < i)[None, :, None, None], reflected, keys)
        seen = ((token <= i)[None] & (document == document[:, i, None]))[..., None]
        scores = factor * jnp.einsum("bhk,bshk->bsh", q[:, i], keys)
        weights = jax.nn.softmax(scores, axis=1, where=seen)
        return keys, jnp.einsum("bsh,bshv->bhv", weights, v)

    with jax.default_matmul_precision("highest"):
        _, out = lax.scan(attend, k, token)
    return jnp.moveaxis(out, 0, 1).astype(dtype), None


@checked
def path_attention_step(
    q_t: shapes.Query, k_t: shapes.SharedKey, v_t: shapes.SharedValue, w_t: shapes.SharedKey,
    beta_t: shapes.SharedStrength, cache: PathCache, *,
    scale: float | None = None,
) -> tuple[shapes.HeadValue, PathCache]:  # fmt: skip
    r"""Append one token to the cache and attend to all tokens in it, through their reflections.

        o_i = sum_(j <= i) softmax_j(scale k_j^T H_(j+1) ... H_i q_i) v_j

    Arguments as `path_attention`, without the time axis; `cache` holds the tokens before this one.
    The paper reflects all cached keys at every token instead, and could take none back.

    Cost:
        About 2 batch heads capacity (3 key + value + 32) FLOPs, and 64 batch key_value_heads
        capacity (3 key + 48) for what the reflections of a block do together; one read of the
        cache.

    Example:
        >>> q = k = v = w = jnp.ones((1, 2, 4)) / 2
        >>> cache = PathCache.empty(1, 2, 4, 4, capacity=8)
        >>> out, cache = path_attention_step(q, k, v, w, jnp.ones((1, 2)), cache)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    check_room(cache, 1)
    q_t, scale = fixed_scale(q_t, scale)
    return _step(scale, q_t, k_t, v_t, w_t, beta_t, cache)


@partial(jax.jit, static_argnums=0)
def _step(scale, *arrays):
    *tokens, cache = arrays

    def share(q_t, *tokens):
        *tokens, cache = tokens
        slot = cache.length
        cache = write_token(cache, slot, axis=-1, **_named(cache, tokens))
        path = Path(*(getattr(cache, name) for name in NAMES))
        mask = Mask(query_start=slot, key_stop=cache.length)
        out = attend_along_path(q_t[:, None], path, mask, scale=scale)[:, 0]
        return show_overflow(out, cache), cache

    return cut_as_arrays_are(share, tokens, cache, heads=(1, 1, 1, 1, 1), heads_out=(1,))


def _empty_state(batch, heads, key, value, capacity, dtype):
    return PathCache.empty(batch, heads, key, value, capacity, dtype)


def _pair_flops(key: int, value: int) -> int:
    """Of a query and a key: the score, products with w, T W and T tril(W K^T), and the value."""
    return 2 * (3 * key + value + BLOCK)


def _forward_flops(batch, time, heads, key, value):
    return batch * heads * attended_pairs(time, None) * _pair_flops(key, value)


def _step_flops(batch, context, heads, key, value):
    blocks = 2 * BLOCK * (3 * key + BLOCK) + BLOCK**2  # W W^T, W K^T, T with both; T itself
    return batch * heads * context * (_pair_flops(key, value) + blocks)


def _token_bytes(heads: int, key: int, value: int, element_bytes: int) -> int:
    return heads * ((2 * key + value) * element_bytes + STATE_BYTES)


def _forward_bytes(batch, time, heads, key, value, *, element_bytes=4):
    tokens = _token_bytes(heads, key, value, element_bytes) + heads * (key + value) * element_bytes
    return batch * time * tokens


def _state_bytes(batch, context, heads, key, value, *, element_bytes=4):
    return batch * context * _token_bytes(heads, key, value, element_bytes)


def _step_bytes(batch, context, heads, key, value, *, element_bytes=4):
    """The cache is read; q, o and what this token brings cross once."""
    token = _token_bytes(heads, key, value, element_bytes) + heads * (key + value) * element_bytes
    return (
        _state_bytes(batch, context, heads, key, value, element_bytes=element_bytes) + batch * token
    )


ROW = Mixer(
    name="path", title="PaTH attention",
    paper="Yang, Shen, Wen, Tan et al., PaTH Attention (arXiv:2505.16381)",
    is_linear_time=False,
    inputs=(Q, K, V, W, BETA),
    implementations=("chunked",),
    options=MappingProxyType({}),
    function=path_attention, step=path_attention_step, reference=path_attention_reference,
    empty_state=_empty_state,
    forward_flops=_forward_flops, forward_bytes=_forward_bytes,
    step_flops=_step_flops, step_bytes=_step_bytes,
    state_bytes=_state_bytes,
)  # fmt: skip
"""The row of `MIXERS`."""
