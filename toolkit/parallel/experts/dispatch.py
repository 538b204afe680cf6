"""A mixture with experts sharded over several devices, on whole arrays."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked
from toolkit.experts import Routing, route, router_logits, silu_gate
from toolkit.experts.mixture import fitting_weights
from toolkit.experts.products import Weights
from toolkit.parallel.axes import axes_of, check_auto_axes
from toolkit.parallel.experts.folding import expert_specs
from toolkit.parallel.experts.ways import Way, by_all_to_all, by_gather, by_ragged


class Dispatched(NamedTuple):
    """The outputs of the experts, and which pairs were kept.

    Attributes:
        outputs: [..., width], in the dtype of the tokens.
        is_kept: [..., chosen], False for a pair dropped because its expert was full.

    Example:
        >>> Dispatched(jnp.ones((3, 4)), jnp.ones((3, 2), bool)).is_kept.shape
        (3, 2)
    """

    outputs: Float[Array, "*tokens width"]
    is_kept: Bool[Array, "*tokens chosen"]


@checked
def sharded_route(
    x: Float[Array, "*tokens width"], kernel: Float[Array, "width experts"], count: int,
    mesh: Mesh, *,
    tokens: PartitionSpec, bias: Float[Array, "experts"] | None = None,
    choice_bias: Float[Array, "experts"] | None = None,
    experts: Int[Array, "*tokens chosen"] | None = None, **switches: Any,
) -> Routing:  # fmt: skip
    """`toolkit.experts.route` for sharded tokens, without communication.

    The compiler alone would gather the logits of all tokens before taking the largest.

    Args:
        x: tokens [..., width].
        kernel: the router's kernel [width, experts], replicated.
        count: experts per token.
        mesh: the devices.
        tokens: spec of the leading axes of x.
        bias: the router's bias [experts], or None.
        choice_bias: as in `route`.
        experts: as in `route`, sharded like the tokens.
        switches: the other arguments of `route`, such as those of a row of `ROUTERS`.

    Returns:
        The `Routing`, sharded like the tokens.

    Cost: 2 width experts FLOPs per token; the gradient sums the router's over all devices.

    Source: `route`.

    Example:
        >>> mesh, x = jax.sharding.Mesh(jax.devices(), "model"), jnp.ones((16, 4))
        >>> tokens = jax.sharding.PartitionSpec("model")
        >>> sharded_route(x, jnp.ones((4, 8)), 2, mesh, tokens=tokens).experts.shape
        (16, 2)
    """

    arrays = (x, kernel, bias, choice_bias, experts)
    return _routed(arrays, count, mesh, tokens, tuple(sorted(switches.items())))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _routed(arrays, count: int, mesh: Mesh, tokens: PartitionSpec, switches: tuple) -> Routing:
    def on_each_device(x, kernel, bias, choice_bias, experts) -> Routing:
        logits = router_logits(x, kernel, bias)
        return route(logits, count, choice_bias=choice_bias, experts=experts, **dict(switches))

    whole = PartitionSpec()
    specs = (tokens, whole, whole, whole, tokens)
    return jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=tokens)(*arrays)


@checked
def sharded_mixture(
    x: Float[Array, "*tokens width"], routing: Routing,
    gate: Float[Array, "experts width hidden"] | None, up: Float[Array, "experts width hidden"],
    down: Float[Array, "experts hidden width"], mesh: Mesh, *,
    axes: str | tuple[str, ...], tokens: PartitionSpec, hidden_axis: str | None = None,
    fsdp_axes: str | tuple[str, ...] = (),
    dispatch: Literal["all_to_all", "gather", "ragged"] = "all_to_all",
    capacity: float | None = None, gate_bias: Float[Array, "experts hidden"] | None = None,
    up_bias: Float[Array, "experts hidden"] | None = None,
    down_bias: Float[Array, "experts width"] | None = None, activation: Callable = silu_gate,
) -> Dispatched:  # fmt: skip
    """`toolkit.experts.mixture`, with experts sharded over a mesh.

        C = ceil(capacity t k / E)         slots of an expert for each of n devices with t tokens

    Every token is sent to the devices of its experts and back. Along axes of `tokens` that are not
    in `axes`, experts are replicated ("expert data parallel").

    With a capacity, an expert takes the first C pairs of each device in the order of its tokens
    and drops the others. A token's output then depends on earlier tokens on its device, even of
    other documents: decoding does not reproduce it, and documents are not separate. The dropped
    pairs depend on the mesh, so losses with drops are not comparable between meshes.

    Args:
        x: tokens [..., width].
        routing: from `sharded_route` (or `route`) for these tokens.
        gate: G [experts, width, hidden], or None; `axes` must divide the experts.
        up: U [experts, width, hidden].
        down: D [experts, hidden, width].
        mesh: the devices; its axes must be auto axes.
        axes: the mesh axes that shard experts; `expert_axes` chooses the innermost.
        tokens: spec of the leading axes of x: all of `axes`, and possibly others.
        hidden_axis: a mesh axis that shards the hidden size of every expert, or None. If `tokens`
            are sharded along it too, rows are gathered before the products and scattered after
            them.
        fsdp_axes: further axes of `tokens` that shard the width of the weights, which are gathered
            before use.
        dispatch: "all_to_all" (equal shares, on every platform), "gather" (all tokens to all
            devices; fewer bytes where n < capacity k, or two thirds of it for bfloat16 tokens,
            whose sums return in float32) or "ragged" (only the rows that are needed; on TPUs only).
        capacity: most pairs per expert, relative to an even load, with "all_to_all"; None: no
            drops, with t slots from each device.
        gate_bias: a [experts, hidden], or None.
        up_bias: b [experts, hidden], or None.
        down_bias: c [experts, width], or None.
        activation: as in `mixture`.

    Returns:
        A `Dispatched`: outputs and which pairs were kept, sharded like the tokens.

    Cost: bytes sent by a device, forward, of b bytes a number; the gradient sends them once more.
        "all_to_all": 2 E C width b (n-1)/n, and 6 C E width hidden FLOPs; "gather": 2 t width b
        (n-1) and 8 t k (n-1) for the routing; "ragged": at most 2 t k width b (n-1)/n and
        4 E (n-1). `dispatch_traffic` lists them.

    Source: Lepikhin et al., "GShard", 2020, arXiv:2006.16668, section 3.2 (capacity, all-to-all);
        Liu et al., "MoE Parallel Folding", 2025, arXiv:2504.14960.

    Example:
        >>> mesh, x = jax.sharding.Mesh(jax.devices(), "model"), jnp.ones((16, 4))
        >>> tokens = jax.sharding.PartitionSpec("model")
        >>> routing = sharded_route(x, jnp.ones((4, 8)), 2, mesh, tokens=tokens)
        >>> weights = jnp.ones((8, 4, 6)), jnp.ones((8, 4, 6)), jnp.ones((8, 6, 4))
        >>> sharded_mixture(x, routing, *weights, mesh, axes="model", tokens=tokens).outputs.shape
        (16, 4)
    """
    weights = fitting_weights(x, routing, gate, up, down, gate_bias, up_bias, down_bias)
    axes, fsdp_axes = _names(axes), _names(fsdp_axes)
    devices = _check(x, weights, mesh, axes, tokens, hidden_axis, fsdp_axes)
    if capacity is not None and dispatch != "all_to_all":
        raise ValueError(f'capacity is of dispatch "all_to_all"; got {capacity} with "{dispatch}"')
    if capacity is not None and not capacity > 0:
        raise ValueError(f"capacity must be above 0; got {capacity}; 1.25 is usual")
    pairs = math.prod(routing.experts.shape) // devices
    of_device = pairs // routing.experts.shape[-1]
    slots = of_device if capacity is None else expert_slots(pairs, up.shape[0], capacity)
    is_cut_inside = any(hidden_axis in names for names in axes_of(tokens))
    way = Way(axes, hidden_axis, is_cut_inside, min(slots, of_device), activation)

    return _mixed(x, routing, weights, mesh, tokens, fsdp_axes, dispatch, way)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def _mixed(
    x: Array, routing: Routing, weights: Weights, mesh: Mesh, tokens: PartitionSpec,
    fsdp_axes: tuple[str, ...], dispatch: str, way: Way,
) -> Dispatched:  # fmt: skip
    def on_each_device(x: Array, routing: Routing, weights: Weights) -> Dispatched:
        if fsdp_axes:
            weights = _gathered(weights, fsdp_axes)
        return dispatched_here(x, routing, weights, dispatch, way)

    specs = expert_specs(way.axes, hidden_axis=way.hidden_axis, fsdp_axes=fsdp_axes)
    names = [name for name, array in weights._asdict().items() if array is not None]
    of_weights: Any = Weights(**{name: specs[name] for name in names})  # pyright: ignore
    spread = jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(tokens, tokens, of_weights),
        out_specs=tokens,
        check_vma=dispatch != "ragged",  # of which JAX does not know how its result varies
    )
    return spread(x, routing, weights)


def dispatched_here(
    x: Array, routing: Routing, weights: Weights, dispatch: str, way: Way
) -> Dispatched:
    """One device's part of a sharded mixture, inside `jax.shard_map`: its tokens, and the weights
    of its own experts."""
    shape, chosen = x.shape, routing.experts.shape
    x, experts = x.reshape(-1, shape[-1]), routing.experts.reshape(-1, chosen[-1])
    shares = routing.weights.reshape(experts.shape)
    if dispatch == "gather":
        sums = by_gather(way, x, experts, shares, weights)
        is_kept = jnp.ones(experts.shape, bool)
    else:
        send = by_all_to_all if dispatch == "all_to_all" else by_ragged
        out, is_kept = send(way, x, experts, weights)
        shares = jnp.where(is_kept, shares, 0)
        sums = (shares[..., None] * out.astype(shares.dtype)).sum(1)
    return Dispatched(sums.astype(x.dtype).reshape(shape), is_kept.reshape(chosen))


def expert_slots(pairs: int, experts: int, capacity: float) -> int:
    """C, the pairs that an expert takes from each device; at least 1."""
    return max(1, math.ceil(capacity * pairs / experts))


def _names(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _gathered(weights: Weights, axes: tuple[str, ...]) -> Weights:
    dimension = {"gate": 1, "up": 1, "down": 2}
    return weights._replace(
        **{
            name: lax.all_gather(getattr(weights, name), axes, axis=at, tiled=True)
            for name, at in dimension.items()
            if getattr(weights, name) is not None
        }
    )


def _check(
    x: Array, weights: Weights, mesh: Mesh, axes: tuple[str, ...], tokens: PartitionSpec,
    hidden_axis: str | None, fsdp_axes: tuple[str, ...],
) -> int:  # fmt: skip
    """Refuse axes that do not fit; returns the number of shards of the tokens."""
    check_auto_axes(mesh)
    of_tokens = [name for names in axes_of(tokens) for name in names]
    used = {*axes, *of_tokens, *fsdp_axes} | ({hidden_axis} if hidden_axis else set())
    if unknown := sorted(used - set(mesh.shape)):
        raise ValueError(f"axis {unknown[0]!r}: the mesh has {', '.join(map(repr, mesh.shape))}")
    if len(tokens) > x.ndim - 1:
        raise ValueError(f"tokens {tokens} must cut the leading axes of x, shape {x.shape}, alone")
    if missing := [name for name in axes if name not in of_tokens]:
        raise ValueError(
            f"tokens must be cut along all of axes, {axes}; {tokens} is not along {missing[0]!r}"
        )
    if hidden_axis in axes:
        raise ValueError(f"hidden_axis={hidden_axis!r} cuts experts already: axes={axes}")
    if wrong := [
        name for name in fsdp_axes if name not in of_tokens or name in {*axes, hidden_axis}
    ]:
        raise ValueError(
            f"fsdp_axes must be axes of tokens, {tokens}, which cut neither experts nor their "
            f"hidden size; got {wrong[0]!r}"
        )
    count, width, hidden = weights.up.shape
    cuts = [(size, names) for size, names in zip(x.shape, axes_of(tokens), strict=False)]
    cuts += [(count, axes), (width, fsdp_axes)]
    names = ["tokens"] * (len(cuts) - 2) + ["experts", "width"]
    if hidden_axis:
        cuts, names = [*cuts, (hidden, (hidden_axis,))], [*names, "hidden"]
    for name, (size, along) in zip(names, cuts, strict=True):
        parts = math.prod(mesh.shape[axis] for axis in along)
        if size % parts:
            raise ValueError(
                f"{name}={size} is not divisible by {parts} parts of axis "
                f"{' x '.join(map(repr, along))}; {size + -size % parts} would be"
            )
    return math.prod(mesh.shape[axis] for axis in of_tokens)
