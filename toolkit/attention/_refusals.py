"""Kernels have a gradient by hand and no other derivative: whoever asks for one is told.

JAX would raise errors of its own, in which neither a mixer nor another `implementation` occurs.
"""

from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

_BESIDE = '; implementation="xla" has derivatives of any order in both modes.'


def gradient_only(tree: Any, what: str = 'implementation="pallas"', beside: str = _BESIDE) -> Any:
    """What goes into a function with a gradient only: forward mode is refused, when it runs."""
    message = f"{what} has no forward mode{beside}"
    return jax.tree.map(partial(_reverse_mode_only, message), tree)


def no_derivative(what: str, tree: Any) -> Any:
    """What goes into kernels without a derivative; `what` is computed by them."""
    return jax.tree.map(partial(_refused, what), tree)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reverse_mode_only(message: str, x: Array) -> Array:
    return x


@_reverse_mode_only.defjvp
def _reverse_mode_only_jvp(message, primals, tangents):
    return primals[0], _tangent_p.bind(tangents[0], message=message)


def _refuse_to_run(*_: Any, message: str, **__: Any) -> Any:
    raise NotImplementedError(message)


# The tangent of forward mode, which reverse mode only transposes.
_tangent_p = Primitive("tangent_of_a_kernel")
_tangent_p.def_impl(_refuse_to_run)
_tangent_p.def_abstract_eval(lambda x, message: x)
ad.deflinear(_tangent_p, lambda cotangent, *_, **__: [cotangent])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, _refuse_to_run)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refused(what: str, x: Array) -> Array:
    return x


@_refused.defjvp
def _refused_jvp(what, primals, tangents):
    raise NotImplementedError(f'{what} of implementation="pallas" has no derivative' + _BESIDE)
