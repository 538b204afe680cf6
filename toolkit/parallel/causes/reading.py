"""Why a compiled program communicates: each collective with its cause, and memory by category.

The compiler records the source line of every instruction, and jax the names and shardings of
arguments and results. Tracing a collective's operand back and its result forward joins the two.
"""

import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from toolkit._checks import checked
from toolkit.measure import Collective, program_cost
from toolkit.measure.program_text import first_group
from toolkit.measure.programs import Site, collective_sites, read_program
from toolkit.parallel.causes.cause import ExplainedCollective, MemoryRow
from toolkit.parallel.causes.explanation import Explanation
from toolkit.parallel.causes.program_trace import End, Place, ProgramTrace, compiled_with_own_lines


@checked
def explain(program: Lowered | jax.stages.Compiled) -> Explanation:
    """Trace every collective of a compiled program to its cause, and sum memory by category.

    Args:
        program: the result of `jax.jit(f).lower(...)`, which is compiled here, or of its
            `compile()`. Axis names come from arguments on a mesh. A program compiled elsewhere may
            come from jax's persistent cache, with source lines of another checkout; a lowered
            program avoids that.

    Returns:
        An `Explanation`, whose counts are those of this backend's compiler.

    Cost: linear in the length of the program text per collective, and a compilation of a lowered
        program; nothing runs.

    Source: OpenXLA, "HLO IR text" (metadata and stack frames).

    Example:
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = make_mesh({"data": 8})  # eight devices, real or simulated
        >>> x = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, PartitionSpec("data")))
        >>> found = explain(jax.jit(lambda x: x.sum(0)).lower(x)).collectives[0]
        >>> found.collective.kind, found.axes, found.before, found.after
        ('all-reduce', ('data',), 'partial sums', 'whole')
    """
    compiled = compiled_with_own_lines(program) if isinstance(program, Lowered) else program
    text = compiled.as_text() or ""
    computations, entry, devices = read_program(text)
    trace = ProgramTrace(text, computations, entry)
    mesh = _mesh_of(compiled)
    names = _Names(compiled, trace)
    found = tuple(
        _explained(collective, site, trace, names, mesh, devices)
        for collective, site in collective_sites(computations, entry, devices)
    )
    return Explanation(mesh, found, _memory(compiled, found, names))


class _Names:
    """Names and specs of a program's arguments and results by position."""

    def __init__(self, compiled: jax.stages.Compiled, trace: ProgramTrace) -> None:
        self._arguments = trace.parameters()
        inputs = jax.tree.leaves(compiled.input_shardings)
        # jax drops unused arguments; positions then do not match the shardings.
        self._inputs = inputs if len(inputs) == len(self._arguments) else []
        outputs = jax.tree_util.tree_leaves_with_path(compiled.output_shardings)
        self._outputs = [(jax.tree_util.keystr(path), sharding) for path, sharding in outputs]

    def arguments(self, trees: tuple) -> list[str]:
        """The name of each positional argument."""
        found, first = [], 0
        for position, tree in enumerate(trees):
            name = self._arguments.get(first, "") if self._inputs else ""
            word = re.match(r"\w+", name)
            found.append(f"argument {word[0] if word else position}")
            first += len(jax.tree.leaves(tree))
        return found

    def say(self, end: End) -> str:
        if end.argument is not None:
            sharding = self._inputs[end.argument] if self._inputs else None
            return f"argument {self._arguments[end.argument]}{_spec_of(sharding)}"
        if end.output is not None and end.output < len(self._outputs):
            name, sharding = self._outputs[end.output]
            return f"result {name or 'of the program'}{_spec_of(sharding)}"
        if not end.operation:
            return "the compiler's own operation"
        return f"{end.operation} at {end.place}" if end.place.file else end.operation


def _explained(
    collective: Collective, site: Site, trace: ProgramTrace, names: _Names, mesh: Mesh | None,
    devices: int,
) -> ExplainedCollective:  # fmt: skip
    instruction = site[-1][1]
    before, after = _change(collective.kind, instruction.attributes)
    place: Place = trace.place(instruction)
    origin, wanted = trace.origin(site), trace.wanted_by(site)
    if not place.file:
        place = wanted.place if wanted.place.file else origin.place
    return ExplainedCollective(
        collective=collective,
        axes=_axes(mesh, collective, instruction.attributes, devices),
        before=before,
        after=after,
        source=str(place),
        function=place.function,
        origin=names.say(origin),
        wanted_by=names.say(wanted),
    )


def _change(kind: str, attributes: str) -> tuple[str, str]:
    """An array's sharding along the axes of a collective, before and after."""
    _, _, rest = attributes.partition("dimensions={")
    dimension = f"dimension {rest.partition('}')[0]}" if rest else "a dimension"
    return {
        "all-gather": (f"cut along {dimension}", "whole"),
        "reduce-scatter": ("partial sums", f"cut along {dimension}"),
        "all-reduce": ("partial sums", "whole"),
        "all-to-all": ("cut along one dimension", "cut along another"),
        "collective-permute": ("a piece here", "the same piece elsewhere"),
    }[kind]


def _axes(
    mesh: Mesh | None, collective: Collective, attributes: str, devices: int
) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ."""
    if mesh is None or mesh.size != devices:
        return ()
    if collective.kind == "collective-permute":
        pairs = attributes.partition("source_target_pairs={")[2].partition("}}")[0]
        numbers = [int(number) for number in pairs.replace("{", "").replace("}", "").split(",")]
        sources, targets = (np.unravel_index(numbers[i::2], mesh.devices.shape) for i in (0, 1))
        moved = [np.any(a != b) for a, b in zip(sources, targets, strict=True)]
    else:
        members = np.unravel_index(first_group(attributes, devices), mesh.devices.shape)
        moved = [len(set(places.tolist())) > 1 for places in members]
    return tuple(name for name, is_moved in zip(mesh.axis_names, moved, strict=True) if is_moved)


def _mesh_of(compiled: jax.stages.Compiled) -> Mesh | None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return max(meshes, key=lambda mesh: mesh.size, default=None)  # type: ignore[return-value]


def _spec_of(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return ""
    return " " + str(sharding.spec).replace("PartitionSpec", "P")


def _memory(
    compiled: jax.stages.Compiled, found: tuple[ExplainedCollective, ...], names: _Names
) -> tuple[MemoryRow, ...]:
    cost = program_cost(compiled)
    arguments, _ = compiled.in_avals
    shardings, _ = compiled.input_shardings
    rows = [
        MemoryRow(name, _bytes_held(tree, places), None)
        for name, tree, places in zip(names.arguments(arguments), arguments, shardings, strict=True)
    ]
    results = _bytes_held(compiled.out_info, compiled.output_shardings)
    gathered = max((item.collective.bytes for item in found), default=0)
    return (
        *rows,
        MemoryRow("all arguments", sum(row.predicted or 0 for row in rows), cost.argument_bytes),
        MemoryRow("results", results, cost.output_bytes),
        MemoryRow("results over arguments (donated)", None, -cost.alias_bytes),
        MemoryRow("temporaries", None, cost.temp_bytes),
        MemoryRow("largest result of a collective", None, gathered),
        MemoryRow("resident while it runs", None, cost.resident_bytes),
    )


def _bytes_held(tree: Any, shardings: Any) -> int:
    """Bytes of a device's shards of a tree, from shapes and shardings."""
    leaves, places = jax.tree.leaves(tree), jax.tree.leaves(shardings)
    return sum(
        math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, place in zip(leaves, places, strict=True)
    )
