"""Tokens sent early to their expected experts; a wrong guess changes no result.

After attention's sum over devices, every device receives some of the tokens. The choice is free: an
order of tokens before the reduce-scatter, and its inverse after the all-gather behind the experts,
change no number. The order puts a token on the device with most of its expected experts, so that
fewer rows are sent in the all-to-all. Experts that the same tokens choose share a device.
"""

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from scipy.optimize import linear_sum_assignment

from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.parallel.axes import devices_along

Count = Annotated[int, AtLeast(1)]


class ExpertGroups(NamedTuple):
    """The experts of each device, and the preferred devices of each token of the vocabulary.

    Attributes:
        order: [experts], the experts in the order of the devices, to permute weights.
        places: [experts], the position of each expert in that order, to map chosen experts.
        preferences: [vocabulary, devices], the share of a token's pairs that each device computes.

    Example:
        >>> table = jax.device_get(jnp.array([[8, 0, 8, 0], [0, 8, 0, 8]]))
        >>> group_experts(table, 2).preferences.max(1).tolist()
        [1.0, 1.0]
    """

    order: Int[np.ndarray, "experts"]
    places: Int[np.ndarray, "experts"]
    preferences: Float[np.ndarray, "vocabulary devices"]


@checked
def group_experts(
    table: Int[np.ndarray, "vocabulary experts"], devices: Count, *,
    starts: Count = 8, seed: int = 0,
) -> ExpertGroups:  # fmt: skip
    """Put experts that the same tokens choose on one device, with equally many on each.

        maximise  sum over tokens v of  sum over experts e on the device of v:  table[v, e]

    Tokens are assigned for given experts (each device takes an equal part of all pairs) and experts
    for given tokens, in turns; the latter exactly, as an assignment problem. The best of several
    random starts is taken.

    Args:
        table: how often each token of the vocabulary chose each expert, in a sample of text.
        devices: number of devices, a divisor of the number of experts.
        starts: number of random starts.
        seed: seed of the starts.

    Returns:
        The `ExpertGroups`; the same for the same seed.

    Cost: a few assignment problems of experts x experts for each start; on the host.

    Source: "Speculative MoE", 2025, arXiv:2503.04398, section 4 (there by a cross-entropy search).

    Example:
        >>> table = jax.device_get(jnp.array([[8, 0, 8, 0], [0, 8, 0, 8]]))
        >>> sorted(group_experts(table, 2).order[:2].tolist()) in ([0, 2], [1, 3])
        True
    """
    experts = table.shape[1]
    if experts % devices:
        raise ValueError(f"devices must divide the {experts} experts; got {devices}")
    if (table < 0).any():
        raise ValueError(f"table must hold counts, at least 0; got {table.min()}")
    draw, best, most = np.random.default_rng(seed), np.arange(experts), -1.0
    for _ in range(starts):
        device_of_expert = draw.permutation(experts) % devices
        for _ in range(20):
            mass = np.stack([table[:, device_of_expert == d].sum(1) for d in range(devices)], 1)
            device_of_token = _shared_out(mass.astype(float), table.sum(1))
            gain = np.stack([table[device_of_token == d].sum(0) for d in range(devices)], 1)
            slots = np.repeat(np.arange(devices), experts // devices)
            rows, columns = linear_sum_assignment(gain[:, slots], maximize=True)
            found = slots[columns][np.argsort(rows)]
            is_settled = (found == device_of_expert).all()
            device_of_expert = found
            if is_settled:
                break
        local = float(gain[np.arange(experts), device_of_expert].sum())
        if local > most:
            best, most = device_of_expert, local
    order = np.argsort(best, kind="stable")
    mass = np.stack([table[:, best == d].sum(1) for d in range(devices)], 1)
    preferences = mass / np.maximum(table.sum(1, keepdims=True), 1)
    return ExpertGroups(order, np.argsort(order), preferences)


def _shared_out(mass: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The device of each token: the one with most of its mass that still has room."""
    devices = mass.shape[1]
    room = np.full(devices, weight.sum() / devices)
    device_of_token = np.zeros(len(mass), int)
    ranked = np.sort(mass, axis=1)
    # Those that would lose most elsewhere choose first.
    for token in np.argsort(ranked[:, -2] - ranked[:, -1] if devices > 1 else ranked[:, 0]):
        with_room = room >= weight[token] / 2
        choice = np.where(with_room, mass[token], -1) if with_room.any() else room
        device_of_token[token] = np.argmax(choice)
        room[device_of_token[token]] -= weight[token]
    return device_of_token


@checked
def shuffled_order(preferences: Float[Array, "tokens devices"]) -> Int[Array, "tokens"]:
    """An order of tokens that gives every device equally many, preferably those that prefer it.

    Device after device takes the free tokens that lose most elsewhere. Wrong preferences cost bytes
    but change no result.

    Args:
        preferences: preference of each token for each device, such as rows of
            `ExpertGroups.preferences`; the number of devices divides that of the tokens.

    Returns:
        A permutation of the tokens, whose equal parts belong to the devices in turn.

    Cost: a sort of the tokens for each device; runs under `jax.jit`.

    Source: "Speculative MoE", 2025, arXiv:2503.04398, section 3 (there within the collective).

    Example:
        >>> shuffled_order(jnp.array([[0.0, 1.0], [1.0, 0.0], [0.2, 0.8], [0.9, 0.1]])).tolist()
        [1, 3, 0, 2]
    """
    tokens, devices = preferences.shape
    if not preferences.size:
        raise ValueError(f"preferences: got {tokens} tokens, {devices} devices; wanted both")
    if tokens % devices:
        nearest = tokens + -tokens % devices
        raise ValueError(f"{tokens} tokens are no multiple of {devices} devices; {nearest} are")
    return _order(preferences, tokens // devices)


@functools.partial(jax.jit, static_argnums=1)
def _order(preferences: Array, each: int) -> Array:
    # -inf marks a token that is taken, so none may come in.
    preferences = jnp.nan_to_num(preferences.astype(jnp.float32))
    tokens, devices = preferences.shape
    is_free, parts = jnp.ones(tokens, bool), []
    for device in range(devices):
        loss = preferences[:, device]
        if device + 1 < devices:
            loss = loss - preferences[:, device + 1 :].max(1)
        part = lax.top_k(jnp.where(is_free, loss, -jnp.inf), each)[1]
        is_free = is_free.at[part].set(False)
        parts.append(part)
    return jnp.concatenate(parts)


@checked
def scatter_shuffled(
    parts: Float[Array, "tokens width"], order: Int[Array, "tokens"], axis: str
) -> Float[Array, "own width"]:
    """Sum over devices, of which each receives its tokens by `order`; inside `jax.shard_map`.

    Args:
        parts: this device's part of the sum, for all tokens.
        order: a permutation of the tokens, the same on all devices.
        axis: the mesh axis.

    Returns:
        The sums of this device's tokens.

    Cost: one reduce-scatter, as without an order; a copy of the parts.

    Source: "Speculative MoE", 2025, arXiv:2503.04398, section 3.

    Example:
        >>> mesh, lie = jax.sharding.Mesh(jax.devices(), "e"), jax.sharding.PartitionSpec
        >>> get = lambda x: scatter_shuffled(x, jnp.arange(8)[::-1], "e")
        >>> spread = jax.shard_map(get, mesh=mesh, in_specs=lie(), out_specs=lie("e"))
        >>> spread(jnp.arange(8.0)[:, None])[:, 0].tolist()
        [56.0, 48.0, 40.0, 32.0, 24.0, 16.0, 8.0, 0.0]
    """
    devices = devices_along(axis)
    if parts.shape[0] % devices:
        raise ValueError(
            f"{parts.shape[0]} tokens are no multiple of {devices} devices of {axis!r}"
        )
    return lax.psum_scatter(parts[order], axis, scatter_dimension=0, tiled=True)


@checked
def gather_unshuffled(
    own: Float[Array, "own width"], order: Int[Array, "tokens"], axis: str
) -> Float[Array, "tokens width"]:
    """Gather all tokens on every device in their original order; inside `jax.shard_map`.

    Args:
        own: this device's tokens, from `scatter_shuffled`.
        order: the same permutation.
        axis: the mesh axis.

    Returns:
        [tokens, width].

    Cost: one all-gather, as without an order; a copy of the result.

    Source: "Speculative MoE", 2025, arXiv:2503.04398, section 3.

    Example:
        >>> mesh, lie = jax.sharding.Mesh(jax.devices(), "e"), jax.sharding.PartitionSpec
        >>> get = lambda x: gather_unshuffled(x, jnp.arange(8)[::-1], "e")
        >>> how = {"mesh": mesh, "in_specs": lie("e"), "out_specs": lie(), "check_vma": False}
        >>> jax.shard_map(get, **how)(jnp.arange(8.0)[:, None])[:, 0].tolist()
        [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    """
    if (gathered := own.shape[0] * devices_along(axis)) != order.shape[0]:
        raise ValueError(
            f"own must be an equal part of the {order.shape[0]} tokens of order; got {gathered} in "
            "all"
        )
    whole = lax.all_gather(own, axis, axis=0, tiled=True)
    return jnp.zeros_like(whole).at[order].set(whole, unique_indices=True)
