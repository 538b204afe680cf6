r"""Exact softmax attention in tiles: memory linear in time, forward and backward.

Write a query tile's scores against key tile j as s_j (keys x queries). Softmax needs the largest
score and the sum of exponentials over *all* keys, yet tiles arrive one at a time. The online
softmax keeps three running quantities for every query: the largest score so far m, the sum of
exponentials l, and the unnormalised output a. A new tile changes them by

    m' = max(m, max_keys s_j)          c = exp(m - m')          p_j = exp(s_j - m')
    l' = c l + sum_keys p_j            a' = c a + v_j p_j

so what was summed under the old maximum is rescaled by c to the new one. After the last tile the
output is a / l, and lse = m + log l is all that the backward pass needs from the softmax.

Backward. With P = exp(S - lse) recomputed tile by tile, o = V P and the loss's gradient do,

    dV = do P^T        dP = V^T do        dS = P * (dP - delta),  delta = sum_value(do * o)
    dK = Q dS^T        dQ = K dS          (times the scale of the scores)

delta is the softmax Jacobian's correction, summed over the values instead of over all the keys
(the two are equal because o = V P), so no row of P is ever held whole.

Scores are stored keys x queries, so the maximum and the sum over keys run down the rows, many
queries at a time, and every product is rows x columns: S = K Q with K [time, key], Q [key, time],
and O = V P with V [value, time]. This layout, not the tile size, is what makes it fast on a CPU.
Query heads that share a key head lie side by side in the columns, in the order (time, group).

Non-finite numbers. A masked position must not show even when it holds NaN, but 0 * NaN is NaN in
a matrix product. So a key or value with a non-finite entry is taken out of the products: its value
becomes 0 and its key NaN, which makes its scores NaN, and the mask removes exactly the invisible
ones. A query that sees the key returns NaN, the others do not change. The backward pass works on
finite numbers only and carries NaN in lse, for rows that saw one and have a gradient to pass on.

Source: Milakov and Gimelshein (2018), arXiv:1805.02867; Dao et al. (2022), arXiv:2205.14135,
algorithms 1 and 4; Dao (2023), arXiv:2307.08691.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit.attention._precision import accumulator
from toolkit.attention._visibility import Extent, Segments, sees

LARGEST_TILE = 256  # 256 x 256 float32 scores are 256 kB and stay in a core's L2 cache


class Tiling(NamedTuple):
    """What is fixed at compile time.

    Attributes:
        query_tile: queries in a tile, counted in time steps.
        key_tile: keys in a tile.
        group: query heads that share one key head.
        scale: factor of the scores.
        is_causal: a query sees no key after itself.
        sliding_window: keys a query sees, itself included; None for all.
    """

    query_tile: int
    key_tile: int
    group: int
    scale: float
    is_causal: bool
    sliding_window: int | None


def blockwise_attention(
    q: Float[Array, "batch query_time heads key"],
    k: Float[Array, "batch key_heads key key_time"],
    v: Float[Array, "batch key_heads value key_time"],
    extent: Extent,
    segments: Segments | None,
    *,
    scale: float,
    is_causal: bool,
    sliding_window: int | None,
) -> Float[Array, "batch query_time heads value"]:
    """Softmax attention of `q` over `k, v` (time last), in tiles."""
    batch, time, heads, _ = q.shape
    key_heads, key_time = k.shape[1], k.shape[3]
    group = heads // key_heads
    # In a window, narrower tiles waste less work on keys outside it.
    largest = LARGEST_TILE if sliding_window is None else min(LARGEST_TILE, max(64, sliding_window))
    query_tile = _even_tile(time, max(largest // group, 16))
    key_tile = _even_tile(key_time, largest)
    tiling = Tiling(query_tile, key_tile, group, float(scale), is_causal, sliding_window)

    q = _pad_time(q, query_tile, axis=1).reshape(batch, -1, key_heads, group, q.shape[3])
    q = q.transpose(0, 2, 4, 1, 3).reshape(batch, key_heads, q.shape[4], -1)
    k = _pad_time(k, key_tile, axis=3).swapaxes(2, 3)
    v = _pad_time(v, key_tile, axis=3)
    if segments is not None:
        segments = Segments(
            jnp.repeat(_pad_time(segments.query, query_tile, axis=1), group, axis=1),
            _pad_time(segments.key, key_tile, axis=1),
        )
    # Adding zeros that vary like q, k and v makes all three vary over the same axes of `shard_map`;
    # differentiation then sums the gradient of a replicated one over the axes it is shared by.
    zero = sum(jnp.zeros_like(array, shape=()) for array in (q, k, v))
    extent = Extent(*(jnp.asarray(index, jnp.int32) for index in extent))
    out: Array = _attend(tiling, q + zero, k + zero, v + zero, extent, segments)
    out = out.reshape(batch, key_heads, v.shape[2], -1, group)[:, :, :, :time]
    return out.transpose(0, 3, 1, 4, 2).reshape(batch, time, heads, v.shape[2])


def _even_tile(time: int, largest: int) -> int:
    """Split `time` in as few equal tiles as `largest` allows, a multiple of 16 wide."""
    tiles = -(-time // largest)
    return -(-time // (16 * tiles)) * 16


def _pad_time(array: Array, tile: int, *, axis: int) -> Array:
    """Lengthen `axis` with zeros to a whole number of tiles."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % tile)
    return jnp.pad(array, widths)


# ---------------------------------------------------------------- which keys a query sees


def _key_zones(tiling: Tiling, extent: Extent, query_tile: Array, *, has_segments: bool):
    """Key tiles that query tile number `query_tile` walks, as zones (start, stop, needs a mask).

    Tiles outside the zones are seen by no query and skipped, tiles in the middle by all of them.
    """
    first_query = extent.query_start + query_tile * tiling.query_tile
    last_query = first_query + tiling.query_tile - 1
    # Keys [seen, seen_stop) are seen by some query of the tile, [whole, whole_stop) by all of them.
    seen = whole = extent.key_start
    seen_stop = whole_stop = extent.key_stop
    if tiling.is_causal:
        seen_stop = jnp.minimum(seen_stop, last_query + 1)
        whole_stop = jnp.minimum(whole_stop, first_query + 1)
    if tiling.sliding_window is not None:
        seen = jnp.maximum(seen, first_query - tiling.sliding_window + 1)
        whole = jnp.maximum(whole, last_query - tiling.sliding_window + 1)
        if not tiling.is_causal:
            seen_stop = jnp.minimum(seen_stop, last_query + tiling.sliding_window)
            whole_stop = jnp.minimum(whole_stop, first_query + tiling.sliding_window)
    start, stop = seen // tiling.key_tile, -(-seen_stop // tiling.key_tile)
    if has_segments:
        return [(start, stop, True)]
    if tiling.sliding_window is None:
        stop_whole = jnp.clip(whole_stop // tiling.key_tile, start, jnp.maximum(start, stop))
        return [(start, stop_whole, False), (stop_whole, stop, True)]
    start_whole = jnp.clip(-(-whole // tiling.key_tile), start, jnp.maximum(start, stop))
    stop_whole = whole_stop // tiling.key_tile
    stop_whole = jnp.clip(stop_whole, start_whole, jnp.maximum(start_whole, stop))
    return [
        (start, start_whole, True),
        (start_whole, stop_whole, False),
        (stop_whole, stop, True),
    ]


def _visible(
    tiling: Tiling, extent: Extent, segments: Segments | None, query_tile, key_tile
) -> Array:
    """Which keys (rows) of a tile each query column sees."""
    column = jnp.arange(tiling.query_tile * tiling.group, dtype=jnp.int32) // tiling.group
    query = (extent.query_start + query_tile * tiling.query_tile + column)[None, :]
    key = (key_tile * tiling.key_tile + jnp.arange(tiling.key_tile, dtype=jnp.int32))[:, None]
    visible = sees(
        query, key, extent, is_causal=tiling.is_causal, sliding_window=tiling.sliding_window
    )
    if segments is not None:
        query_segment = _tile(segments.query, query_tile, tiling.query_tile * tiling.group)
        key_segment = _tile(segments.key, key_tile, tiling.key_tile)
        visible &= key_segment[:, None] == query_segment[None, :]
    return visible


def _walk(zones: list, step: Callable, carry: Any) -> Any:
    """Fold `step(key_tile, carry, is_masked)` over the zones of `_key_zones`."""
    for start, stop, is_masked in zones:
        carry = lax.fori_loop(start, stop, partial(step, is_masked=is_masked), carry)
    return carry


# ---------------------------------------------------------------- one head
# q [key, columns]; k [key_time, key]; v [value, key_time]; out, d_out [value, columns];
# lse [1, columns].


def _head_forward(tiling: Tiling, extent: Extent, segments: Segments | None, q, k, v):
    """Output [value, columns] and lse [1, columns] of one key head."""
    columns = tiling.query_tile * tiling.group
    precise = accumulator(q.dtype)
    k_is_finite, v_is_finite = jnp.isfinite(k), jnp.isfinite(v)
    both_are_finite = k_is_finite.all(axis=1) & v_is_finite.all(axis=0)
    k, v = jnp.where(both_are_finite[:, None], k, jnp.nan), jnp.where(v_is_finite, v, 0)

    def query_tile(i):
        q_i = _tile(q, i, columns)

        def step(j, carry, is_masked):
            largest, total, out = carry
            k_j, v_j = _tile(k, j, tiling.key_tile, axis=0), _tile(v, j, tiling.key_tile)
            scores = _matmul("sk,kt->st", k_j, q_i) * tiling.scale
            if is_masked:
                scores = jnp.where(_visible(tiling, extent, segments, i, j), scores, -jnp.inf)
            new_largest = jnp.maximum(largest, scores.max(axis=0, keepdims=True))
            p = jnp.exp(scores - new_largest)
            rescale = jnp.exp(largest - new_largest)
            total = rescale * total + p.sum(axis=0, keepdims=True)
            out = rescale * out + _matmul("vs,st->vt", v_j, p.astype(v.dtype))
            return new_largest, total, out

        # The maximum starts at the lowest *finite* number: -inf - (-inf) would be NaN.
        lowest = float(jnp.finfo(precise).min)
        largest = jnp.full_like(q, lowest, shape=(1, columns), dtype=precise)
        total = jnp.zeros_like(largest)
        out = jnp.zeros_like(q, shape=(v.shape[0], columns), dtype=precise)
        zones = _key_zones(tiling, extent, i, has_segments=segments is not None)
        largest, total, out = _walk(zones, step, (largest, total, out))
        # A query that sees no key gives 0, and lse = +inf makes its p = exp(s - lse) vanish too.
        sees_nothing = total == 0
        out = out / jnp.where(sees_nothing, 1, total)
        return out, jnp.where(sees_nothing, jnp.inf, largest + jnp.log(total))

    out, lse = lax.map(query_tile, jnp.arange(q.shape[1] // columns, dtype=jnp.int32))
    return _join_tiles(out).astype(q.dtype), _join_tiles(lse)


def _head_backward(
    tiling: Tiling, extent: Extent, segments: Segments | None, q, k, v, out, lse, d_out
):
    """Gradients of one key head: dq by query tile, dk and dv summed in place over query tiles."""
    columns = tiling.query_tile * tiling.group
    precise = accumulator(q.dtype)
    # A row without a gradient contributes 0 even if it saw NaN; a NaN gradient is passed on.
    has_gradient, is_finite = (
        (d_out != 0).any(0, keepdims=True),
        jnp.isfinite(d_out).all(0, keepdims=True),
    )
    lse = jnp.where(has_gradient, jnp.where(is_finite, lse, jnp.nan), jnp.inf)
    q, k, v, out, d_out = (jnp.where(jnp.isfinite(x), x, 0) for x in (q, k, v, out, d_out))
    delta = (out.astype(precise) * d_out.astype(precise)).sum(0, keepdims=True)

    def query_tile(d_keys_values, i):
        q_i, d_out_i = _tile(q, i, columns), _tile(d_out, i, columns)
        lse_i, delta_i = _tile(lse, i, columns), _tile(delta, i, columns)

        def step(j, carry, is_masked):
            d_q, d_k, d_v = carry
            k_j, v_j = _tile(k, j, tiling.key_tile, axis=0), _tile(v, j, tiling.key_tile)
            p = jnp.exp(_matmul("sk,kt->st", k_j, q_i) * tiling.scale - lse_i)
            if is_masked:
                p = jnp.where(_visible(tiling, extent, segments, i, j), p, 0)
            d_scores = p * (_matmul("vs,vt->st", v_j, d_out_i) - delta_i)
            p, d_scores = p.astype(q.dtype), d_scores.astype(q.dtype)
            d_v = _add_to_tile(d_v, j, _matmul("vt,st->vs", d_out_i, p), axis=1)
            d_k = _add_to_tile(d_k, j, _matmul("st,kt->sk", d_scores, q_i), axis=0)
            return d_q + _matmul("sk,st->kt", k_j, d_scores), d_k, d_v

        zones = _key_zones(tiling, extent, i, has_segments=segments is not None)
        start = (jnp.zeros_like(q_i, dtype=precise), *d_keys_values)
        d_q, d_k, d_v = _walk(zones, step, start)
        return (d_k, d_v), d_q

    start = jnp.zeros_like(k, dtype=precise), jnp.zeros_like(v, dtype=precise)
    tiles = jnp.arange(q.shape[1] // columns, dtype=jnp.int32)
    (d_k, d_v), d_q = lax.scan(query_tile, start, tiles)
    d_q, d_k = _join_tiles(d_q) * tiling.scale, d_k * tiling.scale
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


def _tile(array: Array, tile, width: int, axis: int = -1) -> Array:
    return lax.dynamic_slice_in_dim(array, tile * width, width, axis)


def _add_to_tile(array: Array, tile, addition: Array, axis: int) -> Array:
    width = addition.shape[axis]
    total = _tile(array, tile, width, axis) + addition
    return lax.dynamic_update_slice_in_dim(array, total, tile * width, axis)


def _join_tiles(tiles: Float[Array, "tiles size columns"]) -> Float[Array, "size all_columns"]:
    return tiles.transpose(1, 0, 2).reshape(tiles.shape[1], -1)


def _matmul(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=accumulator(a.dtype))


# ---------------------------------------------------------------- every head, and the gradient


def _each_head(function: Callable, extent: Extent, segments: Segments | None, *arrays: Array):
    """Apply `function(extent, segments, *arrays)` to every batch entry and head.

    One after another on a CPU, where one product of two matrices is fast and a batch of them is
    not; all at once on an accelerator, which needs the parallel work.
    """

    def one_by_one(extent, segments, *arrays):
        extent = Extent(*(jnp.broadcast_to(index, arrays[0].shape[:1]) for index in extent))

        def entry(of_entry):
            extent, segments, *heads = of_entry
            return lax.map(lambda head: function(extent, segments, *head), tuple(heads))

        return lax.map(entry, (extent, segments, *arrays))

    def at_once(extent, segments, *arrays):
        heads = jax.vmap(function, in_axes=(None, None, *(0 for _ in arrays)))
        of_entry = Extent(*(0 if index.ndim else None for index in extent))
        return jax.vmap(heads, in_axes=(of_entry, *(0 for _ in (segments, *arrays))))(
            extent, segments, *arrays
        )

    return lax.platform_dependent(extent, segments, *arrays, cpu=one_by_one, default=at_once)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiling: Tiling, q, k, v, extent, segments):
    return _attend_forward(tiling, q, k, v, extent, segments)[0]


def _attend_forward(tiling: Tiling, q, k, v, extent, segments):
    out, lse = _each_head(partial(_head_forward, tiling), extent, segments, q, k, v)
    return out, (q, k, v, out, lse, extent, segments)


def _attend_backward(tiling: Tiling, residuals, d_out):
    *arrays, extent, segments = residuals
    d_inputs = _each_head(partial(_head_backward, tiling), extent, segments, *arrays, d_out)
    return *d_inputs, None, None


_attend.defvjp(_attend_forward, _attend_backward)
