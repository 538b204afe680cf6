"""A stage's forward and backward pass, cut where a pipeline needs cuts.

The joint program (weights, input, output's gradient) -> (output, input's gradient, weights'
gradients) is traced once. Its equations are then divided among three tasks:

    F:  weights, x            -> y, kept            kept: what later tasks need of it
    I:  weights, kept, dy     -> dx, split          split: what only the weights' gradients need
    W:  weights, split        -> dw                 B is I and W in one
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

# Computed again from what is kept anyway, instead of being kept too; gathered again, for what is
# cut over devices would else be kept whole from F on.
_CHEAP = frozenset(
    """abs add all_gather and broadcast_in_dim ceil clamp convert_element_type copy eq exp
    expand_dims floor ge gt integer_pow iota le lt max min mul ne neg not or rsqrt reshape
    select_n sign slice sqrt square squeeze stop_gradient sub transpose""".split()  # noqa: SIM905
)
# Of these alone are the gradients of biases, norms and gates made, which are smaller than what they
# sum up.
_SUMMED = _CHEAP - {"all_gather"} | {"dynamic_update_slice", "reduce_sum"}
_CALLS = frozenset(("pjit", "jit", "closed_call", "core_call"))


@dataclass(frozen=True)
class Partition:
    """The three tasks of a stage, as functions of lists of arrays."""

    forward: Callable[..., Any]  # (weights, x, rest) -> (y, kept)
    # (weights, rest, kept, dy) -> (dx, dw where it is known, else None, split)
    input_gradient: Callable[..., Any]
    weight_gradient: Callable[..., Any]  # (weights, rest, split) -> the dw that are left, else None
    backward: Callable[..., Any]  # (weights, rest, kept, dy) -> (dx, dw)
    # kept, split: shapes of what waits between the tasks
    kept: tuple[Any, ...]
    split: tuple[Any, ...]


def partition(
    function: Callable[..., Any], weights: Sequence[Any], x: Sequence[Any], rest: Sequence[Any], *,
    recompute: bool,
) -> Partition:  # fmt: skip
    """Cut a stage's passes into tasks.

    `function` maps (weights, x, rest) to y, all lists of arrays; y is like x, and `rest`, of any
    type, gets no gradient. What depends on weights and `rest` alone is never kept, but computed
    where it is needed. What is kept is what jax keeps, less what cheap operations make of the
    others; to recompute keeps x alone, and runs the forward pass again within the backward pass.
    """

    def joint(weights, x, rest, dy):
        y, pull = jax.vjp(lambda weights, x: function(weights, x, rest), weights, x)
        dw, dx = pull(dy)
        return y, dx, dw

    traced = _inlined(jax.make_jaxpr(joint)(weights, x, rest, x))
    cut = _Cut(traced, [len(weights), len(x), len(rest), len(x)])
    w, inputs, others, dy = cut.inputs
    y, dx, dw = cut.outputs([len(x), len(x), len(weights)])

    everywhere = cut.reached_from(w + others, only=True)
    late = cut.reached_from(dy)
    if recompute:
        kept = [v for v in inputs if v in cut.needed([*dx, *dw])]
    else:
        needed = cut.between(dx + dw, given=late_inputs(cut, late, everywhere))
        kept = [v for v in needed if v not in everywhere and v not in dy]
        kept = cut.thinned(kept, everywhere)
    before = {*everywhere, *kept, *dy}
    early = cut.produced([*dx], given=before)
    sums = [v for v in dw if cut.primitives(v, given=before | early) <= _SUMMED]
    early |= cut.produced(sums, given=before)
    left = [v for v in dw if v not in early and v not in before]
    at_once = [v for v in dw if v not in left]
    read = cut.between(left, given=before | early)
    # What I gathered of gradients waits whole: if W gathered it too, both would do more than B.
    fixed = {*kept, *(late & cut.made_by("all_gather"))}
    split = cut.thinned([v for v in read if v not in everywhere], everywhere, fixed)

    run = cut.function
    forward = run(w + inputs + others, y + kept)
    first = run(w + others + kept + dy, dx + at_once + split)
    second = run(w + others + split, left)
    whole = run(w + others + kept + dy, dx + dw)
    n = len(x)

    def filled(values, of):
        found = dict(zip(map(id, of), values, strict=True))
        return [found.get(id(v)) for v in dw]

    def input_gradient(weights, rest, kept, dy):
        out = first(*weights, *rest, *kept, *dy)
        at = n + len(at_once)
        return out[:n], filled(out[n:at], at_once), out[at:]

    def backward(weights, rest, kept, dy):
        out = whole(*weights, *rest, *kept, *dy)
        return out[:n], out[n:]

    def run_forward(weights, x, rest):
        out = forward(*weights, *x, *rest)
        return out[:n], out[n:]

    return Partition(
        run_forward,
        input_gradient,
        lambda weights, rest, split: filled(second(*weights, *rest, *split), left),
        backward,
        tuple(v.aval for v in kept),
        tuple(v.aval for v in split),
    )


def late_inputs(cut: "_Cut", late: set[Any], everywhere: set[Any]) -> set[Any]:
    """What is known before the output's gradient arrives."""
    return {v for v in cut.all if v not in late} | everywhere


class _Cut:
    """The dataflow of a traced program."""

    def __init__(self, closed: Any, sizes: list[int]):
        self.closed = closed
        self.equations = closed.jaxpr.eqns
        self.inputs = _groups(closed.jaxpr.invars, sizes)
        self.constants = list(closed.jaxpr.constvars)
        self.producer = {v: eqn for eqn in self.equations for v in eqn.outvars}
        self.order = {v: at for at, eqn in enumerate(self.equations) for v in eqn.outvars}
        self.all = [*self.constants, *closed.jaxpr.invars, *self.producer]

    def outputs(self, sizes: list[int]) -> list[list[Any]]:
        return _groups(self.closed.jaxpr.outvars, sizes)

    def reached_from(self, start: Iterable[Any], *, only: bool = False) -> set[Any]:
        """What depends on one of `start`, or with `only` on nothing else (but constants)."""
        found = {*start, *(self.constants if only else ())}
        for eqn in self.equations:
            inputs = [v for v in eqn.invars if _is_variable(v)]
            if (all if only else any)(v in found for v in inputs):
                found.update(eqn.outvars)
        return found

    def needed(self, wanted: Iterable[Any], given: Iterable[Any] = ()) -> set[Any]:
        """All that `wanted` is computed from, down to what is given."""
        found, given = {v for v in wanted if _is_variable(v)}, {*given}
        for eqn in reversed(self.equations):
            if any(v in found and v not in given for v in eqn.outvars):
                found.update(v for v in eqn.invars if _is_variable(v))
        return found

    def between(self, wanted: Iterable[Any], given: set[Any]) -> list[Any]:
        """The given values from which `wanted` is computed, in the order of the program."""
        found = self.needed(wanted, given) & given
        return [v for v in self.all if v in found]

    def produced(self, wanted: Iterable[Any], given: set[Any]) -> set[Any]:
        """All results of the equations that compute `wanted`."""
        found = self.needed(wanted, given) - given
        return {v for u in found if u in self.producer for v in self.producer[u].outvars}

    def made_by(self, name: str) -> set[Any]:
        """The results of all equations of that name."""
        return {v for v, eqn in self.producer.items() if eqn.primitive.name == name}

    def primitives(self, wanted: Any, given: set[Any]) -> set[str]:
        """The names of the equations that compute one value."""
        found = self.produced([wanted], given)
        return {self.producer[v].primitive.name for v in found}

    def _narrowed(self, v: Any, everywhere: set[Any], fixed: Iterable[Any]) -> Any:
        """The smallest array of which alone cheap operations make a value: such as what was
        converted to float32, which several values then share."""
        smallest = v
        while v in self.producer and v not in fixed:
            eqn = self.producer[v]
            own = {u for u in eqn.invars if _is_variable(u) and u not in everywhere}
            if eqn.primitive.name not in _CHEAP or len(own) != 1:
                break
            (v,) = own
            smallest = v if _bytes(v) < _bytes(smallest) else smallest
        return smallest

    def thinned(
        self, values: list[Any], everywhere: set[Any], fixed: Iterable[Any] = ()
    ) -> list[Any]:
        """Less those that cheap operations make of the others, or of a smaller one."""
        left = dict.fromkeys(self._narrowed(v, everywhere, fixed) for v in values)

        def is_made(v: Any, known: dict[Any, bool]) -> bool:
            if v not in known:
                eqn = self.producer.get(v)
                known[v] = (
                    eqn is not None
                    and eqn.primitive.name in _CHEAP
                    and all(is_made(u, known) for u in eqn.invars if _is_variable(u))
                )
            return known[v]

        for v in sorted(left, key=lambda v: -self.order.get(v, -1)):
            known = dict.fromkeys({*left, *everywhere} - {v}, True)
            if v in self.producer and v not in fixed and is_made(v, known):
                del left[v]
        return list(left)

    def function(self, given: list[Any], wanted: list[Any]) -> Callable[..., list[Any]]:
        """The program from `given` (one array each) to `wanted`."""
        needed = self.needed(wanted, given)
        equations = [
            eqn
            for eqn in self.equations
            if any(v in needed and v not in {*given} for v in eqn.outvars)
        ]
        jaxpr = self.closed.jaxpr.replace(invars=given, outvars=wanted, eqns=equations)
        return _function(jaxpr, self.closed.consts)


def _function(jaxpr: Any, constants: Sequence[Any] = ()) -> Callable[..., list[Any]]:
    jaxpr = jaxpr.replace(debug_info=jaxpr.debug_info.with_unknown_names())
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))


def _is_variable(v: Any) -> bool:
    return not isinstance(v, core.Literal)


def _bytes(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize


def _groups(values: Sequence[Any], sizes: list[int]) -> list[list[Any]]:
    left = iter(values)
    return [list(itertools.islice(left, size)) for size in sizes]


def _inlined(closed: Any) -> Any:
    """The same program with the equations of inner `jit`s in line, traced anew.

    `dataflow.programs.inlined` leaves calls that hold constants as they are: all that they read
    would be kept.
    """
    if not any(eqn.primitive.name in _CALLS for eqn in closed.jaxpr.eqns):
        return closed

    def run(*values):
        known = dict(zip(closed.jaxpr.invars, values, strict=True))
        known |= zip(closed.jaxpr.constvars, closed.consts, strict=True)
        for eqn in closed.jaxpr.eqns:
            if eqn.primitive.name in _CALLS:
                inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
                inputs = [known[v] if _is_variable(v) else v.val for v in eqn.invars]
                results = core.jaxpr_as_fun(inner)(*inputs)
            else:
                inputs = list(dict.fromkeys(v for v in eqn.invars if _is_variable(v)))
                alone = {"invars": inputs, "outvars": eqn.outvars, "eqns": [eqn], "constvars": []}
                results = _function(closed.jaxpr.replace(**alone))(*(known[v] for v in inputs))
            known |= zip(eqn.outvars, results, strict=True)
        return [known[v] if _is_variable(v) else v.val for v in closed.jaxpr.outvars]

    return _inlined(jax.make_jaxpr(run)(*closed.in_avals))
