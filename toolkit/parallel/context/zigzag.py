"""Zigzag order, which balances causal attention over devices.

Of 2N chunks of a sequence, device i of N holds chunks i and 2N-1-i. In the order of the text, the
last device would compute many times more scores than the first.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from toolkit._checks import checked
from toolkit.parallel.axes import devices_along

MOST_TOKENS = 2**31 - 1


@checked
def zigzag_order(time: int, devices: int) -> Int[Array, "time"]:
    """The permutation into zigzag order: `x[:, zigzag_order(...)]` is in zigzag order.

    Args:
        time: tokens of the sequence, a multiple of 2 devices.
        devices: number of devices.

    Returns:
        int32 [time]; its `jnp.argsort` is the inverse.

    Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023, arXiv:2310.01889; the
        order is that of Zhu's ring-flash-attention, 2024.

    Example:
        >>> zigzag_order(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if devices < 1:
        raise ValueError(f"devices={devices}: want at least 1")
    if not 1 <= time <= MOST_TOKENS or time % (2 * devices):
        raise ValueError(f"time={time}: want a multiple of 2 x {devices} devices")
    chunks = jnp.arange(time, dtype=jnp.int32).reshape(2, devices, -1)
    return jnp.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)


@checked
def to_zigzag(x: Array, axis: str) -> Array:
    """Reorder text to zigzag order; inside `jax.shard_map`, with tokens sharded along `axis`.

    Args:
        x: this device's tokens, two chunks [batch, time, ...] of the text.
        axis: the mesh axis.

    Returns:
        Chunks i and 2N-1-i of the text, for device i of N, in x's shape.

    Cost: Two permutes of half of x each.

    Example:
        >>> mesh, cut = make_mesh({"context": 2}, devices=jax.devices()[:2]), jax.P(None, "context")
        >>> go = jax.shard_map(
        ...     lambda x: to_zigzag(x, "context"), mesh=mesh, in_specs=cut, out_specs=cut)
        >>> go(jnp.arange(8)[None]).tolist()
        [[0, 1, 6, 7, 2, 3, 4, 5]]
    """
    halves, devices = _halves(x), devices_along(axis)
    halves = [
        lax.ppermute(half, axis, [(i, _home(2 * i + at, devices)) for i in range(devices)])
        for at, half in enumerate(halves)
    ]
    # Device i gets an even and an odd chunk of the text; i itself comes first.
    return _joined(halves, lax.axis_index(axis) % 2 == 1)


@checked
def from_zigzag(x: Array, axis: str) -> Array:
    """Reorder zigzag to text order: the inverse of `to_zigzag`.

    Args:
        x: this device's tokens [batch, time, ...], two chunks in zigzag order.
        axis: the mesh axis.

    Returns:
        Chunks 2i and 2i+1 of the text, for device i, in x's shape.

    Cost: Two permutes of half of x each.

    Example:
        >>> mesh, cut = make_mesh({"context": 2}, devices=jax.devices()[:2]), jax.P(None, "context")
        >>> go = jax.shard_map(
        ...     lambda x: from_zigzag(x, "context"), mesh=mesh, in_specs=cut, out_specs=cut)
        >>> go(zigzag_order(8, 2)[None]).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    (first, second), devices = _halves(x), devices_along(axis)
    is_odd = lax.axis_index(axis) % 2 == 1
    even, odd = jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)
    halves = [
        lax.ppermute(half, axis, [(_home(2 * i + at, devices), i) for i in range(devices)])
        for at, half in enumerate((even, odd))
    ]
    return jnp.concatenate(halves, axis=1)


def _home(chunk: int, devices: int) -> int:
    """The device that holds a chunk of the text in zigzag order."""
    return min(chunk, 2 * devices - 1 - chunk)


def _halves(x: Array) -> list[Array]:
    if x.ndim < 2:
        raise ValueError(f"x must have axes [batch, time, ...]; got shape {x.shape}")
    if x.shape[1] % 2:
        raise ValueError(f"time={x.shape[1]} on each device: zigzag wants an even number")
    return jnp.split(x, 2, axis=1)


def _joined(halves: list[Array], is_swapped: Array) -> Array:
    first, second = halves
    return jnp.concatenate(
        [jnp.where(is_swapped, second, first), jnp.where(is_swapped, first, second)], axis=1
    )
