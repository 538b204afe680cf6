"""Dataclasses as pytrees whose structure knows their class.

In jaxlib 0.10 to 0.12 two classes that `jax.tree_util.register_dataclass` registers have equal
structures if they have as many children and equal static fields. `jax.jit` finds programs by the
structures of arguments, and in some processes, by their addresses, runs that of another class.
"""

from dataclasses import fields
from typing import Any, TypeVar

from jax.tree_util import GetAttrKey, register_pytree_with_keys

Class = TypeVar("Class", bound=type)


def register_dataclass(owner: Class) -> Class:
    """Make a dataclass a pytree; fields whose metadata say `static` are part of its structure."""
    children = [x.name for x in fields(owner) if not x.metadata.get("static")]
    static = [x.name for x in fields(owner) if x.metadata.get("static")]
    names, keys = children + static, [GetAttrKey(name) for name in children]

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(node, x) for x in children], tuple([getattr(node, x) for x in static])

    def flatten_with_keys(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values, settings = flatten(node)
        return list(zip(keys, values, strict=True)), settings

    def unflatten(settings: tuple[Any, ...], values: Any) -> Any:
        return owner(**dict(zip(names, (*values, *settings), strict=True)))

    register_pytree_with_keys(owner, flatten_with_keys, unflatten, flatten)
    return owner
