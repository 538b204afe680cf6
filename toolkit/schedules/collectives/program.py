"""The messages of a collective in rounds, and their execution with symbols in place of numbers."""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from toolkit._checks import checked
from toolkit.schedules.collectives.fabrics.topology import Topology
from toolkit.schedules.collectives.trees import Forest, Tree


class Message(NamedTuple):
    """One chunk goes from one rank to another.

    Attributes:
        chunk: which one.
        source: the rank that sends.
        target: the rank that receives.
        adds: whether it is added to what the target has; else it replaces that.

    Example:
        >>> Message(chunk=0, source=1, target=2, adds=False).target
        2
    """

    chunk: int
    source: int
    target: int
    adds: bool


@dataclass(frozen=True)
class Program:
    """Rounds of messages, in each of which a rank sends at most one to each other.

    Attributes:
        name: name for titles.
        collective: as in `Forest`.
        ranks: number of ranks.
        owners: for each chunk its root; chunks are of one size.
        rounds: the messages; all of a round leave before any arrives.

    Example:
        >>> to_program(forest(ring(4))).owners
        (0, 0, 1, 1, 2, 2, 3, 3)
    """

    name: str
    collective: str
    ranks: int
    owners: tuple[int, ...]
    rounds: tuple[tuple[Message, ...], ...]


def unit_trees(forest: Forest, phase) -> list[Tree]:
    """One tree per chunk of one size, in the order of roots."""
    found = []
    for tree in sorted(forest.trees(phase), key=lambda tree: tree.root):
        found += [tree] * int(tree.share / forest.unit)
    return found


@checked
def to_program(forest: Forest) -> Program:
    """Put the edges of all trees into rounds, of at most one message from one rank to another.

    A message is ready once its sender has the chunk (of a reduction: from all children); among
    those ready, one that starts the longest way goes first.

    Args:
        forest: trees of a collective.

    Example:
        >>> len(to_program(forest(ring(8))).rounds)  # 2 chunks from each of 7 others, 2 ways in
        7
    """
    reduce, gather = (unit_trees(forest, phase) for phase in ("reduce", "gather"))
    owners = tuple(tree.root for tree in reduce or gather)
    messages: list[Message] = []
    waits_for: list[int] = []
    followers: list[list[int]] = []

    def add(message: Message, after: list[int]) -> int:
        messages.append(message)
        waits_for.append(len(after))
        followers.append([])
        for earlier in after:
            followers[earlier].append(len(messages) - 1)
        return len(messages) - 1

    for chunk, root in enumerate(owners):
        arrived: dict[int, list[int]] = {}
        if reduce:
            for edge in sorted(reduce[chunk].edges, key=lambda edge: -edge.step):
                message = Message(chunk, edge.child, edge.parent, True)
                number = add(message, arrived.get(edge.child, []))
                arrived.setdefault(edge.parent, []).append(number)
        if gather:
            sums = arrived.get(root, [])
            brought: dict[int, list[int]] = {root: sums}
            for edge in sorted(gather[chunk].edges, key=lambda edge: edge.step):
                message = Message(chunk, edge.parent, edge.child, False)
                # What a rank had added to its own has left before the sum replaces it.
                brought[edge.child] = [add(message, brought[edge.parent])]
    left = [1] * len(messages)
    for number in reversed(range(len(messages))):
        left[number] += max((left[later] for later in followers[number]), default=0)
    ready: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by sender and receiver

    def release(number: int) -> None:
        ends = messages[number].source, messages[number].target
        heapq.heappush(ready.setdefault(ends, []), (-left[number], number))

    for number, count in enumerate(waits_for):
        if not count:
            release(number)
    rounds = []
    while ready:
        now = [heapq.heappop(waiting)[1] for waiting in ready.values()]
        ready = {ends: waiting for ends, waiting in ready.items() if waiting}
        for follower in itertools.chain.from_iterable(followers[number] for number in now):
            waits_for[follower] -= 1
            if not waits_for[follower]:
                release(follower)
        rounds.append(tuple(messages[number] for number in now))
    return Program(forest.name, forest.collective, forest.topology.compute, owners, tuple(rounds))


@checked
def program_faults(program: Program) -> list[str]:
    """Execute a program with symbols: which ranks' data every chunk holds, everywhere.

    Args:
        program: any program, even one written by hand or read from a file.

    Returns:
        What is wrong, in words; an empty list if every chunk arrives once, every sum holds every
        rank's data once, and all ranks end with what the collective promises.

    Example:
        >>> program_faults(to_program(forest(ring(4), "all-reduce")))
        []
    """
    sums = program.collective in ("reduce-scatter", "reduce", "all-reduce")
    everyone = frozenset(range(program.ranks))
    complete = [everyone if sums else frozenset({owner}) for owner in program.owners]
    state: list[list[frozenset[int]]] = [
        [frozenset({rank}) if sums or rank == owner else frozenset() for owner in program.owners]
        for rank in range(program.ranks)
    ]
    faults = []
    for position, messages in enumerate(program.rounds):
        where = f"round {position}"
        pairs = Counter((message.source, message.target) for message in messages)
        for (source, target), count in pairs.items():
            if count > 1:
                faults.append(f"{where}: {count} messages from rank {source} to rank {target}")
        sent = [state[message.source][message.chunk] for message in messages]
        for (chunk, source, target, adds), data in zip(messages, sent, strict=True):
            present = state[target][chunk]
            what = f"{where}: chunk {chunk} from rank {source} to rank {target}"
            if not data:
                faults.append(f"{what}: the sender does not have it yet")
            elif adds and data & present:
                twice = min(data & present)
                faults.append(f"{what}: the data of rank {twice} would be added twice")
            elif not adds and data != complete[chunk]:
                lost = min(complete[chunk] - data)
                faults.append(f"{what}: sent before the data of rank {lost} were added")
            elif not adds and present == complete[chunk]:
                faults.append(f"{what}: the receiver has it already")
            state[target][chunk] = data | present if adds else data
    gathers = program.collective in ("all-gather", "broadcast", "all-reduce")
    for rank in range(program.ranks):
        for chunk, owner in enumerate(program.owners):
            if (gathers or rank == owner) and state[rank][chunk] != complete[chunk]:
                lost = sorted(complete[chunk] - state[rank][chunk])
                faults.append(
                    f"at the end rank {rank} lacks the data of rank {lost[0]} in chunk {chunk}"
                )
    return faults


@checked
def forest_faults(forest: Forest, rate: Fraction | None = None) -> list[str]:
    """Check trees one by one, then execute them (`program_faults`).

    Args:
        forest: any forest, even one written by hand.
        rate: GB/s that is claimed for it; the link loads must give exactly this one.

    Returns:
        What is wrong, in words; an empty list if nothing is.

    Cost: number of ranks times the number of chunks.

    Example:
        >>> forest_faults(forest(dgx1()), optimum(dgx1()).rate)
        []
    """
    faults = [*_tree_faults(forest), *_share_faults(forest)]
    if faults:
        return faults
    loads: Counter[tuple[int, int]] = Counter()
    for phase in ("reduce", "gather"):
        for tree in forest.trees(phase):
            for edge in tree.edges:
                path = edge.path if phase == "gather" else edge.path[::-1]
                for link in itertools.pairwise(path):
                    loads[link] += tree.share  # type: ignore[assignment]
    slowest = max(loads[link] / forest.topology.links[link] for link in loads)
    if rate is not None and rate * slowest != 1:
        link = max(loads, key=lambda link: loads[link] / forest.topology.links[link])
        faults.append(
            f"link {_link(forest.topology, link)} carries {loads[link]} of the array, which gives "
            f"{1 / slowest} GB/s; claimed were {rate}"
        )
    return faults + program_faults(to_program(forest))


def _link(topology: Topology, link: tuple[int, int]) -> str:
    return "->".join(topology.labels[node] for node in link)


def _tree_faults(forest: Forest) -> Iterator[str]:
    topology = forest.topology
    for phase in ("reduce", "gather"):
        for number, tree in enumerate(forest.trees(phase)):
            where = f"{phase} tree {number} of root {tree.root}"
            reached = {tree.root: -1}
            for edge in sorted(tree.edges, key=lambda edge: edge.step):
                if edge.parent not in reached or reached[edge.parent] >= edge.step:
                    yield f"{where}: {edge.parent} has no data at step {edge.step} for {edge.child}"
                if edge.child in reached:
                    yield f"{where}: {edge.child} is reached twice"
                reached[edge.child] = edge.step
                path = edge.path if phase == "gather" else edge.path[::-1]
                for link in itertools.pairwise(path):
                    if link not in topology.links:
                        yield f"{where}: there is no link {link[0]}->{link[1]}"
                if (edge.parent, edge.child) != (edge.path[0], edge.path[-1]):
                    yield f"{where}: the path {edge.path} does not lead to {edge.child}"
            for node in sorted(set(range(topology.compute)) - set(reached)):
                yield f"{where}: {node} is not reached"


def _share_faults(forest: Forest) -> Iterator[str]:
    shares: dict[str, Counter] = {}
    for phase in ("reduce", "gather"):
        shares[phase] = Counter()
        for tree in forest.trees(phase):
            if tree.share <= 0:
                yield f"{phase} tree of root {tree.root}: its share is {tree.share}"
            shares[phase][tree.root] += tree.share  # type: ignore[assignment]
    used = [phase for phase in shares if shares[phase]]
    if forest.collective == "all-reduce" and shares["reduce"] != shares["gather"]:
        yield "roots gather other shares than they reduce"
    for phase in used:
        total = sum(shares[phase].values())
        if total != 1:
            yield f"{phase} trees carry {total} of the array"
        if forest.collective in ("all-gather", "reduce-scatter"):
            for rank in range(forest.topology.compute):
                if shares[phase][rank] != Fraction(1, forest.topology.compute):
                    yield f"{phase} trees carry {shares[phase][rank]} of the array for rank {rank}"
