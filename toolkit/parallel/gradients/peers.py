"""The devices among which one hop of an exchange goes: all of some axes, or groups along one."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array


@dataclass(frozen=True)
class Peers:
    """Devices that exchange messages inside `jax.shard_map`."""

    axes: tuple[str, ...]  # mesh axes, outermost first
    size: int  # number of devices
    # along a single axis, the indices of the devices of each group; None: all of them
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def _where(self) -> dict[str, Any]:
        return {
            "axis_name": self.axes,
            "axis_index_groups": self.groups and [list(group) for group in self.groups],
        }

    def all_to_all(self, tree: Any) -> Any:
        """Row j of every array [size, ...] goes to peer j; row i of the result is from peer i."""
        how = {**self._where, "split_axis": 0, "concat_axis": 0}
        return jax.tree.map(lambda x: jax.lax.all_to_all(x, **how), tree)

    def all_gather(self, tree: Any) -> Any:
        """The arrays of all peers, stacked."""
        if self.size == 1:
            return jax.tree.map(lambda x: x[None], tree)
        return jax.tree.map(lambda x: jax.lax.all_gather(x, **self._where), tree)

    def sum_scatter(self, rows: Array) -> Array:
        """The sum over peers of the row that is this device's."""
        if self.size == 1:
            return rows[0]
        return jax.lax.psum_scatter(rows, **self._where, scatter_dimension=0)


@dataclass(frozen=True)
class Along:
    """The devices of an exchange, and their two levels: `far` groups of `near` devices."""

    sizes: tuple[tuple[str, int], ...]  # the mesh axes, outermost first, with their sizes
    peers: Peers  # all of them
    near: Peers  # the peers of a device within its group
    far: Peers  # the devices at its place in the other groups

    @classmethod
    def over(cls, axes: dict[str, int], near: int | None) -> "Along":
        """Of mesh axes with their sizes, outermost first: the innermost is near; a single axis is
        divided into groups of `near` devices, by default those of one process."""
        sizes, names, size = tuple(axes.items()), tuple(axes), math.prod(axes.values())
        peers = Peers(names, size)
        if len(names) > 1:
            inner = axes[names[-1]]
            if near not in (None, inner):
                raise ValueError(f"near: got {near}, and the axis {names[-1]!r} has {inner}")
            return cls(sizes, peers, Peers(names[-1:], inner), Peers(names[:-1], size // inner))
        near = math.gcd(size, jax.local_device_count()) if near is None else near
        if near < 1 or size % near:
            raise ValueError(f"near: got {near}, wanted a divisor of {size} devices")
        if near in (1, size):
            single = Peers(names, 1)
            return cls(sizes, peers, *((peers, single) if near > 1 else (single, peers)))
        inside = tuple(tuple(range(at, at + near)) for at in range(0, size, near))
        across = tuple(zip(*inside, strict=True))
        return cls(sizes, peers, Peers(names, near, inside), Peers(names, size // near, across))

    def devices(self, axes: tuple[str, ...]) -> int:
        """The number of devices along some of the axes."""
        return math.prod(size for axis, size in self.sizes if axis in axes)

    def index(self) -> Array:
        """This device's index among all, groups outermost."""
        return jax.lax.axis_index(self.peers.axes)
