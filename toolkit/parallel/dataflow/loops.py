"""Dimensions of a program's inputs that belong to one loop, so that they are cut together or not at
all.

Examples are the columns of one weight and the rows of the next, or the heads of queries, keys and
values. Two dimensions are joined if an operation's rule gives them the same letter.
"""

import math
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from toolkit.parallel.dataflow.flow import source_of
from toolkit.parallel.dataflow.programs import INLINED, inner_program, scan_counts
from toolkit.parallel.dataflow.rules import rule_of

_VIEWS = ("convert_element_type", "transpose", "reshape", "squeeze", "copy", "slice")
_USES = {
    "dot_general": ("row", "column"),
    "conv_general_dilated": ("row", "column"),
    "gather": ("table", "column"),
}


class Use(NamedTuple):
    """The role of an input's dimension in the first product or lookup, and its line.

    `role` is "row" (summed), "column" (kept), or "table" (looked up).
    """

    role: str
    source: str


class Loops:
    """The loops of a program whose sizes are divisible by a number of pieces."""

    def __init__(self, program: ClosedJaxpr, pieces: int) -> None:
        self._pieces, self._parent = pieces, {}
        self._inputs = program.jaxpr.invars
        self._is_input: dict[Var, int] = {atom: i for i, atom in enumerate(self._inputs)}
        self.uses: dict[tuple[int, int], Use] = {}
        self.stacked: set[tuple[int, int]] = set()  # (input, dimension) over which a scan runs
        self._scans: list[tuple[Any, list[Any], list[Any]]] = []  # with carries, scanned arrays
        self._products: list[Any] = []
        self.has_too_few = False  # a reshape whose parts the pieces do not all divide
        self._walk(program.jaxpr)

    def groups(self, inputs: set[int]) -> list[tuple[tuple[int, int], ...]]:
        """The (input, dimension) pairs of each loop that can be cut, largest inputs first.

        None is a loop over which two arrays with rows of the other inputs are multiplied, as
        queries and keys over the size of a head: partial scores are more than all else.
        """
        found: dict[Any, list[tuple[int, int]]] = {}
        summed = self._summed_between_rows({*range(len(self._inputs))} - inputs)
        for position in sorted(inputs):
            variable = self._inputs[position]
            for dimension, size in enumerate(variable.aval.shape):
                if size % self._pieces == 0 and size:
                    root = self.root((variable, dimension))
                    if root not in summed:
                        found.setdefault(root, []).append((position, dimension))
        return [tuple(dict(reversed(group)).items())[::-1] for group in found.values()]

    def recurrences(self, inputs: set[int]) -> set[int]:
        """The `id` of each scan, as over time, that carries and reads rows of these inputs."""
        return {
            id(scan)
            for scan, carried, scanned in self._scans
            if self._has_rows(carried, inputs) and self._has_rows(scanned, inputs)
        }

    def _summed_between_rows(self, inputs: set[int]) -> set[Any]:
        found = set()
        for product in self._products:
            arrays, (summed, batched) = product.invars, product.params["dimension_numbers"]
            # Neither only weighs the other, as the gates of experts do.
            is_table = all(
                any(size > 1 and at not in (*own, *alike) for at, size in enumerate(x.aval.shape))
                for x, own, alike in zip(arrays, summed, batched, strict=True)
            )
            if is_table and all(self._has_rows([x], inputs) for x in arrays):
                found |= {self.root((arrays[0], at)) for at in summed[0]}
        return found

    def _has_rows(self, arrays: list[Any], inputs: set[int]) -> bool:
        """Whether any of these arrays has a dimension of the first of one of the inputs."""
        roots = {self.root((self._inputs[place], 0)) for place in inputs}
        nodes = [(x, at) for x in arrays for at in range(len(x.aval.shape)) if isinstance(x, Var)]
        return any(self.root(node) in roots for node in nodes)

    def root(self, node: Any) -> Any:
        while (parent := self._parent.get(node, node)) != node:
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node

    def _join(self, nodes: list[Any]) -> None:
        for node in nodes[1:]:
            self._parent[self.root(node)] = self.root(nodes[0])

    def _join_arrays(self, left: Any, right: Any, shift: int = 0) -> None:
        """Join dimension by dimension; the right array lacks the first `shift` dimensions."""
        if isinstance(left, Var) and isinstance(right, Var):
            if not shift and left in self._is_input:
                self._is_input.setdefault(right, self._is_input[left])
            if shift and left in self._is_input:
                self._is_input[right] = self._is_input[left]
            for dimension in range(len(getattr(right.aval, "shape", ()))):
                self._join([(left, dimension + shift), (right, dimension)])

    def _walk(self, jaxpr: Jaxpr) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name in INLINED and (inner := inner_program(equation)) is not None:
                self._call(equation, inner, equation.invars)
            elif name == "cond":
                self._call(equation, equation.params["branches"][-1], equation.invars[1:])
            elif name == "scan":
                self._scan(equation)
            elif name == "while":
                given = equation.invars[equation.params["cond_nconsts"] :]
                self._call(equation, equation.params["body_jaxpr"], given)
            else:
                self._operation(equation)

    def _call(self, equation: Any, inner: ClosedJaxpr, given: Any) -> None:
        offset = max(len(given) - len(inner.jaxpr.invars), 0)
        for outer, own in zip(given[offset:], inner.jaxpr.invars, strict=True):
            self._join_arrays(outer, own)
        self._walk(inner.jaxpr)
        for own, outer in zip(inner.jaxpr.outvars, equation.outvars, strict=True):
            self._join_arrays(own, outer)

    def _scan(self, equation: Any) -> None:
        body = equation.params["jaxpr"].jaxpr
        constants, carries = scan_counts(equation, body)
        first = constants + carries
        self._scans.append((equation, body.invars[constants:first], body.invars[first:]))
        for place, (outer, own) in enumerate(zip(equation.invars, body.invars, strict=True)):
            self._join_arrays(outer, own, int(place >= constants + carries))
            if place >= constants + carries and isinstance(outer, Var) and outer in self._is_input:
                self.stacked.add((self._is_input[outer], 0))
        self._walk(body)
        for place, (outer, own) in enumerate(zip(equation.outvars, body.outvars, strict=True)):
            self._join_arrays(outer, own, int(place >= carries))
        for before, after in zip(body.invars[constants:], body.outvars[:carries], strict=False):
            self._join_arrays(before, after)

    def _operation(self, equation: Any) -> None:
        rule, name = rule_of(equation), equation.primitive.name
        if name == "dot_general":
            self._products.append(equation)
        arrays = [
            (atom, letters)
            for atom, letters in zip(
                (*equation.invars, *equation.outvars), (*rule.operands, *rule.results), strict=True
            )
            if isinstance(atom, Var)
        ]
        nodes: dict[int, list[Any]] = {}
        for atom, letters in arrays:
            for dimension, letter in enumerate(letters):
                if letter is not None:
                    nodes.setdefault(letter, []).append((atom, dimension))
        for found in nodes.values():
            sizes = [atom.aval.shape[dimension] for atom, dimension in found]
            if math.gcd(self._pieces, *sizes) > 1 or self._pieces == 1:
                self._join(found)  # those of too few heads by a factor of the pieces
                some = {size % self._pieces == 0 for size in sizes}
                self.has_too_few |= name == "reshape" and len(some) == 2
        first = equation.invars[0] if equation.invars else None
        if name in _VIEWS and isinstance(first, Var) and first in self._is_input:
            self._is_input[equation.outvars[0]] = self._is_input[first]
        if name in _USES:
            for atom, letters in arrays[: len(equation.invars)]:
                if atom in self._is_input:
                    self._note(equation, atom, letters, rule.summed, _USES[name])

    def _note(
        self, equation: Any, atom: Var, letters: Any, summed: frozenset[int], roles: Any
    ) -> None:
        position = self._is_input[atom]
        variable = self._inputs[position]
        for dimension, letter in enumerate(letters):
            root = self.root((atom, dimension))
            for original in range(len(variable.aval.shape)):
                if letter is not None and self.root((variable, original)) == root:
                    use = Use(roles[0] if letter in summed else roles[1], source_of(equation))
                    self.uses.setdefault((position, original), use)
