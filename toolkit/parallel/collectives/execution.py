"""A program of messages runs as a loop over its rounds, on a buffer of chunks."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Num

from toolkit._checks import checked
from toolkit.schedules.collectives import Program

AxisName = str | tuple[str, ...]


@checked
def all_gather(
    x: Num[Array, "..."], axis_name: AxisName, program: Program, *,
    axis: int = 0, tiled: bool = False,
) -> Num[Array, "..."]:  # fmt: skip
    """Gather an array from all devices of a mesh axis, along the trees of a program.

    Args:
        x: this device's array [...].
        axis_name: the mesh axis, or axes, of as many devices as the program has ranks.
        program: of an "all-gather", from `toolkit.schedules.collectives.to_program`.
        axis: where the devices' axis goes.
        tiled: whether it is joined with the axis that is there, instead of a new one.

    Returns:
        The arrays of all devices, as `jax.lax.all_gather` returns them.

    Cost: rounds times the most neighbours of a device in `ppermute`s of one chunk, which is a
        device's bytes over its number of trees. Compiling does not depend on the rounds.

    Example:
        >>> from toolkit.schedules.collectives import forest, ring, to_program
        >>> program = to_program(forest(ring(8)))  # then, inside jax.shard_map:
        >>> gather = lambda x: all_gather(x, "x", program, tiled=True)
        >>> len(program.rounds)
        7
    """
    ranks = _ranks(program, "all-gather", axis_name)
    is_own = jnp.arange(ranks) == lax.axis_index(axis_name)
    parts = jnp.where(is_own.reshape(ranks, *(1,) * x.ndim), x, jnp.zeros_like(x))
    axis %= x.ndim + (not tiled)
    gathered = jnp.moveaxis(_by_rank(program, parts, axis_name), 0, axis)
    return lax.collapse(gathered, axis, axis + 2) if tiled else gathered


@checked
def reduce_scatter(
    x: Num[Array, "..."], axis_name: AxisName, program: Program, *,
    scatter_dimension: int = 0, tiled: bool = False,
) -> Num[Array, "..."]:  # fmt: skip
    """Sum an array over all devices of a mesh axis and leave each device its part.

    Args:
        x: this device's summands [...].
        axis_name: the mesh axis, or axes, of as many devices as the program has ranks.
        program: of a "reduce-scatter", from `toolkit.schedules.collectives.to_program`.
        scatter_dimension: the axis that is divided among the devices.
        tiled: whether that axis stays, with a device's part; else it has one entry per device and
            is removed.

    Returns:
        This device's part of the sum, as `jax.lax.psum_scatter` returns it.

    Example:
        >>> from toolkit.schedules.collectives import forest, ring, to_program
        >>> program = to_program(forest(ring(8), "reduce-scatter"))
        >>> scatter = lambda x: reduce_scatter(x, "x", program, tiled=True)
        >>> program.collective
        'reduce-scatter'
    """
    ranks = _ranks(program, "reduce-scatter", axis_name)
    size, rest = x.shape[scatter_dimension], divmod(x.shape[scatter_dimension], ranks)
    if rest[1] or (not tiled and size != ranks):
        wanted = "a multiple of" if tiled else "exactly"
        raise ValueError(f"scatter_dimension: want {wanted} {ranks} entries; got {size}")
    first = jnp.moveaxis(x, scatter_dimension, 0)
    parts = first.reshape(ranks, size // ranks, *first.shape[1:])
    part = _by_rank(program, parts, axis_name)[lax.axis_index(axis_name)]
    return jnp.moveaxis(part, 0, scatter_dimension) if tiled else part[0]


@checked
def all_reduce(x: Num[Array, "..."], axis_name: AxisName, program: Program) -> Num[Array, "..."]:
    """Sum an array over all devices of a mesh axis, along the trees of a program.

    Args:
        x: this device's summands [...].
        axis_name: the mesh axis, or axes, of as many devices as the program has ranks.
        program: of an "all-reduce", from `toolkit.schedules.collectives.to_program`.

    Returns:
        The sum [...], as `jax.lax.psum` returns it; to jax it varies over the axis.

    Example:
        >>> from toolkit.schedules.collectives import forest, ring, to_program
        >>> program = to_program(forest(ring(8), "all-reduce"))
        >>> total = lambda x: all_reduce(x, "x", program)
        >>> program.ranks
        8
    """
    return _whole(x, axis_name, program, "all-reduce")


@checked
def broadcast(x: Num[Array, "..."], axis_name: AxisName, program: Program) -> Num[Array, "..."]:
    """Give every device the root's array.

    Args:
        x: this device's array [...], of which only the root's counts.
        axis_name: the mesh axis, or axes, of as many devices as the program has ranks.
        program: of a "broadcast", from `toolkit.schedules.collectives.to_program`.

    Returns:
        The root's array [...].

    Example:
        >>> from toolkit.schedules.collectives import forest, ring, to_program
        >>> program = to_program(forest(ring(8), "broadcast", root=3))
        >>> spread = lambda x: broadcast(x, "x", program)
        >>> set(program.owners)
        {3}
    """
    is_root = lax.axis_index(axis_name) == program.owners[0]
    return _whole(jnp.where(is_root, x, 0).astype(x.dtype), axis_name, program, "broadcast")


@checked
def reduce(x: Num[Array, "..."], axis_name: AxisName, program: Program) -> Num[Array, "..."]:
    """Sum an array over all devices of a mesh axis, for the root.

    Args:
        x: this device's summands [...].
        axis_name: the mesh axis, or axes, of as many devices as the program has ranks.
        program: of a "reduce", from `toolkit.schedules.collectives.to_program`.

    Returns:
        The sum [...] at the root, zeros elsewhere.

    Example:
        >>> from toolkit.schedules.collectives import forest, ring, to_program
        >>> program = to_program(forest(ring(8), "reduce", root=3))
        >>> total = lambda x: reduce(x, "x", program)
        >>> set(program.owners)
        {3}
    """
    total = _whole(x, axis_name, program, "reduce")
    is_root = lax.axis_index(axis_name) == program.owners[0]
    return jnp.where(is_root, total, 0).astype(x.dtype)


def _ranks(program: Program, collective: str, axis_name: AxisName) -> int:
    if program.collective != collective:
        raise ValueError(f"program must be of an {collective!r}; got {program.collective!r}")
    devices = lax.axis_size(axis_name)
    if devices != program.ranks:
        raise ValueError(
            f"axis_name: axis {axis_name!r} has {devices} devices; the program has {program.ranks} "
            "ranks"
        )
    if collective in ("all-gather", "reduce-scatter"):
        # Chunks lie in the order of their roots, as many for each.
        per_rank = len(program.owners) // program.ranks
        if list(program.owners) != [rank for rank in range(devices) for _ in range(per_rank)]:
            raise ValueError("program: want equally many chunks of every rank, in order of ranks")
    return devices


def _by_rank(program, parts, axis_name):
    """Run a program on parts [ranks, ...], each in the chunks of its rank."""
    chunks = jax.vmap(lambda part: _chunks(part, len(program.owners) // program.ranks))(parts)
    buffer = _run(program, chunks.reshape(len(program.owners), -1), axis_name)
    return buffer.reshape(program.ranks, -1)[:, : parts[0].size].reshape(parts.shape)


def _whole(x, axis_name, program, collective):
    _ranks(program, collective, axis_name)
    buffer = _run(program, _chunks(x, len(program.owners)), axis_name)
    return buffer.reshape(-1)[: x.size].reshape(x.shape)


def _chunks(x: Any, count: int) -> Any:
    """An array in chunks [count, n], with zeros at the end."""
    if x.dtype == bool:
        raise ValueError("x must hold numbers, for sums; got bool")
    each = -(-x.size // count)
    return jnp.pad(x.reshape(-1), (0, each * count - x.size)).reshape(count, each)


def _run(program: Program, buffer: Any, axis_name: AxisName) -> Any:
    """All rounds of a program on a buffer [chunks, n]; an idle device moves one chunk more."""
    idle, ranks, rounds = len(program.owners), program.ranks, len(program.rounds)
    pairs = {(m.source, m.target) for messages in program.rounds for m in messages}
    lanes = _lanes(sorted(pairs), ranks)
    lane_of = {pair: lane for lane, matching in enumerate(lanes) for pair in matching}
    sent = np.full((rounds, len(lanes), ranks), idle)
    received, adds = sent.copy(), np.zeros(sent.shape, bool)
    for step, messages in enumerate(program.rounds):
        for chunk, source, target, is_sum in messages:
            lane = lane_of[source, target]
            if sent[step, lane, source] != idle:
                raise ValueError(f"program: rank {source} sends {target} two chunks in a round")
            sent[step, lane, source] = received[step, lane, target] = chunk
            adds[step, lane, target] = is_sum
    rank = lax.axis_index(axis_name)

    def one_round(buffer, tables):
        sent, received, adds = (table[:, rank] for table in tables)
        leaving = [buffer[sent[lane]] for lane in range(len(lanes))]
        for lane, moves in enumerate(lanes):
            got, slot = lax.ppermute(leaving[lane], axis_name, moves), received[lane]
            buffer = buffer.at[slot].set(jnp.where(adds[lane], buffer[slot] + got, got))
        return buffer, None

    tables = tuple(jnp.asarray(table) for table in (sent, received, adds))
    return lax.scan(one_round, jnp.pad(buffer, ((0, 1), (0, 0))), tables)[0][:idle]


def _lanes(pairs: list[tuple[int, int]], ranks: int) -> list[list[tuple[int, int]]]:
    """Divide pairs into as few permutations as a rank has neighbours, by alternating paths."""
    sends: list[dict[int, int]] = [{} for _ in range(ranks)]  # lane -> the other end
    receives: list[dict[int, int]] = [{} for _ in range(ranks)]
    for source, target in pairs:
        lane = next(lane for lane in itertools.count() if lane not in sends[source])
        other = next(lane for lane in itertools.count() if lane not in receives[target])
        if lane != other and lane in receives[target]:
            # Along the path from the target that alternates between both lanes, swap them.
            path, node, is_target, step = [], target, True, lane
            while step in (receives if is_target else sends)[node]:
                end = (receives if is_target else sends)[node][step]
                path.append((end, node, step) if is_target else (node, end, step))
                node, is_target, step = end, not is_target, lane + other - step
            for a, b, step in path:
                del sends[a][step], receives[b][step]
            for a, b, step in path:
                sends[a][lane + other - step], receives[b][lane + other - step] = b, a
        sends[source][lane], receives[target][lane] = target, source
    count = 1 + max(lane for row in sends for lane in row)
    return [
        [(a, sends[a][lane]) for a in range(ranks) if lane in sends[a]] for lane in range(count)
    ]
