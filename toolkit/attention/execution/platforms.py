"""Programs that only some platforms can run, refused when they are lowered for another one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from toolkit._compat import varying, varying_axes


def run_on(branches: Mapping[str, Callable[..., Any]], *args: Any, otherwise: str) -> Any:
    """Run the branch of the platform for which the program is lowered, or refuse in one line."""
    shapes = jax.eval_shape(next(iter(branches.values())), *args)

    def refuse(*operands: Any) -> Any:
        refusal = _REFUSAL.bind(reason=otherwise)
        # Under `jax.shard_map` a kernel's results vary wherever one of its operands does.
        axes = tuple(frozenset().union(*map(varying_axes, jax.tree.leaves(operands))))
        refusal = varying(refusal, axes) if axes else refusal
        return jax.tree.map(lambda x: jnp.full(x.shape, refusal.astype(x.dtype)), shapes)

    return lax.platform_dependent(*args, **branches, default=refuse)


def _fail(platforms: Sequence[str], reason: str) -> NoReturn:
    raise ValueError(f"{reason}; the program is for {' and '.join(platforms)}.")


# A number whose program cannot be lowered. Since it depends on nothing, `jax.grad` and `jax.vmap`
# leave it alone.
_REFUSAL = Primitive("refusal")
_REFUSAL.def_abstract_eval(lambda *, reason: core.ShapedArray((), jnp.float32))
_REFUSAL.def_impl(lambda *, reason: _fail([jax.default_backend()], reason))
mlir.register_lowering(
    _REFUSAL, lambda context, *, reason: _fail(context.module_context.platforms, reason)
)
