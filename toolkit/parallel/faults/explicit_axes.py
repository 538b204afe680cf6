"""A program traced on explicit axes as one on auto axes, with its shardings as constraints.

On explicit axes the sharding is part of every array's type. What the program decides itself, by
`jax.sharding.reshard` and `out_sharding`, becomes constraints and the types are dropped, so that
the sharding of an argument can be changed without tracing again. Types that a gradient copies from
the forward pass are no decisions.
"""

from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from toolkit.parallel.dataflow.flow import source_of

_SHARDINGS = ("dst_sharding", "out_sharding", "sharding")
_FRESH = ("broadcast_in_dim", "iota", "convert_element_type")


def has_explicit_axes(mesh: Mesh) -> bool:
    """Whether shardings along some axis are part of types."""
    return AxisType.Explicit in mesh.axis_types


def on_auto_axes(mesh: Mesh) -> Mesh:
    """The same devices and names, with auto axes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))


def with_constraints(program: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """The program on a mesh of auto axes; it runs under `jax.set_mesh(mesh)`."""
    return ClosedJaxpr(_converted(program.jaxpr, mesh), program.consts)


def constraint(inside: Var, outside: Var, sharding: Any, source_info: Any) -> Any:
    """The equation outside = with_sharding_constraint(inside)."""
    struct = jax.ShapeDtypeStruct(outside.aval.shape, outside.aval.dtype)  # type: ignore
    with jax.set_mesh(sharding.mesh):
        traced = jax.make_jaxpr(jax.lax.with_sharding_constraint, static_argnums=1)(
            struct, sharding
        )
    return traced.jaxpr.eqns[0].replace(invars=[inside], outvars=[outside], source_info=source_info)


def _converted(jaxpr: Jaxpr, mesh: Mesh) -> Jaxpr:
    names: dict[Any, Any] = {}
    with jax.set_mesh(mesh):
        context = jax.make_jaxpr(lambda x: x + 1)(0.0).jaxpr.eqns[0].ctx

    def renamed(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom
        return names.setdefault(atom, Var(_without_sharding(atom.aval)))

    def converted(equation: Any) -> list[Any]:
        name, params = equation.primitive.name, dict(equation.params)
        given = [renamed(atom) for atom in equation.invars]
        if name == "mesh_cast":  # between explicit and auto axes
            names[equation.outvars[0]] = given[0]
            return []
        decided = next(
            (key for key in _SHARDINGS if isinstance(params.get(key), NamedSharding)), None
        )
        sharding = None if decided is None else NamedSharding(mesh, params.pop(decided).spec)
        outs = [renamed(atom) for atom in equation.outvars]
        if sharding is not None and name in ("reshard", "sharding_constraint"):
            return [constraint(given[0], outs[0], sharding, equation.source_info)]
        if name == "shard_map":
            _check_is_manual(equation)
            params["mesh"] = _value(params["mesh"], mesh)
        else:
            params = {key: _value(value, mesh) for key, value in params.items()}
        params |= {} if decided is None else {decided: None}
        is_copied = "transpose(" in str(equation.source_info.name_stack)
        ends = [] if sharding is None or name in _FRESH or is_copied else outs[:1]
        results = [Var(atom.aval) for atom in ends] + outs[len(ends) :]
        changed = equation.replace(invars=given, outvars=results, params=params, ctx=context)
        pairs = zip(results, ends, strict=False)
        return [changed, *(constraint(*pair, sharding, equation.source_info) for pair in pairs)]

    places = {
        name: [renamed(atom) for atom in getattr(jaxpr, name)] for name in ("constvars", "invars")
    }
    equations = [new for equation in jaxpr.eqns for new in converted(equation)]
    return jaxpr.replace(
        **places, eqns=equations, outvars=[renamed(atom) for atom in jaxpr.outvars]
    )


def _value(value: Any, mesh: Mesh) -> Any:
    """A parameter of an equation on auto axes."""
    if isinstance(value, Jaxpr):
        return _converted(value, mesh)
    if isinstance(value, ClosedJaxpr):
        return with_constraints(value, mesh)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_value(inner, mesh) for inner in value)
    if isinstance(value, NamedSharding):
        return NamedSharding(mesh, value.spec)
    if isinstance(value, Mesh | AbstractMesh) and not value.empty:
        return mesh if isinstance(value, Mesh) else mesh.abstract_mesh
    return value


def _without_sharding(kind: Any) -> Any:
    if not isinstance(kind, ShapedArray):
        return kind
    return ShapedArray(kind.shape, kind.dtype, kind.weak_type)


def _check_is_manual(equation: Any) -> None:
    params = equation.params
    manual = params.get("newly_manual_axes", params.get("manual_axes", params["mesh"].axis_names))
    left = {*params["mesh"].axis_names} - {*manual}
    if left:
        raise ValueError(
            f"function: jax.shard_map at {source_of(equation)} leaves the explicit axes "
            f"{', '.join(sorted(left))} to the compiler; want it over all axes of the mesh"
        )
