r"""One token's queries against the slots of a latent cache: what every step of decoding shares.

    u_h = sum_{j < filled} softmax_j(scale (q_h . c_j + p_h . r_j)) c_j

Beside u comes the logarithm of the sum of exponentials, by which parts of a cache are merged.
"xla" reads all slots at once, on CPUs a block at a time; "pallas" is a kernel for NVIDIA's Hopper
GPUs that reads every filled slot once. Numbers in empty slots never affect a result, not even NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._attend import masked_softmax
from toolkit.attention.best_known import in_best_form
from toolkit.attention.execution.precision import accumulator

Implementation = Literal["xla", "pallas"]
Attended = tuple[Float[Array, "batch heads latent"], Float[Array, "batch heads"]]
BLOCK = 512
"""Slots met at a time on CPUs: what it has read for the scores, a core still has at hand for the
sum."""


def attend_slots(
    q: Float[Array, "batch heads latent"], rope_q: Float[Array, "batch heads rope"],
    latents: Float[Array, "batch slots latent"], rope_keys: Float[Array, "batch slots rope"],
    filled: Int[Array, " batch"], *,
    scale: float,
    implementation: Implementation | None = None,
) -> Attended:  # fmt: skip
    """Outputs, and the log of the sum of exponentials, in the precision of sums."""

    def form(name: str) -> Callable[..., Attended]:
        return partial(_kernel if name == "pallas" else _xla, scale)

    arrays = q, rope_q, latents, rope_keys, filled
    return in_best_form("latent", implementation, form, *arrays)


def _kernel(scale, *arrays) -> Attended:
    from toolkit.attention.kernels.dispatch import attend_latent_slots

    return attend_latent_slots(*arrays, scale=scale)


def _xla(scale: float, *arrays: Array) -> Attended:
    whole, by_blocks = partial(_whole, scale), partial(_by_blocks, scale)
    if arrays[2].shape[1] <= 2 * BLOCK:
        return whole(*arrays)
    return lax.platform_dependent(*arrays, cpu=by_blocks, default=whole)


def attend_visible(
    q: Array, rope_q: Array, latents: Array, rope_keys: Array, visible: Bool[Array, "batch slots"],
    scale: float, completed: Callable[[Array], Array] = lambda scores: scores,
) -> Attended:  # fmt: skip
    """The same over all visible slots at once; `completed` adds the other part of the scores."""
    scores = completed(dot_slots(q, latents, visible)) + dot_slots(rope_q, rope_keys, visible)
    p, total, lse = masked_softmax(scale * scores, visible[:, None])
    return weighted_latents(p, latents, visible) / total, lse[..., 0]


def first_slots(slots: int, filled: Int[Array, " batch"]) -> Bool[Array, "batch slots"]:
    """Which slots hold a token."""
    return jnp.arange(slots, dtype=jnp.int32)[None] < filled[:, None]


def _whole(scale, q, rope_q, latents, rope_keys, filled) -> Attended:
    visible = first_slots(latents.shape[1], filled)
    return attend_visible(q, rope_q, latents, rope_keys, visible, scale)


def _by_blocks(
    scale: float, q: Array, rope_q: Array, latents: Array, rope_keys: Array, filled: Array
) -> Attended:
    """The same, a block of slots at a time: blocks are merged by the logs of their sums."""
    slots = latents.shape[1]
    whole = latents, rope_keys, first_slots(slots, filled)

    def block(start):
        # Or XLA widens all of a bfloat16 cache ahead of the loop.
        arrays, start = lax.optimization_barrier((whole, start))
        first = jnp.minimum(start, slots - BLOCK)  # the last one overlaps the one before
        c, r, visible = (lax.dynamic_slice_in_dim(x, first, BLOCK, axis=1) for x in arrays)
        is_new = first + jnp.arange(BLOCK, dtype=jnp.int32) >= start
        return attend_visible(q, rope_q, c, r, visible & is_new[None], scale)

    def merge(before, start):
        return merged(before, block(start)), None

    starts = jnp.arange(0, slots, BLOCK, dtype=jnp.int32)
    return lax.scan(merge, block(starts[0]), starts[1:])[0]


def merged(first: Attended, other: Attended) -> Attended:
    """Attention to the union of two disjoint sets of slots."""
    (out, lse), (new, own) = first, other
    total = jnp.logaddexp(lse, own)
    old, fresh = (
        jnp.exp(x - jnp.where(total == -jnp.inf, 0, total))[..., None] for x in (lse, own)
    )
    return out * old + new * fresh, total


@jax.custom_jvp
def dot_slots(
    q: Float[Array, "batch heads size"],
    rows: Float[Array, "batch slots size"],
    visible: Bool[Array, "batch slots"],
) -> Float[Array, "batch heads slots"]:
    """Products of one query per head with every slot, in the precision of sums."""
    del visible  # the softmax leaves out the scores of the others; derivatives have to
    return _dot(q, rows)


@jax.custom_jvp
def weighted_latents(
    p: Float[Array, "batch heads slots"],
    latents: Float[Array, "batch slots latent"],
    visible: Bool[Array, "batch slots"],
) -> Float[Array, "batch heads latent"]:
    """Sum of the latents of visible slots, in the precision of p."""
    out = _weighted(p, latents)

    def without_the_others():  # 0 * NaN is NaN: slower, and right where an empty slot holds one
        return _weighted(p, _visible_rows(latents, visible))

    return lax.cond(jnp.isfinite(out).all(), lambda: out, without_the_others)


def _dot(q, rows):
    # On CPUs XLA takes two thirds of the time with the long operand first.
    precise = accumulator(rows.dtype)
    return jnp.einsum("bsr,bhr->bsh", rows, q, preferred_element_type=precise).swapaxes(1, 2)


def _weighted(p, latents):
    weights = p.astype(latents.dtype)
    return jnp.einsum("bhs,bsr->bhr", weights, latents, preferred_element_type=p.dtype)


def _visible_rows(rows, visible):
    return jnp.where(visible[..., None], rows, 0)


def _never_of_others(function, product):
    """Derivatives of a product with slots, into which those without a token do not enter."""

    def rule(primals, tangents):
        (left, rows, visible), (d_left, d_rows, _) = primals, tangents
        kept, d_kept = _visible_rows(rows, visible), _visible_rows(d_rows, visible)
        return function(*primals), product(d_left, kept) + product(left, d_kept)

    function.defjvp(rule)


_never_of_others(dot_slots, _dot)
_never_of_others(weighted_latents, _weighted)
