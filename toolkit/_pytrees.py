"""Dataclasses as pytrees whose structure knows their class.

In jaxlib 0.10 to 0.12 two classes that `jax.tree_util.register_dataclass` registers have equal
structures if they have as many children and equal static fields. `jax.jit` finds programs by the
structures of arguments, and in some processes, by their addresses, runs that of another class.
"""

import functools
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, TypeVar

import jax
from jax.tree_util import GetAttrKey, register_pytree_with_keys

Class = TypeVar("Class", bound=type)


def register_dataclass(owner: Class) -> Class:
    """Make a dataclass a pytree whose structure knows its class.

    As `jax.tree_util.register_dataclass` and `flax.struct.dataclass` do; but with theirs, jaxlib
    0.10 to 0.12 may run the program of another class that has as many fields.

    Args:
        owner: a dataclass. A field whose metadata hold `{"static": True}` is part of the structure,
            so a program is compiled per value of it; the others are children.

    Returns:
        The class, so that this may stand above `@dataclass` as a decorator.

    Example:
        >>> from dataclasses import make_dataclass
        >>> Memory = register_dataclass(make_dataclass("Memory", ["matrix", "length"]))
        >>> jax.tree.map(jnp.shape, Memory(jnp.ones((2, 3)), jnp.zeros(2)))
        Memory(matrix=(2, 3), length=(2,))
    """
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


def check_classes(name: str, tree: Any) -> None:
    """Refuse a pytree with a node that jaxlib may take for another class's."""
    jax.tree.leaves(tree, is_leaf=functools.partial(_refuse, name))


def _refuse(name: str, node: Any) -> bool:
    structure = jax.tree.structure(node, is_leaf=lambda x: x is not node)
    data = structure.node_data()
    if data is not None and isinstance(data[1], tuple):
        names, twin = _twin(structure.num_leaves, len(data[1]))
        values = (*range(structure.num_leaves), *data[1])
        if structure == jax.tree.structure(twin(**dict(zip(names, values, strict=True)))):
            raise TypeError(
                f"{name}: {type(node).__name__} is registered by jax.tree_util.register_dataclass "
                "or by flax.struct, so jaxlib may run another class's program with it; use "
                "toolkit.attention.register_dataclass"
            )
    return False


@functools.cache
def _twin(children: int, static: int) -> tuple[list[str], type]:
    """Another class of that many fields, registered by jax: equal structures are the fault."""

    class Twin(SimpleNamespace):
        pass

    names = [f"x{i}" for i in range(children + static)]
    jax.tree_util.register_dataclass(Twin, names[:children], names[children:])  # noqa: TID251
    return names, Twin
