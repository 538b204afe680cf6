"""How compressed gradients become their mean on all replicas: a table of exchanges.

A gradient of n numbers lies as rows [D, n/D], one for each of the D replicas. `scatter` leaves each
replica the mean of its own row, as ZeRO wants it; `whole` leaves all rows on all replicas.
Everything is inside `jax.shard_map`. Bytes are what one device sends, c(n) those of a payload.

Rows whose payloads are decoded alike are bit-identical on all replicas. A gathered sparse payload
is added worker by worker: as one scatter with repeated places it would use atomics on GPUs, whose
order may differ from replica to replica.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from toolkit.parallel.gradients.compression.compressor import Compressor
from toolkit.parallel.gradients.compression.messages import Messages, Rows
from toolkit.parallel.gradients.compression.packing import pack, unpack
from toolkit.parallel.gradients.peers import Along, Peers

Sends = Callable[[Compressor, Along, int], list[tuple[Peers, float]]]
Shapes = Callable[[Along, int], list[tuple[int, int]]]


@dataclass(frozen=True)
class Pattern:
    """One way to exchange messages.

    Attributes:
        name: of the row.
        whole: (rows [D, length], along, messages) -> mean [D, length], the same on all replicas.
        scatter: the same -> mean [length] of this replica's row; None if rows come only together.
        sends, scatter_sends: (compressor, along, length) -> of every collective its devices, and
            the bytes that each of them sends.
        memories: (along, length) -> shapes of what the hops of `whole` encode, in order;
            `scatter` makes all of them but the last.
        source: the paper.

    Example:
        >>> from toolkit.parallel.gradients.peers import Along
        >>> along = Along.over({"data": 8}, None)
        >>> sends = PATTERNS["scatter_gather"].sends(COMPRESSORS["int8"](64), along, 512)
        >>> [sent for _, sent in sends]
        [3808, 3808]
    """

    name: str
    whole: Callable[[Rows, Along, Messages], Rows]
    scatter: Callable[[Rows, Along, Messages], Array] | None
    sends: Sends
    scatter_sends: Sends | None
    memories: Shapes
    source: str


def _scatter(rows: Rows, peers: Peers, messages: Messages) -> Array:
    """The mean of the row that is this device's: all-to-all of payloads, then the sum."""
    if peers.size == 1:
        return rows[0]
    theirs = peers.all_to_all(messages.encode(rows))
    return jnp.mean(messages.decode(theirs, rows.shape[1]), axis=0)


def _gather(rows: Rows, peers: Peers, messages: Messages) -> Array:
    """[parts, length] -> [peers, parts, length]."""
    payload = peers.all_gather(messages.encode(rows))
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), payload)
    return messages.decode(flat, rows.shape[1]).reshape(peers.size, *rows.shape)


def _scatter_gather(rows: Rows, along: Along, messages: Messages) -> Rows:
    mean = _scatter(rows, along.peers, messages)
    return _gather(mean[None], along.peers, messages)[:, 0]


def _all_reduce(rows: Rows, along: Along, messages: Messages) -> Rows:
    def mean(payload: Array) -> Array:
        return jax.lax.psum(payload, along.peers.axes) / along.peers.size

    return messages.reduced(rows.reshape(1, -1), mean).reshape(rows.shape)


def _sum_scatter(rows: Rows, along: Along, messages: Messages) -> Array:
    return along.peers.sum_scatter(rows) / along.peers.size


def _all_gather(rows: Rows, along: Along, messages: Messages) -> Rows:
    gathered = along.peers.all_gather(messages.encode(rows.reshape(1, -1)))

    def add(total: Array, payload: tuple) -> tuple[Array, None]:
        return total + messages.decode(payload, rows.size)[0], None

    total = jax.lax.scan(add, jnp.zeros(rows.size, jnp.float32), gathered)[0]
    return (total / along.peers.size).reshape(rows.shape)


def _near_first(rows: Rows, along: Along) -> Array:
    """[D, length] -> [near, far, length]: without it the parts land on other devices."""
    return rows.reshape(along.far.size, along.near.size, -1).swapaxes(0, 1)


def _two_hop_scatter(rows: Rows, along: Along, messages: Messages) -> Array:
    near_first = _near_first(rows, along).reshape(along.near.size, -1)
    partial = _scatter(near_first, along.near, messages)
    return _scatter(partial.reshape(along.far.size, -1), along.far, messages)


def _two_hop(rows: Rows, along: Along, messages: Messages) -> Rows:
    mean = _two_hop_scatter(rows, along, messages)
    return _gather(mean[None], along.peers, messages)[:, 0]


def _far_scatter(rows: Rows, along: Along, messages: Messages) -> Array:
    partial = along.near.sum_scatter(_near_first(rows, along)) / along.near.size
    return _scatter(partial, along.far, messages)


def _far(rows: Rows, along: Along, messages: Messages) -> Rows:
    mean = _far_scatter(rows, along, messages)
    across = _gather(mean[None], along.far, messages)[:, 0]
    return along.near.all_gather(across).swapaxes(0, 1).reshape(rows.shape)


def _vote(rows: Rows, along: Along, messages: Messages) -> Rows:
    """sign(sum of signs), a tie is +1; NaN everywhere if a number is not finite anywhere."""
    length = rows.shape[1]
    flag = jax.lax.psum(jnp.sum(0 * rows), along.peers.axes)  # a sign alone would hide it
    theirs = along.peers.all_to_all(pack((rows >= 0).astype(jnp.uint8), 1))
    ayes = jnp.sum(unpack(theirs, 1, length).astype(jnp.int32), axis=0)
    mine = pack((2 * ayes >= along.peers.size).astype(jnp.uint8), 1)
    return 2.0 * unpack(along.peers.all_gather(mine), 1, length) - 1 + flag


def _each(peers: Peers, sent: float) -> tuple[Peers, float]:
    """Every device sends so much to, or for, each of the others."""
    return peers, (peers.size - 1) * sent


def _send(compressor: Compressor, along: Along, length: int) -> list[tuple[Peers, float]]:
    return [_each(along.peers, compressor.payload_bytes(length))]


def _send_two_hop(compressor: Compressor, along: Along, length: int) -> list[tuple[Peers, float]]:
    near = _each(along.near, compressor.payload_bytes(along.far.size * length))
    return [near, _each(along.far, compressor.payload_bytes(length))]


def _send_far(compressor: Compressor, along: Along, length: int) -> list[tuple[Peers, float]]:
    near = _each(along.near, 4 * along.far.size * length)
    return [near, _each(along.far, compressor.payload_bytes(length))]


def _send_whole(compressor: Compressor, along: Along, length: int) -> list[tuple[Peers, float]]:
    return [_each(along.peers, compressor.payload_bytes(along.peers.size * length))]


def _ring(along: Along, size: float) -> list[tuple[Peers, float]]:
    return 2 * [_each(along.peers, size / along.peers.size)]


PATTERNS: dict[str, Pattern] = {
    row.name: row
    for row in (
        Pattern(
            "all_reduce",
            _all_reduce,
            None,
            lambda compressor, along, length: _ring(
                along, compressor.payload_bytes(along.peers.size * length)
            ),
            None,
            lambda along, length: [(1, along.peers.size * length)],
            "dense with float32; with random_k: Vogels et al., PowerSGD, 2019, appendix",
        ),
        Pattern(
            "dense",
            lambda rows, along, messages: jax.lax.pmean(rows, along.peers.axes),
            _sum_scatter,
            lambda compressor, along, length: 2 * [_each(along.peers, 4 * length)],
            lambda compressor, along, length: [_each(along.peers, 4 * length)],
            lambda along, length: [],
            "ring all-reduce",
        ),
        Pattern(
            "gather",
            _all_gather,
            None,
            _send_whole,
            None,
            lambda along, length: [(1, along.peers.size * length)],
            "Xu et al., GRACE, 2021",
        ),
        Pattern(
            "scatter_gather",
            _scatter_gather,
            lambda rows, along, messages: _scatter(rows, along.peers, messages),
            lambda *where: 2 * _send(*where),
            _send,
            lambda along, length: [(along.peers.size, length), (1, length)],
            "Tang et al., 1-bit Adam, 2021, section 3",
        ),
        Pattern(
            "two_hop",
            _two_hop,
            _two_hop_scatter,
            lambda *where: _send_two_hop(*where) + _send(*where),
            _send_two_hop,
            lambda along, length: [
                *[(along.near.size, along.far.size * length)] * (along.near.size > 1),
                *[(along.far.size, length)] * (along.far.size > 1),
                (1, length),
            ],
            "Wang et al., ZeRO++, 2023, section 3.3 (qgZ)",
        ),
        Pattern(
            "far",
            _far,
            _far_scatter,
            lambda *where: _send_far(*where) + _send_far(*where)[::-1],
            _send_far,
            lambda along, length: [*[(along.far.size, length)] * (along.far.size > 1), (1, length)],
            "Xu et al., three-level partitioning, 2025: only the outer level is quantised",
        ),
        Pattern(
            "vote",
            _vote,
            None,
            lambda compressor, along, length: [
                *_ring(along, 4),  # the flag
                *2 * [_each(along.peers, -(-length // 8))],
            ],
            None,
            lambda along, length: [],
            "Bernstein et al., signSGD, 2018",
        ),
    )
}
"""Exchanges by name."""
