r"""Exact softmax attention in tiles: memory linear in time, forward and backward.

Write a query tile's scores against key tile j as s_j (queries x keys). Softmax needs the largest
score and the sum of exponentials over *all* keys, yet tiles arrive one at a time. The online
softmax keeps three running quantities for every query: the largest score so far m, the sum of
exponentials l, and the unnormalised output a. A new tile changes them by

    m' = max(m, max_keys s_j)          c = exp(m - m')          p_j = exp(s_j - m')
    l' = c l + sum_keys p_j            a' = c a + p_j v_j

so what was summed under the old maximum is rescaled by c to the new one. After the last tile the
output is a / l, and lse = m + log l is all that the backward pass needs from the softmax.

Backward. With P = exp(S - lse) recomputed tile by tile, O = P V and the loss's gradient dO,

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta),  delta = sum_value(dO * O)
    dK = dS^T Q        dQ = dS K          (times the scale of the scores)

delta is the softmax Jacobian's correction, summed over the values instead of over all the keys
(the two are equal because O = P V), so no row of P is ever held whole. A gradient of lse adds to
dP, since d lse / dS = P.

Scores that are not seen are the lowest finite number, seen ones that overflowed the next, and all
others above them: exp never meets -inf - (-inf), a query that has seen nothing yet forgets what it
summed when it sees its first key, and its maximum tells at the end whether it saw none (0), or only
scores that overflowed (NaN).

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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from toolkit.attention._attend import Segments
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.softmax.scores import Context, Inputs, Options
from toolkit.attention.softmax.tiles import Tile, Tiles, Tiling, pad


# Compiled as functions of their own, or JAX would trace them anew where they are differentiated.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def attend_tiles(
    options: Options, tiling: Tiling, inputs: Inputs, context: Context
) -> tuple[Float[Array, "batch query_time heads value"], Float[Array, "batch query_time heads"]]:
    """Output and log-sum-exp, tile by tile."""
    q, k, v = inputs[:3]
    tiles = _tiles(options, tiling, inputs, context)
    k, v = _keys(k, tiling), _keys(v, tiling)
    k = k + (_zero_or_nan(k) + _zero_or_nan(v).astype(k.dtype))[..., None]

    def heads(tiles, _, *arrays):
        return (), _forward(tiles, *arrays)

    _, (out, lse) = _each_head(heads, tiles, (), _rows(q, tiling), k, _finite(v))
    out, lse = (_from_rows(x, q.shape, tiling) for x in (out, lse))
    return out.astype(q.dtype), lse


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
    precise = accumulator(q.dtype)
    # XLA would spend seconds on folding what follows where the gradient is constant, as of a sum.
    d_out, d_lse = lax.optimization_barrier((d_out, d_lse))
    out, d_out, d_lse = (_rows(x, tiling) for x in (out, d_out, d_lse))
    lse = _rows(lse, tiling, -jnp.inf)
    # A row without a gradient contributes 0 even if it saw NaN, and so does one that sees nothing;
    # a NaN gradient is passed on. A maximum would pass over it where compiled programs are fast.
    size = jnp.abs(d_out).sum(axis=-1, dtype=precise) + jnp.abs(d_lse)
    has_gradient = (size != 0) & (lse != -jnp.inf)
    lse = jnp.where(has_gradient, jnp.where(jnp.isfinite(size), lse, jnp.nan), jnp.inf)
    d_out = _finite(d_out)
    delta = _finite((out.astype(precise) * d_out.astype(precise)).sum(axis=-1) - d_lse)
    # The bias's gradient may be shared by heads and sequences, so it is summed in one place.
    d_bias = ()
    if bias is not None and is_wanted.bias:
        d_bias = (jnp.zeros_like(_tiled(bias, tiling), dtype=precise),)
    tiles = _tiles(options, tiling, inputs, context)
    keys = (_finite(_keys(x, tiling)) for x in (k, v))
    arrays = _finite(_rows(q, tiling)), d_out, delta, lse, *keys
    d_bias, (d_q, d_k, d_v, d_slopes) = _each_head(_backward, tiles, d_bias, *arrays)
    return Inputs(
        _from_rows(d_q, q.shape, tiling).astype(q.dtype),
        _from_keys(d_k, k),
        _from_keys(d_v, v),
        None if bias is None or not d_bias else _cropped(d_bias[0], bias),
        None if slopes is None else _of_slopes(d_slopes, slopes, tiling),
    )


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _zero_or_nan(x: Float[Array, "heads time size"]) -> Float[Array, "heads time"]:
    """NaN where a token is not finite."""
    return (x - x).sum(axis=2)


# ---------------------------------------------------------------- the tiles of some heads
# q, out, d_out [heads, rows, size]; k, v [heads, time, size]; lse, delta [heads, rows].


def _forward(tiles: Tiles, q, k, v):
    """Output [heads, rows, value] and lse [heads, rows]."""
    precise = accumulator(q.dtype)
    lowest = jnp.finfo(precise).min
    overflowed = np.nextafter(lowest, lowest.dtype.type(0))
    lowest_seen = np.nextafter(overflowed, lowest.dtype.type(0))

    def step(tile: Tile, carry):
        scores, _ = tile.scores(_matmul(tile.of_queries(q), tile.of_keys(k), (1, 1)))
        seen = jnp.where(scores == -jnp.inf, overflowed, jnp.maximum(scores, lowest_seen))
        scores = jnp.where(tile.visible(), seen, lowest)
        largest = scores.max(axis=1)
        if carry is not None:
            before = tile.of_queries(carry[0])
            largest = jnp.maximum(before, largest)
        p = jnp.exp(scores - largest[:, None])
        total = p.sum(axis=1)
        out = _matmul(tile.dropped(p).astype(v.dtype), tile.of_keys(v), (1, 0))
        if carry is None:
            return tuple(x[None] for x in (largest, total, out))
        rescale = jnp.exp(before - largest)
        total = tile.add_to_queries(carry[1], total, rescale)
        return tile.put(carry[0], largest), total, tile.add_to_queries(carry[2], out, rescale)

    start = None
    if (q.shape[0], *tiles.count) != (1, 1, 1):
        total = jnp.zeros_like(q, shape=q.shape[:2], dtype=precise)
        out = jnp.zeros_like(q, shape=(*q.shape[:2], v.shape[2]), dtype=precise)
        start = jnp.full_like(total, lowest), total, out
    largest, total, out = tiles.walk(q.shape[0], step, start)
    # A maximum may pass over NaN, which the sum of exponentials never does.
    sees_any = (largest != lowest) | jnp.isnan(total)
    total = jnp.where(largest == overflowed, jnp.nan, total)
    out = jnp.where(sees_any[..., None], out / total[..., None], 0)
    return out, jnp.where(sees_any, largest + jnp.log(total), -jnp.inf)


def _backward(tiles: Tiles, d_bias, q, d_out, delta, lse, k, v):
    """Gradients of some heads, summed in place; that of the slopes [heads, rows of a tile]."""
    precise = accumulator(q.dtype)

    def step(tile: Tile, carry):
        d_q, d_k, d_v, d_slopes, d_bias = carry
        q_i, d_out_i, delta_i, lse_i = (tile.of_queries(x) for x in (q, d_out, delta, lse))
        k_j, v_j = tile.of_keys(k), tile.of_keys(v)
        scores, slope_of_cap = tile.scores(_matmul(q_i, k_j, (1, 1)), is_backward=True)
        is_passed = tile.visible() & (lse_i != jnp.inf)[:, None]
        p = jnp.where(is_passed, jnp.exp(scores - lse_i[:, None]), 0)
        d_p = tile.dropped(_matmul(d_out_i, v_j, (1, 1)))
        d_scores = p * (d_p - delta_i[:, None])
        d_bias = tuple(tile.add_to_bias(d, d_scores) for d in d_bias)
        if tiles.slopes is not None:
            sums = (tile.distance(precise) * d_scores).sum(axis=1)
            d_slopes = d_slopes.at[tile.head].add(-sums)
        if slope_of_cap is not None:
            d_scores *= slope_of_cap
        p = tile.dropped(p).astype(q.dtype)
        d_scores = (d_scores * tiles.options.scale).astype(q.dtype)
        # As size x keys: the other way around they take thrice the time on a CPU.
        d_v = tile.add_to_keys(d_v, _matmul(d_out_i, p, (0, 0)))
        d_k = tile.add_to_keys(d_k, _matmul(q_i, d_scores, (0, 0)))
        return tile.add_to_queries(d_q, _matmul(d_scores, k_j, (1, 0))), d_k, d_v, d_slopes, d_bias

    d_q = jnp.zeros_like(q, dtype=precise)
    d_k, d_v = (jnp.zeros_like(x.swapaxes(1, 2), dtype=precise) for x in (k, v))
    d_slopes = jnp.zeros_like(q, shape=(q.shape[0], tiles.tiling.rows), dtype=precise)
    start = d_q, d_k, d_v, d_slopes, d_bias
    d_q, d_k, d_v, d_slopes, d_bias = tiles.walk(q.shape[0], step, start)
    return d_bias, (d_q, d_k, d_v, d_slopes)


def _matmul(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=accumulator(a.dtype))


# ---------------------------------------------------------------- every head


def _each_head(function: Callable, tiles: Tiles, shared: Any, *arrays: Array) -> Any:
    """Apply `shared, out = function(tiles, shared, *arrays)` to the heads of all sequences.

    One after another on a CPU, where one product of two matrices is fast and a batch of them is
    not, and wherever they add to something shared; side by side on an accelerator, which needs the
    parallel work.
    """

    def in_turn(*arrays):
        return function(tiles, shared, *arrays)

    def together(*arrays):
        def head(number, *arrays):
            own = tiles._replace(first_head=number, is_share=True)
            return function(own, (), *(x[None] for x in arrays))[1]

        numbers = jnp.arange(arrays[0].shape[0], dtype=jnp.int32)
        return shared, jax.tree.map(lambda x: x[:, 0], jax.vmap(head)(numbers, *arrays))

    if jax.tree.leaves(shared):
        return in_turn(*arrays)
    if tiles.tiling.at_once:
        return together(*arrays)
    return lax.platform_dependent(*arrays, cpu=in_turn, default=together)


def _rows(x: Array, tiling: Tiling, value: float = 0) -> Float[Array, "heads rows *size"]:
    """[batch, time, heads, *size] by key head, padded to whole tiles."""
    # Four axes, as keys have: transposed alike, they are one kernel to compile.
    x = pad(x, tiling.query_tile, axis=1, value=value)
    batch, time, _, *size = x.shape
    x = x.reshape(batch, time, tiling.key_heads, -1).swapaxes(1, 2)
    return x.reshape(batch * tiling.key_heads, time * tiling.group, *size)


def _from_rows(x: Array, shape: tuple[int, ...], tiling: Tiling) -> Array:
    """[batch, time, heads, *size] again, with the first three axes of `shape`."""
    batch, time, heads, _ = shape
    rows, *size = x.shape[1:]
    x = x.reshape(batch, tiling.key_heads, rows // tiling.group, -1)[:, :, :time]
    return x.swapaxes(1, 2).reshape(batch, time, heads, *size)


def _keys(x: Array, tiling: Tiling) -> Float[Array, "heads time size"]:
    """[batch, heads, size, time], padded to whole tiles."""
    x = pad(x, tiling.key_tile, axis=3)
    return x.swapaxes(2, 3).reshape(-1, x.shape[3], x.shape[2])


def _from_keys(x: Array, like: Array) -> Array:
    """[batch, heads, size, time] again, in the shape and dtype of `like`."""
    batch, heads, size, time = like.shape
    return x.reshape(batch, heads, size, -1)[..., :time].astype(like.dtype)


def _of_slopes(d_slopes: Array, slopes: Array, tiling: Tiling) -> Array:
    """The gradient of ALiBi's slopes, from sums by head and row of a tile."""
    d_slopes = d_slopes.reshape(-1, tiling.key_heads, tiling.query_tile, tiling.group)
    return d_slopes.sum(axis=(0, 2)).reshape(-1).astype(slopes.dtype)


def _cropped(x: Array, like: Array) -> Array:
    """What was padded, in the shape and dtype of what it was padded from."""
    return x[:, :, : like.shape[2], : like.shape[3]].astype(like.dtype)


def _tiled(x: Any, tiling: Tiling) -> Any:
    """What broadcasts to [batch, heads, queries, keys], padded to whole tiles."""
    for axis, width in ((2, tiling.query_tile), (3, tiling.key_tile)):
        if x is not None and x.shape[axis] > 1:
            x = pad(x, width, axis=axis)
    return x


def _tiles(options: Options, tiling: Tiling, inputs: Inputs, context: Context) -> Tiles:
    documents, slopes = context.mask.documents, inputs.alibi_slopes
    if documents is not None:
        query = jnp.repeat(pad(documents.query, tiling.query_tile, axis=1), tiling.group, axis=1)
        documents = Segments(query, pad(documents.key, tiling.key_tile, axis=1))
    allowed = _tiled(context.mask.allowed, tiling)
    mask = replace(context.mask, documents=documents, allowed=allowed)
    if slopes is not None:
        slopes = slopes.astype(accumulator(inputs.q.dtype)).reshape(-1, tiling.group)
        slopes = jnp.tile(slopes, (1, tiling.query_tile))
    time, keys = inputs.q.shape[1], inputs.k.shape[3]
    count = -(-time // tiling.query_tile), -(-keys // tiling.key_tile)
    context = context._replace(mask=mask)
    return Tiles(options, tiling, context, keys, _tiled(inputs.bias, tiling), slopes, count)
