"""The best all-reduce whose two phases overlap: a linear program, proved in fractions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from toolkit._checks import checked
from toolkit.schedules.collectives.fabrics.topology import Topology
from toolkit.schedules.collectives.forest import pack
from toolkit.schedules.collectives.optimum import scale_of
from toolkit.schedules.collectives.packed.flow import Network
from toolkit.schedules.collectives.trees import Forest

_LARGEST = 10**6  # denominator of a number in a solution
_SMALL = 1e-7  # what HiGHS leaves of a constraint
_MOST_ROUNDS = 400

Link = tuple[int, int]
Shares = dict[Link, Fraction]


@dataclass(frozen=True)
class JointOptimum:
    """The best all-reduce with both phases at once, with both proofs.

    Attributes:
        rate: GB/s: bytes of the array over seconds.
        roots: GB/s of the array's part that is reduced to each rank and gathered from it.
        gather: link -> GB/s of its rate that is used to gather.
        reduce: link -> GB/s of its rate that is used to reduce.
        cuts: (phase, nodes inside, weight): with these weights the links allow no higher rate.

    Example:
        >>> joint_all_reduce(mesh(4)).rate, optimum(mesh(4), "all-reduce").rate
        (Fraction(1, 1), Fraction(2, 3))
    """

    rate: Fraction
    roots: tuple[Fraction, ...]
    gather: Mapping[Link, Fraction]
    reduce: Mapping[Link, Fraction]
    cuts: tuple[tuple[str, tuple[int, ...], Fraction], ...]


@checked
def joint_all_reduce(topology: Topology, switches_compute: bool = False) -> JointOptimum:
    """The highest throughput of an all-reduce whose reductions and gathers share the links.

        max sum_v x_v  with  g_e + r_e <= b_e,  and for every set S that leaves a rank out:
        g(out of S) >= x(S),  r(into S) >= x(S)

    Cuts are added until a flow shows that none is violated; the numbers of HiGHS are then rounded
    to fractions, and both the flows and the weights of the cuts are checked exactly.

    Args:
        topology: the network.
        switches_compute: whether switches may copy and add (NVLS, SHARP); the rate is then an upper
            bound. Otherwise what enters a switch leaves it, in each phase.

    Raises:
        ArithmeticError: if the fractions prove nothing.

    Cost: seconds for 32 ranks.

    Source: Zhao et al., ForestColl, 2024, https://arxiv.org/abs/2402.06787, on all-reduce.

    Example:
        >>> joint_all_reduce(star(8, 300), switches_compute=True).rate
        Fraction(300, 1)
    """
    problem = _Problem(topology, not switches_compute)
    for _ in range(_MOST_ROUNDS):
        solution = problem.solve()
        if not problem.add_cuts(solution.x):
            return problem.proved(solution)
    raise ArithmeticError(f"{_MOST_ROUNDS} rounds of cuts were not enough")


@checked
def joint_forest(topology: Topology) -> Forest:
    """Trees of the all-reduce of `joint_all_reduce`.

    Args:
        topology: the network.

    Example:
        >>> joint_forest(mesh(4)).rate
        Fraction(1, 1)
    """
    best = joint_all_reduce(topology)
    scale = scale_of([*best.roots, *best.gather.values(), *best.reduce.values()])
    units = [int(rate * scale) for rate in best.roots]
    gather = {link: int(rate * scale) for link, rate in best.gather.items()}
    reduce = {(b, a): int(rate * scale) for (a, b), rate in best.reduce.items()}
    parts: dict[str, Any] = {
        "gather": pack(topology, gather, units),
        "reduce": pack(topology.backwards(), reduce, units),
    }
    return Forest(f"joint forest on {topology.name}", "all-reduce", topology, **parts)


class _Problem:
    """Variables: x of every rank, then g and r of every link."""

    def __init__(self, topology: Topology, keeps_balance: bool) -> None:
        self.topology = topology
        self.links = list(topology.links)
        self.ranks = topology.compute
        self.cuts: dict[tuple[str, tuple[int, ...]], None] = {}
        self.balance = range(self.ranks, len(topology.labels)) if keeps_balance else range(0)
        for rank in range(self.ranks):
            everyone = tuple(node for node in range(len(topology.labels)) if node != rank)
            for phase in ("gather", "reduce"):
                self.cuts[phase, everyone] = None
                self.cuts[phase, (rank,)] = None

    def crossing(self, phase: str, inside: Iterable[int]) -> list[int]:
        """The links that leave a set in a gather, or enter it in a reduction."""
        nodes = set(inside)
        ends = [(a, b) if phase == "gather" else (b, a) for a, b in self.links]
        return [at for at, (a, b) in enumerate(ends) if a in nodes and b not in nodes]

    def column(self, phase: str, link: int) -> int:
        return self.ranks + link + (len(self.links) if phase == "reduce" else 0)

    def solve(self) -> Any:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        m, rates = len(self.links), [float(rate) for rate in self.topology.links.values()]
        rows, columns, values = [], [], []

        def put(row: int, column: int, value: float) -> None:
            rows.append(row)
            columns.append(column)
            values.append(value)

        for link in range(m):
            put(link, self.ranks + link, 1)
            put(link, self.ranks + m + link, 1)
        for row, (phase, inside) in enumerate(self.cuts, m):
            for rank in inside:
                if rank < self.ranks:
                    put(row, rank, 1)
            for link in self.crossing(phase, inside):
                put(row, self.column(phase, link), -1)
        shape = (m + len(self.cuts), self.ranks + 2 * m)
        above = csr_array((values, (rows, columns)), shape=shape)
        rows, columns, values = [], [], []
        for row, (phase, switch) in enumerate(self.balanced()):
            for link, (a, b) in enumerate(self.links):
                if switch in (a, b):
                    put(row, self.column(phase, link), 1 if a == switch else -1)
        count = len(self.balanced())
        equal = csr_array((values, (rows, columns)), shape=(count, shape[1])) if count else None
        found = linprog(
            np.r_[-np.ones(self.ranks), np.zeros(2 * m)],
            A_ub=above, b_ub=np.r_[rates, np.zeros(len(self.cuts))],
            A_eq=equal, b_eq=np.zeros(count) if count else None, method="highs-ds",
        )  # fmt: skip
        if found.status:
            raise ArithmeticError(f"HiGHS: {found.message}")
        return found

    def balanced(self) -> list[tuple[str, int]]:
        return [(phase, switch) for phase in ("gather", "reduce") for switch in self.balance]

    def add_cuts(self, x: np.ndarray) -> bool:
        """Add the cuts that a solution violates most; whether there are any."""
        before = len(self.cuts)
        for phase in ("gather", "reduce"):
            for inside, lacking in self.violated(phase, [Fraction(float(each)) for each in x]):
                if lacking > _SMALL * float(sum(x[: self.ranks])):
                    self.cuts[phase, inside] = None
        return len(self.cuts) > before

    def violated(self, phase: str, x: list[Fraction]):
        """(set, what it lacks) for every rank that some data do not reach."""
        scale = scale_of(x) if max(each.denominator for each in x) < 1 << 20 else 1 << 40
        source, whole = len(self.topology.labels), [max(0, int(each * scale)) for each in x]
        arcs = [(source, rank, whole[rank]) for rank in range(self.ranks)]
        for link, (a, b) in enumerate(self.links):
            ends = (a, b) if phase == "gather" else (b, a)
            arcs.append((*ends, whole[self.column(phase, link)]))
        network, total = Network(source + 1, arcs), sum(whole[: self.ranks])
        for sink in range(self.ranks):
            lacking = total - network.flow(source, sink)
            if lacking > 0:
                inside = network.reached(source) - {source}
                yield tuple(sorted(inside)), lacking / scale

    def proved(self, solution: Any) -> JointOptimum:
        """The solution and its proof as fractions, checked."""
        x = [_fraction(each) for each in solution.x]
        m, rates = len(self.links), list(self.topology.links.values())
        weights = [_fraction(-each) for each in solution.ineqlin.marginals]
        potential = {}
        if self.balance:
            numbers = [_fraction(each) for each in solution.eqlin.marginals]
            potential = dict(zip(self.balanced(), numbers, strict=True))
        rate, cuts = sum(x[: self.ranks], Fraction(0)), list(self.cuts)
        assert all(each >= 0 for each in x + weights)
        is_possible = all(x[self.ranks + e] + x[self.ranks + m + e] <= rates[e] for e in range(m))
        is_possible &= not any(list(self.violated(phase, x)) for phase in ("gather", "reduce"))
        is_possible &= all(self.flows_on(phase, switch, x) for phase, switch in self.balanced())
        # Any rate is at most the sum of b_e pi_e, if every rank's cuts weigh 1 and more and every
        # link's price pi_e is at least what its cuts weigh.
        price = weights[:m]
        on = {(phase, e): Fraction(0) for phase in ("gather", "reduce") for e in range(m)}
        of_rank = [Fraction(0)] * self.ranks
        for (phase, inside), weight in zip(cuts, weights[m:], strict=True):
            for link in self.crossing(phase, inside):
                on[phase, link] += weight
            for rank in inside:
                if rank < self.ranks:
                    of_rank[rank] += weight
        is_bound = all(each >= 1 for each in of_rank)
        for (phase, link), weight in on.items():
            a, b = self.links[link]
            up, down = potential.get((phase, a), 0), potential.get((phase, b), 0)
            is_bound &= price[link] >= weight + up - down
        bound = sum((p * b for p, b in zip(price, rates, strict=True)), Fraction(0))
        if not (is_possible and is_bound and bound == rate):
            raise ArithmeticError(
                f"topology {self.topology.name!r}: fractions near {float(rate)} prove no optimum"
            )
        weighed = zip(cuts, weights[m:], strict=True)
        return JointOptimum(
            rate,
            tuple(x[: self.ranks]),
            dict(zip(self.links, x[self.ranks :], strict=False)),
            dict(zip(self.links, x[self.ranks + m :], strict=False)),
            tuple((phase, inside, weight) for (phase, inside), weight in weighed if weight),
        )

    def flows_on(self, phase: str, switch: int, x: list[Fraction]) -> bool:
        """Whether what enters a switch leaves it."""
        ends = [(a == switch) - (b == switch) for a, b in self.links]
        return not sum(end * x[self.column(phase, link)] for link, end in enumerate(ends))


def _fraction(value: float) -> Fraction:
    return Fraction(float(value)).limit_denominator(_LARGEST)
