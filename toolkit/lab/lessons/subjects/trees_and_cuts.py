"""Lesson 15, trees and cuts: the bound of a set of ranks, the tightest set, a tree by hand."""

from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from matplotlib.figure import Figure

from toolkit.figures import look
from toolkit.lab.lessons.drawing import draw_bars, mark_guess
from toolkit.lab.lessons.outline import (
    Answer,
    Exercise,
    Outline,
    Question,
    Show,
    WrongAnswer,
    ask,
    ask_number,
)
from toolkit.schedules.collectives import (
    Edge,
    Forest,
    Topology,
    Tree,
    forest_faults,
    joint_all_reduce,
    leaf_spine,
    mesh,
    named_topology,
    optimum,
    star,
    torus,
)

SIDE = 3
DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}


def bridged() -> Topology:
    """Two rings of four with cables of 3 GB/s, joined by one cable of 1 GB/s."""
    pairs = [(a, (a + 1) % 4, 3) for a in range(4)]
    cables = [*pairs, *((4 + a, 4 + b, rate) for a, b, rate in pairs), (0, 4, 1)]
    links = {link: Fraction(rate) for a, b, rate in cables for link in ((a, b), (b, a))}
    return Topology("two rings and a bridge", tuple(map(str, range(8))), 8, links)


def _box_ms() -> Answer:
    network = named_topology("h100:8")
    rate = float(optimum(network, "all-reduce").rate)
    adding = float(joint_all_reduce(network, switches_compute=True).rate)
    return Answer(
        1e3 / rate,
        f"{1e3 / rate:.2f} ms (modelled, without delays). Of the sum of 8 arrays, 7/8 of a GB must "
        "come into each GPU twice, as summands of its part and as the other parts: 2 x 7/8 / 450 "
        f"s. A switch that adds and copies itself (NVLS) would halve it to {1e3 / adding:.2f} ms.",
    )


def _two_boxes() -> Answer:
    rates = {
        boxes: float(optimum(named_topology(f"h100:{boxes}x8")).rate) for boxes in (1, 2, 4, 8)
    }

    def draw(figure: Figure, guess: float) -> None:
        axes = figure.add_axes((0.1, 0.18, 0.86, 0.74))
        axes.plot([*rates], [*rates.values()], **look("full").line, marker="o")
        mark_guess(axes, 2, guess, rates[2])
        axes.set_xscale("log", base=2)
        axes.set_xticks([*rates], map(str, rates))
        axes.set(xlabel="boxes of eight", ylabel="all-gather, GB/s")
        axes.set_ylim(bottom=0)

    return Answer(
        rates[2],
        f"{rates[2]:.0f} GB/s (modelled), more than the {rates[1]:.0f} of one box: a GPU takes in "
        "450 GB/s from its box and 50 from outside, so 15/16 of the array come in at 500. With "
        f"four boxes it is {rates[4]:.0f} GB/s; with eight, {rates[8]:.0f}, the tightest set is "
        "all boxes but one.",
        draw,
    )


def _row_at_once() -> Answer:
    network = mesh(4, rate=24)
    apart, joint = optimum(network, "all-reduce").rate, joint_all_reduce(network).rate
    return Answer(
        float(joint),
        f"{float(joint):g} GB/s, against {float(apart):g} of one after the other (both proved "
        "here in fractions). All sums flow to one end rank by rank, and the results come back on "
        "the other way of the same cables: each way of each cable carries the array once.",
    )


def _bound(links: Mapping[tuple[int, int], Any], ranks: int, inside: set[int], wrong: str) -> float:
    """The bound of a cut, or a wrong one."""
    count = len(inside) if wrong == "switches" else sum(node < ranks for node in inside)
    outward = sum(r for (a, b), r in links.items() if a in inside and b not in inside)
    inward = sum(r for (a, b), r in links.items() if b in inside and a not in inside)
    rate = {"both ways": outward + inward, "inward": inward}.get(wrong, outward)
    if wrong == "upside down":
        return ranks * count / rate
    if wrong == "one part":
        return rate / count
    if wrong == "no parts":
        return rate
    return ranks * rate / count


_WRONG = {
    "both ways": "These are the links both ways: data leave over the outward ones only.",
    "inward": "These are the links that come in; the parts inside must get out.",
    "switches": "Switches hold no part of the array: count the ranks inside alone.",
    "upside down": "Upside down: the rate of the links stands above, the number of ranks below.",
    "one part": "This is the rate for one rank's part; the array is as many parts as there are "
    "ranks.",
    "no parts": "The rate out of the set is not yet that of the array, of which |S| parts in N "
    "leave.",
}


def _judge_bound(bound: Callable[..., Any], show: Show) -> str:
    lopsided = Topology(
        "one way", tuple("0123"), 4,
        {(0, 1): Fraction(3), (1, 2): Fraction(2), (2, 3): Fraction(2), (3, 0): Fraction(4),
         (2, 0): Fraction(1), (1, 3): Fraction(1)},
    )  # fmt: skip
    cases = [
        ("one rank of a star", star(4, 300), {0}),
        ("a leaf with its hosts", leaf_spine(2, 4, 1), {0, 1, 2, 3, 8}),
        ("half of two rings", bridged(), {0, 1, 2, 3}),
        ("one-way links", lopsided, {0, 1}),
    ]
    got, wanted = [], []
    for _, network, inside in cases:
        links = {link: float(rate) for link, rate in network.links.items()}
        got.append(ask_number(bound, dict(links), network.compute, set(inside)))
        wanted.append(_bound(links, network.compute, inside, ""))
    show(draw_bars([name for name, *_ in cases], got, wanted, xlabel="GB/s"))
    if all(abs(a - b) < 1e-6 * b for a, b in zip(got, wanted, strict=True)):
        return "Right: no schedule moves more over these sets."
    for wrong, reason in _WRONG.items():
        values = [
            _bound({k: float(v) for k, v in n.links.items()}, n.compute, s, wrong)
            for _, n, s in cases
        ]
        if all(abs(a - b) < 1e-6 * abs(b) for a, b in zip(got, values, strict=True)):
            raise WrongAnswer(reason)
    at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if abs(a - b) >= 1e-6 * b)
    raise WrongAnswer(f"Of {cases[at][0]} it is {wanted[at]:g} GB/s, not {got[at]:g}.")


def _judge_find_cut(find_cut: Callable[..., Any], show: Show) -> str:
    found, best, names = [], [], []
    reason = ""
    for network in (mesh(2, 3), bridged(), leaf_spine(2, 3, 1)):
        links = {link: float(rate) for link, rate in network.links.items()}
        nodes, ranks = len(network.labels), network.compute
        value = ask(find_cut, dict(links), ranks)
        try:
            inside = {int(node) for node in value}
        except (TypeError, ValueError):
            raise WrongAnswer("find_cut must return a set of nodes.") from None
        if not inside <= set(range(nodes)):
            raise WrongAnswer(f"find_cut: nodes are 0 to {nodes - 1}; got {sorted(inside)}.")
        count = sum(node < ranks for node in inside)
        if not count or count == ranks:
            members = "no rank" if not count else "all ranks"
            raise WrongAnswer(
                f"On {network.name} the set holds {members}: nothing has to leave it."
            )
        names.append(network.name)
        found.append(_bound(links, ranks, inside, ""))
        best.append(float(optimum(network).rate))
        others = [node for node in range(ranks) if node not in inside]
        if found[-1] > best[-1] * (1 + 1e-9) and not reason:
            reason = (
                f"On {network.name} your set allows {found[-1]:.3g} GB/s; another allows only "
                f"{best[-1]:.3g}."
            )
            if nodes > ranks and count == len(inside):
                reason += " Switches can be inside too."
            elif count == 1 or len(others) == 1:
                reason += " Sets of one rank, or of all but one, are not the only ones."
    show(draw_bars(names, found, best, xlabel="GB/s that the set allows"))
    if reason:
        raise WrongAnswer(reason)
    return "Right: three proofs that no schedule is faster."


def _judge_tree(tree: Callable[..., Any], show: Show) -> str:
    network, ranks = torus(SIDE, SIDE), SIDE * SIDE
    trees, loads = [], Counter[tuple[int, int]]()
    for root in range(ranks):
        edges, depth = _edges(ask(tree, root), root), {root: 0}
        made = []
        for parent, child in edges:
            what = f"tree({root}): the edge {parent} -> {child}"
            if (parent, child) not in network.links:
                raise WrongAnswer(f"{what} is no cable of the torus.")
            if parent not in depth:
                raise WrongAnswer(f"{what} starts where nothing has arrived yet.")
            if child in depth:
                raise WrongAnswer(f"{what} reaches {child} a second time.")
            depth[child] = depth[parent] + 1
            made.append(Edge(parent, child, (parent, child), depth[parent]))
            loads[parent, child] += 1
        if missing := set(range(ranks)) - set(depth):
            raise WrongAnswer(f"tree({root}) does not reach rank {min(missing)}.")
        trees.append(Tree(root, Fraction(1, ranks), tuple(made)))
    forest = Forest("by hand", "all-gather", network, gather=tuple(trees))
    assert not forest_faults(forest)  # what is wrong with it was said above
    by_way = [
        max(loads[place, _step(place, way)] for place in range(ranks))
        for way in DIRECTIONS.values()
    ]
    names = [f"links that lead {way}" for way in DIRECTIONS]
    show(draw_bars(names, by_way, [2] * 4, xlabel="trees on the fullest of them"))
    if forest.rate == optimum(network).rate:
        steps = f" in {forest.height} steps" if forest.height == 2 else ""
        return f"Right: {forest.rate} GB/s{steps}, the optimum; no link has more than 2."
    reason = f"Every part arrives, at {float(forest.rate):.3g} GB/s; 4.5 are possible."
    if by_way[0] + by_way[1] != by_way[2] + by_way[3]:
        reason += " Rows and columns are not equally busy: not all corners by the same way."
    elif len(set(by_way)) > 1:
        reason += " Some directions do more than others: use each of the four twice per tree."
    else:
        reason += " The trees of different roots meet on some links: move one tree to all roots."
    raise WrongAnswer(reason)


def _edges(value: Any, root: int) -> list[tuple[int, int]]:
    try:
        return [(int(parent), int(child)) for parent, child in value]
    except (TypeError, ValueError):
        raise WrongAnswer(f"tree({root}) must return a list of pairs (parent, child).") from None


def _step(place: int, way: tuple[int, int]) -> int:
    row, column = divmod(place, SIDE)
    return (row + way[0]) % SIDE * SIDE + (column + way[1]) % SIDE


OUTLINE = Outline(
    "Trees and cuts",
    questions=(
        Question(
            "box_ms",
            "Eight H100 meet at an NVSwitch that only passes data on; each sends and receives 450 "
            "GB/s. How long does an all-reduce of 1 GB take at least, in milliseconds?",
            _box_ms,
            unit="ms",
            low=0.01,
            high=1000,
        ),
        Question(
            "two_boxes",
            "One such box all-gathers at 514 GB/s (bytes of the whole array over seconds). Now two "
            "boxes gather together: each GPU also has a card of 50 GB/s to the other box. How many "
            "GB/s are possible?",
            _two_boxes,
            unit="GB/s",
            low=1,
            high=10000,
        ),
        Question(
            "row_at_once",
            "Four ranks stand in a row, with cables of 24 GB/s each way between neighbours. A "
            "reduce-scatter and then an all-gather sum an array at 16 GB/s. How many GB/s are "
            "possible if both may run at once?",
            _row_at_once,
            unit="GB/s",
            low=1,
            high=1000,
        ),
    ),
    exercises=(
        Exercise(
            "bound",
            "The GB/s that a set of nodes allows an all-gather.",
            _judge_bound,
            (
                "Every rank inside holds one part, which must leave the set once.",
                "|S| parts of M/N bytes leave over links of rate B: |S| M / (N B) seconds or more.",
                "out = sum(rate for (a, b), rate in links.items() if a in inside and b not in "
                "inside); ranks * out / sum(node < ranks for node in inside).",
            ),
            minutes=10,
        ),
        Exercise(
            "find_cut",
            "The set of nodes that allows least.",
            _judge_find_cut,
            (
                "There are only 2^n sets; try them all. Nodes from `ranks` on are switches.",
                "Leave out sets without a rank and sets with all ranks: nothing has to leave them.",
                "nodes = {n for link in links for n in link}; for size in range(1, len(nodes)) and "
                "each in itertools.combinations(nodes, size): keep the one with the least bound.",
            ),
            minutes=10,
        ),
        Exercise(
            "tree",
            "A tree on the torus of 3 x 3 whose nine copies reach the optimum.",
            _judge_tree,
            (
                "8 edges on 4 directions: each direction twice. Write the tree of rank 0, then "
                "move it: add the root's row and column, modulo 3.",
                "First the four neighbours, one in each direction. Then the four corners, each "
                "from one of the neighbours.",
                "From the right neighbour go down, from the lower one left, from the left one up, "
                "from the upper one right.",
            ),
            minutes=15,
        ),
    ),
)
