r"""What evicting systems share: one score per token, known before the query.

A published cache frees the rows that it evicts. Here they stay, unread, so that systems with equal
budgets can be compared on one cache: `Decoded.bytes_read` is what the published cache would read.
Where a system keeps every generated token, these stand before those of the prompt, the newest
first, within the same budget; the published cache grows by them instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention._attend import masked_softmax
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.selector import Selector

TOGETHER = 64  # queries of a prompt at a time
_STEP = 2.0**-23  # between two numbers from 1 to 2 in float32


@register_dataclass
@dataclass(frozen=True)
class Evictor(Selector):
    """A system whose index is a score per token [capacity], -inf for a token that is gone."""

    group: ClassVar[str] = "sum"
    estimates_mass: ClassVar[bool] = False
    compares_scores: ClassVar[bool] = True
    sees_queries: ClassVar[bool] = True

    def update(self, index: Array, k: Array, v: Array, position) -> Array:
        return index.at[position].set(newest(position))

    def scores(self, index: Array, keys: Array, q: Array, length) -> Array:
        return jnp.broadcast_to(index[None], (q.shape[0], index.shape[0]))


def newest(position: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Scores above every share of a softmax, the later the larger."""
    return 1 + (1 + jnp.asarray(position).astype(jnp.float32)) * _STEP


def attention(
    keys: Float[Array, "capacity key"], queries: Float[Array, "group queries key"],
    positions: Int[Array, "queries"], length, *,
    is_causal: bool = True,
) -> Float[Array, "group queries capacity"]:  # fmt: skip
    """Softmax weights of queries at some positions; 0 for a query that is not of the sequence."""
    token, query = jnp.arange(keys.shape[0], dtype=jnp.int32)[None], positions[:, None]
    visible = (token < length) & (query >= 0) & (query < length)
    visible &= (token <= query) if is_causal else True
    precise = accumulator(queries.dtype)
    x = jnp.einsum("gqk,sk->gqs", queries, keys, preferred_element_type=precise)
    exponentials, total, _ = masked_softmax(x, visible[None])
    return exponentials / total


def over_queries(
    add: Callable[[Array, Array], Array], keys: Float[Array, "capacity key"],
    queries: Float[Array, "group capacity key"], length, *,
    is_causal: bool = True,
) -> Float[Array, "capacity"]:  # fmt: skip
    """Reduce the softmax weights of all queries of a prompt, a few queries at a time."""
    blocks = -(-queries.shape[1] // TOGETHER)
    missing = blocks * TOGETHER - queries.shape[1]
    queries = jnp.pad(queries, ((0, 0), (0, missing), (0, 0)))

    def step(total: Array, block: Any) -> tuple[Array, None]:
        positions = block * TOGETHER + jnp.arange(TOGETHER, dtype=jnp.int32)
        own = lax.dynamic_slice_in_dim(queries, block * TOGETHER, TOGETHER, axis=1)
        return add(total, attention(keys, own, positions, length, is_causal=is_causal)), None

    start = jnp.zeros(keys.shape[0], accumulator(keys.dtype))
    return lax.scan(step, start, jnp.arange(blocks, dtype=jnp.int32))[0]
