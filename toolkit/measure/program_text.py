"""A parser of the compiler's program text: computations, shapes, replica groups.

The text is a list of computations, each a list of lines

    %name = shape opcode(operands), attributes

Attributes of a loop or a branch name its computations. Layouts (`{1,0:T(8,128)}`) and comments are
dropped.

Source: OpenXLA, "HLO IR text" and the sources of its printer for the replica-group notations.
"""

import itertools
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

_LAYOUT = re.compile(r"(?<=\])\{[^{}]*\}")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=\s]*)\]")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)")
_CALLEES = re.compile(
    r"\b(?:body|condition|calls|to_apply|branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_LISTED_GROUPS = re.compile(r"replica_groups=\{(?:\{([\d,]*)\}|\})")
_IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True)
class Instruction:
    """One line of a program, without layouts."""

    name: str  # name of its result
    shape: str  # of the result, such as "f32[8,32]" or a tuple of such
    opcode: str  # such as "all-reduce" or "while"
    operands: str  # the text between the parentheses
    attributes: str  # all that follows

    @property
    def operand_names(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.operands)

    @property
    def callees(self) -> list[str]:
        """The computations that a loop, branch, call or fusion runs."""
        return [
            name.strip().lstrip("%")
            for several, single in _CALLEES.findall(self.attributes)
            for name in (several or single).split(",")
        ]

    @property
    def trip_count(self) -> int | None:
        """The trip count of a loop, if the compiler wrote it down."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None


def read_computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Computation name -> its instructions, and the name of the entry."""
    computations: dict[str, list[Instruction]] = {}
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


def _read_instruction(name: str, rest: str) -> Instruction:
    rest = _LAYOUT.sub("", _COMMENT.sub("", rest))
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].strip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    return Instruction(
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


def tuple_elements(shape: str) -> list[str]:
    """Splits "(a, (b, c), d)" at its outermost commas."""
    elements, depth, start = [], 0, 1
    for index, character in enumerate(shape):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if (character == "," and depth == 1) or depth == 0:
            elements.append(shape[start:index].strip())
            start = index + 1
    return elements


def shape_bytes(shape: str) -> int:
    """Bytes of an array shape or of all arrays in a tuple shape."""
    return sum(
        _element_bits(kind) * math.prod(map(int, re.findall(r"\d+", sizes))) // 8
        for kind, sizes in _ARRAY.findall(shape)
    )


def _element_bits(kind: str) -> int:
    if kind == "pred":
        return 8
    if kind in ("token", "opaque"):
        return 0
    width = re.match(r"[a-z]+(\d+)", kind)  # f32, bf16, s8, u4, c64, f8e4m3fn
    return int(width[1]) if width else 0


def first_group(attributes: str, devices: int) -> list[int]:
    """The first group of devices, in any notation of `replica_groups`.

    {{0,1},{2,3}} lists them; {} means all; [4,2]<=[2,4]T(1,0) is four groups of two, read from the
    transposed grid; mesh['a'=4,'b'=2] {'a':(2)2,'b'} names mesh axes, or a factor of one (here
    after the first 2 of the 4, 2).
    """
    if "replica_groups=" not in attributes:
        return list(range(devices))
    if found := _IOTA_GROUPS.search(attributes):
        size, grid, order = int(found[1]), integers(found[2]), integers(found[3] or "")
        steps = _steps(grid)
        grid, steps = zip(*((grid[i], steps[i]) for i in order or range(len(grid))), strict=True)
        return _places(grid, steps)[:size]
    if found := _LISTED_GROUPS.search(attributes):
        return integers(found[1] or "") or list(range(devices))
    if found := _MESH_GROUPS.search(attributes):
        axes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        steps = dict(zip(axes, _steps(list(axes.values())), strict=True))
        grid, cut = [], []
        for axis, before, factor in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", found[2]):
            size = int(factor or axes[axis])
            grid.append(size)
            cut.append(steps[axis] * axes[axis] // (int(before or 1) * size))
        return _places(grid, cut)
    notation = attributes.partition("replica_groups=")[2][:60]
    raise ValueError(f"replica groups in an unknown notation: {notation!r}")


def integers(text: str) -> list[int]:
    """The whole numbers in a text, in its order."""
    return [int(number) for number in re.findall(r"\d+", text)]


def _steps(grid: list[int]) -> list[int]:
    """Strides of a row-major grid."""
    return [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]


def _places(grid: Sequence[int], steps: Sequence[int]) -> list[int]:
    return [
        sum(map(operator.mul, index, steps))
        for index in itertools.product(*(range(size) for size in grid))
    ]
