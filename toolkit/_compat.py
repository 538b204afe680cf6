"""What differs between the versions of jax, flax and ipywidgets that the toolkit runs on."""

from collections.abc import Iterable
from typing import Any


def module_list(modules: Iterable[Any]) -> Any:
    """Modules as one attribute of a module: `nnx.List`, which flax has from 0.12 on."""
    from flax import nnx

    return getattr(nnx, "List", list)(modules)


def set_value(parameter: Any, value: Any) -> None:
    """Replace an nnx variable's value; flax 0.11 has no method for that."""
    if hasattr(parameter, "set_value"):
        parameter.set_value(value)
    else:
        parameter.value = value
