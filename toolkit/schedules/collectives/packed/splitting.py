"""Switches are split away: links through them become links between compute nodes (Bang-Jensen)."""

from collections.abc import Iterator

from toolkit.schedules.collectives.packed.supply import Supply

Path = tuple[int, ...]


class Routes:
    """For every link between compute nodes, the physical paths that it stands for."""

    def __init__(self) -> None:
        self.pieces: dict[tuple[int, int], list[tuple[int | None, int]]] = {}

    def add(self, a: int, b: int, via: int | None, amount: int) -> None:
        """`amount` units from a to b pass the switch `via`, or are a physical link."""
        self.pieces.setdefault((a, b), []).append((via, amount))

    def draw(self, a: int, b: int, amount: int) -> Iterator[tuple[Path, int]]:
        """Use up some units from a to b: the path and the units of each piece."""
        pieces = self.pieces[a, b]
        while amount:
            via, left = pieces.pop()
            used = min(left, amount)
            amount -= used
            if left > used:
                pieces.append((via, left - used))
            if via is None:
                yield (a, b), used
            else:
                yield from _joined([*self.draw(a, via, used)], [*self.draw(via, b, used)])


def _joined(first: list[tuple[Path, int]], second: list[tuple[Path, int]]):
    """Match the pieces of two stretches."""
    while first:
        (before, left), (after, right) = first.pop(), second.pop()
        used = min(left, right)
        if left > used:
            first.append((before, left - used))
        if right > used:
            second.append((after, right - used))
        yield (*before, *after[1:]), used


def split_switches(supply: Supply, compute: int) -> Routes:
    """Remove every switch from a supply's links, so that all data still reach every node.

    For links u -> w -> t through a switch w, as much capacity as possible moves to u -> t. A first
    pass moves at most an even share, so that many nodes are neighbours afterwards and trees are
    low.
    """
    routes = Routes()
    for a in range(supply.nodes):
        for b, amount in supply.capacity[a].items():
            if amount:
                routes.add(a, b, None, amount)
    for switch in range(compute, supply.nodes):
        for is_even in (True, False):
            _split(supply, switch, routes, is_even)
        assert not any(supply.capacity[switch].values()), "a balanced switch can be split away"
        for node in supply.capacity[switch]:
            del supply.capacity[node][switch]
        supply.capacity[switch] = {}
    return routes


def _split(supply: Supply, switch: int, routes: Routes, is_even: bool) -> None:
    capacity = supply.capacity
    around = sorted(capacity[switch])
    outward = {node: capacity[switch][node] for node in around}
    inward = {node: capacity[node][switch] for node in around}
    total = sum(outward.values())
    for turn in range(1, len(around) + 1 - is_even):  # at last back to where it came from
        for position, a in enumerate(around):
            b = around[(position + turn) % len(around)]
            most = min(capacity[a][switch], capacity[switch][b])
            if is_even and total:
                even = -(-inward[a] * outward[b] // max(1, total - outward[a]))
                most = min(most, max(even, max(supply.units)))
            moved = supply.split(a, switch, b, most) if most else 0
            if moved and a != b:
                routes.add(a, b, switch, moved)
