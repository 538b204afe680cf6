r"""Functions with hand-written value and gradient, whose other derivatives are JAX's.

`jax.custom_vjp` refuses forward mode, and JAX does not transpose a loop whose length is traced. So
a function comes in three parts here: fast `forward` and `backward`, and `equation`, the same
mathematics in plain JAX. With y = f(x),

    value           f(x)                          forward
    gradient        g(x, dy) = f'(x)^T dy         backward
    forward mode    f'(x) dx                      jvp of equation
    beyond          g'(x, dy) (dx, ddy)           jvp of the vjp of equation, and so on

The tangent map f'(x) dx is a primitive of its own, linear in dx, whose transpose is `backward`.

Derivatives that a function lacks are refused here in one line, since JAX's own errors would name
neither the mixer nor another `implementation`: the transpose of a mixer (`without_transpose`), and
all derivatives of kernels but their gradient (`gradient_only`, `no_derivative`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from toolkit.attention.execution.cores import refuse_explicit_axes


def differentiable(forward: Callable, backward: Callable, equation: Callable) -> Callable:
    """The function of (inputs, context) that `forward` and `equation` both compute."""
    # forward: (inputs, context) -> outputs, a tuple of arrays; `inputs` is a pytree of floating-
    # point arrays, `context` one of anything else. backward: (outputs, inputs, context, d_outputs,
    # is_wanted) -> gradients like `inputs`, with anything where `is_wanted`, a tree of booleans
    # like it, says no. equation: as `forward`, in operations that JAX differentiates.

    @jax.custom_jvp
    def function(inputs, context):
        # JAX states the mesh where it differentiates, and would trace all anew where none was.
        with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
            return without_transpose(forward(inputs, context))

    @partial(function.defjvp, symbolic_zeros=True)
    def function_jvp(primals, tangents):
        inputs, context = primals
        outputs = function(inputs, context)
        changes = jax.tree.leaves(tangents[0])
        is_wanted = tuple(not isinstance(change, SymbolicZero) for change in changes)
        changes = [change for change in changes if not isinstance(change, SymbolicZero)]
        _, tree = jax.tree.flatten((inputs, context))

        def tangent(_, primals, changes):
            inputs, context = jax.tree.unflatten(tree, primals)
            changed, given = _choose(inputs, is_wanted)
            run = lambda leaves: equation(given(leaves), context)  # noqa: E731
            return list(jax.jvp(run, (changed,), (list(changes),))[1])

        def transpose(outputs, primals, d_outputs):
            inputs, context = jax.tree.unflatten(tree, primals)
            return gradient(is_wanted, outputs, inputs, context, tuple(d_outputs))

        operands = [*outputs, *jax.tree.leaves(primals), *changes]
        counts = len(outputs), len(changes)
        d_outputs = _linear_p.bind(*operands, tangent=tangent, transpose=transpose, counts=counts)
        return outputs, tuple(d_outputs)

    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def gradient(is_wanted, outputs, inputs, context, d_outputs):
        refuse_explicit_axes(jax.tree.leaves((inputs, d_outputs)), "this gradient")
        tree = jax.tree.structure(inputs)
        wanted = jax.tree.unflatten(tree, is_wanted)
        d_inputs = tree.flatten_up_to(backward(outputs, inputs, context, d_outputs, wanted))
        return [d for w, d in zip(is_wanted, d_inputs, strict=True) if w]

    @gradient.defjvp
    def gradient_jvp(is_wanted, primals, tangents):
        # The outputs follow from the inputs, so their tangents are ignored.
        _, inputs, context, d_outputs = primals
        _, d_inputs, _, dd_outputs = tangents

        def plain(inputs, d_outputs):
            changed, given = _choose(inputs, is_wanted)
            return jax.vjp(lambda leaves: equation(given(leaves), context), changed)[1](d_outputs)[
                0
            ]

        changes = jax.jvp(plain, (inputs, d_outputs), (d_inputs, dd_outputs))[1]
        return gradient(is_wanted, *primals), changes

    return function


def _choose(inputs: Any, is_wanted: tuple[bool, ...]) -> tuple[list, Callable]:
    """The wanted leaves, and a function that replaces them."""
    leaves, tree = jax.tree.flatten(inputs)

    def given(chosen):
        chosen = iter(chosen)
        filled = [next(chosen) if w else x for w, x in zip(is_wanted, leaves, strict=True)]
        return jax.tree.unflatten(tree, filled)

    return [x for w, x in zip(is_wanted, leaves, strict=True) if w], given


# ---------------------------------------------------------------- the tangent map
# Operands are the outputs, whose shapes its results have, then primals, then tangents, in which it
# is linear; `counts` are those of the first and the last.

_linear_p = Primitive("hand_written_transpose")
_linear_p.multiple_results = True


def _split(operands, counts):
    outputs, changes = counts
    stop = len(operands) - changes
    return operands[:outputs], operands[outputs:stop], operands[stop:]


@_linear_p.def_impl
def _run(*operands, tangent, transpose, counts):
    return tangent(*_split(operands, counts))


@_linear_p.def_abstract_eval
def _results(*operands, tangent, transpose, counts):
    return list(operands[: counts[0]])


mlir.register_lowering(_linear_p, mlir.lower_fun(_run, multiple_results=True))


def _jvp(operands, tangents, **params):
    """The map is linear in the last operands; for the others, JAX differentiates its equation."""
    outputs, primals, changes = _split(operands, params["counts"])
    _, d_primals, d_changes = _split(tangents, params["counts"])
    results = _linear_p.bind(*operands, **params)
    total = [jnp.zeros_like(result) for result in results]
    if any(type(d) is not ad.Zero for d in d_changes):
        d_changes = [ad.instantiate_zeros(d) for d in d_changes]
        total = _linear_p.bind(*outputs, *primals, *d_changes, **params)
    moved = [i for i, d in enumerate(d_primals) if type(d) is not ad.Zero]
    if moved:

        def of_moved(leaves):
            filled = list(primals)
            for i, leaf in zip(moved, leaves, strict=True):
                filled[i] = leaf
            return params["tangent"](outputs, filled, changes)

        start, direction = ([x[i] for i in moved] for x in (primals, d_primals))
        _, more = jax.jvp(of_moved, (start,), (direction,))
        total = [a + b for a, b in zip(total, more, strict=True)]
    return results, total


def _transpose(d_results, *operands, tangent, transpose, counts):
    outputs, primals, _ = _split(operands, counts)
    d_results = [ad.instantiate_zeros(d) for d in d_results]
    return [None] * (len(outputs) + len(primals)) + list(transpose(outputs, primals, d_results))


def _batch(operands, axes, *, tangent, transpose, counts):
    """Outputs and tangents all get the axis in front, or their shapes would not say it."""
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    outputs, primals, changes = _split(operands, counts)
    output_axes, primal_axes, change_axes = _split(list(axes), counts)

    def in_front(x, axis):
        return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)

    outputs, changes = (
        [in_front(x, a) for x, a in zip(xs, axes, strict=True)]
        for xs, axes in ((outputs, output_axes), (changes, change_axes))
    )
    in_axes = ([0] * len(outputs), list(primal_axes))

    def over(function):
        def batched(outputs, primals, last):
            return jax.vmap(function, (*in_axes, [0] * len(last)), axis_size=size)(
                list(outputs), list(primals), list(last)
            )

        return batched

    results = _linear_p.bind(
        *outputs,
        *primals,
        *changes,
        tangent=over(tangent),
        transpose=over(transpose),
        counts=counts,
    )
    return results, [0] * len(results)


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch


def without_transpose(outputs: Any) -> Any:
    """Return the arrays, and refuse `jax.linear_transpose` of what computed them in one line."""
    return jax.tree.map(_same_p.bind, outputs)


# The identity. Its tangents bypass it, so that gradients never meet it.
_same_p = Primitive("without_transpose")


def _refuse_transpose(_, x):
    raise NotImplementedError(
        "jax.linear_transpose of a mixer is not available, because it also asks which numbers are "
        "finite; use jax.vjp(function, zeros)[1], which is the transpose of a linear function."
    )


_same_p.def_impl(lambda x: x)
_same_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_same_p, lambda _, x: [x])
ad.primitive_jvps[_same_p] = lambda primals, tangents: (_same_p.bind(*primals), *tangents)
ad.primitive_transposes[_same_p] = _refuse_transpose
batching.primitive_batchers[_same_p] = lambda arrays, axes: (_same_p.bind(*arrays), *axes)


def gradient_only(tree: Any, name: str = "pallas", message: str = "") -> Any:
    """Mark the inputs of a form with a gradient only: forward mode is refused when it runs."""
    message = message or f'implementation="{name}" has no forward mode{_beside(name)}'
    return jax.tree.map(partial(_reverse_mode_only, message), tree)


def no_derivative(what: str, tree: Any, name: str = "pallas") -> Any:
    """Mark the inputs of kernels without a derivative, which compute `what` of a form."""
    message = f'{what} of implementation="{name}" has no derivative{_beside(name)}'
    return jax.tree.map(partial(_refused, message), tree)


def _beside(name: str) -> str:
    other = "xla" if name == "pallas" else "blockwise"
    return f'; implementation="{other}" has derivatives of any order in both modes.'


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
def _refused(message: str, x: Array) -> Array:
    return x


@_refused.defjvp
def _refused_jvp(message, primals, tangents):
    raise NotImplementedError(message)
