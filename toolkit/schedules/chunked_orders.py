"""The pipeline schedules with several chunks per device, each as the rule of its next task.

Device d of p holds the stages c p + d for its chunks c, or in a V the stages d and 2p - 1 - d.
"""

from collections.abc import Iterator

from toolkit._checks import checked
from toolkit.schedules.rules import Pending, check_fills, check_numbers, schedule_of
from toolkit.schedules.schedule import Schedule, Task


@checked
def interleaved(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with v chunks of the model per device: the pipeline fills in steps 1/v as long.

    The loops are run depth first: p microbatches pass all chunks before the next p start.

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
    check_numbers(devices=devices, microbatches=microbatches, chunks=chunks)
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

    return schedule_of(f"interleaved {chunks}", devices, microbatches, order, chunks)


@checked
def breadth_first(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """GPipe in loops: all microbatches pass a device's chunk before the next chunk starts.

        bubble = (p - 1) / (v m + p - 1) if m >= p      activations held: m on every device

    Sharded weights (FSDP) are gathered once per chunk and pass, not once per microbatch.

    Args:
        devices: p; chunk c of device d is stage c p + d.
        microbatches: m.
        chunks: v.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022 (arXiv:2211.05953).

    Example:
        >>> breadth_first(devices=1, microbatches=2).orders[0]
        (F0@0, F1@0, F0@1, F1@1, B0@1, B1@1, B0@0, B1@0)
    """
    check_numbers(devices=devices, microbatches=microbatches, chunks=chunks)

    def order(d: int) -> Iterator[Task]:
        stages = [chunk * devices + d for chunk in range(chunks)]
        yield from (Task("F", i, stage) for stage in stages for i in range(microbatches))
        yield from (Task("B", i, stage) for stage in stages[::-1] for i in range(microbatches))

    return schedule_of(f"breadth-first {chunks}", devices, microbatches, order, chunks)


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
    check_fills("zero_bubble_v", devices, microbatches)

    def order(d: int) -> Iterator[Task]:
        down, up = d, 2 * devices - 1 - d
        f0, i0, w0 = (Pending(kind, down, microbatches) for kind in "FIW")
        f1, i1, w1 = (Pending(kind, up, microbatches) for kind in "FIW")

        def take(*counters: Pending) -> Iterator[Task]:
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


@checked
def dual_pipe_v(devices: int, microbatches: int) -> Schedule:
    """Two chunks per device, laid out as a V, in which forwards alternate with whole backwards.

        bubble time = (p - 1) T_F / 2 when T_F = T_I = T_W
        activations held: 2p + 1 stages, of which a device has two, on every device

    Only the backwards at both ends are split. A forward and a backward that stand side by side are
    meant to overlap one's communication with the other's work, which no figure here assumes.
    DualPipe on 2p devices is two mirrored copies of this order, with every stage stored twice and
    the microbatches divided between the copies: the same times for twice the devices and weights.

    Args:
        devices: p; device d holds the stages d and 2p - 1 - d, so the loss is on device 0.
        microbatches: m, at least 2p.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv:2412.19437), section 3.2.1,
        and its "cut in half" by Sea AI Lab, 2025.

    Example:
        >>> dual_pipe_v(devices=1, microbatches=2).orders[0][:5]
        (F0@0, F0@1, F1@0, B0@1, F1@1)
    """
    check_numbers(devices=devices, microbatches=microbatches)
    if microbatches < 2 * devices:
        raise ValueError(
            f"microbatches: got {microbatches}, dual_pipe_v wants at least 2 devices = "
            f"{2 * devices} to fill the pipeline"
        )

    def order(d: int) -> Iterator[Task]:
        down, up = d, 2 * devices - 1 - d
        (f0, b0), (f1, b1) = (
            [Pending(kind, stage, microbatches) for kind in "FB"] for stage in (down, up)
        )
        waiting: list[Task] = []

        def halved(counter: Pending) -> Iterator[Task]:
            for _, i, stage in counter.take(1):
                waiting.append(Task("W", i, stage))
                yield Task("I", i, stage)

        for _ in range(2 * (devices - 1 - d)):
            yield from f0.take(1)
        for _ in range(d + 1):
            yield from (*f0.take(1), *f1.take(1))
        for _ in range(devices - 1 - d):
            yield from (*halved(b1), waiting.pop(0), *f1.take(1))
        for _ in range(microbatches - 2 * devices + d + 1):
            yield from (*f0.take(1), *b1.take(1), *f1.take(1), *b0.take(1))
        for _ in range(devices - 1 - d):
            yield from (*b1.take(1), *f1.take(1), *b0.take(1))
        for k in range(2 * (d + 1)):
            counter = (b1, b0)[k % 2]
            yield from halved(counter) if k > d else counter.take(1)
        for _ in range(devices - 1 - d):
            yield from (waiting.pop(0), *halved(b0))
        yield from waiting

    placement = (*range(devices), *reversed(range(devices)))
    orders = tuple(tuple(order(d)) for d in range(devices))
    return Schedule("DualPipeV", microbatches, placement, orders)
