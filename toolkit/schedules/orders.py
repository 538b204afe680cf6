"""The pipeline schedules with one stage per device, as rules by which it picks its next task.

Device d of p holds stage d. Microbatches are counted from 0.
"""

from collections.abc import Iterator

from toolkit._checks import checked
from toolkit.schedules.rules import Pending, check_fills, schedule_of
from toolkit.schedules.schedule import Schedule, Task


@checked
def gpipe(devices: int, microbatches: int, slices: int = 1) -> Schedule:
    """All forwards, then all backwards.

        bubble = (p - 1) / (m + p - 1)          activations held: m on every device

    With k slices the pipeline is at the level of tokens (TeraPipe): m k takes the place of m, and
    the backwards of a sequence's slices run from the last to the first.

    Args:
        devices: p, one stage on each.
        microbatches: m.
        slices: k, consecutive parts into which each microbatch is cut along its tokens; slice j of
            microbatch i is task i k + j.

    Source: Huang et al., "GPipe", 2019 (arXiv:1811.06965); Li et al., "TeraPipe", 2021
        (arXiv:2102.07988).

    Example:
        >>> gpipe(devices=1, microbatches=2).orders[0]
        (F0@0, F1@0, B0@0, B1@0)
    """

    def order(d: int) -> Iterator[Task]:
        yield from (Task("F", i, d) for i in range(microbatches * slices))
        yield from (Task("B", i, d) for i in _backward_order(microbatches, slices))

    return schedule_of("GPipe", devices, microbatches, order, slices=slices)


@checked
def one_forward_one_backward(devices: int, microbatches: int, slices: int = 1) -> Schedule:
    """1F1B: after a warm-up, every forward is followed by a backward, which frees its memory.

        bubble = (p - 1) / (m + p - 1)          activations held: min(p - d, m) on device d

    With k slices of each sequence, forward in order and backward from the last to the first, device
    d holds min(p - d + k - 1, m k) slices: all of a sequence are forward before one is backward.

    Args:
        devices: p, one stage on each.
        microbatches: m.
        slices: k, consecutive parts into which each microbatch is cut along its tokens; slice j of
            microbatch i is task i k + j.

    Source: Narayanan et al., "PipeDream", 2019 (arXiv:1806.03377), flushed as in Megatron-LM; Sun
        et al., "Seq1F1B", 2024 (arXiv:2406.03488) for slices, as in InfiniPipe.

    Example:
        >>> one_forward_one_backward(devices=2, microbatches=2).orders[0]
        (F0@0, F1@0, B0@0, B1@0)
        >>> one_forward_one_backward(devices=1, microbatches=2, slices=2).orders[0]
        (F0@0, F1@0, B1@0, F2@0, B0@0, F3@0, B3@0, B2@0)
    """
    total = microbatches * slices

    def order(d: int) -> Iterator[Task]:
        ahead = min(devices - 1 - d + slices - 1, total)
        backward = iter(_backward_order(microbatches, slices))
        yield from (Task("F", i, d) for i in range(ahead))
        for i in range(ahead, total):
            yield Task("F", i, d)
            yield Task("B", next(backward), d)
        yield from (Task("B", i, d) for i in backward)

    return schedule_of("1F1B", devices, microbatches, order, slices=slices)


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
        forward = Pending("F", d, microbatches)
        gradient, weight = Pending("I", d, microbatches), Pending("W", d, microbatches)
        yield from forward.take(devices - 1 - d)
        while gradient.left:
            yield from forward.take(1)
            yield from gradient.take(1)
            if gradient.done - weight.done > d:
                yield from weight.take(1)
        yield from weight.take(weight.left)

    return schedule_of("ZB-H1", devices, microbatches, order)


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
    check_fills("zero_bubble_h2", devices, microbatches)

    def order(d: int) -> Iterator[Task]:
        forward = Pending("F", d, microbatches)
        gradient, weight = Pending("I", d, microbatches), Pending("W", d, microbatches)
        yield from forward.take(2 * (devices - 1 - d) + 1)
        while gradient.left:
            yield from gradient.take(1)
            if gradient.done - weight.done > 2 * d:
                yield from weight.take(1)
            yield from forward.take(1)
        yield from weight.take(weight.left)

    return schedule_of("ZB-H2", devices, microbatches, order)


def _backward_order(microbatches: int, slices: int) -> Iterator[int]:
    """Sequence by sequence, the slices of each from the last to the first."""
    return (i * slices + j for i in range(microbatches) for j in reversed(range(slices)))
