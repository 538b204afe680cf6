"""What `toolkit plan-collective` prints: throughput, certificate, trees and times by size."""

from toolkit._checks import checked
from toolkit.schedules.collectives.baselines import nccl_choice, ring_forest
from toolkit.schedules.collectives.fabrics.topology import Topology
from toolkit.schedules.collectives.forest import MOST_PACKED, forest
from toolkit.schedules.collectives.joint import joint_all_reduce, joint_forest
from toolkit.schedules.collectives.optimum import Collective, Optimum, optimum
from toolkit.schedules.collectives.packed.symmetry import translations
from toolkit.schedules.collectives.rings import disjoint_rings
from toolkit.schedules.collectives.times import pipelined
from toolkit.schedules.collectives.trees import Forest, Tree

_SIZES = (1e4, 1e6, 1e8, 1e10)
_MOST_NAMED = 6
_MOST_JOINT = 32  # ranks whose joint all-reduce takes a second or two


@checked
def best_forest(
    topology: Topology, collective: Collective, size: float, root: int = 0,
    trees_per_root: int | None = None,
) -> Forest:  # fmt: skip
    """The forest of a collective; of an all-reduce, the joint one where that is faster at a size.

    Args:
        topology: the network.
        collective: as `optimum` takes it.
        size: bytes of the whole array.
        root: as `optimum` takes it.
        trees_per_root: as `forest` takes it; the phases of an all-reduce are then apart.

    Example:
        >>> best_forest(mesh(2, 3), "all-reduce", 1e9).name
        'joint forest on mesh 2x3'
    """
    found = forest(topology, collective, root, trees_per_root)
    if collective != "all-reduce" or trees_per_root or topology.compute > _MOST_JOINT:
        return found
    return min(found, joint_forest(topology), key=lambda each: pipelined(each, size).seconds)


@checked
def plan_report(
    topology: Topology, collective: Collective, size: float, root: int = 0,
    trees_per_root: int | None = None,
) -> str:  # fmt: skip
    """The best trees of a collective in words: throughput, the cut, trees, times by size.

    Args:
        topology: the network.
        collective: as `optimum` takes it.
        size: bytes of the whole array.
        root: as `optimum` takes it.
        trees_per_root: as `forest` takes it.

    Returns:
        Lines of text; times are modelled.

    Example:
        >>> plan_report(ring(8), "all-gather", 1e9).splitlines()[1]
        'optimum      2.29 GB/s = 16/7, proved by the links out of 7 of 8 ranks: 2 GB/s'
    """
    best = optimum(topology, collective, root)
    switches = len(topology.labels) - topology.compute
    lines = [
        f"network      {topology.name}: {topology.compute} ranks, {switches} switches, "
        f"{len(topology.links)} links",
        f"optimum      {float(best.rate):.2f} GB/s = {best.rate}, {_proof(topology, best)}",
    ]
    if collective == "all-reduce":
        lines.append(f"joint        {_joint(topology)}")
    if topology.compute > MOST_PACKED and not translations(topology):
        limit = f"more than {MOST_PACKED} ranks without translations (rings, tori, hypercubes)"
        return "\n".join([*lines, f"trees        not packed for {limit}"])
    found = best_forest(topology, collective, size, root, trees_per_root)
    count = sum(1 for phase in ("reduce", "gather") for _ in found.trees(phase))
    busy = [f"{topology.labels[a]} -> {topology.labels[b]}" for a, b in found.busiest]
    lines += [
        f"trees        {float(found.rate):.2f} GB/s = {found.rate}: {count} trees, "
        f"{found.height} steps, shares in units of {found.unit} ({found.name})",
        f"busiest      {_some(busy)}",
        f"first tree   {_tree(topology, (found.gather or found.reduce)[0])}",
        "",
        f"seconds for one {collective} (modelled; {topology.seconds:.0e} s per message)",
        f"{'bytes':>10}  {'trees':>10} {'chunks':>6}  {'what NCCL would take':>20}",
    ]
    has_rings = collective in ("all-gather", "reduce-scatter", "all-reduce")
    for each in sorted({*_SIZES, size}):
        mine = pipelined(found, each)
        row = f"{each:>10.3g}  {mine.seconds:>10.3g} {mine.chunks:>6}"
        if has_rings:
            other = nccl_choice(topology, each, collective)
            theirs = pipelined(other, each)
            row += f"  {theirs.seconds:>10.3g} ({other.name}, {theirs.seconds / mine.seconds:.2f}x)"
        lines.append(row)
    if has_rings:
        rings = ring_forest(topology, collective, disjoint_rings(topology))
        lines += ["", f"rings alone  {float(rings.rate):.2f} GB/s = {rings.rate} ({rings.name})"]
    return "\n".join(lines)


def _proof(topology: Topology, best: Optimum) -> str:
    inside = sum(node < topology.compute for node in best.cut)
    text = f"proved by the links out of {inside} of {topology.compute} ranks: {best.cut_rate} GB/s"
    if best.collective == "all-reduce":
        text = f"one phase after the other: reduce-scatter, then all-gather; the latter {text}"
    return text


def _joint(topology: Topology) -> str:
    if topology.compute > _MOST_JOINT:
        return f"both phases at once: not solved for more than {_MOST_JOINT} ranks"
    best = joint_all_reduce(topology)
    proof = f"proved by {len(best.cuts)} weighted cuts"
    return f"{float(best.rate):.2f} GB/s = {best.rate}, both phases at once, {proof}"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _tree(topology: Topology, tree: Tree) -> str:
    names = topology.labels
    edges = [" > ".join(names[node] for node in edge.path) for edge in tree.edges]
    return f"from {names[tree.root]}, {tree.share} of the array: {_some(edges)}"
