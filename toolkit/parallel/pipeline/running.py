"""Any checked schedule as one SPMD program: a scan over ticks inside `jax.shard_map`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from toolkit._checks import checked
from toolkit.parallel.axes import check_auto_axes
from toolkit.parallel.pipeline.program import Program, program_of
from toolkit.parallel.pipeline.rows import Rows
from toolkit.parallel.pipeline.tasks import Kind, Tasks
from toolkit.parallel.pipeline.ticks import run_ticks
from toolkit.schedules import Schedule

Tree = Any


class Pipeline:
    """Loss and gradients of a chain of stages, in the order of a schedule.

        x_0 = first(shared, data)    x_{s+1} = stage(weights_s, x_s, context)
        loss = sum over microbatches of last(shared, x_S, data)

    Equal, to rounding, to `jax.value_and_grad` of that sum on one device. A microbatch's backward
    pass keeps what jax would keep (or the input alone, in stages that recompute) from its forward
    to its backward task; if the schedule splits it, the weights' gradients wait with what they
    need. Every device runs one task per tick and then sends what it made: the program is a scan
    over ticks, and does not grow with the microbatches.

    Call it as (weights, shared, batch) -> (loss, (gradients of weights, of shared)), within or
    without `jax.jit`; weights as `place` returns them, the batch a pytree of arrays [microbatches,
    sequences, ...], cut along `data` axes in its second dimension, and then the loss a sum over
    their devices too. Mesh axes that are neither `axis` nor `data` are left to the compiler.

    Args:
        stage: (weights, x, context) -> x, or one such function per stage; x is an array or a pytree
            of floating arrays, of the same shape after every stage.
        first: (shared, data) -> x: such as the embedding. It runs on the device of stage 0.
        last: (shared, x, data) -> a scalar: such as the head and a sum of token losses. It runs,
            forward and backward, when the last stage's backward does.
        weights: parameters of every row, of stages of one function all alike.
        schedule: a schedule without faults, of as many devices as `axis` has.
        mesh: the devices.
        axis: mesh axis of the pipeline.
        data: mesh axes that cut the batch.
        carried: (shared, data) -> what the first slice of a sequence finds of earlier ones, such as
            empty keys and values, for a schedule with slices (TeraPipe). Stages are then (weights,
            (x, carried), context) -> (x, carried), of the same shapes, and pass it on to the next
            slice. No gradient goes to `shared` through it. None: stages pass nothing on.
        tied: for each stage its row of weights; stages that share a row lie on one device. None: a
            row each.
        recompute: stages that keep their input alone and run their forward pass again; True: all.

    Cost: ticks x channels permutes of an activation (`Program.permutes`); per device the places
        that `Program` counts (`bytes_waiting`), what a tick hands on (`bytes_of_a_tick`), and
        gradients. A slice in flight also keeps what was passed on to it.

    Source: Narayanan et al., "PipeDream", 2019 (arXiv:1806.03377); Qi et al., "Zero Bubble Pipeline
        Parallelism", 2023 (arXiv:2401.10241) for split backward passes; Li et al., "TeraPipe",
        2021 (arXiv:2102.07988) for slices.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> how = {"schedule": gpipe(1, 4), "mesh": jax.sharding.Mesh(jax.devices()[:1], "stage")}
        >>> ends = {"first": lambda _, data: data, "last": lambda _, x, data: jnp.sum(x**2)}
        >>> run = Pipeline(lambda w, x, _: jnp.tanh(x @ w), weights=[jnp.eye(3)], **ends, **how)
        >>> loss, (gradients, _) = run(run.place([jnp.eye(3)]), (), jnp.ones((4, 2, 3)))
    """

    @checked
    def __init__(
        self, stage: Callable[..., Any] | Sequence[Callable[..., Any]], *,
        first: Callable[..., Any], last: Callable[..., Any], weights: Sequence[Tree],
        schedule: Schedule, mesh: Mesh, axis: str = "stage", data: Sequence[str] = (),
        carried: Callable[..., Any] | None = None, tied: Sequence[int] | None = None,
        recompute: bool | Sequence[int] = False,
    ):  # fmt: skip
        self.first, self.last, self.carried = first, last, carried
        if (schedule.slices > 1) != (carried is not None):
            raise ValueError(
                f"carried: got {'none' if carried is None else 'a function'} for {schedule.name!r} "
                f"with sequences in {schedule.slices} slices; wanted a function for 2 slices or "
                "more, which pass keys and states on to one another"
            )
        self.mesh, self.axis, self.data = mesh, axis, tuple(data)
        _check_mesh(mesh, axis, self.data, schedule)
        count = schedule.stages
        functions = list(stage) if isinstance(stage, Sequence) else [stage] * count
        if len(functions) != count:
            raise ValueError(f"stage: got {len(functions)} functions for {count} stages")
        again = range(count) if recompute is True else tuple(recompute or ())
        if wrong := [s for s in again if not 0 <= s < count]:
            raise ValueError(f"recompute: got stage {wrong[0]}, the schedule has {count}")
        tied = tuple(range(count)) if tied is None else tuple(tied)
        if len(weights) != len(set(tied)):
            raise ValueError(f"weights: got {len(weights)} rows, wanted {len(set(tied))}")
        self.rows = Rows(weights)
        stages = [Kind(functions[s], s in again, self.rows.kinds[tied[s]]) for s in range(count)]
        self.kinds = tuple(dict.fromkeys(stages))
        self.program: Program = program_of(
            schedule, tied=tied, kinds=[self.kinds.index(kind) for kind in stages]
        )
        self._order = [row for rows in self.program.rows for row in rows]

    def place(self, weights: Sequence[Tree], specs: Tree = None) -> Tree:
        """Rows of weights as the pipeline takes them: arrays [rows, ...], each on its device.

        Args:
            weights: the rows, in the order of their numbers.
            specs: for each array the mesh axes of its own dimensions, to cut it further.
        """
        placed = self.rows.stack([weights[row] for row in self._order])
        specs = jax.tree.map(lambda _: (), placed) if specs is None else specs

        def put(leaf: Array, spec: Sequence[Any]) -> Array:
            along = PartitionSpec(self.axis, *spec)
            return jax.device_put(leaf, NamedSharding(self.mesh, along))

        return jax.tree.map(put, placed, specs)

    def unplace(self, placed: Tree) -> list[Tree]:
        """The rows again, in the order of their numbers: for a checkpoint, under any schedule."""
        rows = self.rows.unstack(placed, self._order)
        return [rows[self._order.index(row)] for row in range(len(rows))]

    def __call__(self, weights: Tree, shared: Tree, batch: Tree) -> tuple[Array, tuple[Tree, Tree]]:
        """The loss, and its gradients with respect to weights and shared parameters."""
        self._check(weights, shared, batch)
        along = PartitionSpec(None, self.data) if self.data else PartitionSpec()
        rows = PartitionSpec(self.axis)

        def on_device(weights, shared, batch, columns):
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
            tasks = self.tasks(weights, shared, shapes)
            mine = {name: table[:, 0] for name, table in columns.items()}
            axes = (self.axis, self.data)
            return run_ticks(self.program, tasks, axes, (weights, shared, batch), mine)

        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(rows, PartitionSpec(), along, PartitionSpec(None, self.axis)),
            out_specs=(PartitionSpec(), (rows, PartitionSpec())),
            axis_names={self.axis, *self.data},
            check_vma=False,
        )(weights, shared, batch, self.program.columns)

    def tasks(self, weights: Tree, shared: Tree, data: Tree) -> Tasks:
        """The tasks of each kind of stage, for the shapes that one device has of one microbatch."""
        given = self.first, self.last, weights, shared, data
        return Tasks(self.kinds, self.program.stores, self.rows, *given, self.carried)

    def bytes_waiting(self, weights: Tree, shared: Tree, batch: Tree) -> int:
        """Bytes of activations for which every device has places, whatever the microbatches."""
        tasks, program = self._tasks_of(weights, shared, batch), self.program
        places = [(program.message_slots, tasks.leaves), (program.carry_slots, tasks.carry)]
        places += zip(program.kept_slots, tasks.kept.leaves, strict=True)
        places += zip(program.split_slots, tasks.split.leaves, strict=True)
        return sum(slots * _bytes(arrays) for slots, arrays in places)

    def bytes_of_a_tick(self, weights: Tree, shared: Tree, batch: Tree) -> int:
        """Bytes of activations that one tick needs beside `bytes_waiting`, as it hands them on.

            a slot of every store + activation (2 + channels) + 2 carried

        The slots are read and written back; of activations there are one that was sent, one that
        arrives through each channel, and the one in whose place it is written. What a task computes
        within a stage and does not keep is not counted: on CPUs, the scores of plain attention.
        """
        tasks, program = self._tasks_of(weights, shared, batch), self.program
        slots = [*zip(program.kept_slots, tasks.kept.leaves, strict=True)]
        slots += zip(program.split_slots, tasks.split.leaves, strict=True)
        moved = (2 + len(program.channels)) * _bytes(tasks.leaves) + 2 * _bytes(tasks.carry)
        return moved + sum(_bytes(arrays) for count, arrays in slots if count)

    def _tasks_of(self, weights: Tree, shared: Tree, batch: Tree) -> Tasks:
        return self.tasks(weights, shared, jax.tree.map(self._of_one_device, batch))

    def _of_one_device(self, leaf: Array) -> jax.ShapeDtypeStruct:
        _, *shape = leaf.shape
        for axis in self.data:
            shape[0] //= self.mesh.shape[axis]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    def _check(self, weights: Tree, shared: Tree, batch: Tree) -> None:
        wanted, leaves = self.program.schedule.microbatches, jax.tree.leaves(batch)
        for leaf in leaves:
            if jnp.ndim(leaf) < 1 or leaf.shape[0] != wanted:
                raise ValueError(
                    f"batch: got {leaf.dtype}{list(jnp.shape(leaf))}, wanted {wanted} microbatches "
                    "in the first dimension"
                )
        devices = math.prod(self.mesh.shape[axis] for axis in self.data)
        for leaf in leaves:
            if self.data and (leaf.ndim < 2 or leaf.shape[1] % devices):
                raise ValueError(
                    f"batch: got {leaf.dtype}{list(leaf.shape)}, wanted a multiple of {devices} "
                    f"devices along {', '.join(self.data)} in the second dimension"
                )
        for name, tree in (("weights", weights), ("shared", shared)):
            for leaf in jax.tree.leaves(tree):
                if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                    raise ValueError(f"{name}: got {jnp.result_type(leaf)}, wanted floating arrays")


def _bytes(arrays: Sequence[Any]) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def _check_mesh(mesh: Mesh, axis: str, data: tuple[str, ...], schedule: Schedule) -> None:
    for name in (axis, *data):
        if name not in mesh.axis_names:
            raise ValueError(f"the mesh has axes {mesh.axis_names}; {name!r} is none of them")
    if axis in data:
        raise ValueError(f"data: got axis {axis!r}, along which the stages lie")
    check_auto_axes(mesh)
    if mesh.shape[axis] != schedule.devices:
        raise ValueError(
            f"schedule: {schedule.name!r} has {schedule.devices} devices, and axis {axis!r} of the "
            f"mesh {mesh.shape[axis]}"
        )
