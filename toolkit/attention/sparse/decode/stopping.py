r"""Where Tactic's list may stop, from samples of what comes after, with their error.

The list is split into strata of tokens, [256, 512), [512, 1024) and so on. In each, a few tokens y
are computed exactly; the centroids' guesses u = exp(q . centroid), summed over the rest of the
stratum, are scaled by the samples' ratio. The first tokens of the list are exact. The list stops
at the first x for which

    held(x) >= share (held(x) + rest(x) + 1.5 sd(x))      rest = sum_strata (sum y / sum u) u(left)

held(x) is exact, since these keys are read anyhow; sd is the standard error of the ratio estimates.
Allowing for it costs a few tokens where the rest is heavy and none where it is light. A few heavy
tokens scattered among many light ones (for example Gaussian keys and queries of sharpness 3) escape
any sample.

Source: stratified ratio estimates, Cochran (1977), Sampling Techniques, section 6.10; what they are
used for here is our own; the paper fits a curve (`tactic.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

FIRST, SAMPLES = 256, 16  # tokens of the list that are exact, and samples of a stratum
ERRORS = 1.5  # standard errors of the rest that are allowed for; chosen on other draws than tested


def strata(first: int, capacity: int) -> list[int]:
    """Where the strata begin, for a list that may be as long as the cache."""
    return [first << j for j in range(max(-(-capacity // first) - 1, 0).bit_length())]


def sampled_count(
    share: float, logits: Float[Array, "slots"], is_token: Bool[Array, "slots"],
    order_scores: Float[Array, "clusters"], scores: Float[Array, "clusters"],
    q: Float[Array, "key"], index: Any, keys: Float[Array, "capacity key"],
    forced_lse: Float[Array, ""],
) -> Int[Array, ""]:  # fmt: skip
    """Tokens of the list that one query head needs; `order_scores` put the clusters in order."""
    slots, precise = logits.shape[0], logits.dtype
    order = jnp.argsort(-order_scores, stable=True)
    sizes = jnp.where(order_scores[order] > -jnp.inf, index.sizes[order], 0)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts, last = ends - sizes, ends.shape[0] - 1

    def own(position: Array) -> Array:
        return jnp.minimum(jnp.searchsorted(ends, position, side="right"), last).astype(jnp.int32)

    first = min(FIRST, slots)
    begin = jnp.asarray(strata(first, index.members.shape[0]) or [first], jnp.int32)
    end = jnp.maximum(jnp.minimum(2 * begin, ends[-1]), begin)
    width, drawn = end - begin, jnp.arange(SAMPLES, dtype=jnp.int32)
    count = jnp.clip(width, 0, SAMPLES)
    place = (2 * drawn[None] + 1) * width[:, None] // (2 * jnp.maximum(count, 1)[:, None])
    place = begin[:, None] + place
    is_sample = drawn[None] < count[:, None]
    cluster = own(place)
    token = index.first[order][cluster] + place - starts[cluster]
    rows = keys[index.members[jnp.where(is_sample, token, 0)]]
    exact = (rows @ q).astype(precise)
    rough = jnp.where(sizes > 0, scores[order], -jnp.inf)

    largest = jnp.maximum(forced_lse, jnp.where(is_token, logits, -jnp.inf).max())
    largest = jnp.maximum(largest, jnp.where(is_sample, exact, -jnp.inf).max())
    largest = jnp.maximum(largest, rough.max())
    y = jnp.where(is_sample, jnp.exp(exact - largest), 0)
    u = jnp.where(is_sample, jnp.exp(rough[cluster] - largest), 0)
    of_samples = u.sum(axis=1)
    ratio = jnp.where(of_samples > 0, y.sum(axis=1) / jnp.where(of_samples > 0, of_samples, 1), 0)
    off = jnp.square(y - ratio[:, None] * u).sum(axis=1)
    drawn_of, wide = count.astype(precise), width.astype(precise)
    unseen = jnp.maximum(wide - drawn_of, 0) * wide / jnp.maximum(drawn_of, 1)
    per_token = unseen * off / jnp.maximum(drawn_of - 1, 1) / jnp.maximum(wide, 1)

    each = jnp.exp(rough - largest)
    before = jnp.cumsum(each * sizes.astype(precise)) - each * sizes.astype(precise)

    def guessed(position: Array) -> Array:
        """The centroids' estimate of the list up to a position."""
        cluster = own(position)
        inside = jnp.minimum(position - starts[cluster], sizes[cluster]).astype(precise)
        return before[cluster] + each[cluster] * inside

    taken = jnp.arange(slots + 1, dtype=jnp.int32)
    left = jnp.clip(taken[:, None], begin[None], end[None])
    # The estimate grows with the position: it is looked up per token, not per token and stratum.
    to_end = guessed(end)[None]
    to_left = jnp.clip(guessed(taken)[:, None], guessed(begin)[None], to_end)
    rest = (jnp.maximum(to_end - to_left, 0) * ratio[None]).sum(axis=1)
    variance = ((end[None] - left).astype(precise) * per_token[None]).sum(axis=1)
    listed = jnp.where(is_token, jnp.exp(logits - largest), 0)
    of_list = jnp.concatenate([jnp.zeros(1, precise), jnp.cumsum(listed)])
    read = jnp.exp(forced_lse - largest) + of_list
    rest = rest + jnp.maximum(of_list[first] - of_list, 0)
    suffices = read >= share * (read + rest + ERRORS * jnp.sqrt(variance))
    return jnp.where(suffices.any(), jnp.argmax(suffices), slots).astype(jnp.int32)


def estimate_rows(slots: int, capacity: int) -> int:
    """Keys that one query head computes to decide where to stop."""
    first = min(FIRST, slots)
    return first + SAMPLES * len(strata(first, capacity))


sampled_counts = jax.vmap(sampled_count, in_axes=(None, 0, None, None, 0, 0, None, None, 0))
