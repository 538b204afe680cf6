"""Trip counts of loops, from the text of a compiled program.

Compilers for CPUs and GPUs write them down. The compiler for TPUs does not, but the loop of a
`jax.lax.scan` counts between constants that are in the text.
"""

import re

from toolkit.measure.program_text import Instruction

_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")

Computations = dict[str, list[Instruction]]


def loop_trips(loop: Instruction, around: str, computations: Computations) -> int | None:
    """The trip count of a loop in the computation `around`; None if it is not in the text."""
    if loop.trip_count is not None:
        return loop.trip_count
    condition, body = _CONDITION.search(loop.attributes), _BODY.search(loop.attributes)
    if not condition or not body or not computations.get(condition[1]):
        return None
    test, tests = computations[condition[1]][-1], _by_name(computations[condition[1]])
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, limit = (tests.get(name) for name in test.operand_names)
    if counter is None or limit is None or counter.opcode != "get-tuple-element":
        return None
    index = _INDEX.search(counter.attributes)
    place = int(index[1]) if index else 0
    inside, outside = _by_name(computations[body[1]]), _by_name(computations[around])
    start = _constant(_element(outside.get(loop.operand_names[0]), place, outside), outside)
    end = _constant(limit, tests)
    step = _step(_element(computations[body[1]][-1], place, inside), inside)
    if start is None or end is None or step is None:
        return None
    return max(0, -(-(end - start) // step))


def _by_name(computation: list[Instruction]) -> dict[str, Instruction]:
    return {instruction.name: instruction for instruction in computation}


def _element(given: Instruction | None, place: int, named: dict[str, Instruction]):
    """The element at an index of a tuple."""
    if given is None or given.opcode != "tuple" or place >= len(given.operand_names):
        return None
    return named.get(given.operand_names[place])


def _constant(given: Instruction | None, named: dict[str, Instruction]) -> int | None:
    while given is not None and given.opcode == "copy":
        given = named.get(given.operand_names[0])
    if given is None or given.opcode != "constant" or not given.operands.isdecimal():
        return None
    return int(given.operands)


def _step(given: Instruction | None, named: dict[str, Instruction]) -> int | None:
    """The increment of the counter."""
    while given is not None and given.opcode == "copy":
        given = named.get(given.operand_names[0])
    if given is None or given.opcode != "add":
        return None
    numbers = [_constant(named.get(name), named) for name in given.operand_names]
    return next((number for number in numbers if number), None)
