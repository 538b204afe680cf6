"""Propagate cuts of a program's inputs through its operations and count communication.

On each mesh axis an array is cut along one dimension, whole on every device, or held as partial
sums (split, broadcast and partial). For every operation the cheapest choice is taken: cut one of
its loops and move operands accordingly, or leave it whole.

A loop's body is followed until its carries keep their cuts, and counts once per trip.

Source: Yuan et al., "OneFlow: Redesign the distributed deep learning framework from scratch", 2021
(signatures).
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import PartitionSpec

from toolkit.parallel.dataflow.flow import PARTIAL, WHOLE, Cut, Flow, Machine, cut_of
from toolkit.parallel.dataflow.moves import Moves, Value
from toolkit.parallel.dataflow.programs import INLINED, inner_program, scan_counts
from toolkit.parallel.dataflow.rules import (
    LINEAR,
    REDUCTIONS,
    Rule,
    flops_of,
    reshape_rule,
    rule_of,
)


def follow(
    program: ClosedJaxpr, cuts: Sequence[Cut], mesh: dict[str, int], *,
    results: Sequence[Cut | None] | None = None, machine: Machine | None = None,
) -> Flow:  # fmt: skip
    """The communication of a program with its inputs cut as in `cuts` and its `results` as
    given."""
    machine = machine or Machine()
    walk = _Walk(mesh, machine)
    jaxpr = program.jaxpr
    places = dict(zip(jaxpr.invars, map(Value, cuts), strict=True))
    found = walk.run(jaxpr, places, 1)
    for variable, wanted in zip(jaxpr.outvars, results or [None] * len(found), strict=True):
        value = found.get(variable)
        if value is None or wanted is None:
            continue
        for axis in range(len(mesh)):
            walk.settle(variable, value, axis, wanted[axis], 1, None)
    return walk.flow


class _Walk(Moves):
    """One pass over a program, collecting its moves."""

    def __init__(self, mesh: dict[str, int], machine: Machine) -> None:
        super().__init__(mesh, machine)
        self._rules: dict[int, Rule] = {}

    def run(self, jaxpr: Jaxpr, values: dict[Var, Value], count: int) -> dict[Var, Value]:
        for variable in jaxpr.constvars:
            values[variable] = self._whole()
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name in INLINED and (inner := inner_program(equation)) is not None:
                self._inline(equation, inner, values, count)
            elif name in ("scan", "while"):
                self._loop(equation, values, count)
            elif name == "cond":
                self._inline(equation, equation.params["branches"][-1], values, count, skip=1)
            else:
                self._operation(equation, values, count)
        return {atom: values[atom] for atom in jaxpr.outvars if isinstance(atom, Var)}

    def _whole(self) -> Value:
        return Value((WHOLE,) * len(self.axes))

    def _value(self, atom: Any, values: dict[Var, Value]) -> Value:
        return (
            self._whole() if isinstance(atom, Literal) else values.setdefault(atom, self._whole())
        )

    def _inline(
        self, equation: Any, inner: ClosedJaxpr, values: dict, count: int, skip: int = 0
    ) -> None:
        given = [self._value(atom, values) for atom in equation.invars[skip:]]
        offset = len(given) - len(inner.jaxpr.invars)
        within = dict(zip(inner.jaxpr.invars, given[max(offset, 0) :], strict=True))
        self.run(inner.jaxpr, within, count)
        for outer, atom in zip(equation.outvars, inner.jaxpr.outvars, strict=True):
            values[outer] = self._value(atom, within)

    def _loop(self, equation: Any, values: dict, count: int) -> None:
        params = equation.params
        if equation.primitive.name == "scan":
            body = params["jaxpr"]
            constants, carries = scan_counts(equation, body.jaxpr)
            trips, given = params["length"], list(equation.invars)
        else:
            body, constants = params["body_jaxpr"], params["body_nconsts"]
            given = list(equation.invars[params["cond_nconsts"] :])
            carries, trips = len(given) - constants, 1
        cuts = [self._value(atom, values).cut for atom in given]
        for position in range(constants + carries, len(given)):  # one layer of a stack at a time
            for axis in range(len(self.axes)):
                if cuts[position][axis] == 0:
                    value = self._value(given[position], values)
                    self.settle(given[position], value, axis, WHOLE, count, equation)
                    cuts[position] = _with(cuts[position], axis, WHOLE)
            cuts[position] = tuple(place - (place > 0) for place in cuts[position])
        outs: list[Cut] = []
        flow = self.flow
        for _ in range(4):
            self.flow = Flow([])
            within = dict(zip(body.jaxpr.invars, map(Value, cuts), strict=True))
            self.run(body.jaxpr, within, count * trips)
            outs = [self._value(atom, within).cut for atom in body.jaxpr.outvars]
            carried = [
                tuple(a if a == b else WHOLE for a, b in zip(before, after, strict=True))
                for before, after in zip(cuts[constants:], outs[:carries], strict=False)
            ]
            # A replicated initial carry, such as zeros, may start in the form that the body
            # returns.
            carried = [
                tuple(
                    after if before == WHOLE != after >= 0 else kept
                    for before, after, kept in zip(*three, strict=True)
                )
                for three in zip(cuts[constants:], outs[:carries], carried, strict=False)
            ]
            if carried == cuts[constants : constants + carries]:
                break
            cuts[constants : constants + carries] = carried
        for place, atom in enumerate(body.jaxpr.outvars):
            if isinstance(atom, Literal):
                continue
            value = self._value(atom, within)
            # Stacked partial sums are summed once, after the loop.
            for axis in range(len(self.axes)):
                if place < carries:
                    self.settle(atom, value, axis, carried[place][axis], count * trips, equation)
        flow.moves += self.flow.moves
        flow.seconds_moving += self.flow.seconds_moving
        flow.flops += self.flow.flops
        flow.cuts |= self.flow.cuts
        flow.loops |= self.flow.loops | ({id(equation)} if self.flow.moves else set())
        self.flow = flow
        for place, (outer, cut) in enumerate(zip(equation.outvars, outs, strict=True)):
            stacked = tuple(place + (place >= 0) for place in cut)
            made_by = self._value(body.jaxpr.outvars[place], within).made_by
            values[outer] = Value(carried[place] if place < carries else stacked, made_by)

    def _operation(self, equation: Any, values: dict, count: int) -> None:
        if equation.primitive.name == "sharding_constraint":
            spec = getattr(equation.params["sharding"], "spec", PartitionSpec())
            value = self._value(equation.invars[0], values)
            free = [at for at, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED]
            asked = cut_of(spec, len(equation.invars[0].aval.shape), self.axes)
            wanted = tuple(
                now if place == WHOLE and now in free else place
                for place, now in zip(asked, value.cut, strict=True)
            )
            for axis in range(len(self.axes)):
                self.settle(equation.invars[0], value, axis, wanted[axis], count, equation)
            values[equation.outvars[0]] = Value(wanted)
            return
        rule = self._rules.setdefault(id(equation), rule_of(equation))
        operands = [self._value(atom, values) for atom in equation.invars]
        results = [[WHOLE] * len(self.axes) for _ in equation.outvars]
        work = flops_of(equation) * count
        local = _shapes(equation.invars), _shapes(equation.outvars)
        for axis in range(len(self.axes)):
            if axis and equation.primitive.name == "reshape":
                # The remaining size tells which dimension is outermost now.
                rule = reshape_rule({}, *local)
            letter = self._choose(equation, rule, operands, results, axis, work, local)
            if letter is None:
                for out in results:
                    out[axis] = WHOLE
                for atom, value in zip(equation.invars, operands, strict=True):
                    self.settle(atom, value, axis, WHOLE, count, equation)
                continue
            if letter == PARTIAL:
                for out in results:
                    out[axis] = PARTIAL
                continue
            work /= self.sizes[axis]
            local = tuple(
                [
                    tuple(
                        size // self.sizes[axis] if name == letter else size
                        for size, name in zip(shape, letters, strict=True)
                    )
                    for shape, letters in zip(shapes, names, strict=True)
                ]
                for shapes, names in zip(local, (rule.operands, rule.results), strict=True)
            )
            for atom, value, letters in zip(equation.invars, operands, rule.operands, strict=True):
                self.settle(atom, value, axis, _place(letters, letter), count, equation)
            for value, move in self._exchanges(equation, rule, operands, axis, letter):
                self._record(*move, axis, count, value, equation)
            for out, letters in zip(results, rule.results, strict=True):
                out[axis] = PARTIAL if letter in rule.summed else _place(letters, letter)
        self.flow.flops += work
        self.flow.cuts[id(equation)] = [tuple(cut) for cut in results]
        for atom, cut in zip(equation.outvars, results, strict=True):
            values[atom] = Value(tuple(cut), equation)
            if equation.primitive.name in REDUCTIONS:  # only linear operations can defer a sum
                for axis, place in enumerate(cut):
                    if place == PARTIAL:
                        self.settle(atom, values[atom], axis, WHOLE, count, equation)
                        values[atom].forms[axis] = {WHOLE}

    def _choose(
        self, equation: Any, rule: Rule, operands: list[Value], results: list[list[int]],
        axis: int, work: float, local: tuple[list[tuple[int, ...]], ...],
    ) -> int | None:  # fmt: skip
        """The letter to cut, PARTIAL to pass partial sums on, or None to compute everything
        everywhere."""
        forms = [value.forms[axis] for value in operands]
        if all(form == {WHOLE} for form in forms):
            return None
        is_partial = [form == {PARTIAL} for form in forms]
        name = equation.primitive.name
        is_scaled = name in ("mul", "div") and not equation.invars[-1].aval.shape
        if (all(is_partial) and name in LINEAR) or (is_scaled and is_partial == [True, False]):
            return PARTIAL
        options: list[int | None] = [None]
        for form, letters in zip(forms, rule.operands, strict=True):
            for place in form:
                letter = letters[place] if 0 <= place < len(letters) else None
                if letter in options or letter is None:
                    continue
                if self._divides(rule, letter, axis, local):
                    options.append(letter)

        def moving(letter: int | None) -> float:
            moved = sum(
                self._seconds(atom, value, axis, _place(letters, letter))
                for atom, value, letters in zip(
                    equation.invars, operands, rule.operands, strict=True
                )
            )
            exchanges = self._exchanges(equation, rule, operands, axis, letter)
            return moved + sum(self._time(sent, messages) for _, (_, sent, messages) in exchanges)

        # Compilers do not gather operands of a product that they can compute as partial sums.
        if name == "dot_general":
            options = [
                option for option in options if option in rule.summed and not moving(option)
            ] or options

        def seconds(letter: int | None) -> float:
            moved = moving(letter)
            if letter in rule.summed and letter is not None:
                # Partial sums must be completed sooner or later.
                moved += self._all_reduce_seconds(equation.outvars[0], results[0], axis)
            share = 1 if letter is None else 1 / self.sizes[axis]
            return moved + work * share / self.machine.flops

        # On a tie prefer the cut, which divides the following work.
        return min(reversed(options), key=seconds)

    def _divides(self, rule: Rule, letter: int, axis: int, local: tuple[list, ...]) -> bool:
        """Whether an axis divides what earlier axes leave of a loop."""
        shapes, names = (*local[0], *local[1]), (*rule.operands, *rule.results)
        return all(
            size % self.sizes[axis] == 0
            for shape, letters in zip(shapes, names, strict=True)
            for size, own in zip(shape, letters, strict=True)
            if own == letter
        )

    def _exchanges(
        self, equation: Any, rule: Rule, operands: list[Value], axis: int, letter: int | None
    ) -> list[tuple[Value, tuple[str, float, int]]]:
        """The exchange needed to cut the parts of a cut array, or to join cut parts into a cut
        whole."""
        if letter is None or letter not in rule.exchanged:
            return []
        return [
            (value, self._move(atom, value, axis, _place(letters, letter)))
            for atom, value, letters in zip(equation.invars, operands, rule.operands, strict=True)
            if WHOLE not in value.forms[axis]
        ]


def _shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(getattr(atom.aval, "shape", ())) for atom in atoms]


def _place(letters: Sequence[int | None], letter: int | None) -> int:
    """The dimension of an array with a letter, or WHOLE."""
    return WHOLE if letter is None or letter not in letters else letters.index(letter)


def _with(cut: Cut, axis: int, place: int) -> Cut:
    return (*cut[:axis], place, *cut[axis + 1 :])
