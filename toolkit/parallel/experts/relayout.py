"""Re-layout of experts by their loads: more copies of busy experts, near their tokens.

A layout is an array of numbers, not a shape, so that a new one does not recompile.
"""

from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from toolkit._annotations import AtLeast
from toolkit._checks import checked

Count = Annotated[int, AtLeast(1)]


class ExpertLayout(NamedTuple):
    """The experts on every device, and the device to which every device's tokens are sent.

    Attributes:
        slots: [devices, slots], the expert in each slot; several may be copies of one.
        shares: [devices, experts, devices], the share of a device's tokens of an expert that goes
            to each device; adds up to 1 over the last axis.
        device_loads: [devices], pairs that each device computes.
        moved_share: share of all pairs that leave their device.
        share_across_nodes: share of all pairs that leave their node.

    Example:
        >>> relayout(jax.device_get(jnp.array([[6, 2], [6, 2]])), 2).slots.tolist()
        [[0, 1], [0, 1]]
    """

    slots: Int[np.ndarray, "devices slots"]
    shares: Float[np.ndarray, "devices experts devices"]
    device_loads: Float[np.ndarray, "devices"]
    moved_share: float
    share_across_nodes: float

    @property
    def imbalance(self) -> float:
        """The largest load of a device over the mean, 1 where all are even."""
        return float(self.device_loads.max() / max(self.device_loads.mean(), 1e-30))


@checked
def relayout(
    loads: Int[np.ndarray, "devices experts"], slots: Count, *,
    devices_per_node: int | None = None, across_cost: float = 1.0,
) -> ExpertLayout:  # fmt: skip
    """Compute a layout of experts from the loads of recent steps.

        minimise  4 across_cost (largest pairs that cross nodes at a device) / mean load
                  + 3 (largest load) / mean load

    The next copy goes to the expert with the most pairs per copy, until all slots are taken. Copies
    are placed from the busiest on: on the node with the fewest of the same expert, and there on the
    device with the least load. Tokens go to the copies of their node, evenly, or to all if it has
    none. Of the results from one copy of each expert and from one per node, and of `static_layout`,
    the best by the objective is taken.

    Args:
        loads: pairs of each device's tokens with each expert, as `expert_loads` counts them.
        slots: experts per device.
        devices_per_node: consecutive devices with fast links among them; None: all are one node.
        across_cost: relative cost of a pair that crosses nodes.

    Returns:
        The `ExpertLayout`.

    Cost: of order (slots of all devices) x (devices + experts) operations in Python.

    Source: "LAER-MoE: Load-Adaptive Expert Re-layout", 2026, arXiv:2602.11686, section 4. Its
        search also perturbs the counts of copies at random, which this one does not.

    Example:
        >>> loads = jax.device_get(jnp.array([[90, 5, 5, 0]] * 4))
        >>> relayout(loads, 2).imbalance < static_layout(loads, 2).imbalance
        True
    """
    devices, experts, nodes = _sizes(loads, slots, devices_per_node)
    if devices * slots < experts:
        raise ValueError(
            f"slots must be at least {-(-experts // devices)}, for {experts} experts on {devices} "
            f"devices; got {slots}"
        )
    total = loads.sum(0)
    found = []
    for least in sorted({1, int(nodes[-1]) + 1}):  # copies of each expert to begin with
        if least * experts <= devices * slots:
            copies = _copies(total, np.full(experts, least), devices * slots, devices)
            found.append(_routed(loads, _placed(total, copies, nodes, slots), nodes))
    if experts % slots == 0 and devices % (experts // slots) == 0:
        found.append(static_layout(loads, slots, devices_per_node=devices_per_node))
    return min(found, key=lambda layout: _objective(layout, loads, nodes, across_cost))


@checked
def static_layout(
    loads: Int[np.ndarray, "devices experts"], slots: Count, *, devices_per_node: int | None = None
) -> ExpertLayout:
    """The layout of plain expert parallelism: equally many copies of each expert.

    Slot i of device d holds expert i m + d mod m, for m = experts / slots.

    Args:
        loads: as in `relayout`.
        slots: experts per device.
        devices_per_node: as in `relayout`.

    Returns:
        The `ExpertLayout`, one of those with which `relayout` starts.

    Source: "LAER-MoE", 2026, arXiv:2602.11686, section 2.

    Example:
        >>> static_layout(jax.device_get(jnp.ones((4, 4), int)), 2).slots.tolist()
        [[0, 2], [1, 3], [0, 2], [1, 3]]
    """
    devices, experts, nodes = _sizes(loads, slots, devices_per_node)
    if experts % slots or devices % (experts // slots):
        raise ValueError(
            f"slots must divide the {experts} experts into groups that divide the {devices} "
            f"devices; got {slots}"
        )
    group = experts // slots
    placed = np.arange(slots) * group + (np.arange(devices) % group)[:, None]
    return _routed(loads, placed, nodes)


@checked
def break_even_pairs(
    before: ExpertLayout, after: ExpertLayout, flops_per_byte: float, *, itemsize: Count = 2
) -> float:
    """Pairs per device from which a layout saves more time than restoring its experts takes.

        R > b slots (n - 1) / (3 n (imbalance before - imbalance after)) C / W

    The slowest device computes 18 D F FLOPs per pair, forward and backward, for width D and hidden
    size F. Restoring sends 3 D F numbers per slot from the other n - 1 of n devices, and their
    gradients back: both sizes drop out. Where experts were sharded before, as by FSDP, the same
    bytes were sent then, and any gain pays. Nothing is assumed to hide; as many pairs move.

    Args:
        before: the layout in which experts stay where they are.
        after: the layout that is restored in every step.
        flops_per_byte: C / W, FLOPs that a device computes while it sends a byte.
        itemsize: b, bytes of a number that is sent.

    Returns:
        Pairs per device and layer, the tokens times the experts that each chooses; infinity if
        `after` is no more even (modelled).

    Source: the restored bytes of "LAER-MoE", 2026, arXiv:2602.11686, section 3; the rest derived.

    Example:
        >>> loads = jax.device_get(jnp.array([[90, 5, 5, 0]] * 4))
        >>> round(break_even_pairs(static_layout(loads, 2), relayout(loads, 2), 2200.0))
        2750
    """
    gain, (devices, slots) = before.imbalance - after.imbalance, after.slots.shape
    if gain <= 0:
        return float("inf")
    return itemsize * slots * (devices - 1) / (3 * devices * gain) * flops_per_byte


def _sizes(loads, slots, devices_per_node):
    devices, experts = loads.shape
    each = devices if devices_per_node is None else devices_per_node
    if each < 1 or devices % each:
        raise ValueError(f"devices_per_node must divide the {devices} devices; got {each}")
    if (loads < 0).any():
        raise ValueError(f"loads must be at least 0; got {loads.min()}")
    if slots > experts:
        raise ValueError(f"slots must be at most the {experts} experts; got {slots}")
    return devices, experts, np.arange(devices) // each


def _copies(total: np.ndarray, start: np.ndarray, slots: int, devices: int) -> np.ndarray:
    """The number of copies of each expert, at most one per device: the next goes to the busiest."""
    copies = start.copy()
    for _ in range(slots - copies.sum()):
        copies[np.argmax(np.where(copies < devices, total / copies, -1))] += 1
    return copies


def _placed(total: np.ndarray, copies: np.ndarray, nodes: np.ndarray, slots: int) -> np.ndarray:
    """The expert in each slot [devices, slots]."""
    placed: list[list[int]] = [[] for _ in nodes]
    load = np.zeros(len(nodes))
    per_node = np.zeros((nodes[-1] + 1, len(total)), int)
    share = total / copies
    busiest = np.argsort(-share, kind="stable")
    for expert in np.repeat(busiest, copies[busiest]):
        free = [d for d in range(len(nodes)) if len(placed[d]) < slots]
        # Two copies on one device count as one, so that happens only if no other device has room.
        free = [d for d in free if expert not in placed[d]] or free
        device = min(free, key=lambda d: (per_node[nodes[d], expert], load[d]))
        placed[device].append(int(expert))
        load[device] += share[expert]
        per_node[nodes[device], expert] += 1
    return np.array(placed)


def _routed(loads: np.ndarray, placed: np.ndarray, nodes: np.ndarray) -> ExpertLayout:
    """The destinations of tokens: evenly to the copies of their node, or to all copies."""
    devices, experts = loads.shape
    copies = np.zeros((devices, experts))
    np.add.at(copies, (np.arange(devices)[:, None], placed), 1)
    shares = np.zeros((devices, experts, devices))
    for node in range(nodes[-1] + 1):
        near = copies * (nodes == node)[:, None]
        used = np.where(near.sum(0) > 0, near, copies)
        shares[nodes == node] = (used / used.sum(0)).T
    pairs = loads[:, :, None] * shares
    total = max(pairs.sum(), 1e-30)
    stays = np.einsum("ded->", pairs)
    across = (pairs.sum(1) * (nodes[:, None] != nodes)).sum()
    return ExpertLayout(
        placed, shares, pairs.sum((0, 1)), float(1 - stays / total), float(across / total)
    )


def _objective(layout: ExpertLayout, loads, nodes, across_cost: float) -> float:
    pairs = (loads[:, :, None] * layout.shares).sum(1) * (nodes[:, None] != nodes)
    crossing = max(pairs.sum(0).max(), pairs.sum(1).max())
    mean = max(loads.sum() / len(nodes), 1e-30)
    return float((4 * across_cost * crossing + 3 * layout.device_loads.max()) / mean)
