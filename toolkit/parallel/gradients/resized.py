"""What replicas have not sent yet, on another number of replicas.

The update is a mean, so that merged replicas *average* their residuals and new ones copy them: the
mean of what is pending is conserved. Later steps are not those of the old number, bit for bit. Of
numbers that the new replicas no longer divide, and so send as they are, nothing is pending.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from toolkit.parallel.gradients.buffers import Group, cut_rows
from toolkit.parallel.gradients.compression.feedback import Feedback
from toolkit.parallel.gradients.compression.messages import load, store
from toolkit.parallel.gradients.peers import Along
from toolkit.parallel.gradients.plan import ExchangePlan


def resized(plan: ExchangePlan, residuals: Any) -> Any:
    """The residuals of another number of replicas, [replicas, cuts, ...], as this plan has them."""
    wanted = plan.init().residuals
    sharding = NamedSharding(plan.layout.mesh, plan.layout.replica_spec)
    found = []
    for group, stored, like in zip(plan.remembering, residuals, wanted, strict=True):
        feedback = group.exchange.memory
        assert feedback is not None
        if group.along.peers.axes != plan.axes:
            raise ValueError(
                "exchange: got residuals of another number of replicas under a hierarchical "
                "layout; wanted the same number"
            )
        hops = []
        shapes = plan.hops(group)
        for at, (old, new) in enumerate(zip(stored, like, strict=True)):
            before = _before(group.along, len(old[0]))
            length = group.size // before.peers.size
            if at == len(shapes):  # the common mean of differences
                rows = [(group.along.peers.size, group.length), (before.peers.size, length)]
            else:
                rows = [shapes[at], plan.hops(group, before)[at]]
            is_plain = feedback.storage is None or at == len(shapes)
            shared = ()
            if at < len(shapes) and group.compressor.start is not None:  # the same everywhere
                (*old, columns), shape = old, new[-1].shape
                shared = (np.broadcast_to(np.asarray(columns)[:1], shape),)
            vectors = old if is_plain else _each(partial(_loaded, feedback, rows[1][1]), old)
            parts = [_moved(np.asarray(x), group, before, *rows) for x in vectors]
            parts = parts if is_plain else _each(partial(_stored, feedback), parts)
            hops.append(tuple(jax.device_put(x, sharding) for x in (*parts, *shared)))
            assert all(x.shape == y.shape for x, y in zip(hops[-1], new, strict=True))
        found.append(tuple(hops))
    return tuple(found)


def _stored(feedback: Feedback, *rows: Array) -> tuple[Array, ...]:
    return store(feedback, rows)


def _loaded(feedback: Feedback, length: int, *stored: Array) -> tuple[Array, ...]:
    return load(feedback, stored, length)


def _each(function: Any, arrays: Any) -> tuple[Array, ...]:
    """A function of one device's arrays, over [replicas, cuts]."""
    return jax.vmap(jax.vmap(function))(*map(jnp.asarray, arrays))


def _before(along: Along, devices: int) -> Along:
    """The devices as they were: the outermost axis, or the number of groups, was another."""
    axes = dict(along.sizes)
    outer = next(iter(axes))
    inner = along.peers.size // axes[outer]
    if devices % inner:
        raise ValueError(
            f"exchange: got residuals of {devices} replicas, wanted a multiple of {inner}, the "
            "devices of the inner axes"
        )
    axes[outer] = devices // inner
    return Along.over(axes, None if len(axes) > 1 else math.gcd(along.near.size, devices))


def _moved(
    x: np.ndarray, group: Group, before: Along, new: tuple[int, int], old: tuple[int, int]
) -> np.ndarray:
    """[replicas, cuts, rows, length] of one hop, on the group's devices."""
    cuts = [
        _rows(_resampled(_vectors(x[:, cut], group, before, old), group, new), group, new)
        for cut in range(x.shape[1])
    ]
    return np.stack(cuts, axis=1).astype(x.dtype)


def _order(group: Group, along: Along) -> np.ndarray:
    """Where the numbers of the rows lie in the tensors one after the other."""
    if not group.is_cut:
        size = group.size
        return np.arange(size - size % along.peers.size)
    rows, at = [], 0
    for leaf in group.leaves:
        places = at + jnp.arange(leaf.size).reshape(leaf.shape)
        rows.append(np.asarray(cut_rows(places, leaf, along)))
        at += leaf.size
    return np.concatenate(rows, axis=1).reshape(-1)


def _vectors(x: np.ndarray, group: Group, along: Along, rows: tuple[int, int]) -> np.ndarray:
    """[devices, rows, length] as whole vectors [senders, n]."""
    near, far, size = along.near.size, along.far.size, along.peers.size
    if rows[0] * rows[1] == x.shape[0] * (length := len(_order(group, along)) // size):
        if rows[0] not in (1, size):  # near first
            x = x.reshape(size, near, far, length).swapaxes(1, 2)
        vectors = x.reshape(size, -1)
    elif rows[0] == far and rows[1] == length:
        vectors = x.reshape(far, near, far, length).transpose(0, 2, 1, 3).reshape(far, -1)
    else:
        vectors = x.reshape(1, -1)
    whole = np.zeros((len(vectors), group.size), x.dtype)
    whole[:, _order(group, along)] = vectors
    return whole


def _resampled(whole: np.ndarray, group: Group, rows: tuple[int, int]) -> np.ndarray:
    """The vectors of as many senders as the hop has now: averages, or copies."""
    along, size = group.along, rows[0] * rows[1]
    n = group.length * along.peers.size
    senders = along.peers.size if size == n else along.far.size if size > group.length else 1
    if senders % len(whole) and len(whole) % senders:
        raise ValueError(
            f"exchange: got residuals of {len(whole)} replicas on {senders}, wanted a multiple or "
            "a divisor"
        )
    if senders > len(whole):
        return np.repeat(whole, senders // len(whole), axis=0)
    return whole.reshape(senders, len(whole) // senders, -1).mean(axis=1)


def _rows(whole: np.ndarray, group: Group, rows: tuple[int, int]) -> np.ndarray:
    """The inverse of `_vectors`, on the group's devices."""
    along, length = group.along, group.length
    near, far, size = along.near.size, along.far.size, along.peers.size
    vectors = whole[:, _order(group, along)]
    if len(vectors) == size and rows[0] * rows[1] == size * length:
        if rows[0] not in (1, size):
            vectors = vectors.reshape(size, far, near, length).swapaxes(1, 2)
    elif len(vectors) == far:
        vectors = vectors.reshape(far, far, near, length).transpose(0, 2, 1, 3)
    return vectors.reshape(size, *rows)
