"""Sub-programs of a traced program, and the counts of its scans."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

INLINED = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
INLINED += (
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


def scan_counts(equation: Any, body: Jaxpr) -> tuple[int, int]:
    """Numbers of constants and carries of a scan; all other operands are scanned over their first
    axis."""

    def turns(outside, inside):
        pairs = zip(outside, inside, strict=True)
        return sum(outer.aval.ndim != one.aval.ndim for outer, one in pairs)

    carries = len(body.outvars) - turns(equation.outvars, body.outvars)
    return len(body.invars) - turns(equation.invars, body.invars) - carries, carries
