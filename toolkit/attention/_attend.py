r"""The masked softmax, and exact attention with it, for every form but the blockwise one.

    o_t = sum_{i in I_t} p_ti v_i      p_ti = exp(s_ti - lse_t)      lse_t = log sum_{I_t} exp(s_ti)

Which keys a query sees is one value for every form of softmax attention, a `Mask`. A query that
sees no key gives 0. A number that is not finite shows in the queries that see it and nowhere else,
neither in outputs nor in gradients.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.attention._shapes import SegmentIds
from toolkit.attention.execution.precision import accumulator, half_precision, precise_einsum


class Softmax(NamedTuple):
    """A softmax before its division."""

    exponentials: Float[Array, "*rows keys"]  # relative to the largest score, 0 where not visible
    total: Float[Array, "*rows 1"]  # their sum; 1 for a row that sees nothing
    lse: Float[Array, "*rows 1"]  # logarithm of the sum of exponentials; -inf for such a row


class Attended(NamedTuple):
    """What attention over a selection returns, in the precision of sums."""

    # outputs [queries, group, value]; 0 for a query that attends to nothing
    out: Float[Array, "queries group value"]
    # probabilities [queries, group, keys], 0 outside the selection
    weights: Float[Array, "queries group keys"]
    # logarithm of the sum of exponentials [queries, group]. Attention over two disjoint selections
    # is the sum of their outputs weighted by a softmax over the two.
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

    An array, such as a learned temperature, multiplies the queries instead.
    """
    if scale is not None and isinstance(scale, Array):
        if scale.ndim:
            raise ValueError(f"scale must be one number; got shape {tuple(scale.shape)}.")
        precise = accumulator(q.dtype)
        return (q.astype(precise) * scale.astype(precise)).astype(q.dtype), 1.0
    return q, float(q.shape[-1] ** -0.5 if scale is None else scale)


@checked
def attend(
    q: Float[Array, "queries group key"], k: Float[Array, "*own keys key"],
    v: Float[Array, "*own keys value"], mask: Bool[Array, "queries keys"], *,
    scale: float,
) -> Attended:  # fmt: skip
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


def bounded(numbers: Int[Array, "..."] | int, least: int, most: int) -> Int[Array, "..."]:
    """Numbers clipped to a range, as int32; a plain cast of 64-bit numbers would wrap around."""
    numbers = jnp.asarray(numbers)
    kind = jnp.iinfo(numbers.dtype)
    return jnp.clip(numbers, max(least, kind.min), min(most, kind.max)).astype(jnp.int32)


# How many keys a query sees before and after its own place; None for all of them.
Window = tuple[int | None, int | None]
CAUSAL = None, 0


class Segments(NamedTuple):
    """Document numbers of queries and keys; a query sees the keys of its own document only."""

    query: Int[Array, "batch query_time"]
    key: Int[Array, "batch key_time"]


@register_dataclass
@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: those that all of its attributes allow. `Mask()` is causal.

    The window alone is fixed when compiling, so a cache grows without compiling anew. A place is
    one number for all rows of a batch, or one for each. A bias of -inf hides keys too; it is
    differentiated, and so it lies with the inputs.
    """

    # keys that a query sees before and after its own place
    window: Window = field(default=CAUSAL, metadata={"static": True})
    # index of the first query on the keys' axis; None for 0
    query_start: Int[Array, "..."] | int | None = None
    # first key that exists, which a ring that is part full has; None for 0
    key_start: Int[Array, "..."] | int | None = None
    # one past the last key that exists; None for all of them
    key_stop: Int[Array, "..."] | int | None = None
    documents: Segments | None = None  # of queries and keys; None if every row is one document
    # whether a query may see a key
    allowed: Bool[Array, "#batch #heads #query_time #key_time"] | None = None

    def places(self, keys: int) -> tuple[Array, Array, Array]:
        """`query_start`, `key_start` and `key_stop` of queries that meet a number of keys."""
        start, first = (0 if x is None else x for x in (self.query_start, self.key_start))
        stop = keys if self.key_stop is None else self.key_stop
        return jnp.int32(start), jnp.int32(first), jnp.int32(stop)

    def sees(self, query: Array, key: Array, start: Array, stop: Array) -> Bool[Array, "*times"]:
        """Whether the query at index `query` sees the key at index `key`, by place alone."""
        left, right = self.window
        visible = (key >= start) & (key < stop)
        if left is not None:
            visible &= query - key <= left
        if right is not None:
            visible &= key - query <= right
        return visible


def run_numbers(segment_ids: SegmentIds) -> SegmentIds:
    """Documents are runs of equal numbers: 1 for the first run of a sequence, 2 for the next."""
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    return 1 + jnp.cumsum(segment_ids != before, axis=1, dtype=jnp.int32)


def packed(segment_ids: SegmentIds | None) -> Segments | None:
    """Documents of a sequence without a cache, where queries and keys are the same tokens."""
    if segment_ids is None:
        return None
    numbers = run_numbers(segment_ids)
    return Segments(numbers, numbers)


def positions_in_documents(
    segment_ids: SegmentIds, length: Int[Array, "batch"] | int = 0
) -> Int[Array, "batch time"]:
    """Place of every token in its document; the first document continues after `length` tokens."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    is_first = jnp.diff(run_numbers(segment_ids), axis=1, prepend=1) > 0
    begins = lax.cummax(jnp.where(is_first, index, 0), axis=1)
    before = jnp.broadcast_to(jnp.asarray(length, jnp.int32), segment_ids.shape[:1])[:, None]
    return index - begins + jnp.where(begins == 0, before, 0)
