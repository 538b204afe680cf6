"""For every compute node, a flow that shows that all data can reach it; kept while links change.

Edge splitting and tree packing both ask, thousands of times, how far a link's capacity may fall
until some node no longer gets everything. A cut that suffers loses exactly what the link loses, so
one trial answers: lower the capacity by all that is wanted, mend the flows, and give back what the
worst of them lacks. Few flows use the link, and a mended one needs a short path or two, where a
flow from nothing needs hundreds.
"""

from collections.abc import Iterable


class Batch:
    """Trees that are still alike: their root and weight, the nodes reached, the edges so far."""

    def __init__(self, root: int, weight: int) -> None:
        self.root = root
        self.weight = weight
        self.depth = {root: 0}
        self.edges: list[tuple[int, int]] = []
        self.exhausted: set[tuple[int, int]] = set()

    def part(self, weight: int) -> "Batch":
        """A copy with some of the weight, which this one loses."""
        other = Batch(self.root, weight)
        self.weight -= weight
        other.depth, other.edges = dict(self.depth), list(self.edges)
        other.exhausted = set(self.exhausted)
        return other


class _Flow:
    """What flows along each link, less what flows back, and where partial batches enter."""

    def __init__(self, along: dict[int, int], entering: dict[Batch, dict[int, int]]) -> None:
        self.along = along
        self.entering = entering

    def copy(self) -> "_Flow":
        entering = {batch: dict(amounts) for batch, amounts in self.entering.items()}
        return _Flow(dict(self.along), entering)


class Supply:
    """Capacities between nodes, and a flow of all data to each compute node.

    `units[v]` start at every compute node v, and all of them arrive at each.
    """

    def __init__(self, nodes: int, units: list[int]) -> None:
        self.nodes = nodes
        self.units = units
        self.capacity: list[dict[int, int]] = [{} for _ in range(nodes)]
        self.flows: list[_Flow] = []

    def add(self, a: int, b: int, amount: int) -> None:
        """Change the capacity from a to b."""
        self.capacity[a][b] = self.capacity[a].get(b, 0) + amount
        self.capacity[b].setdefault(a, 0)

    def fill(self) -> None:
        """Find the flows, from nothing.

        Raises:
            ArithmeticError: if there are none.
        """
        for sink in range(len(self.units)):
            flow = _Flow({}, {})
            surplus = {
                node: units for node, units in enumerate(self.units) if units and node != sink
            }
            if self._mend(flow, surplus, {sink: sum(surplus.values())}):
                raise ArithmeticError("the capacities are too small for all data")
            self.flows.append(flow)

    def split(self, a: int, switch: int, b: int, most: int) -> int:
        """Move up to `most` units of capacity from a -> switch -> b to a -> b; how many."""
        n = self.nodes
        first, second, direct = a * n + switch, switch * n + b, a * n + b

        def lowered(amount):
            self.add(a, switch, -amount)
            self.add(switch, b, -amount)
            if a != b:
                self.add(a, b, amount)

        def disturbed(flow, amount):
            return (
                flow.along.get(first, 0) > self.capacity[a][switch]
                or flow.along.get(second, 0) > self.capacity[switch][b]
            )

        def change(flow, amount):
            along = flow.along
            over = (
                along.get(first, 0) - self.capacity[a][switch],
                along.get(second, 0) - self.capacity[switch][b],
            )
            moved = max(0, min(max(over), amount, along.get(first, 0), along.get(second, 0)))
            over = max(0, over[0] - moved), max(0, over[1] - moved)
            _send(along, n, a, switch, -moved - over[0])
            _send(along, n, switch, b, -moved - over[1])
            if a != b:
                along[direct] = along.get(direct, 0) + moved
                along[b * n + a] = -along[direct]
            balance = {a: over[0], switch: over[1] - over[0]}
            balance[b] = balance.get(b, 0) - over[1]
            return balance

        amount, flows = self._try(most, lowered, disturbed, change, None)
        self._keep(flows)
        lowered(amount)
        return amount

    def start(self, batch: Batch) -> None:
        """Begin with a batch of trees."""
        for flow in self.flows:
            flow.entering[batch] = {batch.root: batch.weight}

    def grow(self, batch: Batch, x: int, y: int) -> tuple[int, list[tuple[int, _Flow]]]:
        """How much of a batch can take the edge x -> y next, and the flows that show it."""
        n, edge = self.nodes, x * self.nodes + y

        def lowered(amount):
            self.add(x, y, -amount)

        def disturbed(flow, amount):
            return flow.along.get(edge, 0) > self.capacity[x][y]

        def change(flow, amount):
            over = flow.along.get(edge, 0) - self.capacity[x][y]
            _send(flow.along, n, x, y, -over)
            return {x: over, y: -over}

        most = min(self.capacity[x].get(y, 0), batch.weight)
        return self._try(most, lowered, disturbed, change, (batch, y))

    def take(self, batch: Batch, x: int, y: int, amount: int, flows) -> Batch | None:
        """Give a batch the edge x -> y; what did not fit is returned as another batch."""
        self._keep(flows)
        self.add(x, y, -amount)
        rest = batch.part(batch.weight - amount) if amount < batch.weight else None
        for flow in self.flows:
            if rest is not None:
                flow.entering[rest] = _divide(flow.entering[batch], y, amount)
        batch.depth[y] = batch.depth[x] + 1
        batch.edges.append((x, y))
        return rest

    def finish(self, batch: Batch) -> None:
        """A batch reaches every node by its own edges: no flow has to bring it any more."""
        for sink, flow in enumerate(self.flows):
            entering = flow.entering.pop(batch)
            lacking = {node: units for node, units in entering.items() if node != sink and units}
            if lacking:
                self._mend(flow, {sink: sum(lacking.values())}, lacking)

    def _try(self, most, lowered, disturbed, change, growing):
        """The largest amount up to `most` that every flow survives, and the flows mended for it."""
        while True:
            lowered(most)
            flows, lacking = [], 0
            for sink, flow in enumerate(self.flows):
                if disturbed(flow, most):
                    mended = flow.copy()
                    balance = change(mended, most)
                    surplus = {node: units for node, units in balance.items() if units > 0}
                    deficit = {node: -units for node, units in balance.items() if units < 0}
                    lacking = max(lacking, self._mend(mended, surplus, deficit, growing, most))
                    flows.append((sink, mended))
                    if lacking >= most:
                        break
            lowered(-most)
            if not lacking:
                return most, flows
            most -= lacking
            if not most:
                return 0, []

    def _keep(self, flows: Iterable[tuple[int, _Flow]]) -> None:
        for sink, flow in flows:
            self.flows[sink] = flow

    def _mend(self, flow, surplus, deficit, growing=None, limit=0) -> int:
        """Send surplus to deficit along shortest paths; how much finds no way."""
        n, along, capacity = self.nodes, flow.along, self.capacity
        while surplus:
            before = dict.fromkeys(surplus)
            queue, end = list(surplus), None
            for node in queue:
                if node in deficit:
                    end = node
                    break
                base = node * n
                for other, most in capacity[node].items():
                    if other not in before and most > along.get(base + other, 0):
                        before[other] = node
                        queue.append(other)
                for other, batch in _entrances(flow, node, growing, limit):
                    if other not in before:
                        before[other] = (node, batch)
                        queue.append(other)
            if end is None:
                return sum(surplus.values())
            self._augment(flow, surplus, deficit, before, end, limit)
        return 0

    def _augment(self, flow, surplus, deficit, before, end, limit) -> None:
        """Send along one path as much as it takes."""
        n, steps, node = self.nodes, [], end
        while (step := before[node]) is not None:
            steps.append((step, node))
            node = step[0] if isinstance(step, tuple) else step
        amount = min(surplus[node], deficit[end])
        for step, to in steps:
            if not isinstance(step, tuple):
                amount = min(amount, self.capacity[step][to] - flow.along.get(step * n + to, 0))
                continue
            origin, batch = step
            entering = flow.entering[batch]
            amount = min(amount, entering[origin])
            if to not in batch.depth:
                amount = min(amount, limit - entering.get(to, 0))
        for step, to in steps:
            if isinstance(step, tuple):
                entering = flow.entering[step[1]]
                entering[step[0]] -= amount
                entering[to] = entering.get(to, 0) + amount
            else:
                _send(flow.along, n, step, to, amount)
        for balance, key in ((surplus, node), (deficit, end)):
            balance[key] -= amount
            if not balance[key]:
                del balance[key]


def _send(along: dict[int, int], n: int, a: int, b: int, amount: int) -> None:
    forward = along.get(a * n + b, 0) + amount
    if forward:
        along[a * n + b], along[b * n + a] = forward, -forward
    else:
        along.pop(a * n + b, None)
        along.pop(b * n + a, None)


def _entrances(flow, node, growing, limit):
    """Where else what enters at a node can enter: with its batch, or by the edge that it gets."""
    for batch, amounts in flow.entering.items():
        if amounts.get(node):
            yield from ((other, batch) for other in batch.depth)
            if growing and batch is growing[0] and amounts.get(growing[1], 0) < limit:
                yield growing[1], batch


def _divide(entering: dict[int, int], first: int, amount: int) -> dict[int, int]:
    """Keep `amount` of what enters, that at `first` before all else; the rest is returned."""
    rest = {}
    for node in sorted(entering, key=lambda node: node != first):
        kept = min(entering[node], amount)
        amount -= kept
        if entering[node] > kept:
            rest[node] = entering[node] - kept
        entering[node] = kept
    return rest
