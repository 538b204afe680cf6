"""Three ways to send tokens to the devices of their experts and back, inside `jax.shard_map`.

Each takes this device's tokens x [tokens, width], `experts` [tokens, chosen] among all, and the
weights of this device's own experts, and gives [tokens, chosen, width] with what it kept, or (the
gather) the tokens' sums. n devices lie along the axes that cut experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention.execution.platforms import run_on
from toolkit.experts.best_known import in_best_form
from toolkit.experts.products import Activation, Weights, expert, rows_of


class Way(NamedTuple):
    """The settings of a way."""

    axes: tuple[str, ...]  # the mesh axes that cut experts
    hidden_axis: str | None  # the axis that shards the hidden size, or None
    is_cut_inside: bool  # whether tokens are sharded along `hidden_axis` too
    slots: int  # tokens that an expert takes from each device
    activation: Activation  # of the experts


def by_all_to_all(
    way: Way,
    x: Float[Array, "tokens width"],
    experts: Int[Array, "tokens chosen"],
    weights: Weights,
) -> tuple[Float[Array, "tokens chosen width"], Bool[Array, "tokens chosen"]]:
    """Every device sends every expert `slots` rows, the first that chose it, and gets them back."""
    (own, _, _), (tokens, chosen) = weights.up.shape, experts.shape
    devices, pairs = lax.axis_size(way.axes), experts.size
    count = own * devices
    # A given expert that is none is kept, so that the NaN of its weight shows; nobody computes it.
    is_expert = (experts >= 0) & (experts < count)
    flat = jnp.where(is_expert, experts, count).ravel()
    order = jnp.argsort(flat, stable=True)
    sorted_experts = flat[order]
    starts = jnp.searchsorted(sorted_experts, jnp.arange(count))
    rank = jnp.arange(pairs) - starts[sorted_experts]
    nowhere = count * way.slots
    is_held = (rank < way.slots) & (sorted_experts < count)
    place = jnp.where(is_held, sorted_experts * way.slots + rank, nowhere)
    slots = jnp.zeros(pairs, place.dtype).at[order].set(place)
    pair_of_slot = jnp.full(nowhere, pairs, order.dtype).at[slots].set(jnp.arange(pairs))

    rows = rows_of(x, pair_of_slot, chosen).reshape(devices, own, way.slots, -1)
    rows = lax.all_to_all(rows, way.axes, 0, 0)  # [sender, own expert, slot, width]
    rows = rows.swapaxes(0, 1).reshape(own, devices * way.slots, -1)
    out = _own_experts(way, rows, weights).astype(x.dtype)
    out = out.reshape(own, devices, way.slots, -1).swapaxes(0, 1)
    out = lax.all_to_all(out, way.axes, 0, 0).reshape(nowhere, -1)
    slots = slots.reshape(tokens, chosen)
    return out.at[slots].get(mode="fill", fill_value=0), (slots < nowhere) | ~is_expert


def _own_experts(way: Way, rows: Array, weights: Weights) -> Array:
    """Apply this device's experts to their rows [own, rows, width]; float32."""
    name, bias = way.hidden_axis, weights.down_bias
    if name and way.is_cut_inside:
        rows = lax.all_gather(rows, name, axis=1, tiled=True)
    out = jax.vmap(lambda x, own: expert(way.activation, x, own))(
        rows, weights._replace(down_bias=None if name else bias)
    )
    if not name:
        return out
    if way.is_cut_inside:
        out = lax.psum_scatter(out, name, scatter_dimension=1, tiled=True)
    else:
        out = lax.psum(out, name)
    return out if bias is None else out + bias[:, None].astype(out.dtype)


def by_gather(
    way: Way, x: Float[Array, "tokens width"], experts: Int[Array, "tokens chosen"],
    shares: Float[Array, "tokens chosen"], weights: Weights,
) -> Float[Array, "tokens width"]:  # fmt: skip
    """Every device computes its own experts on the tokens of all; sums go back to their tokens."""
    x, experts, shares = (
        lax.all_gather(array, way.axes, axis=0, tiled=True) for array in (x, experts, shares)
    )
    out = _of_own_pairs(way, x, experts, weights)
    sums = (out * shares[..., None].astype(out.dtype)).sum(1)
    return lax.psum_scatter(sums, way.axes, scatter_dimension=0, tiled=True)


def _of_own_pairs(way: Way, x: Array, experts: Array, weights: Weights) -> Array:
    own = weights.up.shape[0]
    local = experts - lax.axis_index(way.axes) * own
    is_own = (local >= 0) & (local < own)
    out = in_best_form(None, way.activation, x, jnp.where(is_own, local, own), weights)
    return jnp.where(is_own[..., None], out, 0)


def by_ragged(
    way: Way,
    x: Float[Array, "tokens width"],
    experts: Int[Array, "tokens chosen"],
    weights: Weights,
) -> tuple[Float[Array, "tokens chosen width"], Bool[Array, "tokens chosen"]]:
    """As many rows go to every device as it has pairs for: `lax.ragged_all_to_all`, on TPUs only.

    Its receiver's buffer holds the worst case, so that no pair is dropped.
    """

    def on_tpu(x: Array, experts: Array, weights: Weights) -> Array:
        (own, width, _), (tokens, chosen) = weights.up.shape, experts.shape
        devices, here = lax.axis_size(way.axes), lax.axis_index(way.axes)
        is_expert = (experts >= 0) & (experts < own * devices)
        experts = jnp.where(is_expert, experts, own * devices)
        order = jnp.argsort(experts.ravel(), stable=True)
        loads = jnp.zeros(own * devices, jnp.int32).at[experts.ravel()].add(1)
        loads = lax.all_gather(loads, way.axes).reshape(devices, devices, own)
        pairs = loads.sum(-1)  # [sender, receiver]
        to, back = _offsets(pairs, here), _offsets(pairs.T, here)
        worst = devices * tokens * min(chosen, own)
        rows = lax.ragged_all_to_all(
            x[order // chosen], jnp.zeros((worst, width), x.dtype), *to, axis_name=way.axes
        )
        ends = jnp.cumsum(loads[:, here].ravel())  # by sender, then by own expert
        owners = jnp.searchsorted(ends, jnp.arange(worst), side="right")
        is_row = jnp.arange(worst) < ends[-1]
        owners = jnp.where(is_row, owners % own, own).astype(jnp.int32)
        out = in_best_form(None, way.activation, rows, owners[:, None], weights)[:, 0]
        out = jnp.where(is_row[:, None], out, 0).astype(x.dtype)
        out = lax.ragged_all_to_all(
            out, jnp.zeros((tokens * chosen, width), x.dtype), *back, axis_name=way.axes
        )
        return jnp.zeros_like(out).at[order].set(out).reshape(tokens, chosen, width)

    why = 'dispatch="ragged" runs on TPUs: XLA has no ragged all-to-all for other platforms'
    out = run_on({"tpu": on_tpu}, x, experts, weights, otherwise=why)
    return out, jnp.ones(experts.shape, bool)


def _offsets(pairs: Int[Array, "sender receiver"], here: Array) -> tuple[Array, ...]:
    """The arguments of `lax.ragged_all_to_all`: local offsets, numbers sent, offsets in the
    receivers' buffers, numbers received.
    """
    before = jnp.cumsum(pairs, axis=1) - pairs
    at_receiver = jnp.cumsum(pairs, axis=0) - pairs
    return before[here], pairs[here], at_receiver[here], pairs[:, here]
