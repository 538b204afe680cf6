"""Communication, work and memory of compiled programs.

Everything comes from the optimised program (`jax.jit(f).lower(...).compile()`), so it is exact for
this backend, after fusion and combining. Another backend may choose other collectives.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from toolkit._checks import checked
from toolkit.measure.loop_trips import loop_trips
from toolkit.measure.program_text import (
    Instruction,
    first_group,
    read_computations,
    shape_bytes,
    tuple_elements,
)
from toolkit.measure.tables import text_table

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast", "send", "recv",
)  # fmt: skip
_PAIRS = re.compile(r"target_pairs=\"?\{((?:\{[\d, ]*\},? ?)*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


@dataclass(frozen=True)
class Collective:
    """One communication of a compiled program, from one device's view.

    Attributes:
        kind: the compiler's name, one of `KINDS`.
        bytes: size of the result on one device, in one run.
        operand_bytes: size of the operands on one device, in one run.
        group_size: devices that take part in one group.
        bytes_sent: bytes a device sends in one run by the bandwidth-optimal algorithm.
        count: runs per execution of the program.
        is_count_exact: whether `count` is known. False if the trip count of an enclosing loop is
            unknown (and counts as one), or in a conditional, whose branch that sends most counts as
            taken while the others have a count of 0.
        name: jax's name of the source operation.

    Example:
        >>> found = Collective("all-reduce", 64, 64, 8, 112.0, 3, True, "psum")
        >>> found.total_bytes_sent
        336.0
    """

    kind: str
    bytes: int
    operand_bytes: int
    group_size: int
    bytes_sent: float
    count: int
    is_count_exact: bool
    name: str

    @property
    def is_size_exact(self) -> bool:
        """Whether the bytes are known. A ragged all-to-all depends on the data, and counts as if
        its input were full and evenly divided."""
        return self.kind != "ragged-all-to-all"

    @property
    def total_bytes_sent(self) -> float:
        """Bytes a device sends per execution of the program: `bytes_sent * count`."""
        return self.bytes_sent * self.count


@dataclass(frozen=True)
class ProgramCost:
    """The compiler's estimate of a program's cost per device.

    Attributes:
        flops: floating point operations; a loop's body counts only once.
        bytes_accessed: memory traffic between fused kernels; loops as for `flops`.
        argument_bytes: arrays passed in, this device's shards.
        output_bytes: arrays returned.
        temp_bytes: scratch memory while it runs.
        alias_bytes: outputs written over donated arguments (part of both counts above).

    Example:
        >>> x = jnp.ones((8, 8))
        >>> cost = program_cost(jax.jit(jnp.dot).lower(x, x).compile())
        >>> cost.argument_bytes, cost.output_bytes
        (512, 256)
    """

    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def resident_bytes(self) -> int:
        """Memory a device holds while the program runs: arguments, outputs and temporaries."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """List every communication of a compiled program, with bytes and counts.

    With N devices in a group and optimal algorithms, a device sends per run

        all-gather          (N-1)/N * result bytes
        reduce-scatter      (N-1)/N * operand bytes
        all-reduce        2 (N-1)/N * result bytes     (a reduce-scatter, then an all-gather)
        all-to-all          (N-1)/N * operand bytes    (ragged: of the input, as if it were full)
        collective-permute            operand bytes    (by a device that has a destination)
        send, recv                    operand bytes, 0 (likewise; those of the host do not count)
        collective-broadcast          result bytes     (each passes it on, piece by piece)

    Of a conditional's branches, the one that sends most counts as taken.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`.

    Returns:
        One `Collective` per instruction and call site, in program order. Tensors combined into one
        instruction are one entry with their total bytes.

    Raises:
        ValueError: a replica group in a notation this reader does not know.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
        MPICH", 2005, section 4 (the bandwidth-optimal algorithms).

    Example:
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((8,), ("data",))  # eight devices, real or simulated
        >>> x = jax.device_put(jnp.ones(64), NamedSharding(mesh, PartitionSpec("data")))
        >>> [c.kind for c in collectives(jax.jit(jnp.sum).lower(x).compile())]
        ['all-reduce']
    """
    computations, entry, devices = read_program(compiled.as_text() or "")
    sites = collective_sites(computations, entry, devices)
    return [found for found, _ in sites]


@checked
def collective_table(found: list[Collective]) -> str:
    """Tabulate collectives, one line per distinct one, with their total.

    Args:
        found: the result of `collectives`.

    Returns:
        Aligned text; "~" before a count or size that is not exact.

    Example:
        >>> found = [Collective("all-reduce", 64, 64, 8, 112.0, 3, True, "psum")]
        >>> print(collective_table(found))
        collective  devices  runs  result bytes  sent per run  sent in all
        all-reduce        8     3            64           112          336
        total                   3                                      336
    """
    merged: dict[tuple, int] = {}
    for item in found:
        exact = item.is_size_exact, item.is_count_exact
        key = (item.kind, item.group_size, item.bytes, item.bytes_sent, *exact)
        merged[key] = merged.get(key, 0) + item.count
    rows = [("collective", "devices", "runs", "result bytes", "sent per run", "sent in all")]
    for (kind, group, size, sent, is_size_exact, is_exact), count in merged.items():
        runs = f"{'' if is_exact else '~'}{count:,}"
        about = "" if is_size_exact else "~"
        sums = (f"{about}{sent:,.0f}", f"{about}{sent * count:,.0f}")
        rows.append((kind, f"{group}", runs, f"{size:,}", *sums))
    total = sum(item.total_bytes_sent for item in found)
    rows.append(("total", "", f"{sum(item.count for item in found):,}", "", "", f"{total:,.0f}"))
    return text_table(rows, "<>>>>>")


def program_cost(compiled: jax.stages.Compiled) -> ProgramCost:
    """Read the compiler's counts of work and memory, per device.

    The compiler's `peak_memory_in_bytes` is omitted, because on a CPU it misses temporaries.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`.

    Raises:
        ValueError: this backend reports no memory analysis.

    Example:
        >>> x = jnp.ones((8, 8))
        >>> program_cost(jax.jit(jnp.dot).lower(x, x).compile()).flops >= 2 * 8**3
        True
    """
    work: dict[str, Any] = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()
    if memory is None:
        raise ValueError("the backend of this compiled program reports no memory analysis")
    return ProgramCost(
        flops=float(work.get("flops", 0.0)),
        bytes_accessed=float(work.get("bytes accessed", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
    )


Site = tuple[tuple[str, Instruction], ...]
"""The location of an instruction: (computation, instruction) pairs from the entry inwards."""


def read_program(text: str) -> tuple[dict[str, list[Instruction]], str, int]:
    """The computations of a program, the name of its entry, and its number of devices."""
    computations, entry = read_computations(text)
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text)
    return computations, entry, max(map(int, sizes), default=1)


def collective_sites(
    computations: dict[str, list[Instruction]], entry: str, devices: int
) -> Iterator[tuple[Collective, Site]]:
    """Every communication with its site: the calls and loops around it, itself last."""

    def walk(
        computation: str, count: int, is_exact: bool, around: Site
    ) -> Iterator[tuple[Collective, Site]]:
        instructions = computations.get(computation, [])
        started: set[tuple[str, str]] = set()
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        for instruction in instructions:
            site = (*around, (computation, instruction))
            kind = collective_kind(instruction, computation)
            if kind in KINDS:
                yield read_collective(instruction, kind, shapes, devices, count, is_exact), site
                continue
            is_loop = instruction.opcode == "while"
            trips = loop_trips(instruction, computation, computations) if is_loop else 1
            runs = count * (1 if trips is None else trips)
            is_known = is_exact and trips is not None and instruction.opcode != "conditional"
            inside = [list(walk(callee, runs, is_known, site)) for callee in instruction.callees]
            if instruction.opcode == "conditional":
                inside = _with_one_taken(inside)
            for sites in inside:
                for found, inner in sites:
                    # On a TPU three fusions with one channel form an asynchronous collective: its
                    # start, the work that hides it, its end.
                    channel = _CHANNEL.search(inner[-1][1].attributes)
                    key = (found.kind, channel[1] if channel else "")
                    if instruction.opcode == "fusion" and channel:
                        if key in started:
                            continue
                        started.add(key)
                    yield found, inner

    yield from walk(entry, 1, True, ())


def _with_one_taken(branches: list[list[tuple[Collective, Site]]]):
    """Collectives of a conditional, with the branch that sends most taken."""
    sent = [sum(found.total_bytes_sent for found, _ in sites) for sites in branches]
    taken = sent.index(max(sent, default=0.0)) if sent else 0
    return [
        sites if at == taken else [(replace(found, count=0), site) for found, site in sites]
        for at, sites in enumerate(branches)
    ]


def collective_kind(instruction: Instruction, computation: str) -> str:
    """The kind of collective of an opcode in a computation, if it is one.

    Transfers to or from the host are not collectives.

    TPUs run a fusion "all-reduce-scatter", an all-reduce of which each device cuts out its share,
    as one ring of a reduce-scatter: half of what the all-reduce inside would send.
    """
    if "is_host_transfer=true" in instruction.attributes:
        return ""
    kind = instruction.opcode.removesuffix("-start")
    is_scattered = kind == "all-reduce" and computation.startswith("all-reduce-scatter")
    return "reduce-scatter" if is_scattered else kind


def read_collective(
    instruction: Instruction, kind: str, shapes: dict[str, str], devices: int, count: int,
    is_exact: bool,
) -> Collective:  # fmt: skip
    """Read a collective's line; `shapes` are those of the operands, by name."""
    result, names = instruction.shape, instruction.operand_names
    if instruction.opcode.endswith("-start") and result.startswith("("):
        # Asynchronous forms return (operands, results, ...), and some all-reduces only results.
        kinds = tuple_elements(result)
        result = kinds[1] if kind != "all-reduce" or kinds[0].startswith("(") else result
    elif kind in ("send", "recv"):
        result = tuple_elements(result)[0]  # beside a context and a token
    if kind == "ragged-all-to-all":
        names = names[:1]  # the others are where the output goes, and sizes
    result_bytes = shape_bytes(result)
    operand_bytes = shape_bytes(" ".join(shapes[name] for name in names))
    name = _OP_NAME.search(instruction.attributes)
    if kind in ("collective-permute", "send", "recv"):
        listed = _PAIRS.search(instruction.attributes)
        pairs = re.findall(r"(\d+), *(\d+)", listed[1] if listed else "")
        group = len({device for pair in pairs for device in pair}) if listed else 2
        is_sending = any(source != target for source, target in pairs) or listed is None
        sent = float(operand_bytes * is_sending)
    else:
        group = len(first_group(instruction.attributes, devices))
        volume = {"all-gather": result_bytes, "all-reduce": 2 * result_bytes}
        sent = volume.get(kind, operand_bytes) * (group - 1) / group
        if kind == "collective-broadcast":
            sent = float(result_bytes * (group > 1))
        if kind == "reduce-scatter" and instruction.opcode.startswith("all-reduce"):
            result_bytes //= group  # what is cut out of it
    return Collective(
        kind=kind,
        bytes=result_bytes,
        operand_bytes=operand_bytes,
        group_size=group,
        bytes_sent=sent,
        count=count,
        is_count_exact=is_exact,
        name=name[1] if name else instruction.name,
    )
