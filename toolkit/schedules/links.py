"""Messages and collectives inside a pipeline schedule: transfers that share links fairly."""

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from toolkit._checks import checked
from toolkit.schedules.schedule import Schedule, Task, faults
from toolkit.schedules.simulation import Durations, Span, Time, Timeline

Amount = float | int | Fraction


class Transfer(NamedTuple):
    """Data that pass some links while devices work: a message, or a whole collective.

    Attributes:
        name: name for titles.
        loads: link -> GB that pass it, as `Forest.loads` times the array's size; in a steady
            proportion.
        after: tasks that must end before it starts.
        before: tasks that wait for it.

    Example:
        >>> Transfer("gradients", {(0, 1): 2}, after=(Task("B", 0, 0),)).before
        ()
    """

    name: str
    loads: Mapping[Any, Amount]
    after: tuple[Task, ...] = ()
    before: tuple[Task, ...] = ()


@dataclass(frozen=True)
class SharedTimeline:
    """A schedule whose transfers shared links. All numbers are modelled and exact.

    Attributes:
        timeline: its tasks, as `simulate` returns them.
        transfers: (transfer, start, end), in the order given.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> whole = gpipe(devices=1, microbatches=1)
        >>> sums = gradient_sums(whole, [{"link": 4}])
        >>> simulate_on_links(whole, {"link": 2}, sums).makespan  # 3 of work, then 4 GB
        Fraction(5, 1)
    """

    timeline: Timeline
    transfers: tuple[tuple[Transfer, Time, Time], ...]

    @property
    def makespan(self) -> Time:
        """From the first start to the last end, of tasks and transfers."""
        return max([self.timeline.makespan, *(end for *_, end in self.transfers)])


@checked
def fair_rates(
    loads: Sequence[Mapping[Any, Amount]], links: Mapping[Any, Amount]
) -> list[Fraction]:
    """Max-min fair rates of transfers that share links.

    All rates grow alike until a link is full; those on it stay, the others grow on. No rate can be
    raised without lowering one that is not larger.

    Args:
        loads: for each transfer link -> GB; on its busiest link it moves at its rate, on others in
            proportion.
        links: link -> GB/s.

    Returns:
        GB/s of each transfer on its busiest link.

    Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2.

    Example:
        >>> fair_rates([{"a": 1}, {"a": 1, "b": 1}, {"b": 1}], {"a": 1, "b": 2})
        [Fraction(1, 2), Fraction(1, 2), Fraction(3, 2)]
    """
    parts = []
    for load in loads:
        wrong = [link for link, amount in load.items() if link not in links or not _is_size(amount)]
        if wrong or not load:
            raise ValueError(f"loads: want GB above 0 on known links; got {dict(load)}")
        if slow := [link for link in load if not _is_size(links[link])]:
            raise ValueError(f"links: want GB/s above 0; got {links[slow[0]]} for {slow[0]!r}")
        most = max(Fraction(amount) for amount in load.values())
        parts.append({link: Fraction(amount) / most for link, amount in load.items()})
    left = {link: Fraction(rate) for link, rate in links.items()}
    rates, growing = [Fraction(0)] * len(parts), set(range(len(parts)))
    while growing:
        width: dict[Hashable, Fraction] = {}
        for at in growing:
            for link, part in parts[at].items():
                width[link] = width.get(link, Fraction(0)) + part
        step = min(left[link] / width[link] for link in width)
        for link in width:
            left[link] -= step * width[link]
        for at in growing:
            rates[at] += step
        growing -= {at for at in growing if any(not left[link] for link in parts[at])}
    return rates


def _is_size(amount: Amount) -> bool:
    return 0 < amount < math.inf  # and no NaN


@checked
def simulate_on_links(
    schedule: Schedule,
    links: Mapping[Any, Amount],
    transfers: Sequence[Transfer],
    durations: Durations | None = None,
) -> SharedTimeline:
    """When each task and each transfer runs, if transfers share the links fairly (`fair_rates`).

    A device runs its tasks in order, each once the tasks and transfers that it waits for have
    ended; transfers run beside it. Whenever one starts or ends, all rates are set anew.

    Args:
        schedule: any schedule.
        links: link -> GB/s, such as `Topology.links`.
        transfers: such as `stage_messages` and `gradient_sums`.
        durations: seconds, as `simulate` takes them; delays add to those of transfers' links.

    Raises:
        ValueError: when the schedule cannot run, or a transfer names a task that it does not have.

    Cost: per start or end of a transfer, the number of links in use, in fractions.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> pair = gpipe(devices=2, microbatches=1)
        >>> sent = stage_messages(pair, 1, lambda a, b: [(a, b)])
        >>> simulate_on_links(pair, {(0, 1): 2, (1, 0): 1}, sent).makespan  # 2 (1 + 2) + 1/2 + 1
        Fraction(15, 2)
    """
    if wrong := faults(schedule):
        raise ValueError(f"schedule: {schedule.name!r} cannot run: {wrong[0]}")
    durations = durations or Durations()
    durations.check(schedule)
    known = {task for order in schedule.orders for task in order}
    awaited: dict[Task, set[int]] = {task: set() for task in known}
    opens: dict[Task, set[int]] = {task: set() for task in known}
    for number, transfer in enumerate(transfers):
        for task in (*transfer.after, *transfer.before):
            if task not in known:
                raise ValueError(f"transfers: {transfer.name!r} names {task}, which is no task")
        for task in transfer.before:
            awaited[task].add(number)
        for task in transfer.after:
            opens[task].add(number)
    fair_rates([transfer.loads for transfer in transfers], links)  # refuses unknown links
    left = [max(Fraction(each) for each in transfer.loads.values()) for transfer in transfers]
    begun = {number: Fraction(0) for number, each in enumerate(transfers) if not each.after}
    running, arrived, ended = list(begun), dict[int, Time](), dict[Task, Time]()
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    never, now, wakes = Fraction(1 << 300), Fraction(0), list[Time]()

    def ready(task: Task) -> Time:
        """When all that a task waits for has arrived; never if that is not known yet."""
        times = [arrived.get(number, never) for number in awaited[task]]
        for other in schedule.waits_for(task):
            is_here = schedule.placement[other.stage] == schedule.placement[task.stage]
            delay = 0 if is_here else durations.between(other.stage, task.stage)
            times.append(ended.get(other, never) + delay)
        return max(times, default=now)

    while True:
        for row, order in zip(spans, schedule.orders, strict=True):
            if len(row) < len(order) and (not row or row[-1].end <= now):
                task = order[len(row)]
                if (start := ready(task)) <= now:
                    took = durations.of(task.kind) / schedule.chunks * durations.factor(task)
                    ended[task] = now + took
                    row.append(Span(task, now, ended[task]))
                    heapq.heappush(wakes, ended[task])
                    for number in opens[task]:
                        if all(other in ended for other in transfers[number].after):
                            begun[number] = max(ended[other] for other in transfers[number].after)
                            running.append(number)
                elif start < never:
                    heapq.heappush(wakes, start)
        running = [number for number in running if number not in arrived]
        moving = [number for number in running if begun[number] <= now]
        rates = fair_rates([transfers[number].loads for number in moving], links)
        ends = [now + left[n] / rate for n, rate in zip(moving, rates, strict=True)]
        while wakes and wakes[0] <= now:
            heapq.heappop(wakes)
        if not (later := [*wakes[:1], *ends]):
            break
        for number, rate, end in zip(moving, rates, ends, strict=True):
            left[number] -= rate * (min(later) - now)
            if end == min(later):
                arrived[number] = end
        now = min(later)
    for row, order in zip(spans, schedule.orders, strict=True):
        if len(row) < len(order):
            raise ValueError(f"transfers: one waits for {order[len(row)]}, which waits for it")
    found = tuple((each, begun[n], arrived[n]) for n, each in enumerate(transfers))
    return SharedTimeline(Timeline(schedule, durations, tuple(map(tuple, spans))), found)


@checked
def stage_messages(
    schedule: Schedule, gigabytes: Amount, path: Callable[[int, int], Iterable[Any]]
) -> list[Transfer]:
    """A message for every activation and gradient that passes from one device to another.

    Args:
        schedule: any schedule.
        gigabytes: of a message.
        path: (device, device) -> the links between them.

    Returns:
        Transfers, forward ones first.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> [each.name for each in stage_messages(gpipe(2, 1), 1, lambda a, b: [(a, b)])]
        ['F0@0 to F0@1', 'B0@1 to B0@0']
    """
    found, place = [], schedule.placement
    for task in sorted(task for order in schedule.orders for task in order):
        for other in schedule.waits_for(task):
            a, b = place[other.stage], place[task.stage]
            if a != b:
                loads = dict.fromkeys(path(a, b), gigabytes)
                found.append(Transfer(f"{other} to {task}", loads, (other,), (task,)))
    return sorted(found, key=lambda each: (each.after[0].kind != "F", each.after))


@checked
def gradient_sums(schedule: Schedule, loads: Sequence[Mapping[Any, Amount]]) -> list[Transfer]:
    """A collective per stage for the sum of its gradients, once its last backward pass has ended.

    Args:
        schedule: any schedule.
        loads: for each stage link -> GB, as `Forest.loads` times the gradients' GB.

    Returns:
        A transfer per stage.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> gradient_sums(gpipe(1, 2), [{"link": 1}])[0].after
        (B0@0, B1@0)
    """
    if len(loads) != schedule.stages:
        raise ValueError(f"loads: want one mapping for each of {schedule.stages} stages")
    last = [
        tuple(sorted(t for row in schedule.orders for t in row if t.stage == s and t.kind in "BW"))
        for s in range(schedule.stages)
    ]
    return [
        Transfer(f"gradients of stage {stage}", load, last[stage])
        for stage, load in enumerate(loads)
    ]
