"""Several tasks on the same devices in waves: shares of devices, and a shape to search.

Tasks of one level do not wait for one another, and their work can be divided among waves. In a wave
each task has devices of its own, and all of them end together.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit._checks import checked
from toolkit.schedules.search.shapes import Block, Shape

HALVINGS = 200
Time = Callable[[float], float]


@dataclass(frozen=True)
class Wave:
    """Tasks side by side.

    Attributes:
        devices: of each task, 0 if it has no part.
        work: the share of each task's work that is done.
        seconds: until the longest of them ends.

    Example:
        >>> Wave(devices=(2, 1), work=(1.0, 1.0), seconds=3.0).seconds
        3.0
    """

    devices: tuple[int, ...]
    work: tuple[float, ...]
    seconds: float


@checked
def wave_bound(times: Sequence[Callable], devices: int) -> tuple[float, tuple[float, ...]]:
    """The least time of a level of tasks, if devices could be divided at will.

        T with sum_i T_i^-1(T) = G

    It is a lower bound where each T_i falls convexly. Shares below one device are taken at the rate
    of T_i there, which may be better than a device shared in time: no plan, then, but a bound.

    Args:
        times: for each task T_i, a falling function of a number of devices.
        devices: G.

    Returns:
        (T, devices of each task).

    Source: Wang et al., "Spindle", 2024 (arXiv:2409.03365), section 4, the continuous problem.

    Example:
        >>> wave_bound([lambda n: 6 / n, lambda n: 2 / n], devices=4)
        (2.0, (3.0, 1.0))
    """
    if devices < 1 or not times:
        raise ValueError(
            f"devices must be at least 1 and times not empty; got {devices}, {len(times)}"
        )

    def share(time: Time, wanted: float) -> float:
        low, high = 1e-9, float(devices)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if time(middle) > wanted else (low, middle)
        return high

    # At the least, each task alone on all devices.
    low, high = max(time(devices) for time in times), sum(time(devices) for time in times) + 1
    while sum(share(time, high) for time in times) > devices:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        needed = sum(share(time, middle) for time in times)
        low, high = (middle, high) if needed > devices else (low, middle)
    found = round(high, 12)
    return found, tuple(round(share(time, high), 9) for time in times)


@checked
def wave_plan(times: Sequence[Callable], devices: int) -> list[Wave]:
    """A level of tasks in waves of whole devices, powers of two for each.

    Every wave has the division that would end all that is left soonest. It is as long as its
    shortest task, and the others go on in the next wave. One wave that does all the work is taken
    instead where that is faster.

    Args:
        times: for each task T_i, as of `wave_bound`.
        devices: G.

    Returns:
        The waves, one after another.

    Cost: (log G)^tasks.

    Source: Wang et al., "Spindle", 2024 (arXiv:2409.03365), sections 4 and 5.

    Example:
        >>> [wave.devices for wave in wave_plan([lambda n: 6 / n, lambda n: 2 / n], devices=4)]
        [(2, 1), (4, 0)]
    """
    if len(times) > devices:
        raise ValueError(f"times: got {len(times)} tasks, wanted at most one per device, {devices}")
    sizes = [1 << k for k in range(devices.bit_length())]
    single = min(
        (
            Wave(each, (1.0,) * len(times), max(t(n) for t, n in zip(times, each, strict=True)))
            for each in itertools.product(sizes, repeat=len(times))
            if sum(each) <= devices
        ),
        key=lambda wave: wave.seconds,
    )
    several, left = [], [1.0] * len(times)
    while any(left):
        alive = [i for i, share in enumerate(left) if share]
        each = min(
            (
                each
                for each in itertools.product(
                    *(sizes if i in alive else [0] for i in range(len(left)))
                )
                if sum(each) <= devices
            ),
            key=lambda each: max(left[i] * times[i](each[i]) for i in alive),
        )
        # As long as the shortest: the others go on in the next wave.
        ends = {i: left[i] * times[i](each[i]) for i in alive}
        length = min(ends.values())
        work = [
            min(left[i], length / times[i](each[i])) if i in ends else 0.0 for i in range(len(left))
        ]
        left = [
            0.0 if share - done < 1e-12 else share - done
            for share, done in zip(left, work, strict=True)
        ]
        several.append(Wave(each, tuple(work), length))
    return min([single], several, key=lambda waves: sum(wave.seconds for wave in waves))


@checked
def wave_shape(levels: Sequence[Sequence[Wave]], unit: float, *, backward: int = 2) -> Shape:
    """Levels of waves as the blocks of one microbatch, for `find_repetend` and `search_schedule`.

    A task's part in a wave is a block on the devices that the wave gives it, after all blocks of
    the level before. Backward blocks follow in reverse. A forward holds 1 until its backward.

    Args:
        levels: for each level its waves, as `wave_plan` returns them.
        unit: seconds of a span of 1; spans are rounded to whole ones.
        backward: how many times as long as a forward a backward is; 0: none, as in inference.

    Returns:
        The blocks of one microbatch.

    Source: Wang et al., "Spindle", 2024 (arXiv:2409.03365), for the waves.

    Example:
        >>> level = wave_plan([lambda n: 6 / n, lambda n: 2 / n], devices=4)
        >>> [(block.devices, block.span) for block in wave_shape([level], unit=0.5, backward=0)]
        [((0, 1), 4), ((2,), 4), ((0, 1, 2, 3), 1)]
    """
    if unit <= 0 or backward < 0:
        raise ValueError(f"unit must be positive and backward at least 0; got {unit}, {backward}")
    blocks: list[Block] = []
    before: tuple[int, ...] = ()
    for number, level in enumerate(levels):
        first = len(blocks)
        for index, wave in enumerate(level):
            start, span = 0, max(1, round(wave.seconds / unit))
            for task, count in enumerate(wave.devices):
                if count:
                    name = f"F{number}.{task}.{index}"
                    kept = 1 if backward else 0
                    mine = tuple(range(start, start + count))
                    blocks.append(Block(name, mine, span, kept, before))
                    start += count
        before = tuple(range(first, len(blocks)))
    forward = list(blocks)
    followers = {i: [j for j, b in enumerate(forward) if i in b.after] for i in range(len(forward))}
    place = {i: 2 * len(forward) - 1 - i for i in range(len(forward))}
    for i in reversed(range(len(forward))) if backward else ():
        after = (i, *sorted(place[j] for j in followers[i]))
        name = f"B{str(forward[i].name)[1:]}"
        blocks.append(Block(name, forward[i].devices, backward * forward[i].span, -1, after))
    return tuple(blocks)
