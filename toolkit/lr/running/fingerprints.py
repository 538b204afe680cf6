"""The check that a resumed search has the same batches, loss and optimiser.

Batches are identified by their bytes, functions by their traced programs including constants.
Digests are arrays, so that any checkpoint can hold them.
"""

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Addresses and names differ between traces of the same function.
_INCIDENTAL = re.compile(r"0x[0-9a-f]+|\bname=\S+")


FINGERPRINTS = ("batches", "loss_fn", "optimizer", "validation", "jax")


def fingerprints(
    loss_fn: Callable, optimizer: optax.GradientTransformation, state: Any, validation: Any,
    batch: Any, batches: np.ndarray,
) -> dict[str, np.ndarray]:  # fmt: skip
    """A digest for each; `batch` is one's shapes, `batches` the digest of their data."""
    optimizer = optax.with_extra_args_support(optimizer)
    own = () if state.model_state is None else (state.model_state,)

    def first_update(params: Any) -> tuple:
        state = optimizer.init(params)
        return state, optimizer.update(params, state, params, value=jnp.float32(1))

    def loss(params: Any, own: tuple, batch: Any) -> Any:
        # Rebuilt in the gradient's trace, because a loss may change its arguments, as nnx does.
        return loss_fn(params, *jax.tree.map(lambda leaf: leaf, own), batch)

    # With the gradient, which may be one of its own.
    with_gradient = jax.value_and_grad(loss, has_aux=bool(own))
    parts = (
        _parts(jax.make_jaxpr(with_gradient)(state.params, own, batch)),
        _parts(jax.make_jaxpr(first_update)(state.params)),
        [] if validation is None else _parts(jax.make_jaxpr(validation)(state.params, *own)),
        [jax.__version__],
    )
    return dict(zip(FINGERPRINTS, [batches, *map(digest_of, parts)], strict=True))


def require_same_fingerprints(begun: dict[str, Any], now: dict[str, np.ndarray]) -> None:
    """Refuse to resume with another loss, optimiser, validation or batches."""
    changed = [name for name in now if not np.array_equal(begun[name], now[name])]
    if "jax" in changed:  # which traces other programs
        warnings.warn(
            "start: begun under another version of jax: whether loss_fn and optimizer are the same "
            "cannot be told",
            stacklevel=4,
        )
        changed = [name for name in changed if name == "batches"]
    if changed:
        raise ValueError(
            f"start: the search was begun with other {' and '.join(changed)}; it goes on with "
            "those alone, an iterator from its first batch"
        )


def digest_of(parts: list[Any]) -> np.ndarray:
    """SHA-256 of texts and arrays, [32] uint8."""
    whole = hashlib.sha256()
    for part in parts:
        add_part(whole, part)
    return np.frombuffer(whole.digest(), np.uint8)


def add_part(whole: Any, part: Any) -> None:
    """Add a text or an array to a hash."""
    if isinstance(part, str):
        whole.update(part.encode())
        return
    is_key = jnp.issubdtype(jnp.result_type(part), jax.dtypes.prng_key)
    array = np.ascontiguousarray(jax.random.key_data(part) if is_key else part)
    whole.update(f"{array.dtype}{array.shape}".encode())
    whole.update(array.view(np.uint8).data)


def _parts(closed: Any) -> list[Any]:
    """The text of a program and its constant arrays, in order."""
    return [_INCIDENTAL.sub("", str(closed.jaxpr)), *_constants(closed)]


def _constants(closed: Any) -> Iterator[Any]:
    yield from getattr(closed, "consts", ())
    jaxpr: Callable | Any = getattr(closed, "jaxpr", closed)
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _constants(inner)


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
