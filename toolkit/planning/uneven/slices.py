"""Sequences in slices of equal time, and short ones packed with them: chunks of a pipeline.

With causal attention a slice attends to all slices before it, so that equal times want ever
shorter slices. `schedules.one_forward_one_backward(slices=...)` orders them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit._checks import checked

ROUND = 1e-12
MOST_SLICES = 1 << 20


@dataclass(frozen=True)
class Chunks:
    """A batch in chunks.

    Attributes:
        most_tokens: of a chunk that packs short sequences.
        chunks: for each chunk its pieces: (sequence, first token, end).
        seconds: of each chunk.
        step: modelled seconds of a step through the pipeline.

    Example:
        >>> Chunks(8.0, (((0, 0.0, 8.0),),), (4.0,), 4.0).step
        4.0
    """

    most_tokens: float
    chunks: tuple[tuple[tuple[int, float, float], ...], ...]
    seconds: tuple[float, ...]
    step: float


def _work(tokens: float, quadratic: float, linear: float) -> float:
    return quadratic * tokens**2 + linear * tokens


@checked
def equal_time_cuts(
    tokens: float, slices: int, *, quadratic: float, linear: float
) -> tuple[float, ...]:
    """The ends of slices that all take as long, each attending to all before it.

        a t_i^2 + b t_i = (i / k) W,    W = a S^2 + b S
        t_i = (-b + sqrt(b^2 + 4 a W i / k)) / (2 a)

    Args:
        tokens: S, in any unit.
        slices: k.
        quadratic: a, of attention; 0 for none.
        linear: b, of all else.

    Returns:
        t_1 .. t_k = S.

    Source: "InfiniPipe", 2025 (arXiv:2509.21275): chunks with their causal costs; derived here.

    Example:
        >>> [round(end, 4) for end in equal_time_cuts(64, 4, quadratic=0.01, linear=0.5)]
        [24.4874, 40.3682, 53.0833, 64]
    """
    _check(quadratic, linear, tokens=tokens, slices=slices)
    if slices > MOST_SLICES:
        raise ValueError(f"slices: got {slices}, wanted at most {MOST_SLICES}")
    whole, ends = _work(tokens, quadratic, linear), []
    for i in range(1, slices):
        wanted = whole * i / slices
        # Written without a difference of nearly equal numbers, so that a may be 0.
        ends.append(2 * wanted / (linear + math.sqrt(linear**2 + 4 * quadratic * wanted)))
    return (*ends, tokens)


@checked
def sliced_seconds(work: float, slices: int, *, stages: int, overhead: float) -> float:
    """Seconds of one sequence through a pipeline in slices of equal time.

        step(k) = (k + p - 1) (W / k + f) / p        least near k = sqrt((p - 1) W / f)

    Args:
        work: W, seconds of the sequence on one device that has all stages.
        slices: k.
        stages: p.
        overhead: f, fixed seconds per slice, on all stages together.

    Returns:
        Seconds.

    Source: "InfiniPipe", 2025 (arXiv:2509.21275), for the trade; Li et al., "TeraPipe", 2021
        (arXiv:2102.07988).

    Example:
        >>> round(sliced_seconds(72.96, 16, stages=4, overhead=0.6), 2)
        24.51
    """
    if slices < 1 or stages < 1 or work < 0 or overhead < 0:
        raise ValueError(
            f"slices and stages must be at least 1, work and overhead not negative; got {slices}, "
            f"{stages}, {work} and {overhead}"
        )
    return (slices + stages - 1) * (work / slices + overhead) / stages


@checked
def best_slices(work: float, *, stages: int, overhead: float, most: int = 4096) -> int:
    """The number of slices with the shortest step; arguments as of `sliced_seconds`.

    Args:
        work: W.
        stages: p.
        overhead: f.
        most: the largest number.

    Returns:
        k, an integer beside sqrt((p - 1) W / f).

    Example:
        >>> best_slices(72.96, stages=4, overhead=0.6)
        19
    """
    sliced_seconds(work, most, stages=stages, overhead=overhead)  # refuses what it cannot take
    near = math.sqrt((stages - 1) * work / overhead) if overhead else most
    tried = {1, most} | {min(most, max(1, math.floor(near) + at)) for at in (0, 1)}
    return min(
        sorted(tried), key=lambda k: sliced_seconds(work, k, stages=stages, overhead=overhead)
    )


@checked
def chunk_sequences(
    lengths: Sequence[float], *, stages: int, quadratic: float, linear: float, overhead: float = 0.0
) -> Chunks:
    """Cut long sequences into slices and pack short ones together, for the shortest step.

        step = (sum_j T_j + (p - 1) max_j T_j) / p

    For every size c = S_max / k: sequences longer than c are cut into slices of equal time, the
    others packed into chunks of at most c tokens, the heaviest first into the first that has room.

    Args:
        lengths: tokens of each sequence.
        stages: p, of equal time.
        quadratic: a, seconds per squared token.
        linear: b, seconds per token.
        overhead: f, fixed seconds per chunk.

    Returns:
        The best of all sizes tried.

    Source: "InfiniPipe", 2025 (arXiv:2509.21275), elastic pipelines; the formulation is ours.

    Example:
        >>> found = chunk_sequences([32.0, 8.0, 4.0, 4.0], stages=4, quadratic=0.01, linear=0.5)
        >>> sum(end - start for chunk in found.chunks for _, start, end in chunk)
        48.0
    """
    _check(quadratic, linear, stages=stages, **{"shortest of lengths": min(lengths, default=0)})
    best: Chunks | None = None
    for k in range(1, 33):
        size = max(lengths) / k
        pieces, short = [], []
        for number, tokens in enumerate(lengths):
            parts = math.ceil(tokens / size - ROUND)
            if parts == 1:
                short.append(number)
                continue
            ends = equal_time_cuts(tokens, parts, quadratic=quadratic, linear=linear)
            pieces += [((number, a, b),) for a, b in zip((0.0, *ends), ends, strict=False)]
        packs: list[list[int]] = []
        for number in sorted(short, key=lambda i: -lengths[i]):
            room = (
                p for p in packs if sum(lengths[i] for i in p) + lengths[number] <= size + ROUND
            )
            pack = next(room, None)
            if pack is None:
                packs.append(pack := [])
            pack.append(number)
        chunks = (*pieces, *(tuple((i, 0.0, lengths[i]) for i in pack) for pack in packs))
        seconds = tuple(
            overhead
            + sum(_work(b, quadratic, linear) - _work(a, quadratic, linear) for _, a, b in chunk)
            for chunk in chunks
        )
        step = (sum(seconds) + (stages - 1) * max(seconds)) / stages
        if best is None or step < best.step:
            best = Chunks(size, chunks, seconds, step)
    assert best is not None
    return best


def _check(quadratic: float, linear: float, **sizes: float) -> None:
    if quadratic < 0 or linear < 0 or quadratic + linear == 0:
        raise ValueError(
            f"quadratic and linear must not be negative nor both 0; got {quadratic} and {linear}"
        )
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{name} must be positive; got {size}")
