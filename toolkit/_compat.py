"""Differences between the supported versions of jax, flax and ipywidgets.

The oldest are Colab's: jax 0.7.2, flax 0.11.2, ipywidgets 7.7.1. All version checks are here. The
GPU kernels refuse to run on old versions (`require_jax`).
"""

from collections.abc import Iterable
from typing import Any

import jax


def require_jax(version: str, what: str) -> None:
    """Raise if jax is older than a version such as "0.10", in which `what` first works."""
    if jax.__version_info__ < tuple(map(int, version.split("."))):
        raise NotImplementedError(
            f"{what} need jax >= {version}; this is {jax.__version__}. "
            'implementation="xla" runs here.'
        )


def distributed_options(shutdown_seconds: int) -> dict[str, Any]:
    """What `jax.distributed.initialize` takes beside addresses; later ones leave SIGTERM alone."""
    if not hasattr(jax.config, "jax_enable_preemption_service"):
        return {}
    jax.config.update("jax_enable_preemption_service", False)
    return {"shutdown_timeout_seconds": shutdown_seconds}


def coordination() -> Any:
    """The client of the service by which the processes of a job find each other; None alone."""
    from jax._src import distributed  # jax has no public name for it

    return distributed.global_state.client


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which an array varies under `jax.shard_map`."""
    kind = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def varying(x: Any, axes: tuple[str, ...]) -> Any:
    """An array made to vary over more mesh axes under `jax.shard_map`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)  # pyright: ignore


def vary_alike(tree: Any) -> Any:
    """Under `jax.shard_map`: all arrays vary over every mesh axis that one of them varies over.

    Kernels and carries of loops need that. The gradient of an array that was the same on all
    devices is summed over them.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))

    def vary(x: Any) -> Any:
        missing = tuple(axes - varying_axes(x))
        return varying(x, missing) if missing else x

    return jax.tree.map(vary, tree)


def output_like(x: Any, like: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `x`, varying over the mesh axes of `like`."""
    kind = jax.typeof(like)
    if hasattr(kind, "manual_axis_type"):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind.manual_axis_type)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, vma=kind.vma)  # pyright: ignore


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


def tooltip(text: str) -> dict[str, str]:
    """The argument that gives a widget a tooltip; ipywidgets 7 names it after the description."""
    from ipywidgets import DOMWidget

    has_tooltip = "tooltip" in DOMWidget.class_trait_names()
    return {"tooltip" if has_tooltip else "description_tooltip": text}
