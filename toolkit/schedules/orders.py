"""The pipeline schedules of the field, each as the rule by which a device picks its next task.

Device d of p holds stage d, or with several chunks c the stages c p + d; in a V the stages d and
2p - 1 - d. Microbatches are counted from 0.
"""

import math
from collections.abc import Callable, Iterator

from toolkit._checks import checked
from toolkit.schedules.schedule import Schedule, Task

MOST_FORWARDS = 10**6


@checked
def gpipe(devices: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

        bubble = (p - 1) / (m + p - 1)          activations held: m on every device

    Args:
        devices: p, one stage on each.
        microbatches: m.

    Source: Huang et al., "GPipe", 2019 (arXiv:1811.06965).

    Example:
        >>> gpipe(devices=1, microbatches=2).orders[0]
        (F0@0, F1@0, B0@0, B1@0)
    """

    def order(d: int) -> Iterator[Task]:
        for kind in "FB":
            yield from (Task(kind, i, d) for i in range(microbatches))

    return _schedule("GPipe", devices, microbatches, order)


@checked
def one_forward_one_backward(devices: int, microbatches: int) -> Schedule:
    """1F1B: after a warm-up, every forward is followed by a backward, which frees its memory.

        bubble = (p - 1) / (m + p - 1)          activations held: min(p - d, m) on device d

    Args:
        devices: p, one stage on each.
        microbatches: m.

    Source: Narayanan et al., "PipeDream", 2019 (arXiv:1806.03377), flushed as in Megatron-LM.

    Example:
        >>> one_forward_one_backward(devices=2, microbatches=2).orders[0]
        (F0@0, F1@0, B0@0, B1@0)
    """

    def order(d: int) -> Iterator[Task]:
        ahead = min(devices - 1 - d, microbatches)
        yield from (Task("F", i, d) for i in range(ahead))
        for i in range(ahead, microbatches):
            yield Task("F", i, d)
            yield Task("B", i - ahead, d)
        yield from (Task("B", i, d) for i in range(microbatches - ahead, microbatches))

    return _schedule("1F1B", devices, microbatches, order)


@checked
def interleaved(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with v chunks of the model per device: the pipeline fills in steps 1/v as long.

        bubble = (p - 1) / (v m + p - 1)
        activations held: (2 (p - 1 - d) + (v - 1) p + 1) / v stages on device d, if m > p

    Args:
        devices: p; chunk c of device d is stage c p + d.
        microbatches: m, a multiple of p.
        chunks: v.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM", 2021 (arXiv:2104.04473), section 2.2.

    Example:
        >>> interleaved(devices=2, microbatches=2, chunks=2).orders[1][:3]
        (F0@1, F1@1, F0@3)
    """
    _check(devices=devices, microbatches=microbatches, chunks=chunks)
    if microbatches % devices:
        raise ValueError(
            f"microbatches: got {microbatches}, wanted a multiple of the {devices} devices "
            f"({microbatches - microbatches % devices + devices} is the next)"
        )
    total = microbatches * chunks

    def order(d: int) -> Iterator[Task]:
        def task(kind: str, k: int) -> Task:
            group, rest = divmod(k, devices * chunks)
            chunk, i = divmod(rest, devices)
            chunk = chunk if kind == "F" else chunks - 1 - chunk
            return Task(kind, group * devices + i, chunk * devices + d)

        ahead = min(2 * (devices - 1 - d) + (chunks - 1) * devices, total)
        yield from (task("F", k) for k in range(ahead))
        for k in range(ahead, total):
            yield task("F", k)
            yield task("B", k - ahead)
        yield from (task("B", k) for k in range(total - ahead, total))

    return _schedule(f"interleaved {chunks}", devices, microbatches, order, chunks)


@checked
def zero_bubble_h1(devices: int, microbatches: int) -> Schedule:
    """1F1B whose weight gradients wait, to fill the bubble, in no more memory than 1F1B.

        bubble time = (p - 1) (T_F + T_I - T_W)     where T_W <= min(T_F, T_I) and m >= p
                    = (p - 1) max(T_F, T_I)         where T_W is longer, and m >= p
        memory: (p - d) M_B + d M_W on device d     where M_W <= M_B and m >= p

    When the three are equal the bubble is a third of 1F1B's.

    Args:
        devices: p, one stage on each.
        microbatches: m.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv:2401.10241), ZB-H1.

    Example:
        >>> zero_bubble_h1(devices=1, microbatches=1).orders[0]
        (F0@0, I0@0, W0@0)
    """

    def order(d: int) -> Iterator[Task]:
        forward = _Counter("F", d, microbatches)
        gradient, weight = _Counter("I", d, microbatches), _Counter("W", d, microbatches)
        yield from forward.take(devices - 1 - d)
        while gradient.left:
            yield from forward.take(1)
            yield from gradient.take(1)
            if gradient.done - weight.done > d:
                yield from weight.take(1)
        yield from weight.take(weight.left)

    return _schedule("ZB-H1", devices, microbatches, order)


@checked
def zero_bubble_h2(devices: int, microbatches: int) -> Schedule:
    """ZB-H1 with more forwards ahead: no bubble on any device, in about twice the memory.

        bubble time = (p - 1) max(0, T_F + T_I - 2 min(T_F, T_W))     0 when the three are equal
        memory: (2p - 2d - 1) M_B + 2d M_W on device d                where M_W <= M_B

    The paper's T_F + T_I - 2 T_W holds where T_W <= T_F and 2 T_W <= T_F + T_I. The bubble is that
    between a device's first and last task; see `Timeline.span_bubble`.

    Args:
        devices: p, one stage on each.
        microbatches: m, at least 2p - 1.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv:2401.10241), ZB-H2.

    Example:
        >>> zero_bubble_h2(devices=2, microbatches=3).orders[1]
        (F0@1, I0@1, F1@1, I1@1, F2@1, I2@1, W0@1, W1@1, W2@1)
    """
    _check_fills("zero_bubble_h2", devices, microbatches)

    def order(d: int) -> Iterator[Task]:
        forward = _Counter("F", d, microbatches)
        gradient, weight = _Counter("I", d, microbatches), _Counter("W", d, microbatches)
        yield from forward.take(2 * (devices - 1 - d) + 1)
        while gradient.left:
            yield from gradient.take(1)
            if gradient.done - weight.done > 2 * d:
                yield from weight.take(1)
            yield from forward.take(1)
        yield from weight.take(weight.left)

    return _schedule("ZB-H2", devices, microbatches, order)


@checked
def zero_bubble_v(devices: int, microbatches: int) -> Schedule:
    """Two chunks per device, laid out as a V: no bubble, and on every device the memory of 1F1B's
    fullest.

        bubble time = 0 when T_F = T_I = T_W     memory: p M_B on every device where M_W <= M_B

    The bubble is that between a device's first and last task; see `Timeline.span_bubble`. A
    microbatch crosses between devices 2 (p - 1) times forward, twice as often as in 1F1B.

    Args:
        devices: p; device d holds the stages d and 2p - 1 - d, so the loss is on device 0.
        microbatches: m, at least 2p - 1.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024 (arXiv:2405.15362).

    Example:
        >>> zero_bubble_v(devices=2, microbatches=3).placement
        (0, 1, 1, 0)
    """
    _check_fills("zero_bubble_v", devices, microbatches)

    def order(d: int) -> Iterator[Task]:
        down, up = d, 2 * devices - 1 - d
        f0, i0, w0 = (_Counter(kind, down, microbatches) for kind in "FIW")
        f1, i1, w1 = (_Counter(kind, up, microbatches) for kind in "FIW")

        def take(*counters: _Counter) -> Iterator[Task]:
            for counter in counters:
                yield from counter.take(1)

        yield from f0.take(2 * (devices - d) - 1)
        for _ in range(d):
            yield from take(f1, f0)
        for _ in range(devices - d):
            yield from take(f1, i1, w1)
        while f1.done < f0.done or f0.left:
            yield from take(f0, i0, w0, f1, i1, w1)
        for _ in range(d):
            yield from take(i0, i1)
        for _ in range(devices - d):
            yield from take(i0, w0)
        yield from w1.take(w1.left)
        yield from w0.take(w0.left)

    placement = (*range(devices), *reversed(range(devices)))
    return Schedule("ZB-V", microbatches, placement, tuple(tuple(order(d)) for d in range(devices)))


class _Counter:
    """The tasks of one kind at one stage, taken in the order of the microbatches."""

    def __init__(self, kind: str, stage: int, microbatches: int) -> None:
        self.kind, self.stage = kind, stage
        self.done, self.left = 0, microbatches

    def take(self, count: int) -> Iterator[Task]:
        for _ in range(min(count, self.left)):
            self.done, self.left = self.done + 1, self.left - 1
            yield Task(self.kind, self.done - 1, self.stage)


def _schedule(
    name: str,
    devices: int,
    microbatches: int,
    order: Callable[[int], Iterator[Task]],
    chunks: int = 1,
) -> Schedule:
    _check(devices=devices, microbatches=microbatches)
    orders = tuple(tuple(order(d)) for d in range(devices))
    return Schedule(name, microbatches, tuple(range(devices)) * chunks, orders)


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}: got {number}, wanted at least 1")
    if (forwards := math.prod(numbers.values())) > MOST_FORWARDS:
        most = max(numbers, key=lambda name: numbers[name])
        raise ValueError(
            f"{most}: got {numbers[most]}; {' x '.join(numbers)} is {forwards:,}, "
            f"wanted at most {MOST_FORWARDS:,}"
        )


def _check_fills(name: str, devices: int, microbatches: int) -> None:
    _check(devices=devices, microbatches=microbatches)
    if microbatches < 2 * devices - 1:
        raise ValueError(
            f"microbatches: got {microbatches}, {name} wants at least 2 devices - 1 = "
            f"{2 * devices - 1} to fill the pipeline; zero_bubble_h1 runs with any number"
        )
