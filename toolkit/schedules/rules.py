"""What the rules of schedules share: pending tasks, and the checks of numbers."""

import math
from collections.abc import Callable, Iterator

from toolkit.schedules.schedule import Schedule, Task

MOST_FORWARDS = 10**6


class Pending:
    """The tasks of one kind at one stage, taken in the order of the microbatches."""

    def __init__(self, kind: str, stage: int, microbatches: int) -> None:
        self.kind, self.stage = kind, stage
        self.done, self.left = 0, microbatches

    def take(self, count: int) -> Iterator[Task]:
        for _ in range(min(count, self.left)):
            self.done, self.left = self.done + 1, self.left - 1
            yield Task(self.kind, self.done - 1, self.stage)


def schedule_of(
    name: str, devices: int, microbatches: int, order: Callable[[int], Iterator[Task]],
    chunks: int = 1, slices: int = 1,
) -> Schedule:  # fmt: skip
    """The schedule of a rule `order` (device -> tasks), each device holding every p-th stage."""
    cut = {} if slices == 1 else {"slices": slices}
    check_numbers(devices=devices, microbatches=microbatches, **cut)
    name += f", {slices} slices" if slices > 1 else ""
    orders = tuple(tuple(order(d)) for d in range(devices))
    placement = tuple(range(devices)) * chunks
    return Schedule(name, microbatches * slices, placement, orders, slices)


def check_numbers(**numbers: int) -> None:
    """ValueError for a number below 1, or for more tasks than anybody has time for."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}: got {number}, wanted at least 1")
    if (forwards := math.prod(numbers.values())) > MOST_FORWARDS:
        most = max(numbers, key=lambda name: numbers[name])
        raise ValueError(
            f"{most}: got {numbers[most]}; {' x '.join(numbers)} is {forwards:,}, "
            f"wanted at most {MOST_FORWARDS:,}"
        )


def check_fills(name: str, devices: int, microbatches: int) -> None:
    """ValueError for fewer microbatches than a schedule without bubbles needs."""
    check_numbers(devices=devices, microbatches=microbatches)
    if microbatches < 2 * devices - 1:
        raise ValueError(
            f"microbatches: got {microbatches}, {name} wants at least 2 devices - 1 = "
            f"{2 * devices - 1} to fill the pipeline; zero_bubble_h1 runs with any number"
        )
