"""Follow a value through a compiled program: its origin, its consumer, their lines.

Moves (copies, slices, transposes, loop carries) are skipped, so that a gather is traced to the
argument that it gathers and to the product that needs the whole array.
"""

import re
from pathlib import PurePath
from typing import NamedTuple

import jax

from toolkit.measure.program_text import Instruction, shape_bytes
from toolkit.measure.programs import Site
from toolkit.parallel.dataflow.flow import is_library

_MOVES = (
    *("copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "transpose", "reshape"),
    *("convert", "dynamic-slice", "slice", "get-tuple-element", "tuple", "optimization-barrier"),
    *("parameter", "constant"),
)
_PLACES = ("s32[]", "u32[]", "s64[]", "pred[]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INDEX = re.compile(r"index=(\d+)")
_MOST_STEPS = 200


def compiled_with_own_lines(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile with source lines as part of the cache's key; otherwise a persistent cache returns
    the lines of whoever compiled the program first.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        return lowered.compile(compiler_options={})  # any option bypasses the in-memory cache
    finally:
        jax.config.update(name, before)


class Place(NamedTuple):
    """A source line: file name, line, function; empty if the compiler kept none."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line}" if self.file else "no line known"


class End(NamedTuple):
    """The end of a trace.

    `argument` and `output` are positions in the program's parameters and results, or None.
    """

    operation: str
    place: Place
    argument: int | None = None
    output: int | None = None


class ProgramTrace:
    """A compiled program's text, indexed for tracing."""

    def __init__(self, text: str, computations: dict[str, list[Instruction]], entry: str) -> None:
        self._computations, self._entry = computations, entry
        self._by_name = {
            name: {instruction.name: instruction for instruction in instructions}
            for name, instructions in computations.items()
        }
        self._places = _read_places(text)

    def parameters(self) -> dict[int, str]:
        """Position -> jax's name of the argument, such as "params['up']"."""
        return {
            int(instruction.operands): self.name(instruction)
            for instruction in self._computations[self._entry]
            if instruction.opcode == "parameter"
        }

    def name(self, instruction: Instruction) -> str:
        """jax's name of the operation, with its transformations."""
        found = _OP_NAME.search(instruction.attributes)
        return found[1].replace("\\'", "'") if found else ""

    def operation(self, instruction: Instruction) -> str:
        """The primitive, and whether it runs in the backward pass."""
        name = self.name(instruction).partition(";")[0]
        word = name.rpartition("/")[2] or instruction.opcode
        return f"{word} (backward)" if "transpose(" in name else word

    def place(self, instruction: Instruction) -> Place:
        """The innermost line of the user's source that the instruction comes from."""
        if found := re.search(r"stack_frame_id=(\d+)", instruction.attributes):
            return self._places.get(int(found[1]), Place("", 0, ""))
        found = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        return Place(found[1], int(found[2]), "") if found else Place("", 0, "")

    def origin(self, site: Site) -> End:
        """The origin of the first operand of a site's instruction."""
        computation, instruction = site[-1]
        names = instruction.operand_names
        return self._back(site[:-1], computation, names[0] if names else "", None)

    def wanted_by(self, site: Site) -> End:
        """The first operation that uses the result of a site's instruction."""
        computation, instruction = site[-1]
        return self._forward(site[:-1], computation, instruction.name, None)

    def _end(self, instruction: Instruction | None) -> End:
        if instruction is None:
            return End("", Place("", 0, ""))
        return End(self.operation(instruction), self.place(instruction))

    def _back(self, around: Site, computation: str, name: str, element: int | None) -> End:
        instruction = None
        for _ in range(_MOST_STEPS):
            instruction = self._by_name[computation].get(name)
            if instruction is None:
                break
            names = instruction.operand_names
            if instruction.opcode == "parameter":
                if computation == self._entry:
                    return End("argument", self.place(instruction), int(instruction.operands))
                if not around:
                    break
                computation, caller = around[-1]
                around, name = around[:-1], caller.operand_names[int(instruction.operands)]
            elif instruction.opcode == "get-tuple-element":
                element = int(_INDEX.findall(instruction.attributes)[0])
                name = names[0]
            elif instruction.opcode == "tuple" and element is not None:
                name, element = names[element], None
            elif self._is_move(instruction) and names:
                name = max(names, key=lambda name_of: self._size(computation, name_of))
            else:
                break
        return self._end(instruction)

    def _forward(self, around: Site, computation: str, name: str, element: int | None) -> End:
        instruction = None
        for _ in range(_MOST_STEPS):
            users = [user for user in self._computations[computation] if name in user.operand_names]
            if element is not None:
                users = [user for user in users if _element(user) in (element, None)]
            if not users:
                break
            instruction = next((user for user in users if not self._is_move(user)), users[0])
            if instruction.opcode == "while":
                return End("a loop", self.place(instruction))
            if instruction.opcode == "get-tuple-element":
                element = None
            elif instruction.opcode == "tuple":
                position = instruction.operand_names.index(name)
                if instruction == self._computations[computation][-1]:
                    if computation == self._entry:
                        return End("result", self.place(instruction), None, position)
                    if around and around[-1][1].opcode == "while":
                        return End("the loop's next trip", self.place(around[-1][1]))
                element = position
            elif not self._is_move(instruction):
                break
            name = instruction.name
        if instruction is None and computation == self._entry:
            return End("result", Place("", 0, ""), None, 0)
        return self._end(instruction)

    def _is_move(self, instruction: Instruction) -> bool:
        """Whether an instruction, or all of a fusion, only moves data."""
        if instruction.opcode in ("fusion", "call"):
            inside = [step for name in instruction.callees for step in self._computations[name]]
            # Arithmetic on single integers computes offsets of slices.
            return all(step.opcode in _MOVES or step.shape in _PLACES for step in inside)
        return instruction.opcode in _MOVES

    def _size(self, computation: str, name: str) -> int:
        found = self._by_name[computation].get(name)
        return shape_bytes(found.shape) if found else 0


def _element(instruction: Instruction) -> int | None:
    if instruction.opcode != "get-tuple-element":
        return None
    return int(_INDEX.findall(instruction.attributes)[0])


def _read_places(text: str) -> dict[int, Place]:
    """Read the tables before the program: frame -> line."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M))
    functions = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FunctionNames"), re.M))
    pattern = r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
    lines = {
        number: Place(files.get(file, ""), int(line), functions.get(function, ""))
        for number, file, function, line in re.findall(
            pattern, _section(text, "FileLocations"), re.M
        )
    }
    pattern = r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)"
    frames = {
        number: (lines[line], str(int(parent) - 1))
        for number, line, parent in re.findall(pattern, _section(text, "StackFrames"), re.M)
        if line in lines
    }
    return {int(number): _own_line(number, frames) for number in frames}


def _own_line(number: str, frames: dict[str, tuple[Place, str]]) -> Place:
    """The innermost line outside of libraries, or else a library's."""
    innermost, seen = frames[number][0], set()
    while number in frames and number not in seen:
        seen.add(number)
        place, number = frames[number]
        if not is_library(place.file):
            return place
    return innermost


def _section(text: str, title: str) -> str:
    return text.partition(f"\n{title}\n")[2].partition("\n\n")[0]
