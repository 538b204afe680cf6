"""Which exchange for which tensors: all that is worth having, and two published searches.

Two schedules of the first tensors differ for the rest only by (delay, link, end). One that is no
better in any of the three can be dropped, so that a front of the others holds an optimum.
"""

import bisect
import itertools
import operator
from collections.abc import Sequence

import numpy as np

from toolkit._checks import checked
from toolkit.planning.gradients.lanes import Cost, Message, Option, Schedule, one_by_one

SAME = 1e-9  # of the step: sums in another order are no other schedule


def _check(ready: Sequence[float], options: Sequence[Option]) -> None:
    if not ready or any(b < a for a, b in itertools.pairwise(ready)):
        raise ValueError("ready: wanted at least one time, in rising order")
    if not options:
        raise ValueError("options: got none, wanted at least one")


@checked
def best_exchanges(
    ready: Sequence[float], options: Sequence[Option], *, is_grouped: bool = False
) -> Schedule:
    """The schedule that ends first, over all options for all tensors, and all contiguous groups.

        front[0] = {(0, 0, 0)}
        front[e] = what no other undercuts in (delay, link, end), over groups i..e, options
                   and front[i]

    Args:
        ready: seconds at which each gradient is ready, in the order of back-propagation.
        options: ways to exchange any tensor or group.
        is_grouped: whether neighbours may travel as one message; otherwise each by itself.

    Returns:
        A `Schedule`.

    Cost: n tensors and o options: o n fronts to merge, o n^2 / 2 with groups; 0.1 s for 60 tensors
        and 4 options by themselves.

    Source: The problem is that of Wang et al., "ByteComp", 2022 (Espresso, EuroSys 2023), and with
        groups that of Wang et al., "MergeComp", 2021; the programme is counted here.

    Example:
        >>> dense = Option("dense", lambda first, last: Cost(0.0, 2.0 * (last - first)))
        >>> small = Option("small", lambda first, last: Cost(1.5, 0.5 * (last - first)))
        >>> best_exchanges([1.0, 2.0], [dense, small]).options()
        ['dense', 'small']
    """
    _check(ready, options)
    sizes = [options[0].cost(at, at + 1).send for at in range(len(ready))]
    found = greedy_exchanges(ready, options, sizes)
    rest = np.zeros(len(ready) + 1)  # seconds that the link needs at least for the others
    if not is_grouped:
        least = [min(o.cost(at, at + 1).send for o in options) for at in range(len(ready))]
        rest[:-1] = np.cumsum(least[::-1])[::-1]
    fronts = [np.zeros((1, 3))]
    origins: list[np.ndarray] = [np.zeros((1, 3), int)]  # group's start, option, state before
    for last in range(1, len(ready) + 1):
        states, origin = [], []
        for first in range(0 if is_grouped else last - 1, last):
            before = fronts[first]
            for at, cost in _worth(options, first, last):
                delay = before[:, 0] + cost.encode
                link = np.maximum(before[:, 1], ready[last - 1] + delay) + cost.send
                end = np.maximum(before[:, 2], link + cost.decode)
                states.append(np.stack([delay, link, end], axis=1))
                rows = np.arange(len(before))
                origin.append(np.stack([0 * rows + first, 0 * rows + at, rows], axis=1))
        every, came = np.concatenate(states), np.concatenate(origin)
        # What ends later than a schedule already found need not be kept.
        least = np.max([every[:, 2], ready[-1] + every[:, 0], every[:, 1] + rest[last]], axis=0)
        is_early = least <= found.seconds * (1 + 1e-9)
        every, came = every[is_early], came[is_early]
        kept = _undominated(np.round(every / (SAME * found.seconds)))
        fronts.append(every[kept])
        origins.append(came[kept])
    final = fronts[-1]
    row = int(np.argmin(np.maximum(final[:, 2], ready[-1] + final[:, 0])))
    messages, last = [], len(ready)
    while last:
        first, at, row = map(int, origins[last][row])
        messages.append(Message(first, last, options[at]))
        last = first
    return Schedule(tuple(ready), tuple(reversed(messages)))


def _worth(options: Sequence[Option], first: int, last: int) -> list[tuple[int, Cost]]:
    """The options that no other undercuts in every lane."""
    costs = [(at, option.cost(first, last)) for at, option in enumerate(options)]
    return [
        (at, cost)
        for at, cost in costs
        if not any(
            all(map(operator.le, other, cost)) and (other != cost or before < at)
            for before, other in costs
            if before != at
        )
    ]


def _undominated(states: np.ndarray) -> list[int]:
    """The rows that no other row undercuts, or equals earlier."""
    kept: list[int] = []
    links: list[float] = []  # a staircase: links rise, ends fall
    ends: list[float] = []
    for row in np.lexsort(states.T[::-1]).tolist():  # delays rise
        _, link, end = states[row].tolist()
        at = bisect.bisect_right(links, link)
        if at and ends[at - 1] <= end:
            continue
        kept.append(row)
        last = at
        while last < len(ends) and ends[last] >= end:
            last += 1
        links[at:last], ends[at:last] = [link], [end]
    return kept


@checked
def greedy_exchanges(
    ready: Sequence[float],
    options: Sequence[Option],
    sizes: Sequence[float],
    *,
    decisions: int | None = None,
) -> Schedule:
    """Espresso's greedy search: tensors one after the other, the largest first.

    All begin with the first option. What is sent before the last time at which the link is idle
    cannot gain and stays; of the others each takes the option with which the step ends first, the
    largest first, and of equals the one that is ready last.

    Args:
        ready: as for `best_exchanges`.
        options: the first is the one to begin with.
        sizes: numbers of each tensor, by which they are ordered.
        decisions: stop after so many tensors; None: when no tensor is left.

    Returns:
        A `Schedule`, of tensors by themselves.

    Cost: At most n o schedules.

    Source: Wang et al., "ByteComp", 2022 (arXiv:2205.14465), section 4.

    Example:
        >>> dense = Option("dense", lambda first, last: Cost(0.0, 2.0))
        >>> small = Option("small", lambda first, last: Cost(1.5, 0.5))
        >>> greedy_exchanges([1.0, 2.0], [dense, small], [5, 5]).options()
        ['dense', 'small']
    """
    _check(ready, options)
    if len(sizes) != len(ready):
        raise ValueError(f"sizes: got {len(sizes)} for {len(ready)} tensors")
    chosen = [options[0]] * len(ready)
    left = set(range(len(ready)))
    for _ in range(len(ready) if decisions is None else decisions):
        left -= set(range(_last_bubble(one_by_one(ready, chosen))))
        if not left:
            break
        at = max(left, key=lambda tensor: (sizes[tensor], tensor))
        left.remove(at)
        chosen[at] = min(
            options,
            key=lambda option: one_by_one(ready, [*chosen[:at], option, *chosen[at + 1 :]]).seconds,
        )
    return one_by_one(ready, chosen)


def _last_bubble(schedule: Schedule) -> int:
    """The first message after the last time at which the link was idle; 0 if it never was."""
    found, busy = 0, 0.0
    for lane in schedule.lanes:
        if lane.name == "link":
            if busy and lane.start > busy:
                found = lane.message
            busy = lane.end
    return found


@checked
def best_cut(ready: Sequence[float], option: Option) -> Schedule:
    """MergeComp's search for two groups: bisection on the cut, exact where the step falls to one
    lowest point and rises again.

    Args:
        ready: as for `best_exchanges`.
        option: of both groups.

    Returns:
        A `Schedule` of one or two messages.

    Cost: 2 log2 n schedules.

    Source: Wang, Wu and Ng, "MergeComp", 2021 (arXiv:2103.15195).

    Example:
        >>> option = Option("half", lambda first, last: Cost(0.1, 0.5 + 0.5 * (last - first)))
        >>> [m.last for m in best_cut([1.0, 2.0, 3.0, 4.0], option).messages]
        [2, 4]
    """
    _check(ready, [option])

    def cut_at(cut: int) -> Schedule:
        ends = [cut, len(ready)] if 0 < cut < len(ready) else [len(ready)]
        starts = [0, *ends[:-1]]
        messages = (Message(*ends_of, option) for ends_of in zip(starts, ends, strict=True))
        return Schedule(tuple(ready), tuple(messages))

    def rises(cut: int) -> bool:
        return cut_at(cut).seconds <= cut_at(cut + 1).seconds

    return cut_at(1 + bisect.bisect_left(range(1, len(ready)), True, key=rises))
