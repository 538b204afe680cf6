"""Search for a tensor-parallel layout by propagation through the traced loss, forward and backward.

Dimensions of one loop (the columns of a weight and the rows of the next; the heads of queries,
keys, values and output) are sharded together or not at all. Loop by loop, a cut is kept if the
modelled step gets faster:

    seconds = moving + FLOPs / rate + 7 parameter bytes held / memory bandwidth

The last term is Adam's update, which reads four arrays and writes three. Only the outermost
dimension in a reshape is cut. A fused [queries | keys | values] may be cut at the cost of
exchanging its parts, so that each device has its own heads of all three. If there are fewer
key-value heads than devices, the mesh axis is split into factors: one cuts these heads, the next
the queries of each group.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from toolkit._checks import check_choice, checked
from toolkit.parallel.dataflow.budget import cut_further, first_that_fits
from toolkit.parallel.dataflow.flow import WHOLE, Cut, Flow, Machine, cut_of, spec_of
from toolkit.parallel.dataflow.fused import with_splits
from toolkit.parallel.dataflow.loops import Loops
from toolkit.parallel.dataflow.programs import inlined
from toolkit.parallel.dataflow.propagation import follow
from toolkit.parallel.layout import Layout, Placement, placements_of

_UPDATE_PASSES = 7


@checked
def auto_layout(
    loss_fn: Callable, params: Any, batch: Any, mesh: Mesh, *,
    batch_axis: str = "data", axis: str = "model", machine: Machine | None = None,
    memory: int | None = None,
) -> Layout:  # fmt: skip
    """Choose which dimension of each parameter to shard, by following the program.

    Args:
        loss_fn: (params, batch) -> scalar loss, differentiable.
        params: pytree of arrays or ShapeDtypeStructs.
        batch: pytree of arrays or ShapeDtypeStructs [batch, ...], of the global batch.
        mesh: the devices.
        batch_axis: the mesh axis that shards the batch.
        axis: the mesh axis that may shard parameters.
        machine: latency, bandwidth and rates; None for an H100's.
        memory: bytes per device that the loss and its gradients may take, with arguments and
            results; None for any number. The optimiser's state comes on top.

    Returns:
        A `Layout`; each reason names the product that keeps, sums or looks up the cut dimension, or
        tells why there is none.

    Raises:
        ValueError: also when no layout fits `memory`; it says what would.

    Cost: two traces of the loss and two passes over its operations per loop; nothing is compiled
        without `memory`. With it the layout found is compiled; while it does not fit, also one with
        every parameter cut along the batch's axis, then one in which memory outweighs time, then
        both.

    Source: Yuan et al., "OneFlow", 2021 (signatures); Shoeybi et al., "Megatron-LM", 2019 (the
        layout it finds for a transformer).

    Example:
        >>> mesh = make_mesh({"data": 1, "model": 8})  # eight devices, real or simulated
        >>> params = {"up": jnp.zeros((512, 2048)), "down": jnp.zeros((2048, 512))}
        >>> loss = lambda p, x: jnp.mean((x + jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)
        >>> layout = auto_layout(loss, params, jnp.zeros((1024, 512)), mesh)
        >>> [tuple(row.spec) for row in layout.placements]
        [('model',), (None, 'model')]
    """
    for name, given in (("batch_axis", batch_axis), ("axis", axis)):
        check_choice(name, given, mesh.axis_names)
    if axis == batch_axis:
        raise ValueError(f"axis={axis!r}: want another axis than batch_axis")
    sizes = dict(mesh.shape)
    machine = machine or Machine()

    def candidates() -> Iterator[Layout]:
        for rates in (machine, dataclasses.replace(machine, memory_bandwidth=1.0)):
            found = find_cuts(loss_fn, params, batch, sizes, batch_axis, axis, rates)
            layout = Layout(mesh, found.rows, PartitionSpec(batch_axis))
            yield layout
            yield cut_further(layout, batch_axis, found.stacked)

    if memory is None:
        return next(candidates())
    return first_that_fits(loss_fn, params, batch, candidates(), memory)


class Found(NamedTuple):
    """Rows with the cuts found, and the (row, dimension) pairs over which loops run."""

    rows: tuple[Placement, ...]
    stacked: set[tuple[int, int]]


def find_cuts(
    loss_fn: Callable, params: Any, batch: Any, sizes: dict[str, int], batch_axis: str, axis: str,
    machine: Machine,
) -> Found:  # fmt: skip
    """The cuts of `auto_layout` on a mesh of these sizes."""
    rows = placements_of(params, lambda shape: (PartitionSpec(), ""))
    if fixed := [row for row in rows if not jnp.issubdtype(row.dtype, jnp.inexact)]:
        raise TypeError(f"params, at {fixed[0].path!r}: got {fixed[0].dtype}, want floating point")
    model = _Model(loss_fn, params, batch, rows, sizes, batch_axis, machine)
    index = list(sizes).index(axis)
    loops = Loops(model.forward, sizes[axis])
    groups = loops.groups(set(range(len(rows))))
    groups = [group for group in groups if any(pair in loops.uses for pair in group)]
    if loops.has_too_few:
        model.split(index)
    chosen, rejected = _search(model, groups, index)
    cuts = model.cuts(chosen, index)
    placed = tuple(
        Placement(
            row.path,
            row.shape,
            row.dtype,
            spec_of(cuts[position], len(row.shape), list(sizes)),
            _reason(position, cuts[position][index], loops, rejected, rows, sizes[axis], axis),
        )
        for position, row in enumerate(rows)
    )
    return Found(placed, loops.stacked)


class _Model:
    """Modelled seconds of a step as a function of its parameters' cuts."""

    def __init__(
        self, loss_fn: Callable, params: Any, batch: Any, rows: tuple[Placement, ...],
        sizes: dict[str, int], batch_axis: str, machine: Machine,
    ) -> None:  # fmt: skip
        self._rows, self._machine = rows, machine
        self._sizes, self._factors = dict(sizes), list(range(len(sizes)))
        pieces = sizes[batch_axis]
        self._axes = list(sizes)
        self.forward = with_splits(inlined(jax.make_jaxpr(loss_fn)(params, batch)))
        results = [atom.aval for atom in self.forward.jaxpr.outvars]
        is_float = [jnp.issubdtype(atom.dtype, jnp.floating) for atom in results]
        if is_float != [True] or results[0].shape:
            raise ValueError("loss_fn: want a function that returns one floating point scalar")

        def loss(params: Any, batch: Any) -> Array:
            return jaxpr_as_fun(self.forward)(*jax.tree.leaves((params, batch)))[0]

        self._program = jax.make_jaxpr(jax.value_and_grad(loss))(params, batch)
        shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(batch)]
        if wrong := [shape for shape in shapes if not shape or shape[0] % pieces]:
            raise ValueError(
                f"batch: an array of shape {wrong[0]}; want a first dimension divisible by "
                f"{batch_axis}={pieces}"
            )
        self._batch = [
            cut_of(PartitionSpec(batch_axis), len(shape), self._axes) for shape in shapes
        ]
        self._whole: Cut = (WHOLE,) * len(self._axes)
        # Without latency, what a recurrence waits for at every step would seem to cost little.
        places = set(range(len(rows), len(rows) + len(shapes)))
        self._recurrences = set() if machine.latency else Loops(self.forward, 1).recurrences(places)

    def split(self, axis: int) -> None:
        """Split an axis into the prime factors of its size."""
        sizes, self._sizes, self._factors = self._sizes, {}, []
        for place, (name, size) in enumerate(sizes.items()):
            factors = prime_factors(size) if place == axis else [size]
            self._sizes |= {f"{name}.{turn}": factor for turn, factor in enumerate(factors)}
            self._factors += [place] * len(factors)

    def cuts(self, groups: list[tuple[tuple[int, int], ...]], axis: int) -> list[Cut]:
        """Each parameter's cut when these groups are cut on an axis."""
        cuts = [self._whole] * len(self._rows)
        for group in groups:
            for position, dimension in group:
                if cuts[position][axis] == WHOLE:
                    cut = list(self._whole)
                    cut[axis] = dimension
                    cuts[position] = tuple(cut)
        return cuts

    def flow(self, cuts: list[Cut]) -> Flow:
        # The loss, then each gradient, sharded like its parameter.
        given, wanted = (
            [tuple(cut[place] for place in self._factors) for cut in places]
            for places in ([*cuts, *self._batch], [self._whole, *cuts])
        )
        if self._recurrences:
            forward = follow(self.forward, given, self._sizes, machine=self._machine)
            if forward.loops & self._recurrences:
                return Flow([], seconds_moving=math.inf)
        return follow(self._program, given, self._sizes, results=wanted, machine=self._machine)

    def seconds(self, cuts: list[Cut]) -> float:
        own_bytes = 0.0
        for row, cut in zip(self._rows, cuts, strict=True):
            pieces = math.prod(
                size
                for size, axis in zip(self._sizes.values(), self._factors, strict=True)
                if cut[axis] >= 0
            )
            own_bytes += float(np.prod(row.shape)) * row.dtype.itemsize / float(pieces)
        update = _UPDATE_PASSES * own_bytes / self._machine.memory_bandwidth
        return self.flow(cuts).seconds(self._machine) + update


def prime_factors(number: int) -> list[int]:
    """Smallest first; [1] of 1."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors or [1]


Groups = list[tuple[tuple[int, int], ...]]


def _search(model: _Model, groups: Groups, axis: int) -> tuple[Groups, dict[Any, float]]:
    """The groups to cut, and for the others the seconds that a cut would cost.

    A loop through the whole program, such as the width of the residual stream, excludes many small
    ones. Therefore small ones are also tried first, and the better order counts.
    """
    nothing = model.seconds(model.cuts([], axis))
    alone = {group: model.seconds(model.cuts([group], axis)) - nothing for group in groups}
    orders = (
        sorted(groups, key=lambda group: (len(group), alone[group])),
        sorted(groups, key=lambda group: alone[group]),
    )
    found = [_add_while_better(model, order, nothing, axis) for order in orders]
    best, chosen = min(found, key=lambda choice: choice[0])
    rejected: dict[Any, float] = {}
    for group in list(chosen):  # an earlier cut may no longer pay
        rest = [other for other in chosen if other != group]
        if (now := model.seconds(model.cuts(rest, axis))) <= best:
            best, chosen = now, rest
    for group in groups:
        if group in chosen:
            continue
        others = [other for other in chosen if not _conflict(group, other)]
        if (now := model.seconds(model.cuts([group, *others], axis))) < best:
            best, chosen = now, [group, *others]
        else:
            rejected |= dict.fromkeys(group, now - best)
    return chosen, rejected


def _conflict(first: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    """Whether two loops would cut two dimensions of one parameter."""
    return not {place for place, _ in first}.isdisjoint(place for place, _ in other)


def _add_while_better(
    model: _Model, order: Groups, seconds: float, axis: int
) -> tuple[float, Groups]:
    chosen: Groups = []
    for group in order:
        if any(_conflict(group, taken) for taken in chosen):
            continue
        now = model.seconds(model.cuts([*chosen, group], axis))
        if now < seconds:
            seconds, chosen = now, [*chosen, group]
    return seconds, chosen


def _reason(
    position: int, dimension: int, loops: Loops, rejected: dict[tuple[int, int], float],
    rows: tuple[Placement, ...], pieces: int, axis: str,
) -> str:  # fmt: skip
    if dimension != WHOLE:
        use = loops.uses.get((position, dimension))
        if use is None:
            return f"dimension {dimension} lies as what it is combined with"
        where = f" at {use.source}" if use.source else ""
        return {
            "row": f"row: the product{where} sums dimension {dimension}; one all-reduce follows",
            "column": f"column: the product{where} keeps dimension {dimension}; nothing moves",
            "table": f"table: each device looks up its rows{where}; one all-reduce joins them",
        }[use.role]
    costs = {place: cost for (where, place), cost in rejected.items() if where == position}
    if costs:
        place = min(costs, key=costs.__getitem__)
        if math.isinf(costs[place]):
            return (
                f"whole: with dimension {place} cut, every step of a recurrence would communicate"
            )
        return f"whole: cutting dimension {place} would cost {costs[place] * 1e6:.3g} µs more"
    if not any(size % pieces == 0 and size for size in rows[position].shape):
        return f"whole: no dimension is divisible by {axis}={pieces}"
    return "whole: its other dimension is cut with none"
