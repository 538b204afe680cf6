"""The program of one device: a scan over ticks, each of one task and one message.

What waits between ticks lies in buffers of slots, all updated outside of the switch over tasks,
where XLA updates them in place; a branch of the switch that returned a buffer would copy it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from toolkit.parallel.pipeline.program import NOWHERE, Program
from toolkit.parallel.pipeline.tasks import Tasks

Tree = Any


class State(NamedTuple):
    """What a device has between ticks, and what it made in a tick."""

    message: list[Array]  # for each array of an activation its slots; in a tick, what is sent
    carry: list[Array]  # for each array that slices pass on its slots; in a tick, what is passed on
    # kept, split: for each store its buffers; in a tick, the contents of one slot each
    kept: list[list[Array]]
    split: list[list[Array]]
    weights: list[Array]  # gradients of the rows of weights; in a tick, of one row
    shared: list[Array]  # gradients of the shared parameters
    loss: Array  # the sum so far


def run_ticks(
    program: Program, tasks: Tasks, axes: tuple[str, tuple[str, ...]],
    arguments: tuple[Tree, Tree, Tree], columns: Mapping[str, Array],
) -> tuple[Array, tuple[Tree, Tree]]:  # fmt: skip
    """The loss and the gradients, summed over devices.

    `tasks` are for the shapes of this device's arguments: its rows of weights, the shared
    parameters and its part of the batch. `axes` are the mesh axis of the pipeline and those that
    cut the batch; `columns` are this device's tables.
    """
    (axis, data_axes), (weights, shared, batch) = axes, arguments
    last = program.schedule.stages - 1
    rows, tree = jax.tree.flatten(weights)

    def tick(state: State, now: Mapping[str, Array]) -> tuple[State, None]:
        # A task that writes nothing into a slot returns what is there.
        idle = State(
            [jnp.full(leaf.shape, jnp.nan, leaf.dtype) for leaf in tasks.leaves],
            [jnp.full(leaf.shape, jnp.nan, leaf.dtype) for leaf in tasks.carry],
            [_slot(buffers, now["kept"]) for buffers in state.kept],
            [_slot(buffers, now["split"]) for buffers in state.split],
            _slot(state.weights, now["row"]),
            state.shared,
            state.loss,
        )

        def run(letter: str, kind: int) -> State:
            data = jax.tree.map(lambda a: _at(a, now["microbatch"]), batch)
            # Without the barrier XLA may move the read behind a conditional, and copy the buffer.
            waiting = lax.optimization_barrier(_slot(state.message, now["read"]))
            given = _Given(
                shared, data, now["stage"] == 0, now["stage"] == last,
                waiting, _carried(tasks, letter, state, now, shared, data),
                *tasks.arguments(kind, _slot(rows, now["row"]), data, now["stage"]),
            )  # fmt: skip
            if letter == "F":
                return _forward(tasks, kind, idle, given)
            return _backward(tasks, letter, kind, idle, given)

        branches = [functools.partial(run, *code) for code in program.codes]
        made = lax.switch(now["code"], [lambda: idle, *branches])
        message = _written(state.message, made.message, now["own"])
        for channel, pairs in enumerate(program.channels):
            came = [lax.ppermute(value, axis, pairs) for value in made.message]
            message = _written(message, came, now["arrival"][channel])
        return State(
            message,
            _written(state.carry, made.carry, now["carry_write"]),
            [_put(*pair, now["kept"]) for pair in zip(state.kept, made.kept, strict=True)],
            [_put(*pair, now["split"]) for pair in zip(state.split, made.split, strict=True)],
            _put(state.weights, made.weights, now["row"]),
            made.shared,
            made.loss,
        ), None

    start = State(
        _empty(tasks.leaves, program.message_slots),
        _empty(tasks.carry, program.carry_slots),
        [_empty(*each) for each in zip(tasks.kept.leaves, program.kept_slots, strict=True)],
        [_empty(*each) for each in zip(tasks.split.leaves, program.split_slots, strict=True)],
        [jnp.zeros_like(leaf) for leaf in rows],
        [jnp.zeros_like(leaf) for leaf in tasks.shared],
        jnp.zeros((), tasks.loss.dtype),
    )
    end, _ = lax.scan(tick, start, columns)
    d_weights = lax.psum(end.weights, data_axes) if data_axes else end.weights
    d_shared, loss = lax.psum((end.shared, end.loss), (axis, *data_axes))
    return loss, (tree.unflatten(d_weights), tasks.shared_tree.unflatten(d_shared))


class _Given(NamedTuple):
    """What a task gets: `waiting` is the message that it reads, `carry` what another slice of the
    sequence passed on; `own` and `rest` as of `Tasks`."""

    shared: Tree
    data: Tree
    is_first: Array
    is_last: Array
    waiting: list[Array]
    carry: list[Array]
    own: list[Any]
    rest: list[Any]


def _forward(tasks: Tasks, kind: int, idle: State, given: _Given) -> State:
    begin = lambda: jax.tree.leaves(tasks.first(given.shared, given.data))  # noqa: E731
    x = lax.cond(given.is_first, begin, lambda: given.waiting)
    y, kept = tasks.cut[kind].forward(given.own, [*x, *given.carry], given.rest)
    y, carry = y[: len(tasks.leaves)], y[len(tasks.leaves) :]
    return idle._replace(message=y, carry=carry, kept=tasks.kept.put(idle.kept, kind, kept))


def _backward(tasks: Tasks, letter: str, kind: int, new: State, given: _Given) -> State:
    cut, shared, data = tasks.cut[kind], given.shared, given.data
    kept, split = tasks.kept.get(new.kept, kind), tasks.split.get(new.split, kind)
    if letter == "W":
        return _added(tasks, kind, new, cut.weight_gradient(given.own, given.rest, split))

    def end() -> tuple[Array, list[Array], list[Array]]:
        x = tasks.tree.unflatten(given.waiting)
        loss, pull = jax.vjp(lambda shared, x: tasks.last(shared, x, data), shared, x)
        d_shared, dy = pull(jnp.ones_like(loss))
        return new.loss + loss, _sums(new.shared, d_shared), jax.tree.leaves(dy)

    loss, total, dy = lax.cond(given.is_last, end, lambda: (new.loss, new.shared, given.waiting))
    new = new._replace(loss=loss, shared=total)
    dy = [*dy, *given.carry]
    if letter == "B":
        dx, dw = cut.backward(given.own, given.rest, kept, dy)
    else:
        dx, dw, split = cut.input_gradient(given.own, given.rest, kept, dy)
        new = new._replace(split=tasks.split.put(new.split, kind, split))
    new = _added(tasks, kind, new, dw)
    dx, carry = dx[: len(tasks.leaves)], dx[len(tasks.leaves) :]

    def start() -> list[Array]:
        _, pull = jax.vjp(lambda shared: tasks.first(shared, data), shared)
        return _sums(new.shared, *pull(tasks.tree.unflatten(dx)))

    total = lax.cond(given.is_first, start, lambda: new.shared)
    return new._replace(message=dx, carry=carry, shared=total)


def _carried(
    tasks: Tasks, letter: str, state: State, now: Mapping[str, Array], shared: Tree, data: Tree
) -> list[Array]:
    """What another slice passed on: to the first slice forward what `carried` gives, to the last
    slice backward zeros."""
    if letter == "W" or not tasks.carry:
        return []
    start = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in tasks.carry]
    if letter == "F" and tasks.carried is not None:
        start = jax.tree.leaves(tasks.carried(shared, data))
    there = now["carry_read"]
    found = lax.optimization_barrier(_slot(state.carry, jnp.maximum(there, 0)))
    return [jnp.where(there == NOWHERE, a, b) for a, b in zip(start, found, strict=True)]


def _added(tasks: Tasks, kind: int, state: State, gradients: Sequence[Any]) -> State:
    """The gradients of a row, and of the shared parameters that its stage reads, added up."""
    totals = [*state.weights, *(state.shared[at] for at in tasks.used[kind])]
    sums = [
        total if gradient is None else total + gradient
        for total, gradient in zip(totals, gradients, strict=True)
    ]
    shared = list(state.shared)
    for at, total in zip(tasks.used[kind], sums[len(state.weights) :], strict=True):
        shared[at] = total
    return state._replace(weights=sums[: len(state.weights)], shared=shared)


def _sums(totals: list[Array], gradients: Tree) -> list[Array]:
    return [a + b for a, b in zip(totals, jax.tree.leaves(gradients), strict=True)]


def _empty(shapes: Sequence[Any], slots: int) -> list[Array]:
    """Buffers of slots, full of NaN where the type has it: an empty slot that is read shows."""
    fill = lambda dtype: jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0  # noqa: E731
    return [jnp.full((max(slots, 1), *s.shape), fill(s.dtype), s.dtype) for s in shapes]


def _at(buffer: Array, index: Any) -> Array:
    return lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)


def _slot(buffers: Sequence[Array], index: Any) -> list[Array]:
    return [_at(buffer, index) for buffer in buffers]


def _written(buffers: Sequence[Array], values: Sequence[Array], index: Array) -> list[Array]:
    """The buffers with values in a slot, unless the index is NOWHERE."""
    slot = jnp.maximum(index, 0)
    there = _slot(buffers, slot)
    chosen = [jnp.where(index == NOWHERE, a, b) for a, b in zip(there, values, strict=True)]
    return _put(buffers, chosen, slot)


def _put(buffers: Sequence[Array], values: Sequence[Array], slot: Array) -> list[Array]:
    pairs = zip(buffers, values, strict=True)
    return [lax.dynamic_update_index_in_dim(buffer, value, slot, 0) for buffer, value in pairs]
