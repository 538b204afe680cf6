r"""Attention to parts of the keys becomes attention to all of them.

A part p gives its output o_p and the logarithm of its sum of exponentials, L_p. Then

    L = log sum_p exp(L_p)        o = sum_p exp(L_p - L) o_p

Ring attention passes keys around and merges what each part gave; split-k decoding cuts one long
cache. An attention sink is a part whose value is 0: all it does is take weight.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit._kinds import check_floating, shown
from toolkit.attention._shapes import HeadGates, HeadValues


@checked
def merge_attention(*parts: tuple[HeadValues, HeadGates]) -> tuple[HeadValues, HeadGates]:
    """Merge what attention to disjoint parts of the keys returned.

        L = log sum_p exp(L_p)        o = sum_p exp(L_p - L) o_p

    Args:
        *parts: of each part its output [batch, time, heads, value] and its residual
            [batch, time, heads], as `softmax_attention(..., return_residual=True)` returns them.

    Returns:
        Output and residual of attention to all of the keys; differentiable any number of times.

    Source: Dao et al. (2022), arXiv:2205.14135, section 3.1; Liu et al. (2023), arXiv:2310.01889
        (ring attention).

    Example:
        >>> q = k = v = jnp.ones((1, 4, 2, 4))
        >>> how = {"is_causal": False, "return_residual": True}
        >>> halves = [softmax_attention(q, k[:, at], v[:, at], **how) for at in ([0, 1], [2, 3])]
        >>> out, residual = merge_attention(*((out, residual) for out, _, residual in halves))
        >>> out.shape, residual.shape
        ((1, 4, 2, 4), (1, 4, 2))
    """
    return combine(*parts)


@checked
def combine(
    *parts: tuple[Float[Array, "... value"], Float[Array, "..."]],
) -> tuple[Float[Array, "... value"], Float[Array, "..."]]:
    """Merge parts of any leading axes, as `merge_attention` does those of sequences.

        L = log sum_p exp(L_p)        o = sum_p exp(L_p - L) o_p

    Args:
        *parts: of each part its output [..., value] and its residual [...], the logarithm of its
            sum of exponentials; -inf where it sees nothing.

    Returns:
        Output and residual of attention to all of the keys, whatever the order of the parts.

    Example:
        >>> one, two = (jnp.zeros((1, 2)), jnp.zeros(1)), (jnp.ones((1, 2)), jnp.zeros(1))
        >>> out, residual = combine(one, two)
        >>> out.tolist()
        [[0.5, 0.5]]
    """
    if not parts:
        raise ValueError("there must be at least one part to merge; got none.")
    for part in parts:
        _check_part(part, parts[0])
    residuals = jnp.stack([residual for _, residual in parts])
    largest = lax.stop_gradient(residuals.max(axis=0))
    largest = jnp.where(largest == -jnp.inf, 0, largest)  # no part sees anything
    weights = jnp.exp(residuals - largest[None])
    total = weights.sum(axis=0)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    shares = (weights / total[None])[..., None]
    outs = jnp.stack([out for out, _ in parts])
    out = (shares * outs.astype(shares.dtype)).sum(axis=0)
    residual = jnp.where(is_empty, -jnp.inf, largest + jnp.log(total))
    return out.astype(outs.dtype), residual


def _check_part(part: Any, first: tuple[Array, Array]) -> None:
    """Refuse what is no output with its residual, or does not fit the first part."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise TypeError(f"a part must be a pair (output, residual); got {shown(part)}.")
    for name, x, like in zip(("output", "residual"), part, first, strict=False):
        if not hasattr(x, "ndim"):
            raise TypeError(f"the {name} of a part must be an array; got {type(x).__name__}.")
        check_floating(f"the {name} of a part", x)
        if x.shape != like.shape:
            found = f"{tuple(like.shape)} and {tuple(x.shape)}"
            raise ValueError(f"the {name}s of all parts must have one shape; got {found}.")
    out, residual = part
    if out.shape[:-1] != residual.shape:
        raise ValueError(
            f"the residual of a part must have the shape of its output without the values, "
            f"{tuple(out.shape[:-1])}; got {tuple(residual.shape)}."
        )


def with_sinks(
    out: HeadValues, residual: HeadGates, sinks: Float[Array, "heads"] | HeadGates
) -> tuple[HeadValues, HeadGates]:
    """Merge with a part whose score is the sink of the head, or of query and head, and whose value
    is 0."""
    sinks = sinks.astype(residual.dtype)
    sinks = sinks.reshape(1, 1, -1) if sinks.ndim == 1 else sinks
    # A query that sees nothing leaves all weight to the sink, even to one of -inf.
    is_empty = residual == -jnp.inf
    seen = jnp.where(is_empty, 0, residual)
    share = jnp.where(is_empty, 0, jax.nn.sigmoid(seen - sinks))[..., None]
    total = jnp.where(is_empty, sinks, jnp.logaddexp(seen, sinks))
    return (share * out.astype(share.dtype)).astype(out.dtype), total
