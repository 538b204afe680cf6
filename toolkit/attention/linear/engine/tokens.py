"""What mixers pass to the engine, and the engine to the kernels."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit.attention._shapes import Key, Keys, Queries, Query, Value, Values
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.linear.gates import unit_length


class Tokens(NamedTuple):
    """What runs through time: the arrays (q, k, v, *others) of a rule's action, and the decay.

    The tokens of a sequence; those of one step have no axis `time`. Queries and keys may have fewer
    heads than values: each serves as many heads in a row (`own_keys`).
    """

    arrays: tuple[Float[Array, "batch time heads *size"], ...]
    g: Float[Array, "batch time heads channels"]  # log-decay; channels is 1 or key
    scale: Float[Array, ""]  # of the outputs


def gather_tokens(
    q: Queries | Query, k: Keys | Key, v: Values | Value, *others: Array, g: Array | None,
    scale: float | None, normalize_qk: bool = False,
) -> Tokens:  # fmt: skip
    """Give g its axes, the outputs a scale (key**-0.5 if None) and, if asked, q and k unit length.

    The tokens are those of a sequence, or one token of each. Without g the state forgets nothing.
    """
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    if g is None:
        # zeros_like, so that under `jax.shard_map` the decay varies wherever the values do.
        g = jnp.zeros_like(v[..., 0])
    g = (g if g.ndim == v.ndim else g[..., None]).astype(accumulator(v.dtype))
    of_outputs = q.shape[-1] ** -0.5 if scale is None else scale
    return Tokens((q, k, v, *others), g, jnp.asarray(of_outputs))


def own_keys(tokens: Tokens) -> Tokens:
    """Give every value head its own q and k, copied where heads share them."""
    q, k, v, *others = tokens.arrays
    q, k = (for_value_heads(x, v.shape[-2], axis=-2) for x in (q, k))
    return tokens._replace(arrays=(q, k, v, *others))


def for_value_heads(x: Array, value_heads: int, axis: int = 2) -> Array:
    """Heads repeated, so that every value head has its own."""
    groups = value_heads // x.shape[axis]
    return x if groups == 1 else jnp.repeat(x, groups, axis)
