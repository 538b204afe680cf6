"""What a traced program calls: programs within it, and the loops of scans."""

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
    """The program a call runs."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = equation.params.get(name)
        if isinstance(found, Jaxpr):
            return ClosedJaxpr(found, ())
        if found is not None:
            return found
    return None


def scan_counts(equation: Any, body: Jaxpr) -> tuple[int, int]:
    """Constants and carries of a scan; what is neither has an axis of turns outside of its body."""

    def turns(outside, inside):
        pairs = zip(outside, inside, strict=True)
        return sum(outer.aval.ndim != one.aval.ndim for outer, one in pairs)

    carries = len(body.outvars) - turns(equation.outvars, body.outvars)
    return len(body.invars) - turns(equation.invars, body.invars) - carries, carries
