"""What `jax.linear_transpose` says of a mixer: linear in v and in q, but not as a program is.

A mixer also asks which numbers are finite, of values that a transpose is not given. JAX would stop
at the first choice between two arrays, without a word.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def without_transpose(outputs: Any) -> Any:
    """The same arrays; `jax.linear_transpose` of what leads to them is refused in one line."""
    return jax.tree.map(_same_p.bind, outputs)


# The identity. Its tangents pass beside it, so that gradients never meet it.
_same_p = Primitive("without_transpose")


def _transpose(_, x):
    raise NotImplementedError(
        "jax.linear_transpose of a mixer is not available, because it also asks which numbers are "
        "finite; use jax.vjp(function, zeros)[1], which is the transpose of a linear function."
    )


_same_p.def_impl(lambda x: x)
_same_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_same_p, lambda _, x: [x])
ad.primitive_jvps[_same_p] = lambda primals, tangents: (_same_p.bind(*primals), *tangents)
ad.primitive_transposes[_same_p] = _transpose
batching.primitive_batchers[_same_p] = lambda arrays, axes: (_same_p.bind(*arrays), *axes)
