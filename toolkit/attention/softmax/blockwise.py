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
(the two are equal because o = V P), so no row of P is ever held whole. A gradient of lse adds to
dP, since d lse / dS = P.

Scores are stored keys x queries, so the maximum and the sum over keys run down the rows, many
queries at a time, and every product is rows x columns: S = K Q with K [time, key], Q [key, time],
and O = V P with V [value, time]. This layout, not the tile size, is what makes it fast on a CPU.

Non-finite numbers. A masked position must not show even when it holds NaN, but 0 * NaN is NaN in
a matrix product. So a key or value with a non-finite entry is taken out of the products: its value
becomes 0 and its key NaN, which makes its scores NaN, and the mask removes exactly the invisible
ones. A query that sees the key returns NaN, the others do not change. The backward pass works on
finite numbers only and carries NaN in lse, for rows that saw one and have a gradient to pass on.

Source: Milakov and Gimelshein (2018), arXiv:1805.02867; Dao et al. (2022), arXiv:2205.14135,
algorithms 1 and 4; Dao (2023), arXiv:2307.08691.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit.attention._attend import Segments
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.softmax.scores import Context, Inputs, Options
from toolkit.attention.softmax.tiles import HeadTiles, Tiling, add_to_tile, pad, tile


def attend_tiles(
    options: Options, tiling: Tiling, inputs: Inputs, context: Context
) -> tuple[Float[Array, "batch query_time heads value"], Float[Array, "batch query_time heads"]]:
    """Output and log-sum-exp, tile by tile."""
    shape = inputs.q.shape
    tiles = _tiles(options, tiling, inputs, context)

    def head(shared, number, *arrays):
        return shared, _head_forward(tiles(number), *arrays)

    arrays = _columns(inputs.q, tiling), *_keys_and_values(inputs.k, inputs.v, tiling)
    _, (out, lse) = _each_head(head, (), tiling.at_once, *arrays)
    return _from_columns(out, shape, tiling), _from_columns(lse, shape, tiling)[..., 0]


def attend_tiles_backward(
    options: Options,
    tiling: Tiling,
    outputs,
    inputs: Inputs,
    context: Context,
    d_outputs,
    is_wanted,
) -> Inputs:
    """Gradients of the inputs, tile by tile; of bias and slopes if wanted."""
    (out, lse), (d_out, d_lse), (q, k, v, bias, slopes) = outputs, d_outputs, inputs[:5]
    precise, (batch, _, heads, _), keys = accumulator(q.dtype), q.shape, k.shape[3]
    # XLA would spend seconds on folding what follows where the gradient is constant, as of a sum.
    d_out, d_lse = lax.optimization_barrier((d_out, d_lse))
    # A row without a gradient contributes 0 even if it saw NaN, and so does one that sees nothing;
    # a NaN gradient is passed on.
    has_gradient = ((d_out != 0).any(axis=-1) | (d_lse != 0)) & (lse != -jnp.inf)
    is_finite = jnp.isfinite(d_out).all(axis=-1) & jnp.isfinite(d_lse)
    lse = jnp.where(has_gradient, jnp.where(is_finite, lse, jnp.nan), jnp.inf)
    q = jnp.where(has_gradient[..., None], q, 0)
    q, k, v, out, d_out, d_lse = (
        jnp.where(jnp.isfinite(x), x, 0) for x in (q, k, v, out, d_out, d_lse)
    )
    delta = (out.astype(precise) * d_out.astype(precise)).sum(axis=-1) - d_lse.astype(precise)
    # The bias's gradient may be shared by heads and sequences, so it is summed in one place.
    d_bias = ()
    if bias is not None and is_wanted.bias:
        d_bias = (jnp.zeros_like(_tiled(bias, tiling), dtype=precise),)
    tiles = _tiles(options, tiling, inputs, context)

    def head(d_bias, number, *arrays):
        return _head_backward(tiles(number), d_bias, *arrays)

    d_bias, (d_q, d_k, d_v, d_slopes) = _each_head(
        head,
        d_bias,
        tiling.at_once,
        _columns(q, tiling),
        *_keys_and_values(k, v, tiling),
        _columns(lse[..., None], tiling, jnp.inf),
        _columns(delta[..., None], tiling),
        _columns(d_out, tiling),
    )
    d_k, d_v = (x.reshape(batch, -1, *x.shape[1:]) for x in (d_k, d_v))
    return Inputs(
        _from_columns(d_q, q.shape, tiling),
        d_k[:, :, :keys].swapaxes(2, 3),
        d_v[..., :keys],
        None if bias is None or not d_bias else _cropped(d_bias[0], bias),
        None if slopes is None else d_slopes.reshape(batch, heads).sum(axis=0).astype(slopes.dtype),
    )


# ---------------------------------------------------------------- one head
# q [key, columns]; k [key_time, key]; v [value, key_time]; out, d_out [value, columns];
# lse, delta [1, columns].


def _head_forward(tiles: HeadTiles, q, k, v):
    """Output [value, columns] and lse [1, columns] of one key head."""
    columns, key_tile = tiles.tiling.columns, tiles.tiling.key_tile
    precise = accumulator(q.dtype)
    k_is_finite, v_is_finite = jnp.isfinite(k), jnp.isfinite(v)
    both_are_finite = k_is_finite.all(axis=1) & v_is_finite.all(axis=0)
    k, v = jnp.where(both_are_finite[:, None], k, jnp.nan), jnp.where(v_is_finite, v, 0)

    def query_tile(i):
        q_i = tile(q, i, columns)

        def step(j, carry):
            largest, total, out, sees_any = carry
            k_j, v_j = tile(k, j, key_tile, axis=0), tile(v, j, key_tile)
            scores, _ = tiles.scores(i, j, _matmul("sk,kt->st", k_j, q_i))
            visible = tiles.visible(i, j)
            scores = jnp.where(visible, scores, -jnp.inf)
            sees_any |= visible.any(axis=0, keepdims=True)
            new_largest = jnp.maximum(largest, scores.max(axis=0, keepdims=True))
            p = jnp.exp(scores - new_largest)
            rescale = jnp.exp(largest - new_largest)
            total = rescale * total + p.sum(axis=0, keepdims=True)
            p = tiles.dropped(i, j, p).astype(v.dtype)
            out = rescale * out + _matmul("vs,st->vt", v_j, p)
            return new_largest, total, out, sees_any

        # The maximum starts at the lowest *finite* number: -inf - (-inf) would be NaN.
        lowest = float(jnp.finfo(precise).min)
        largest = jnp.full_like(q, lowest, shape=(1, columns), dtype=precise)
        total = jnp.zeros_like(largest)
        out = jnp.zeros_like(q, shape=(v.shape[0], columns), dtype=precise)
        start = largest, total, out, jnp.zeros_like(total, dtype=bool)
        largest, total, out, sees_any = tiles.walk(i, step, start)
        # A query that sees no key gives 0. One whose scores all overflowed to -inf gives 0 / 0.
        out = out / jnp.where(sees_any, total, 1)
        lse = jnp.where(total == 0, jnp.nan, largest + jnp.log(total))
        return out, jnp.where(sees_any, lse, -jnp.inf)

    out, lse = lax.map(query_tile, jnp.arange(q.shape[1] // columns, dtype=jnp.int32))
    return _join_tiles(out).astype(q.dtype), _join_tiles(lse)


def _head_backward(tiles: HeadTiles, d_bias, q, k, v, lse, delta, d_out):
    """Gradients of one key head: dq by query tile, the others summed in place over query tiles."""
    columns, key_tile, group = tiles.tiling.columns, tiles.tiling.key_tile, tiles.tiling.group
    precise = accumulator(q.dtype)

    def query_tile(summed, i):
        q_i, d_out_i, lse_i, delta_i = (tile(x, i, columns) for x in (q, d_out, lse, delta))

        def step(j, carry):
            d_q, d_k, d_v, d_slopes, d_bias = carry
            k_j, v_j = tile(k, j, key_tile, axis=0), tile(v, j, key_tile)
            products = _matmul("sk,kt->st", k_j, q_i)
            scores, slope_of_cap = tiles.scores(i, j, products, is_backward=True)
            p = jnp.where(tiles.visible(i, j), jnp.exp(scores - lse_i), 0)
            d_p = tiles.dropped(i, j, _matmul("vs,vt->st", v_j, d_out_i))
            d_scores = p * (d_p - delta_i)
            d_bias = tuple(tiles.add_to_bias(d, i, j, d_scores) for d in d_bias)
            if tiles.slopes is not None:
                d_slopes -= (tiles.distance(i, j, precise) * d_scores).sum(axis=0)
            if slope_of_cap is not None:
                d_scores *= slope_of_cap
            p, d_scores = tiles.dropped(i, j, p).astype(q.dtype), d_scores.astype(q.dtype)
            d_v = add_to_tile(d_v, j, _matmul("vt,st->vs", d_out_i, p), axis=1)
            d_k = add_to_tile(d_k, j, _matmul("st,kt->sk", d_scores, q_i), axis=0)
            return d_q + _matmul("sk,st->kt", k_j, d_scores), d_k, d_v, d_slopes, d_bias

        d_q, *summed = tiles.walk(i, step, (jnp.zeros_like(q_i, dtype=precise), *summed))
        return tuple(summed), d_q

    start = (
        jnp.zeros_like(k, dtype=precise),
        jnp.zeros_like(v, dtype=precise),
        jnp.zeros_like(q, shape=columns, dtype=precise),
        d_bias,
    )
    numbers = jnp.arange(q.shape[1] // columns, dtype=jnp.int32)
    (d_k, d_v, d_slopes, d_bias), d_q = lax.scan(query_tile, start, numbers)
    scale = tiles.options.scale
    d_q, d_k = (_join_tiles(d_q) * scale).astype(q.dtype), (d_k * scale).astype(k.dtype)
    return d_bias, (d_q, d_k, d_v.astype(v.dtype), d_slopes.reshape(-1, group).sum(axis=0))


def _join_tiles(tiles: Float[Array, "tiles size columns"]) -> Float[Array, "size all_columns"]:
    return tiles.transpose(1, 0, 2).reshape(tiles.shape[1], -1)


def _matmul(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=accumulator(a.dtype))


# ---------------------------------------------------------------- every head


def _each_head(function: Callable, shared: Any, at_once: bool, *arrays: Array) -> Any:
    """Apply `shared, out = function(shared, number, *arrays)` to every head of every sequence.

    One after another on a CPU, where one product of two matrices is fast and a batch of them is
    not, and wherever they add to something shared; all at once on an accelerator, which needs the
    parallel work.
    """
    numbers = jnp.arange(arrays[0].shape[0], dtype=jnp.int32)

    def in_turn(shared, *arrays):
        return lax.scan(lambda shared, head: function(shared, *head), shared, arrays)

    def together(shared, *arrays):
        return shared, jax.vmap(lambda *head: function(shared, *head)[1])(*arrays)

    if jax.tree.leaves(shared):
        return in_turn(shared, numbers, *arrays)
    if at_once:
        return together(shared, numbers, *arrays)
    return lax.platform_dependent(shared, numbers, *arrays, cpu=in_turn, default=together)


def _columns(x: Array, tiling: Tiling, value: float = 0) -> Float[Array, "heads size columns"]:
    """[batch, time, heads, size] by key head, padded to whole tiles."""
    x = pad(x, tiling.query_tile, axis=1, value=value)
    batch, time, _, size = x.shape
    x = x.reshape(batch, time, tiling.key_heads, tiling.group, size).transpose(0, 2, 4, 1, 3)
    return x.reshape(-1, size, time * tiling.group)


def _from_columns(x: Array, shape: tuple[int, ...], tiling: Tiling) -> Array:
    """[batch, time, heads, size] again, with the first three axes of `shape`."""
    batch, time, heads, _ = shape
    x = x.reshape(batch, tiling.key_heads, x.shape[1], -1, tiling.group)[:, :, :, :time]
    return x.transpose(0, 3, 1, 4, 2).reshape(batch, time, heads, -1)


def _keys_and_values(k: Array, v: Array, tiling: Tiling) -> tuple[Array, Array]:
    """Keys [heads, time, key] and values [heads, value, time], padded to whole tiles."""
    k, v = (pad(x, tiling.key_tile, axis=3) for x in (k, v))
    return k.swapaxes(2, 3).reshape(-1, k.shape[3], k.shape[2]), v.reshape(-1, *v.shape[2:])


def _cropped(x: Array, like: Array) -> Array:
    """What was padded, in the shape and dtype of what it was padded from."""
    return x[:, :, : like.shape[2], : like.shape[3]].astype(like.dtype)


def _tiled(x: Any, tiling: Tiling) -> Any:
    """What broadcasts to [batch, heads, queries, keys], padded to whole tiles."""
    for axis, width in ((2, tiling.query_tile), (3, tiling.key_tile)):
        if x is not None and x.shape[axis] > 1:
            x = pad(x, width, axis=axis)
    return x


def _tiles(options: Options, tiling: Tiling, inputs: Inputs, context: Context) -> Callable:
    """The function from a head's number to its `HeadTiles`."""
    documents, slopes = context.mask.documents, inputs.alibi_slopes
    if documents is not None:
        query = jnp.repeat(pad(documents.query, tiling.query_tile, axis=1), tiling.group, axis=1)
        documents = Segments(query, pad(documents.key, tiling.key_tile, axis=1))
    allowed = _tiled(context.mask.allowed, tiling)
    mask = replace(context.mask, documents=documents, allowed=allowed)
    context, keys = context._replace(mask=mask), inputs.k.shape[3]
    bias = _tiled(inputs.bias, tiling)
    if slopes is not None:
        slopes = slopes.astype(accumulator(inputs.q.dtype)).reshape(-1, tiling.group)

    def of_head(number):
        own = None if slopes is None else slopes[number % tiling.key_heads]
        own = None if own is None else jnp.tile(own, tiling.query_tile)
        return HeadTiles(options, tiling, context, keys, number, bias, own)

    return of_head
