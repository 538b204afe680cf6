r"""Ring attention: every device keeps its queries while keys and values travel around a ring.

Device i of N holds 1/N of the tokens. At step s it attends to the keys of device i - s and merges
the result into its own (`merge_attention`), while the keys and values move to the next device:

    o_i, L_i = merge over s of attention(q_i, k_(i-s), v_(i-s))        L the log-sum-exp

Plain differentiation would keep the keys and values of the whole sequence on each device. Instead
the backward pass sends them around again, together with their gradients. With w_s = exp(L_s - L),
attention to the keys of one device has the cotangents

    do_s = w_s do        dL_s = w_s do . (o_s - o)

so that each step reuses the tiled backward pass of local attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked
from toolkit._compat import varying, varying_axes
from toolkit._pytrees import register_dataclass
from toolkit.attention import merge_attention, softmax_attention
from toolkit.attention.execution.derivatives import gradient_only
from toolkit.attention.execution.precision import accumulator
from toolkit.parallel.axes import devices_along
from toolkit.parallel.context.checks import check_attention


@checked
def ring_attention(
    q: Float[Array, "batch time heads key"], k: Float[Array, "batch time key_value_heads key"],
    v: Float[Array, "batch time key_value_heads value"], axis: str, *,
    is_causal: bool = True, is_zigzag: bool = False, sliding_window: int | None = None,
    scale: float | None = None, segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time heads value"]:  # fmt: skip
    """Softmax attention over time sharded along a mesh axis; inside `jax.shard_map`.

        o_i = sum_j softmax_j(scale q_i . k_j) v_j        j over the keys of all devices

    Args:
        q: this device's queries [batch, time, heads, key].
        k: its keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: its values [batch, time, key_value_heads, value].
        axis: the mesh axis; its devices hold the text in order.
        is_causal: a token sees no token after itself.
        is_zigzag: the tokens are in zigzag order (`to_zigzag`), which balances causal attention.
        sliding_window: tokens seen, itself included (on each side if not causal); None for all.
        scale: factor of the products; None for key ** -0.5.
        segment_ids: document of each token; equal numbers are one document wherever they stand.

    Returns:
        This device's outputs [batch, time, heads, value] in q's dtype.

    Raises:
        NotImplementedError: in forward mode, which `ulysses_attention` has.

    Cost: With N devices, 2 (N-1) permutes of one device's keys or values forward and 4 (N-1)
        backward (gradients travel in float32, those of float64 inputs in float64), and (N-1) of
        segment_ids each way. FLOPs as softmax attention, and one more forward pass in the backward
        pass. Fully masked chunks are skipped; only zigzag order balances that. Memory: this
        device's tokens only.

    Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
        Context", 2023, arXiv:2310.01889; Li et al., "Sequence Parallelism", 2021, arXiv:2105.13120.

    Example:
        >>> mesh, cut = make_mesh({"context": 2}, devices=jax.devices()[:2]), jax.P(None, "context")
        >>> ring = lambda x: ring_attention(x, x, x, "context")
        >>> ring = jax.shard_map(ring, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
        >>> ring(jnp.ones((1, 4, 3, 8))).shape
        (1, 4, 3, 8)
    """
    if is_zigzag and q.shape[1] % 2:
        raise ValueError(f"q has time={q.shape[1]} on each device: zigzag wants an even number")
    check_attention(q, k, v, sliding_window)
    if sliding_window is not None and sliding_window >= devices_along(axis) * q.shape[1]:
        sliding_window = None
    how = _How(axis, is_causal, is_zigzag, sliding_window, scale)
    message = "ring attention has no forward mode; ulysses attention has."
    q, k, v = gradient_only((q, k, v), message=message)
    out: Any = _ring(q, k, v, segment_ids, how)
    return out.astype(q.dtype)


class _How(NamedTuple):
    axis: str
    is_causal: bool
    is_zigzag: bool
    sliding_window: int | None
    scale: float | None


def _forward(q: Array, k: Array, v: Array, segments: Array | None, how: _How):
    devices = devices_along(how.axis)

    def attend(step: Any, block: tuple) -> tuple[Array, Array]:
        """Attend to the keys that travelled `step` devices, by chunks of the text."""

        def visit(pair: "_Pair") -> tuple[Array, Array]:
            return _attend(pair, how, *pair.arrays)

        def skip(pair: "_Pair") -> tuple[Array, Array]:
            out, residual = jax.eval_shape(visit, pair)
            return _full(out, 0, q), _full(residual, -jnp.inf, q)

        rows = []
        for pairs in _pairs(q, segments, block, step, how):
            parts = [lax.cond(pair.is_seen, visit, skip, pair) for pair in pairs]
            rows.append(merge_attention(*parts) if len(parts) > 1 else parts[0])
        outs, residuals = zip(*rows, strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(residuals, axis=1)

    def body(carry: tuple, step: Array) -> tuple[tuple, None]:
        block, seen = carry
        return (_next(block, how.axis), merge_attention(seen, attend(step, block))), None

    block, seen = (k, v, segments), attend(0, (k, v, segments))
    if devices > 1:
        carry = _next(block, how.axis), seen
        (block, seen), _ = lax.scan(body, carry, jnp.arange(1, devices - 1))
        seen = merge_attention(seen, attend(devices - 1, block))
    out, residual = seen
    return out, (q, k, v, segments, out, residual)


def _backward(how: _How, kept: tuple, cotangent: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, residual = kept
    devices, pieces = devices_along(how.axis), 1 + how.is_zigzag
    rows = [jnp.split(x, pieces, axis=1) for x in (cotangent, out, residual)]

    def gradients(step: Any, block: tuple) -> tuple[Array, ...]:
        """Gradients of the local queries, and of the keys and values that travelled `step`
        devices."""

        def visit(pair: "_Pair", cotangent: Array, out: Array, residual: Array):
            attend = lambda *arrays: _attend(pair, how, *arrays)  # noqa: E731
            (out_here, residual_here), pull = jax.vjp(attend, *pair.arrays)
            # NaN from elsewhere must not enter where nothing is visible or no gradient is needed.
            is_used = (residual_here != -jnp.inf) & (cotangent != 0).any(-1)
            share = jnp.where(is_used, jnp.exp(residual_here - residual), 0)
            change = (jnp.where(is_used[..., None], out_here - out, 0) * cotangent).sum(-1)
            given = pull((share[..., None] * cotangent, share * change))
            return tuple(part.astype(accumulator(part.dtype)) for part in given)

        def skip(pair: "_Pair", *_: Array):
            return tuple(_full(part, 0, q) for part in pair.arrays)

        sums = [[0.0] * pieces for _ in range(3)]
        for at, pairs in enumerate(_pairs(q, segments, block, step, how)):
            for there, pair in enumerate(pairs):
                given = lax.cond(pair.is_seen, visit, skip, pair, *(row[at] for row in rows))
                for total, place, part in zip(sums, (at, there, there), given, strict=True):
                    total[place] += part
        dq, dk, dv = (jnp.concatenate(total, axis=1) for total in sums)
        return dq, dk, dv

    def body(carry: tuple, step: Array) -> tuple[tuple, None]:
        block, dq, around = carry
        here, *there = gradients(step, block)
        return (_next(block, how.axis), dq + here, _next(_sum(around, there), how.axis)), None

    dq, *home = gradients(0, (k, v, segments))
    if devices > 1:
        around = tuple(_full(part, 0, part) for part in home)
        carry = _next((k, v, segments), how.axis), dq, around
        (block, dq, around), _ = lax.scan(body, carry, jnp.arange(1, devices - 1))
        last, *there = gradients(devices - 1, block)
        dq, home = dq + last, _sum(home, _next(_sum(around, there), how.axis))
    return dq.astype(q.dtype), home[0].astype(k.dtype), home[1].astype(v.dtype), None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q: Array, k: Array, v: Array, segments: Array | None, how: _How) -> Array:
    return _forward(q, k, v, segments, how)[0]


_ring.defvjp(_forward, _backward)


@register_dataclass
@dataclass(frozen=True)
class _Pair:
    """A chunk of queries, keys and values: mask, distance, and whether any key is visible."""

    arrays: tuple[Array, Array, Array]
    mask: Bool[Array, "batch 1 time key_time"] | None
    offset: Int[Array, ""]
    is_seen: Bool[Array, ""]


def _pairs(
    q: Array, segments: Array | None, block: tuple, step: Any, how: _How
) -> Iterator[list[_Pair]]:
    """Pairs of each local chunk of queries with the chunks that travelled `step` devices.

    A device holds one chunk of the text or, in zigzag order, two.
    """
    devices, me = devices_along(how.axis), lax.axis_index(how.axis)
    pieces, source = 1 + how.is_zigzag, (me - step) % devices
    size, window = q.shape[1] // pieces, how.sliding_window

    def split(x: Array | None) -> list[Any]:
        return [None] * pieces if x is None else jnp.split(x, pieces, axis=1)

    mine = zip((me, 2 * devices - 1 - me), split(q), split(segments), strict=False)
    for chunk, queries, own in mine:
        theirs = zip((source, 2 * devices - 1 - source), *map(split, block), strict=False)
        pairs = []
        for other, k, v, documents in theirs:
            offset = (chunk - other) * size
            is_seen = offset >= 0 if how.is_causal else jnp.bool_(True)
            if window is not None:
                is_seen &= jnp.abs(offset) < size + window - 1
            mask = None if own is None else (own[:, :, None] == documents[:, None, :])[:, None]
            pairs.append(_Pair((queries, k, v), mask, offset, is_seen))
        yield pairs


def _attend(pair: _Pair, how: _How, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    out, _, residual = softmax_attention(
        q,
        k,
        v,
        mask=pair.mask,
        scale=how.scale,
        is_causal=how.is_causal,
        query_offset=pair.offset,
        sliding_window=how.sliding_window,
        return_residual=True,
    )
    return out.astype(residual.dtype), residual


def _next(block: Any, axis: str) -> Any:
    devices = devices_along(axis)
    around = [(device, (device + 1) % devices) for device in range(devices)]
    return jax.tree.map(lambda part: lax.ppermute(part, axis, around), block)


def _sum(left: Any, right: Any) -> tuple[Array, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _full(shape: Any, value: float, like: Array) -> Array:
    """A constant of at least float32 that varies over the same mesh axes as `like`."""
    x = jnp.full(shape.shape, value, accumulator(shape.dtype))
    axes = tuple(varying_axes(like))
    return varying(x, axes) if axes else x
