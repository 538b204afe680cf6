"""Pipelines of chips of different kinds, with stages as unequal as the chips.

    rate of a pipeline = 1 / max over stages of  l / (q n e(n))    samples per second
    l <= m n                                                       room of a stage

A stage is one chip, or a tensor group of chips of one kind (the slowest member would decide). The
chips are divided into pipelines side by side, which share the batch in proportion to their rates.
Small clusters are searched exhaustively: chips per kind of the first pipeline, then the rest; each
pipeline's stages; and layers to stages by bisection on the rate.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from toolkit._checks import checked
from toolkit._kinds import shown
from toolkit.planning.clusters import cluster
from toolkit.planning.memory.categories import layer_kinds, layer_memory
from toolkit.planning.models import model_of
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.seconds import constants_of
from toolkit.planning.time.step import layer_seconds

ONE = Strategy(recompute="layer")
TRAINED = 16  # bytes per parameter: weight, gradient and two moments, float32
GROUPS = (1, 2, 4, 8)
MOST_MIXED = 16  # chips, in all


class ChipKind(NamedTuple):
    """Chips of one kind.

    Attributes:
        count: how many.
        speed: layers per second of one chip, for one sample.
        room: layers that one chip holds.

    Example:
        >>> ChipKind(2, 3.0, 6).room
        6
    """

    count: int
    speed: float
    room: int


class MixedStage(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        kind: of its chips.
        chips: how many, as a tensor group.
        layers: how many.

    Example:
        >>> MixedStage("h100", 2, 8).layers
        8
    """

    kind: str
    chips: int
    layers: int


class MixedPlan(NamedTuple):
    """Pipelines side by side on chips of several kinds.

    Attributes:
        pipelines: stages of each, those with most room first.
        rates: samples per second of each.
        samples: of a step, per pipeline.
        rate: samples per second of all, if the batch divides as the rates do.
        rounded_rate: with these samples.
        bound: samples per second that no plan beats.

    Example:
        >>> kinds = {"fast": ChipKind(1, 2.0, 4), "slow": ChipKind(1, 1.0, 4)}
        >>> found = plan_mixed(kinds, 6, batch=6)
        >>> found.pipelines[0]
        (MixedStage(kind='fast', chips=1, layers=4), MixedStage(kind='slow', chips=1, layers=2))
    """

    pipelines: tuple[tuple[MixedStage, ...], ...]
    rates: tuple[float, ...]
    samples: tuple[int, ...]
    rate: float
    rounded_rate: float
    bound: float

    def __str__(self) -> str:
        lines = []
        for stages, rate, samples in zip(self.pipelines, self.rates, self.samples, strict=True):
            words = ", ".join(
                f"{stage.layers} layers on {stage.chips} {stage.kind}" for stage in stages
            )
            lines.append(f"{samples} samples per step, {rate:.3g} per second: {words}")
        lines.append(
            f"{self.rounded_rate:.3g} samples per second, of at most {self.bound:.3g} "
            "(HexiScale; modelled)"
        )
        return "\n".join(lines)


@checked
def plan_mixed(
    kinds: Mapping[str, ChipKind], layers: int, *, batch: int, efficiency: float = 0.85
) -> MixedPlan:
    """Divide chips of several kinds into pipelines with unequal stages.

        max over plans of sum over pipelines of 1 / max_stage l / (q n e)
        bound = sum over chips of q / layers

    Args:
        kinds: chips by kind, at most 16 in all.
        layers: of the model.
        batch: samples of a step, shared in whole numbers.
        efficiency: e(n) of a tensor group of two or more chips.

    Returns:
        A `MixedPlan`. Weigh gradients by samples: pipelines see different numbers of them.

    Raises:
        ValueError: when all chips together do not hold the layers.

    Source: "HexiScale", 2024, arXiv:2409.01143: asymmetric pipelines; the search is ours.

    Example:
        >>> kinds = {"fast": ChipKind(2, 3.0, 6), "slow": ChipKind(4, 1.0, 3)}
        >>> found = plan_mixed(kinds, 12, batch=30)
        >>> round(found.rate, 4), len(found.pipelines)
        (0.8333, 2)
    """
    names = tuple(kinds)
    counts = tuple(kinds[name].count for name in names)
    if not names or min(counts) < 1 or sum(counts) > MOST_MIXED or layers < 1 or batch < 1:
        raise ValueError(
            f"want 1 to {MOST_MIXED} chips, and layers and batch of at least 1; got {shown(kinds)}"
        )
    if not 0 < efficiency <= 1 or min(kind.speed for kind in kinds.values()) <= 0:
        raise ValueError(f"want speeds above 0 and efficiency in (0, 1]; got {efficiency}")
    room = sum(kind.count * kind.room for kind in kinds.values())
    if room < layers:
        raise ValueError(f"kinds: all chips hold {room} layers; the model has {layers}")

    @functools.cache
    def pipeline(counts: tuple[int, ...]) -> tuple[float, tuple[MixedStage, ...]]:
        """The fastest pipeline of exactly these chips."""
        ways = [_groups(count) for count in counts]
        found = (0.0, ())
        for way in itertools.product(*ways):
            groups = [
                (name, size) for name, sizes in zip(names, way, strict=True) for size in sizes
            ]
            found = max(found, _fill(groups, kinds, layers, efficiency), key=lambda each: each[0])
        return found

    @functools.cache
    def divided(left: tuple[int, ...], most: tuple[int, ...]):
        """The best pipelines of these chips, none after the first in order; some may idle."""
        best: tuple[float, tuple[tuple[float, tuple[MixedStage, ...]], ...]] = (0.0, ())
        for first in itertools.product(*(range(count + 1) for count in left)):
            if not any(first) or first > most:
                continue
            rate, stages = pipeline(first)
            if not stages:
                continue
            rest = tuple(a - b for a, b in zip(left, first, strict=True))
            others, pipelines = divided(rest, first)
            if rate + others > best[0] + 1e-12:
                best = rate + others, ((rate, stages), *pipelines)
        return best

    rate, found = divided(counts, counts)
    rates = tuple(each for each, _ in found)
    samples = _shared(rates, batch)
    ends = max(n / r for n, r in zip(samples, rates, strict=True))
    bound = sum(kind.count * kind.speed for kind in kinds.values()) / layers
    return MixedPlan(
        tuple(stages for _, stages in found), rates, samples, rate, batch / ends, bound
    )


@checked
def plan_mixed_cluster(
    model: Any, chips: str, *, batch: int, sequence_length: int = 2048
) -> MixedPlan:
    """The same for a model on a cluster of several kinds of chips.

        speed = 1 / seconds of a layer, forward and backward, computed anew whole
        room  = (memory - tables) / (16 bytes per parameter and what a layer keeps of 2 p samples)

    Args:
        model: a configuration of equal layers, or its name in `MODELS`.
        chips: kinds and numbers, such as "h100:4+a100:8".
        batch: samples of a step.
        sequence_length: tokens of a sample.

    Returns:
        A `MixedPlan`. Communication is left out, but for the efficiency of tensor groups.

    Example:
        >>> found = plan_mixed_cluster("llama-3-8b", "h100:4+a100:4", batch=64)
        >>> found.rate <= found.bound
        True
    """
    config, parts = model_of(model), [cluster(part) for part in chips.split("+")]
    kinds = layer_kinds(config, ONE)
    if len(set(kinds)) > 1 or config.loops > 1:
        raise ValueError("model: stages on chips of several kinds are planned for equal layers")
    word, fed, recompute = kinds[0]
    layer = layer_memory(config, word, fed, recompute, ONE, 1, sequence_length)
    tables = 2 * TRAINED * config.vocabulary * config.width
    found = {}
    for where in parts:
        if where.chip.name in found:
            raise ValueError(f"chips {chips!r}: {where.chip.name} stands twice; write it once")
        took = layer_seconds(
            config, word, fed, recompute, ONE, where, 1, sequence_length, constants_of(where, None)
        ).computing
        flight = 2 * sum(part.chips for part in parts)  # samples in flight, at most
        each = TRAINED * layer.share.kept + layer.kept * flight
        room = int((where.chip.memory_bytes - tables - layer.working) // each)
        found[where.chip.name] = ChipKind(where.chips, 1 / took, max(0, room))
    return plan_mixed(found, len(kinds), batch=batch)


@functools.cache
def _groups(count: int, most: int = GROUPS[-1]) -> tuple[tuple[int, ...], ...]:
    """All ways to part chips of one kind into tensor groups."""
    if count == 0:
        return ((),)
    return tuple(
        (size, *rest)
        for size in reversed(GROUPS)
        if size <= min(count, most)
        for rest in _groups(count - size, size)
    )


def _fill(groups, kinds: Mapping[str, ChipKind], layers: int, efficiency: float):
    """Layers to stages so that the slowest is fastest: (rate, stages, most room first)."""
    speeds, rooms = [], []
    for name, size in groups:
        speeds.append(kinds[name].speed * size * (efficiency if size > 1 else 1.0))
        rooms.append(kinds[name].room * size)
    if len(groups) > layers or sum(rooms) < layers or min(rooms) < 1:
        return 0.0, ()
    # The time of the slowest stage is l / speed of some stage and some whole l.
    times = sorted({number / speed for speed in speeds for number in range(1, layers + 1)})
    for time in times:
        holds = [
            min(room, math.floor(time * speed + 1e-9))
            for speed, room in zip(speeds, rooms, strict=True)
        ]
        if min(holds) >= 1 and sum(holds) >= layers:
            break
    else:
        return 0.0, ()
    over = sum(holds) - layers
    for at in sorted(range(len(holds)), key=lambda at: speeds[at]):  # slow stages are relieved
        less = min(over, holds[at] - 1)
        holds[at] -= less
        over -= less
    if over:
        return 0.0, ()
    stages = [
        MixedStage(name, size, count) for (name, size), count in zip(groups, holds, strict=True)
    ]
    stages.sort(key=lambda stage: -kinds[stage.kind].room * stage.chips)
    return 1 / max(count / speed for count, speed in zip(holds, speeds, strict=True)), tuple(stages)


def _shared(rates: tuple[float, ...], batch: int) -> tuple[int, ...]:
    """Samples per pipeline so that the last ends soonest: each goes where it ends first."""
    samples = [math.floor(batch * rate / sum(rates)) for rate in rates]
    while sum(samples) < batch:
        after = [(n + 1) / rate for n, rate in zip(samples, rates, strict=True)]
        samples[after.index(min(after))] += 1
    return tuple(samples)
