"""Tokens that are not finite: replaced by zeros, then NaN wherever they would have reached."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Shaped

from toolkit.attention.linear.engine.tokens import Tokens, for_value_heads


class Poison(NamedTuple):
    """Where values that are not finite must show: in outputs, and in the final state."""

    out: Bool[Array, "batch time heads"]
    state: Bool[Array, "batch heads"]

    def shown(self, out: Array, state: Any) -> tuple[Array, Any]:
        """Outputs and the final state, NaN in these places."""

        def of_array(x: Array) -> Array:
            is_floating = jnp.issubdtype(x.dtype, jnp.floating)
            return jnp.where(_over(self.state, x), jnp.nan, x) if is_floating else x

        return jnp.where(self.out[..., None], jnp.nan, out), jax.tree.map(of_array, state)


def _over(ok: Array, x: Array) -> Array:
    """Append axes of size 1 for those that only x has."""
    return ok.reshape(ok.shape + (1,) * (x.ndim - ok.ndim))


def quarantine(
    tokens: Tokens, state: Any, is_given: bool, starts: Array | None
) -> tuple[Tokens, Any, Poison]:
    """Replace tokens that are not finite by zeros, and return where each would have shown.

    Tokens share chunks, and 0 * NaN is NaN: masks alone would let one spoil the tokens before it,
    other documents, and the gradients of both. A positive log-decay counts as NaN.
    """
    (query, *others), g, scale = tokens

    own = partial(for_value_heads, value_heads=g.shape[2])
    reads, finite = _are_finite(query), [_are_finite(x) for x in others]
    keeps = jnp.all(g <= 0, axis=-1)  # -inf clears the state, and is allowed
    for is_finite in finite:
        keeps &= own(is_finite)

    def blank(x: Array, ok: Array) -> Array:
        return jnp.where(_over(ok, x), x, jnp.zeros_like(x))

    # A key that heads share stays for the others: where the value is 0, it writes nothing.
    places = (
        keeps if x.shape[2] == g.shape[2] else ok for x, ok in zip(others, finite, strict=True)
    )
    arrays = (blank(query, reads), *map(blank, others, places))
    clean = Tokens(arrays, blank(g, keeps), scale)
    faulty = ~keeps
    if is_given:  # XLA would fold our own zeros while it compiles, for seconds
        is_state = jnp.ones(faulty.shape[::2], bool)
        for x in jax.tree.leaves(state):
            is_state &= jnp.all(jnp.isfinite(x), axis=tuple(range(2, x.ndim)))
        faulty = faulty.at[:, 0].set(faulty[:, 0] | ~is_state)
        state = jax.tree.map(partial(blank, ok=is_state), state)
    reach = _until_document_ends(faulty, starts)
    return clean, state, Poison(reach | ~own(reads), reach[:, -1])


def _are_finite(x: Shaped[Array, "batch time heads *size"]) -> Bool[Array, "batch time heads"]:
    if x.ndim == 3:
        return jnp.isfinite(x)
    # 0 * NaN is NaN: a product with zeros takes a third of the time of comparisons on a CPU.
    zeros = jnp.zeros(x.shape[-1], x.dtype)
    return ~jnp.isnan(jnp.einsum("bthk,k->bth", lax.stop_gradient(x), zeros))


def _until_document_ends(faulty: Array, starts: Array | None) -> Array:
    """From every fault to the end of its document."""
    index = jnp.arange(faulty.shape[1], dtype=jnp.int32)[None, :, None]
    if starts is None:
        first_fault = jnp.where(faulty, index, faulty.shape[1]).min(axis=1, keepdims=True)
        return index >= first_fault
    last_fault = lax.cummax(jnp.where(faulty, index, -1), axis=1)
    return last_fault >= lax.cummax(jnp.where(starts[..., None], index, 0), axis=1)
