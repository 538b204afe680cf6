r"""The masked softmax, and exact attention with it: what every form but the blockwise one computes.

    o_t = sum_{i in I_t} p_ti v_i      p_ti = exp(s_ti - lse_t)      lse_t = log sum_{I_t} exp(s_ti)

A query that sees no key gives 0. A number that is not finite shows in the queries that see it and
nowhere else, neither in outputs nor in gradients.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from toolkit._checks import checked
from toolkit.attention._precision import accumulator, half_precision, precise_einsum


class Softmax(NamedTuple):
    """A softmax before its division."""

    exponentials: Float[Array, "*rows keys"]  # relative to the largest score, 0 where not visible
    total: Float[Array, "*rows 1"]  # their sum; 1 for a row that sees nothing
    lse: Float[Array, "*rows 1"]  # logarithm of the sum of exponentials; -inf for such a row


class Attended(NamedTuple):
    """What attention over a selection returns, in the precision of sums.

    Attributes:
        out: outputs [queries, group, value]; 0 for a query that attends to nothing.
        weights: probabilities [queries, group, keys], 0 outside the selection.
        lse: logarithm of the sum of exponentials [queries, group]. Attention over two disjoint
            selections is their outputs weighed by softmax of the two.
    """

    out: Float[Array, "queries group value"]
    weights: Float[Array, "queries group keys"]
    lse: Float[Array, "queries group"]


def masked_softmax(scores: Float[Array, "*rows keys"], visible: Bool[Array, "*#rows keys"]):
    """A `Softmax` over the last axis, of the visible scores."""
    # The largest of a row that sees nothing is -inf, of one whose scores overflowed the lowest
    # finite number: the first gives 0, the other 0 / 0.
    lowest = float(jnp.finfo(scores.dtype).min)
    bounded = jnp.where(visible, jnp.maximum(scores, lowest), -jnp.inf)
    largest = lax.stop_gradient(bounded.max(axis=-1, keepdims=True, initial=-jnp.inf))
    is_empty = largest == -jnp.inf
    largest = jnp.where(is_empty, 0, largest)
    exponentials = jnp.exp(jnp.where(visible, scores, -jnp.inf) - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    total = jnp.where(is_empty, 1, jnp.where(total == 0, jnp.nan, total))
    return Softmax(exponentials, total, jnp.where(is_empty, -jnp.inf, largest + jnp.log(total)))


def fixed_scale(q: Array, scale: float | Array | None) -> tuple[Array, float]:
    """Queries, and the factor of their scores, known when compiling: size ** -0.5 if None.

    One that is an array, as a learned temperature is, multiplies the queries instead.
    """
    if isinstance(scale, Array):
        if scale.ndim:
            raise ValueError(f"scale must be one number; got shape {tuple(scale.shape)}.")
        precise = accumulator(q.dtype)
        return (q.astype(precise) * scale.astype(precise)).astype(q.dtype), 1.0
    return q, float(q.shape[-1] ** -0.5 if scale is None else scale)


@checked
def attend(
    q: Float[Array, "queries group key"],
    k: Float[Array, "*own keys key"],
    v: Float[Array, "*own keys value"],
    mask: Bool[Array, "queries keys"],
    *,
    scale: float,
) -> Attended:
    """Softmax attention of queries to the keys their mask selects, for the heads of one group.

        o_t = sum_{i in I_t} softmax_i(scale q_t . k_i) v_i

    Args:
        q: queries [queries, group, key].
        k: keys, the same for all queries [keys, key], or gathered for each [queries, keys, key].
        v: values [keys, value], or [queries, keys, value].
        mask: which keys each query attends to [queries, keys].
        scale: factor of the scores.

    Returns:
        An `Attended`: outputs, probabilities and residuals.

    Example:
        >>> q, k = jnp.zeros((1, 1, 2)), jnp.ones((3, 2))
        >>> attend(q, k, k, jnp.array([[True, True, False]]), scale=1.0).weights.tolist()
        [[[0.5, 0.5, 0.0]]]
    """
    product = partial(precise_einsum, precision=half_precision(q.dtype))
    # 0 * NaN is NaN, so products see finite numbers only; NaN returns to the rows that saw one.
    q_is_finite, k_is_finite, v_is_finite = (jnp.isfinite(x) for x in (q, k, v))
    is_finite = k_is_finite.all(axis=-1) & v_is_finite.all(axis=-1)
    is_finite = is_finite if is_finite.ndim == 2 else is_finite[None]
    is_sound = (is_finite | ~mask).all(axis=-1)[:, None] & q_is_finite.all(axis=-1)
    q = jnp.where(q_is_finite, q, 0)
    k, v = jnp.where(k_is_finite, k, 0), jnp.where(v_is_finite, v, 0)
    keys, values = ("qsk", "qsv") if k.ndim == 3 else ("sk", "sv")
    scores = scale * product(f"qgk,{keys}->qgs", q, k)
    exponentials, total, lse = masked_softmax(scores, mask[:, None])
    weights = exponentials / total
    out = product(f"qgs,{values}->qgv", weights.astype(v.dtype), v)
    return Attended(out + jnp.where(is_sound, 0, jnp.nan)[..., None], weights, lse[..., 0])
