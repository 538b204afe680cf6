"""The work of a compiled program in its own order: computing, sending, waiting, loops.

FLOPs, bytes and counts come from the compiler's scheduled text: instructions run in the order in
which they are written, and what an asynchronous collective hides stands between its start and its
end.
"""

import functools
import itertools
import re
from typing import Any, NamedTuple

import jax

from toolkit.measure.loop_trips import loop_trips
from toolkit.measure.product_flops import call_target, product_flops
from toolkit.measure.program_text import Instruction, first_group, shape_bytes
from toolkit.measure.programs import (
    KINDS,
    Collective,
    collective_kind,
    read_collective,
    read_program,
)

UPDATE = "update"  # scope of the optimiser's instructions
# These move nothing: aliases, and the ends of asynchronous copies.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all",
    "partition-id", "replica-id", "opt-barrier", "copy-start", "copy-done", "slice-start",
    "slice-done", "async-update", "recv",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# Names given by jax's differentiation, and by `train_program`.
_PHASES = (("transpose(", "backward"), ("jvp(", "forward"), (f"/{UPDATE}/", "update"))
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


class Compute(NamedTuple):
    """One instruction that computes or copies: its FLOPs, bytes moved, and pass."""

    flops: float
    bytes: float
    phase: str


class Send(NamedTuple):
    """The start of a collective among `degree` chips that are `inner` apart."""

    number: int
    kind: str
    bytes_sent: float
    degree: int
    inner: int


class Wait(NamedTuple):
    """Wait until the collective of this number has finished."""

    number: int


class Loop(NamedTuple):
    """Items that run `trips` times."""

    trips: int
    items: tuple[Any, ...]


class CompiledWork(NamedTuple):
    """The work of a program, for `timeline`.

    Attributes:
        items: `Compute`, `Send`, `Wait` and `Loop`, in program order.
        unknown_loops: loops of unknown trip count; they count once.
        unknown_calls: kernels and libraries of unknown FLOPs, which count as none.
    """

    items: tuple[Any, ...]
    unknown_loops: int
    unknown_calls: tuple[str, ...] = ()


def compiled_work(compiled: jax.stages.Compiled) -> CompiledWork:
    """The work of a compiled program in its own order."""
    reader = _Reader(*read_program(compiled.as_text() or ""))
    items = reader.items(reader.entry)
    return CompiledWork(items, reader.unknown_loops, tuple(sorted(reader.unknown_calls)))


class _Reader:
    def __init__(self, computations: dict[str, list[Instruction]], entry: str, devices: int):
        self.computations, self.entry, self.devices = computations, entry, devices
        self.unknown_loops = 0
        self.unknown_calls: set[str] = set()
        self.sent = 0

    def items(self, computation: str) -> tuple[Any, ...]:
        found, started = [], {}
        instructions = self.computations.get(computation, [])
        shapes = {op.name: op.shape for op in instructions}
        own = [self._collectives(op, shapes, computation) for op in instructions]
        last = {_key(instructions[at], *pair): at for at, pairs in enumerate(own) for pair in pairs}
        for at, op in enumerate(instructions):
            if op.opcode == "while":
                found += self._loop(op, computation)
            elif op.opcode == "conditional":
                # As in `collectives`: the branch that sends most; among equals, the one that
                # computes most.
                found += max(map(self.items, op.callees), key=_work_of, default=())
            elif op.opcode == "call":
                found += [item for callee in op.callees for item in self.items(callee)]
            elif op.opcode.endswith("-done"):
                # A receive ends when the matching send of the peers does.
                names = [_channel_of(op)] if op.opcode == "recv-done" else op.operand_names
                found += [Wait(number) for name in names for number in started.get(name, ())]
            elif own[at]:
                found += self._sending(op, own[at], at, last, started, shapes)
            elif op.opcode not in _FREE:
                found.append(self._compute(op, shapes))
        return tuple(found)

    def _loop(self, loop: Instruction, around: str) -> list[Any]:
        trips = loop_trips(loop, around, self.computations)
        self.unknown_loops += trips is None
        body = re.search(r"\bbody=%?([\w.\-]+)", loop.attributes)
        items = self.items(body[1]) if body else ()
        return [Loop(1 if trips is None else trips, items)] if items else []

    def _sending(self, op, own, at, last, started, shapes) -> list[Any]:
        """A collective, or a fusion around the start, the middle or the end of one."""
        found, ends = [], []
        for collective, inside in own:
            key = _key(op, collective, inside)
            if key not in started:
                self.sent += 1
                started[key] = [self.sent]
                found.append(self._send(self.sent, collective, inside))
                started.setdefault(op.name, []).append(self.sent)
                if op.opcode == "send":
                    started[_channel_of(op)] = [self.sent]
            # It has ended if no instruction of its channel and no "-done" follows.
            if last[key] == at and not (op.opcode.endswith("-start") or op.opcode == "send"):
                ends += [Wait(number) for number in started.pop(key)]
        computing = self._compute(op, shapes)
        hiding = [computing] if op.opcode == "fusion" and computing.flops else []
        return [*found, *hiding, *ends]

    def _collectives(self, op, shapes, computation) -> list[tuple[Collective, Instruction]]:
        """The collectives in an instruction: itself, or those in the fusion."""
        kind = collective_kind(op, computation)
        if kind in KINDS:
            found = read_collective(op, kind, shapes, self.devices, 1, True)
            return [(found, op)] if found.group_size > 1 and kind != "recv" else []
        inside = op.callees if op.opcode in ("fusion", "async-start") else ()
        return [found for callee in inside for found in self._wrapped(callee)]

    @functools.cache  # noqa: B019 - a reader lives for one program
    def _wrapped(self, computation: str) -> list[tuple[Collective, Instruction]]:
        named = self._named(computation)
        shapes = {name: op.shape for name, op in named.items()}
        found = (self._collectives(op, shapes, computation) for op in named.values())
        return [each for some in found for each in some]

    @functools.cache  # noqa: B019
    def _named(self, computation: str) -> dict[str, Instruction]:
        return {op.name: op for op in self.computations.get(computation, [])}

    def _send(self, number, found: Collective, inside: Instruction) -> Send:
        inner = 1
        if "replica_groups=" in inside.attributes:
            group = sorted(first_group(inside.attributes, self.devices))
            inner = min((b - a for a, b in itertools.pairwise(group)), default=1)
        return Send(number, found.kind, found.bytes_sent, found.group_size, inner)

    def _compute(self, op: Instruction, shapes: dict[str, str]) -> Compute:
        name = _OP_NAME.search(op.attributes)
        words = name[1] if name else ""
        phase = next((name for mark, name in _PHASES if mark in words), "other")
        return Compute(self._flops(op, shapes), self._moved(op, shapes), phase)

    def _flops(self, op: Instruction, shapes: dict[str, str]) -> float:
        if op.opcode == "fusion":
            return sum(self._fused_flops(callee) for callee in op.callees)
        found = product_flops(op, shapes)
        if found is None:
            self.unknown_calls.add(call_target(op) or op.opcode)
        return found or 0.0

    @functools.cache  # noqa: B019
    def _fused_flops(self, computation: str) -> float:
        instructions = self.computations.get(computation, [])
        shapes = {each.name: each.shape for each in instructions}
        return sum(self._flops(each, shapes) for each in instructions)

    def _moved(self, op: Instruction, shapes: dict[str, str]) -> float:
        """Bytes of operands and result; of slices and partial updates only the part."""
        if op.opcode in _SLICES:
            return 2.0 * shape_bytes(op.shape)
        if op.opcode == "dynamic-update-slice":
            return 2.0 * shape_bytes(shapes.get(op.operand_names[1], ""))
        read = {at: shape_bytes(shapes.get(name, "")) for at, name in enumerate(op.operand_names)}
        if op.opcode != "fusion" or len(op.callees) != 1:
            return float(sum(read.values()) + shape_bytes(op.shape))
        named = self._named(op.callees[0])
        inside = [*named.values()]
        for place in (each for each in inside if each.opcode == "parameter"):
            users = [each for each in inside if place.name in each.operand_names]
            at = int(place.operands) if place.operands.isdecimal() else -1
            if users and at in read and all(user.opcode in _SLICES for user in users):
                read[at] = min(read[at], sum(shape_bytes(user.shape) for user in users))
            elif users and all(_overwrites(user, place) for user in users):
                read[at] = 0
        return float(sum(read.values()) + self._written(inside, named, op))

    def _written(self, inside, named, op) -> int:
        """Bytes of a fusion's result; of a partial update only the part."""
        root = inside[-1] if inside else op
        parts = root.operand_names if root.opcode == "tuple" else [root.name]
        total = 0
        for name in parts:
            part = named.get(name)
            while part is not None and part.opcode == "bitcast":
                part = named.get(part.operand_names[0])
            if part is not None and part.opcode == "dynamic-update-slice":
                part = named.get(part.operand_names[1])
            total += shape_bytes(part.shape) if part is not None else 0
        return total


def _key(op: Instruction, found: Collective, inside: Instruction) -> tuple[str, str]:
    """Identifies a collective: by its line, or by the channel if fusions share one."""
    channel = _CHANNEL.search(inside.attributes) if op.opcode == "fusion" else None
    return found.kind, channel[1] if channel else inside.name


def _overwrites(user: Instruction, place: Instruction) -> bool:
    return user.opcode == "dynamic-update-slice" and user.operand_names[0] == place.name


def _channel_of(op: Instruction) -> str:
    channel = _CHANNEL.search(op.attributes)
    return f"channel {channel[1]}" if channel else ""


def _work_of(items) -> tuple[float, float]:
    """Bytes sent and FLOPs of items."""
    sent = flops = 0.0
    for item in items:
        if isinstance(item, Loop):
            inside = _work_of(item.items)
            sent, flops = sent + item.trips * inside[0], flops + item.trips * inside[1]
        elif isinstance(item, Send):
            sent += item.bytes_sent
        elif isinstance(item, Compute):
            flops += item.flops
    return sent, flops
