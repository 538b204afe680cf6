"""Spanning out-trees that fill given links: Edmonds' theorem, with multiplicities (Tarjan)."""

from collections.abc import Iterator

from toolkit.schedules.collectives.packed.supply import Batch, Supply


def pack_trees(supply: Supply) -> Iterator[Batch]:
    """Trees from every node that starts units, one per unit, in batches of equal trees.

    A batch grows from its root by an edge x -> y as near to the root as possible, as far as the
    remaining trees can still be packed; where the edge takes only a part, the batch is divided.
    """
    nodes = len(supply.units)
    for root, units in enumerate(supply.units):
        waiting = [Batch(root, units)] if units else []
        for batch in waiting:
            supply.start(batch)
        while waiting:
            batch = waiting.pop()
            while len(batch.depth) < nodes:
                rest = supply.take(batch, *_next_edge(supply, batch))
                if rest is not None:
                    waiting.append(rest)
            supply.finish(batch)
            yield batch


def _next_edge(supply: Supply, batch: Batch):
    for x in sorted(batch.depth, key=lambda node: batch.depth[node]):
        outward = supply.capacity[x]
        for y in sorted(outward, key=lambda node: -outward[node]):
            if y in batch.depth or not outward[y] or (x, y) in batch.exhausted:
                continue
            amount, flows = supply.grow(batch, x, y)
            if amount:
                return x, y, amount, flows
            batch.exhausted.add((x, y))
    raise AssertionError("by Edmonds' theorem an edge can be added")
