"""Sub-programs of a traced program, and the counts of its scans."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

CALLS = ("jit", "pjit", "closed_call", "core_call")
REMATERIALISED = ("remat", "remat2", "checkpoint")
INLINED = (
    *CALLS,
    *REMATERIALISED,
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_lin",
    "mesh_call",
)


def inner_program(equation: Any) -> ClosedJaxpr | None:
    """The program of a call."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = equation.params.get(name)
        if isinstance(found, Jaxpr):
            return ClosedJaxpr(found, ())
        if found is not None:
            return found
    return None


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with the equations of its calls in line, also inside of its scans."""
    return ClosedJaxpr(_inlined(program.jaxpr), program.consts)


def _inlined(jaxpr: Jaxpr) -> Jaxpr:
    known: dict[Var, Any] = {}
    equations: list[Any] = []

    def renamed(atoms: Any, names: dict[Var, Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]

    for equation in jaxpr.eqns:
        equation = equation.replace(invars=renamed(equation.invars, known))
        name, inner = equation.primitive.name, inner_program(equation)
        if name in CALLS and inner is not None and not inner.consts:
            body = _inlined(inner.jaxpr)
            names: dict[Var, Any] = dict(zip(body.invars, equation.invars, strict=True))
            for inner in body.eqns:
                given = renamed(inner.invars, names)
                names |= {out: Var(out.aval) for out in inner.outvars}
                equations.append(inner.replace(invars=given, outvars=renamed(inner.outvars, names)))
            known |= zip(equation.outvars, renamed(body.outvars, names), strict=True)
            continue
        if name in ("scan", *REMATERIALISED) and inner is not None:
            body = equation.params["jaxpr"]
            body = _inlined(body) if isinstance(body, Jaxpr) else inlined(body)
            equation = equation.replace(params=equation.params | {"jaxpr": body})
        equations.append(equation)
    return jaxpr.replace(eqns=equations, outvars=renamed(jaxpr.outvars, known))


def equations_of(
    function: Callable, given: Sequence[Var], results: Sequence[Var], source: Any
) -> list[Any]:
    """The equations of a function of these variables, with the lines of the equation `source`."""
    traced = jax.make_jaxpr(function)(*(atom.aval for atom in given)).jaxpr
    names: dict[Any, Any] = dict(zip(traced.invars, given, strict=True))
    names |= zip(traced.outvars, results, strict=True)
    return [
        equation.replace(
            invars=[
                atom if isinstance(atom, Literal) else names.get(atom, atom)
                for atom in equation.invars
            ],
            outvars=[names.get(atom, atom) for atom in equation.outvars],
            source_info=source.source_info,
        )
        for equation in traced.eqns
    ]


def scan_counts(equation: Any, body: Jaxpr) -> tuple[int, int]:
    """Numbers of constants and carries of a scan; all other operands are scanned over their first
    axis."""

    def turns(outside, inside):
        pairs = zip(outside, inside, strict=True)
        return sum(outer.aval.ndim != own.aval.ndim for outer, own in pairs)

    carries = len(body.outvars) - turns(equation.outvars, body.outvars)
    return len(body.invars) - turns(equation.invars, body.invars) - carries, carries
