"""Experts sharded over all devices, of which each device restores those of a layout.

The layout is data: another one runs the same program.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from toolkit._checks import check_choice, check_shape, checked
from toolkit.experts import Routing, silu_gate
from toolkit.experts.mixture import fitting_weights
from toolkit.experts.products import Weights
from toolkit.parallel.axes import check_auto_axes, devices_along
from toolkit.parallel.experts.dispatch import Dispatched, expert_slots
from toolkit.parallel.experts.relayout import ExpertLayout
from toolkit.parallel.experts.ways import Way, by_all_to_all


@checked
def restored(
    shards: Float[Array, "experts *shard"], slots: Int[Array, "devices slots"], axis: str
) -> Float[Array, "slots devices *shard"]:
    """The weights of the experts that a layout puts on this device; inside `jax.shard_map`.

        all-to-all of shards[slots]          every device sends each one the parts of its experts

    Every device keeps a part of every expert ("fully sharded expert parallelism"). The layout is
    data, so a new one runs the same program. The gradient takes the same way back, and copies of an
    expert are summed at its shard.

    Args:
        shards: this device's part of every expert, [experts, ...].
        slots: the experts on each device, as in an `ExpertLayout`.
        axis: the mesh axis, of as many devices as `slots` has rows.

    Returns:
        [slots, devices, ...]: the parts of each held expert, in the order of the devices.

    Cost: slots P (n-1)/n bytes sent by a device, for experts of P bytes; the gradient as much.

    Source: "LAER-MoE", 2026, arXiv:2602.11686, section 3.

    Example:
        >>> mesh, lie = jax.sharding.Mesh(jax.devices(), "e"), jax.sharding.PartitionSpec
        >>> get = lambda parts: restored(parts, jnp.arange(8)[:, None], "e")
        >>> specs = {"mesh": mesh, "in_specs": lie(None, "e"), "out_specs": lie("e")}
        >>> jax.shard_map(get, **specs)(jnp.eye(8)).shape
        (8, 8, 1)
    """
    if slots.shape[0] != (devices := devices_along(axis)):
        raise ValueError(
            f"slots must have a row for each of {devices} devices of axis {axis!r}; "
            f"got {slots.shape[0]}"
        )
    return lax.all_to_all(shards[slots], axis, 0, 0).swapaxes(0, 1)


@checked
def relaid_mixture(
    x: Float[Array, "*tokens width"], routing: Routing, gate: Float[Array, "experts width hidden"],
    up: Float[Array, "experts width hidden"], down: Float[Array, "experts hidden width"],
    layout: ExpertLayout, mesh: Mesh, *,
    axis: str, capacity: float | None = None, activation: Callable = silu_gate,
) -> Dispatched:  # fmt: skip
    """`toolkit.experts.mixture` with experts restored according to a layout.

    Every device keeps a slice of the hidden size of every expert and restores the experts of its
    slots. Its tokens are sent to the copies according to the layout's shares, in the order of the
    tokens, and back. A new layout does not recompile.

    Args:
        x: tokens [..., width], whose first axis is cut along `axis`.
        routing: from `sharded_route` (or `route`) for these tokens.
        gate: G [experts, width, hidden], cut along hidden.
        up: U [experts, width, hidden], likewise.
        down: D [experts, hidden, width], likewise.
        layout: from `relayout` or `static_layout`.
        mesh: the devices; its axes must be auto axes.
        axis: the mesh axis that shards the experts.
        capacity: times an even load of a slot that it takes, as in `sharded_mixture`; None: all.
        activation: as in `mixture`.

    Returns:
        A `Dispatched`.

    Cost: forward, a device sends slots P (n-1)/n bytes for experts of P bytes, and the tokens'
        2 n slots C width b (n-1)/n; the gradient as much again.

    Source: "LAER-MoE: Load-Adaptive Expert Re-layout", 2026, arXiv:2602.11686.

    Example:
        >>> mesh, tokens = jax.sharding.Mesh(jax.devices(), "e"), jax.sharding.PartitionSpec("e")
        >>> routing = sharded_route(jnp.ones((16, 4)), jnp.ones((4, 8)), 2, mesh, tokens=tokens)
        >>> weights = jnp.ones((8, 4, 16)), jnp.ones((8, 4, 16)), jnp.ones((8, 16, 4))
        >>> layout = relayout(jax.device_get(jnp.full((8, 8), 4)), 2)
        >>> relaid_mixture(jnp.ones((16, 4)), routing, *weights, layout, mesh, axis="e")[0].shape
        (16, 4)
    """
    weights = fitting_weights(x, routing, gate, up, down, None, None, None)
    check_auto_axes(mesh)
    check_choice("axis", axis, mesh.axis_names)
    devices, experts, slots = mesh.shape[axis], gate.shape[0], layout.slots.shape[1]
    plan = jnp.asarray(layout.slots, jnp.int32), jnp.asarray(layout.shares, jnp.float32)
    check_shape("layout.shares", plan[1], (devices, experts, devices), "devices experts devices")
    for name, size in (("tokens", x.shape[0]), ("hidden", gate.shape[2])):
        if size % devices:
            raise ValueError(
                f"{name}={size} is not divisible by {devices} parts of axis {axis!r}; "
                f"{size + -size % devices} would be"
            )
    if capacity is not None and not capacity > 0:
        raise ValueError(f"capacity must be above 0; got {capacity}; 1.25 is usual")
    pairs = math.prod(routing.experts.shape) // devices
    tokens = pairs // routing.experts.shape[-1]
    most = tokens if capacity is None else expert_slots(pairs, devices * slots, capacity)
    way = Way((axis,), None, False, min(most, tokens), activation)
    return _relaid(x, routing, weights, plan, mesh, way)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _relaid(x: Array, routing: Routing, weights: Weights, plan, mesh: Mesh, way: Way) -> Dispatched:
    (axis,) = way.axes

    def on_each_device(x, routing, weights, slots, shares) -> Dispatched:
        shape, chosen = x.shape, routing.experts.shape
        gate, up, down = (restored(array, slots, axis) for array in weights[:3])
        gate, up = (jnp.moveaxis(part, 1, 2).reshape(*part.shape[::2], -1) for part in (gate, up))
        whole = Weights(gate, up, down.reshape(down.shape[0], -1, down.shape[-1]))
        x, experts = x.reshape(-1, shape[-1]), routing.experts.reshape(-1, chosen[-1])
        places = _places(experts, slots, shares[lax.axis_index(axis)])
        out, is_kept = by_all_to_all(way, x, places, whole)
        weight = jnp.where(is_kept, routing.weights.reshape(experts.shape), 0)
        sums = (weight[..., None] * out.astype(weight.dtype)).sum(1)
        return Dispatched(sums.astype(x.dtype).reshape(shape), is_kept.reshape(chosen))

    tokens, inner = PartitionSpec(axis), PartitionSpec(None, None, axis)
    of_weights = Weights(inner, inner, PartitionSpec(None, axis))  # pyright: ignore
    specs = (tokens, tokens, of_weights, PartitionSpec(), PartitionSpec())
    spread = jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=tokens)
    return spread(x, routing, weights, *plan)


def _places(
    experts: Int[Array, "tokens chosen"],
    slots: Int[Array, "devices slots"],
    shares: Float[Array, "experts devices"],
) -> Int[Array, "tokens chosen"]:
    """The slot of each pair among those of all devices: copies in turn, by share."""
    flat = experts.ravel()
    order = jnp.argsort(flat, stable=True)
    loads = jnp.zeros(shares.shape[0], jnp.int32).at[flat].add(1)
    rank = (
        jnp.zeros_like(flat)
        .at[order]
        .set(jnp.arange(flat.size, dtype=flat.dtype) - (jnp.cumsum(loads) - loads)[flat[order]])
    )
    part = (rank + 0.5) / loads[flat]
    # A copy without a share is passed over, also at the end, where sums of shares are rounded.
    ends = jnp.where(shares > 0, jnp.cumsum(shares, axis=1), -1.0)
    last = shares.shape[1] - 1 - jnp.argmax(shares[:, ::-1] > 0, axis=1)
    after = (part[:, None] < ends[flat]) & (shares[flat] > 0)
    device = jnp.where(after.any(1), jnp.argmax(after, axis=1), last[flat])
    slot = jnp.argmax(slots[device] == flat[:, None], axis=1)
    place = (device * slots.shape[1] + slot).astype(experts.dtype).reshape(experts.shape)
    is_expert = (experts >= 0) & (experts < shares.shape[0])
    return jnp.where(is_expert, place, slots.size)  # past all slots: its NaN shows
