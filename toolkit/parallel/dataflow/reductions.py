"""Whether the loss of a batch is the mean of the losses of its parts.

A loss is traced for a part and for the whole batch. The two programs differ in what depends on the
number of rows: the sizes of dimensions that hold rows, and constants such as the divisor of a mean.
Every value of the whole batch, of P parts, is then known by those of the parts:

    even    whole = P^d part           no row's own: weights, constants, 1 / rows (d = -1)
    rows    whole = P^d part           row by row
    total   whole = P^d sum_i part_i   a sum over rows (d = 0), their mean (d = -1)
    ratio   the quotient of two totals, such as a mean with unequal weights
    mixed   anything else: statistics of a batch, products of its rows with each other
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from toolkit.parallel.dataflow.programs import INLINED, inlined, inner_program, scan_counts
from toolkit.parallel.dataflow.rules import LINEAR

_PRODUCTS = ("mul", "dot_general")
_SHAPES = (
    *("broadcast_in_dim", "reshape", "transpose", "convert_element_type", "squeeze", "copy"),
    "slice",
)
_SAME = ("optimization_barrier", "sharding_constraint", "name", "reduce_precision", "pvary")
_SUBSETS = ("slice", "dynamic_slice", "dynamic_update_slice", "pad", "split", "concatenate")
_VIEWS = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "copy")
_ALONG = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "fft", "top_k")


class Kind(NamedTuple):
    """How a value of the whole batch follows from its parts', and the power of their number."""

    name: str
    power: int = 0


_EVEN, _ROWS, _MIXED, _RATIO = Kind("even"), Kind("rows"), Kind("mixed"), Kind("ratio")
_ZERO = Kind("zero")  # which may be added to anything


def check_is_mean(
    loss_fn: Callable, given: Sequence[Any], batch: Any, parts: int, *,
    remedy: str = "", allows_mixed: bool = False,
) -> None:  # fmt: skip
    """Check that the loss of a batch is the mean of the losses of its parts.

    `loss_fn` is (*given, batch) -> loss, or a tuple that begins with it. `remedy` ends the message.
    With `allows_mixed` each part may have statistics of its own, as microbatches do.
    """
    sizes = [jax.numpy.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)]
    if parts == 1 or any(not size or size[0] % parts for size in sizes):
        return  # what cannot be cut is refused where it is cut

    def traced(share: int) -> Any:
        # Twice the rows: a single row would be repeated where two are not.
        sizes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (2 * leaf.shape[0] // share, *leaf.shape[1:]), leaf.dtype
            ),
            batch,
        )
        return inlined(jax.make_jaxpr(loss_fn)(*given, sizes))

    part, whole = traced(parts), traced(1)
    rows = len(jax.tree.leaves(batch))
    kinds = [_EVEN] * (len(whole.jaxpr.invars) - rows) + [_ROWS] * rows
    pair = _Pair(parts)
    consts = [
        pair.constant(*both, is_cut=np.shape(both[0]) != np.shape(both[1]))
        for both in zip(part.consts, whole.consts, strict=False)
    ]
    kind = pair.run(part.jaxpr, whole.jaxpr, [*consts, *kinds])[0]
    if kind in (Kind("total", -1), _EVEN, _ZERO) or (kind == _MIXED and allows_mixed):
        return
    names = {"total": "a sum over the batch", "ratio": "a mean whose weights depend on the batch"}
    got = names.get(kind.name, "a loss that mixes rows of the batch")
    raise ValueError(f"loss_fn: got {got}; wanted the mean of its rows{remedy}")


class _Pair:
    """The program of a part beside that of the whole batch, which has `parts` parts."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._makers: dict[Any, Any] = {}

    def constant(self, part: Any, whole: Any, *, is_cut: bool = False) -> Kind:
        if is_cut or (part is whole and np.ndim(part)):
            return _ROWS if is_cut else _EVEN
        part, whole = np.asarray(part), np.asarray(whole)
        if part.tobytes() == whole.tobytes():  # equal, NaN too
            return _EVEN if part.any() else _ZERO
        powers = (power for power in (-2, -1, 1, 2) if part.size == 1)
        near = (p for p in powers if np.isclose(whole, float(self.parts) ** p * part, rtol=1e-3))
        return Kind("even", power) if (power := next(near, None)) else _MIXED

    def run(self, part: Jaxpr, whole: Jaxpr, kinds: list[Kind]) -> list[Kind]:
        """The kinds of a program's results, by those of its constants and inputs."""
        inputs = (*whole.constvars, *whole.invars)
        known: dict[Any, Kind] = dict(zip(inputs, kinds, strict=False))

        def read(ours: Any, theirs: Any) -> Kind:
            if isinstance(theirs, Literal) and isinstance(ours, Literal):
                return self.constant(ours.val, theirs.val)
            return known.get(theirs, _MIXED)

        def results() -> list[Kind]:
            return [read(*both) for both in zip(part.outvars, whole.outvars, strict=True)]

        if [e.primitive for e in part.eqns] != [e.primitive for e in whole.eqns]:
            known |= dict.fromkeys((out for e in whole.eqns for out in e.outvars), _MIXED)
            return results()
        for ours, theirs in zip(part.eqns, whole.eqns, strict=True):
            self._makers |= dict.fromkeys(theirs.outvars, theirs)
            given = [read(*both) for both in zip(ours.invars, theirs.invars, strict=True)]
            kinds = self._equation(ours, theirs, given)
            for out, kind in zip(theirs.outvars, kinds, strict=True):
                known[out] = kind if np.prod(getattr(out.aval, "shape", ())) else _ZERO
        return results()

    def _equation(self, part: Any, whole: Any, given: list[Kind]) -> list[Kind]:
        name, count = whole.primitive.name, len(whole.outvars)
        own, inner = inner_program(part), inner_program(whole)
        if name in INLINED and own is not None and inner is not None:
            consts = [_EVEN] * len(inner.jaxpr.constvars)
            return self.run(own.jaxpr, inner.jaxpr, [*consts, *given[-len(inner.jaxpr.invars) :]])
        if name in _SAME:
            return given
        if name == "scan":
            ours, theirs = (each.params["jaxpr"].jaxpr for each in (part, whole))
            is_over_rows = part.params["length"] != whole.params["length"]
            return self._loop(ours, theirs, given, *scan_counts(whole, theirs), is_over_rows)
        if name == "while":
            return self._while(part, whole, given)
        if name == "cond":  # its branches are ways to one result, chosen alike or row by row
            both = zip(part.params["branches"], whole.params["branches"], strict=True)
            found = [self.run(a.jaxpr, b.jaxpr, given[1:]) for a, b in both]
            return [_chosen(given[0], _joined(kinds)) for kinds in zip(*found, strict=True)]
        cuts = [self._cuts(*both) for both in zip(part.invars, whole.invars, strict=True)]
        outs = [self._cuts(*both) for both in zip(part.outvars, whole.outvars, strict=True)]
        if any(cut is None or len(cut) > 1 for cut in (*cuts, *outs)):
            return [_MIXED] * count
        if {"mixed", "ratio"} & {kind.name for kind in given}:
            worst = _MIXED if _MIXED in given or name not in (*LINEAR, "mul", "div") else _RATIO
            return [worst] * count
        if not self._keeps_rows(whole, cuts, outs):
            return [_MIXED] * count
        if name in _ALONG:
            axes = {whole.params.get(key) for key in ("axis", "dimension")}
            axes |= {*whole.params.get("dimensions", ())}
            if any(axes & {*cut} for cut in cuts if cut):
                return [_MIXED] * count
        return [self._result(whole, given, cuts, out) for out in outs]

    def _result(self, equation: Any, given: list[Kind], cuts: list[Any], out: Any) -> Kind:
        name = equation.primitive.name
        powers, names = [kind.power for kind in given], [kind.name for kind in given]
        dtype = equation.outvars[0].aval.dtype
        is_item = any(k == "rows" and not cut for k, cut in zip(names, cuts, strict=True))
        is_summed = any(cuts) and not out and not is_item
        is_sum = is_summed and name in ("reduce_sum", "dot_general")
        if {*names} <= {"zero", "even"}:  # the same for every row
            if out and not (name in _SHAPES or _is_elementwise(equation, out)):
                return _ROWS
            if name in (*LINEAR, *_PRODUCTS, "div"):
                kind = _of_linear(name, given)
                return kind if kind == _ZERO or not is_sum else Kind("even", kind.power + 1)
            return _MIXED if any(powers) else _EVEN
        if is_summed:
            is_sum = is_sum and (name == "reduce_sum" or all(cuts))
            return Kind("total", sum(powers)) if is_sum and "total" not in names else _MIXED
        if not ({*names} & {"total"} or jax.numpy.issubdtype(dtype, jax.numpy.inexact)):
            return _ROWS  # indices of rows, and masks
        if name in LINEAR or name in _PRODUCTS or name == "div":
            return _of_linear(name, given, is_item)
        if "total" in names or any(powers):
            return _MIXED
        return _ROWS

    def _keeps_rows(self, equation: Any, cuts: list[Any], outs: list[Any]) -> bool:
        """Whether rows keep their places; which other rows a row meets depends on the part."""
        name, params = equation.primitive.name, equation.params
        atoms = (*equation.invars, *equation.outvars)
        shapes: list[Any] = [getattr(atom.aval, "shape", ()) for atom in atoms]
        own, out = shapes[0], shapes[-1]
        if name == "reshape":
            return all(math.prod(own[:a]) >= math.prod(out[:b]) for a in cuts[0] for b in outs[0])
        if name in _SUBSETS:
            rows = {at for cut in (*cuts, *outs) for at in cut}
            alike = [shape for shape in shapes if len(shape) == len(own)]
            padded = [at for at, ends in enumerate(params.get("padding_config", ())) if any(ends)]
            return all(len({shape[at] for shape in alike}) == 1 for at in rows) and not (
                rows & {*padded}
            )
        if name == "gather":
            places = params["dimension_numbers"].start_index_map
        elif name.startswith("scatter"):
            places = params["dimension_numbers"].scatter_dims_to_operand_dims
        else:
            return True
        return all(
            self._is_own_place(equation.invars[1], column, own[place])
            for column, place in enumerate(places)
            if place in cuts[0]
        )

    def _is_own_place(self, atom: Any, column: int, rows: int) -> bool:
        """Whether a column of indices counts the rows."""
        maker = None if isinstance(atom, Literal) else self._makers.get(atom)
        if maker is None:
            return False
        name, given = maker.primitive.name, maker.invars
        if name == "concatenate":
            for piece in given:
                if column < (size := piece.aval.shape[maker.params["dimension"]]):
                    return self._is_own_place(piece, column, rows)
                column -= size
        if name == "iota":
            return maker.outvars[0].aval.shape[maker.params["dimension"]] == rows
        if name == "select_n":  # of a negative index the number of rows is added
            return all(self._is_own_place(case, column, rows) for case in given[1:])
        if name == "add":
            return getattr(given[1], "val", None) == rows and self._is_own_place(
                given[0], column, rows
            )
        return name in _VIEWS and self._is_own_place(given[0], column, rows)

    def _while(self, part: Any, whole: Any, given: list[Any]) -> list[Kind]:
        ends, bodies = (
            [each.params[name].jaxpr for each in (part, whole)]
            for name in ("cond_jaxpr", "body_jaxpr")
        )
        start, fixed = (whole.params[f"{name}_nconsts"] for name in ("cond", "body"))
        first, given, count = given[:start], given[start:], len(whole.outvars)
        found = self._loop(bodies[0], bodies[1], given, fixed, count, False)
        last = ends[1].eqns[-1:]
        if [end.primitive.name for end in last] == ["reduce_or"]:
            # Mapped over rows, a loop goes on while any row does, and a row that ended stays.
            makers = {out: equation for equation in bodies[1].eqns for out in equation.outvars}
            stays = [getattr(makers.get(out), "primitive", None) for out in bodies[1].outvars]
            ends = [end.replace(outvars=[end.eqns[-1].invars[0]]) for end in ends]
            if any(getattr(each, "name", "") != "select_n" for each in stays):
                return [_MIXED] * count
        chooser = self.run(ends[0], ends[1], [*first, *found])[0]
        return [_chosen(chooser, kind) for kind in found]

    def _cuts(self, part: Any, whole: Any) -> tuple[int, ...] | None:
        """The dimensions that hold rows; None if one is no multiple of the parts'."""
        shapes = [getattr(atom.aval, "shape", ()) for atom in (part, whole)]
        if len(shapes[0]) != len(shapes[1]):
            return None
        sizes = list(zip(*shapes, strict=True))
        if any(b not in (a, a * self.parts) for a, b in sizes):
            return None
        return tuple(at for at, (a, b) in enumerate(sizes) if a != b)

    def _loop(
        self, part: Jaxpr, whole: Jaxpr, given: list[Kind], fixed: int, carries: int,
        is_over_rows: bool,
    ) -> list[Kind]:  # fmt: skip
        first, carried, rest = (
            given[:fixed],
            given[fixed : fixed + carries],
            given[fixed + carries :],
        )
        if is_over_rows:
            carried = [Kind("total") if kind == _ZERO else kind for kind in carried]
        while True:
            found = self.run(part, whole, [*first, *carried, *rest])
            after = [_joined(pair) for pair in zip(carried, found[:carries], strict=True)]
            if after == carried:
                break
            carried = after
        if (
            is_over_rows
        ):  # what a row leaves to the next is a sum, or unknown unless it is as it was
            inside = zip(carried, whole.invars[fixed:], whole.outvars, strict=False)
            carried = [
                kind if kind.name == "total" or before is after else _MIXED
                for kind, before, after in inside
            ]
        return [*carried, *found[carries:]]


def _chosen(chooser: Kind, kind: Kind) -> Kind:
    """The kind of a value when `chooser` says whether it is taken."""
    if chooser in (_EVEN, _ZERO):
        return kind
    return _joined((kind, _ROWS)) if chooser == _ROWS and kind != _ZERO else _MIXED


def _is_elementwise(equation: Any, cut: tuple[int, ...]) -> bool:
    """Whether rows that are alike make rows that are alike."""
    if equation.primitive.name == "iota":
        return equation.params["dimension"] not in cut
    shape = equation.outvars[0].aval.shape
    shapes = {getattr(atom.aval, "shape", ()) for atom in equation.invars}
    return shape in shapes and shapes <= {shape, ()}


def _joined(kinds: Sequence[Kind]) -> Kind:
    """The kind of a value that may be any of these."""
    some = {*kinds} - {_ZERO} or {_ZERO}
    if len(some) > 1 and {kind.name for kind in some} <= {"even", "rows"}:
        return _ROWS if not any(kind.power for kind in some) else _MIXED
    return some.pop() if len(some) == 1 else _MIXED


def _of_linear(name: str, given: list[Kind], is_item: bool = False) -> Kind:
    """The kind of a product, a quotient or a sum."""
    names, powers = {kind.name for kind in given}, [kind.power for kind in given]
    if name == "div" and names == {"total"}:
        return _RATIO
    if name in (*_PRODUCTS, "div"):
        if name == "div" and given[1].name == "total":
            return _MIXED
        if _ZERO in given:
            return _ZERO
        power = sum(powers) if name != "div" else powers[0] - powers[1]
        if "total" in names:
            is_one = [kind.name for kind in given].count("total") == 1 and "rows" not in names
            return Kind("total", power) if is_one else _MIXED
        return Kind("rows" if "rows" in names else "even", power)
    some = {kind for kind in given if kind != _ZERO} or {_ZERO}
    powers = [kind.power for kind in some]
    if {kind.name for kind in some} <= {"total", "even"} and len(some) > 1:
        # A mean and a penalty on weights is a mean; a sum and anything is none.
        is_mean = {kind for kind in some if kind.name == "total"} == {Kind("total", -1)}
        return Kind("total", -1 if is_mean and _EVEN in some else 0)
    if {kind.name for kind in some} == {"total", "rows"}:  # a loop's sum and its next row
        return Kind("total", powers[0]) if is_item and len({*powers}) == 1 else _MIXED
    if len({kind.power for kind in some}) > 1:
        return _MIXED
    return Kind("rows", powers[0]) if len(some) > 1 else some.pop()
