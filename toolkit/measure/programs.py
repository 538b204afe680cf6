"""Reads compiled programs: what they communicate, compute and hold.

Everything here comes from the optimised program (`jax.jit(f).lower(...).compile()`), so it is what
this backend runs, fused and combined, and not what the source suggests. It is exact and needs no
fast machine. It is also this backend's own choice: a TPU or GPU may pick other collectives.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_LAYOUT = re.compile(r"(?<=\])\{[^{}]*\}")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=\s]*)\]")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)")
_CALLEES = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Collective:
    """One communication of a compiled program, as one device sees it.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        bytes: size of the result on one device, in one run.
        operand_bytes: size of the operands on one device, in one run.
        group_size: devices that take part in one group.
        bytes_sent: bytes a device sends in one run by the bandwidth-optimal algorithm.
        count: runs per execution of the program (more than one inside a loop).
        is_count_exact: whether `count` is known. False when an enclosing loop's trip count is not
            (it then counts as one trip) or a branch encloses it (counted as taken).
        name: the operation of the source it comes from, as jax names it.
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
    def total_bytes_sent(self) -> float:
        """Bytes a device sends per execution of the program: `bytes_sent * count`."""
        return self.bytes_sent * self.count


@dataclass(frozen=True)
class ProgramCost:
    """What the compiler says a program costs on each device.

    Attributes:
        flops: floating point operations; a loop's body counts once, whatever its trip count.
        bytes_accessed: memory traffic between fused kernels; loops as for `flops`.
        argument_bytes: arrays passed in, this device's shards.
        output_bytes: arrays returned.
        temp_bytes: scratch memory while it runs.
        alias_bytes: outputs written over donated arguments (part of both counts above).
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
    """Lists every communication of a compiled program, with its bytes and how often it runs.

    For N devices in a group, a device that sends optimally sends, in one run,

        all-gather          (N-1)/N * result bytes
        reduce-scatter      (N-1)/N * operand bytes
        all-reduce        2 (N-1)/N * result bytes     (a reduce-scatter, then an all-gather)
        all-to-all          (N-1)/N * operand bytes
        collective-permute            operand bytes    (by a device that has a destination)

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns.

    Returns:
        One `Collective` an instruction and call site, in the order of the program text. Tensors
        that the compiler combined into one instruction are one entry with their bytes summed.

    Raises:
        ValueError: a replica group in a notation this reader does not know.

    Cost:
        Linear in the length of the program text.

    Source:
        Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in
        MPICH", 2005, section 4 (the bandwidth-optimal algorithms).
    """
    return list(_read_program(compiled.as_text() or ""))


def collective_table(found: list[Collective]) -> str:
    """Writes collectives as a table, one line a distinct one, and their total.

    Args:
        found: what `collectives` returned.

    Returns:
        Aligned text; "~" before a count that is not exact.

    Cost:
        Nothing worth counting.
    """
    merged: dict[tuple, int] = {}
    for item in found:
        key = (item.kind, item.group_size, item.bytes, item.bytes_sent, item.is_count_exact)
        merged[key] = merged.get(key, 0) + item.count
    rows = [("collective", "devices", "runs", "result bytes", "sent per run", "sent in all")]
    for (kind, group, size, sent, is_exact), count in merged.items():
        runs = f"{'' if is_exact else '~'}{count:,}"
        rows.append((kind, f"{group}", runs, f"{size:,}", f"{sent:,.0f}", f"{sent * count:,.0f}"))
    total = sum(item.total_bytes_sent for item in found)
    rows.append(("total", "", f"{sum(item.count for item in found):,}", "", "", f"{total:,.0f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def program_cost(compiled: jax.stages.Compiled) -> ProgramCost:
    """Reads the compiler's own counts of work and memory, per device.

    The compiler's `peak_memory_in_bytes` is left out on purpose: on a CPU it misses temporaries.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns.

    Returns:
        A `ProgramCost`.

    Raises:
        ValueError: this backend reports no memory analysis.

    Cost:
        None on the device.
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


@dataclass(frozen=True)
class _Instruction:
    """One line of the program: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str


def _read_program(text: str) -> Iterator[Collective]:
    computations, entry = _read_computations(text)
    partitions = [
        int(number) for number in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text)
    ]
    devices = max(partitions, default=1)

    def walk(computation: str, count: int, is_exact: bool) -> Iterator[Collective]:
        instructions = computations.get(computation, [])
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind in _KINDS:
                yield _collective(instruction, kind, shapes, devices, count, is_exact)
                continue
            trips, is_known = 1, instruction.opcode != "conditional"
            if instruction.opcode == "while":
                found = _TRIPS.search(instruction.attributes)
                trips, is_known = (int(found[1]), True) if found else (1, False)
            for callee in _callees(instruction):
                yield from walk(callee, count * trips, is_exact and is_known)

    return walk(entry, 1, True)


def _read_computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Computation name -> its instructions, and the name of the entry."""
    computations: dict[str, list[_Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            words = line.removeprefix("ENTRY ").split()
            current = words[0].lstrip("%").partition("(")[0]
            computations[current] = []
            entry = current if line.startswith("ENTRY ") else entry
        elif current and (match := _INSTRUCTION.match(line)):
            computations[current].append(_read_instruction(match[1], match[2]))
    return computations, entry


def _read_instruction(name: str, rest: str) -> _Instruction:
    rest = _LAYOUT.sub("", _COMMENT.sub("", rest))
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].strip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    return _Instruction(
        name, shape, rest[:opening], rest[opening + 1 : closing], rest[closing + 1 :]
    )


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _callees(instruction: _Instruction) -> Iterator[str]:
    for _, several, single in _CALLEES.findall(instruction.attributes):
        for name in (several or single).split(","):
            yield name.strip().lstrip("%")


def _collective(
    instruction: _Instruction,
    kind: str,
    shapes: dict[str, str],
    devices: int,
    count: int,
    is_exact: bool,
) -> Collective:
    result = instruction.shape
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        # The asynchronous forms return (operands, results, ...); all-reduce-start only results.
        result = _tuple_elements(result)[1]
    operand_names = re.findall(r"%([\w.\-]+)", instruction.operands)
    operands = " ".join(shapes[name] for name in operand_names) or instruction.operands
    result_bytes, operand_bytes = _shape_bytes(result), _shape_bytes(operands)
    name = _OP_NAME.search(instruction.attributes)
    if kind == "collective-permute":
        pairs = re.findall(r"(\d+),(\d+)", instruction.attributes.partition("target_pairs=")[2])
        group_size = len({device for pair in pairs for device in pair})
        is_sending = any(source != target for source, target in pairs)
        sent = float(operand_bytes * is_sending)
    else:
        group_size = _group_size(instruction.attributes, devices)
        volume = {"all-gather": result_bytes, "all-reduce": 2 * result_bytes}
        sent = volume.get(kind, operand_bytes) * (group_size - 1) / group_size
    return Collective(
        kind=kind,
        bytes=result_bytes,
        operand_bytes=operand_bytes,
        group_size=group_size,
        bytes_sent=sent,
        count=count,
        is_count_exact=is_exact,
        name=name[1] if name else instruction.name,
    )


def _tuple_elements(shape: str) -> list[str]:
    """Splits "(a, (b, c), d)" at its outermost commas."""
    elements, depth, start = [], 0, 1
    for index, character in enumerate(shape):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if (character == "," and depth == 1) or depth == 0:
            elements.append(shape[start:index].strip())
            start = index + 1
    return elements


def _shape_bytes(shape: str) -> int:
    """Bytes of an array shape or of all arrays in a tuple shape."""
    return sum(_element_bits(kind) * _product(sizes) // 8 for kind, sizes in _ARRAY.findall(shape))


def _product(sizes: str) -> int:
    product = 1
    for size in re.findall(r"\d+", sizes):
        product *= int(size)
    return product


def _element_bits(kind: str) -> int:
    if kind == "pred":
        return 8
    if kind in ("token", "opaque"):
        return 0
    width = re.match(r"[a-z]+(\d+)", kind)  # f32, bf16, s8, u4, c64, f8e4m3fn
    return int(width[1]) if width else 0


def _group_size(attributes: str, devices: int) -> int:
    """Devices per group from `{{0,1},{2,3}}`, `[groups,size]<=[...]`, or `{}` for all devices."""
    found = re.search(r"replica_groups=(\{\{([\d,]*)\}|\{\}|\[\d+,(\d+)\]<=)", attributes)
    if found is None and "replica_groups=" not in attributes:
        return devices
    if found is None:
        notation = attributes.partition("replica_groups=")[2][:60]
        raise ValueError(f"replica groups in an unknown notation: {notation!r}")
    if found[3]:
        return int(found[3])
    return len(found[2].split(",")) if found[2] else devices
