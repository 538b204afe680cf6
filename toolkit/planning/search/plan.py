"""Which strategy is fastest on a cluster, why, and what the others cost."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

from toolkit._checks import checked
from toolkit.looped import LoopedConfig
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.memory.categories import layer_kinds, layer_memory
from toolkit.planning.models import check_model, model_of, nearest_multiple
from toolkit.planning.predict import Prediction, prediction_of, stage_memory
from toolkit.planning.search.layers import assign_layers
from toolkit.planning.strategy import RECOMPUTE, Strategy
from toolkit.planning.time.pipelines import balanced
from toolkit.planning.time.step import Constants, constants_of, layer_seconds

RUNNERS_UP = 5
UNITS = 512  # of memory in the knapsack over layers
CHUNK = 256  # tokens of a sequence whose logits exist at one time, where the head is streamed
LARGEST_TENSOR = 64
BLOCK_CHUNKS = (2, 4, 8, 16)  # parts of a sequence by which a layer is gone back through
BALANCED = 8  # of the fastest pipelines, those whose stages are balanced


@dataclasses.dataclass(frozen=True)
class Plan:
    """The fastest strategy that fits, and what else was weighed.

    Attributes:
        best: its prediction.
        runners_up: the fastest of other cuts, slower ones after faster ones.
        considered: strategies whose memory was predicted.
        fitting: of them, those that fit.

    Example:
        >>> found = plan("llama-3-8b", "h100:8", batch=64)
        >>> found.best.fits, found.best.strategy.chips
        (True, 8)
    """

    best: Prediction
    runners_up: tuple[Prediction, ...]
    considered: int
    fitting: int

    def __str__(self) -> str:
        best, rows = self.best, [("", "strategy", "step", "per chip", "why not")]
        rows.append(
            ("*", str(best.strategy), *_said(best), f"MFU {in_words(best.utilisation, 'share')}")
        )
        rows += [
            ("", str(other.strategy), *_said(other), why(other, best)) for other in self.runners_up
        ]
        return (
            f"{self.fitting} of {self.considered} strategies fit {best.cluster.name} with "
            f"{in_words(best.limit, 'bytes')} per chip; modelled\n{text_table(rows, '<<>><')}\n"
            f"{reason(best)}"
        )


def _said(found):
    seconds, held = in_words(found.step_seconds, "seconds"), in_words(found.memory.total, "bytes")
    return seconds, held


def reason(best: Prediction) -> str:
    """In words, what limits the best plan."""
    parts = sorted(best.seconds.items(), key=lambda part: -part[1])
    shares = ", ".join(
        f"{name} {in_words(value / best.step_seconds, 'share')}" for name, value in parts[:3]
    )
    room = 1 - best.memory.total / best.limit
    words = f"its time: {shares}; {in_words(room, 'share')} of the memory is free"
    if not best.strategy.stages:
        return words
    even = prediction_of(
        best.config, best.cluster, dataclasses.replace(best.strategy, stages=()), best.batch,
        best.sequence_length, best.limit, best.constants,
    )  # fmt: skip
    saved = in_words(even.step_seconds - best.step_seconds, "seconds")
    instead = f"save {saved} per step" if even.fits else "fit, equal ones do not"
    return f"{words}; stages of {best.strategy.stage_words} layers {instead}"


def why(other: Prediction, best: Prediction) -> str:
    """In words, what makes a plan slower than the best: the part that grows most."""
    names = best.seconds | other.seconds
    more = {name: other.seconds.get(name, 0) - best.seconds.get(name, 0) for name in names}
    name = max(more, key=lambda part: more[part])
    return f"{name} +{in_words(max(0.0, more[name]), 'seconds')}"


@checked
def plan(
    model: LoopedConfig | str,
    chips: str,
    *,
    batch: int,
    sequence_length: int = 2048,
    memory: float | None = None,
    reserve: float = 0.1,
    constants: Constants | None = None,
) -> Plan:
    """Searches the fastest way to train a model on a cluster within its memory.

    Every cut of the chips into data x fsdp x tensor x pipeline is tried with every number of
    microbatches; for each, a knapsack over the layers decides which of them recompute. Where layers
    that are recomputed whole do not fit, the backward pass goes through them in parts (StreamBP).
    The fastest pipelines also get stages of unequal length, balanced in time as far as memory
    allows.

    Args:
        model: a configuration, or the name of one (`MODELS`).
        chips: kind and number, such as "h100:64" or "v5e:4x4".
        batch: sequences per step, all chips together.
        sequence_length: tokens per sequence.
        memory: bytes a chip may use; None: all it has.
        reserve: share of that memory to keep free, for what predictions miss.
        constants: what chips and links achieve; None: the defaults.

    Returns:
        A `Plan`.

    Raises:
        ValueError: nothing fits, or no cut divides the model and the batch; in one line with the
            nearest that works.

    Cost:
        Below five seconds for 48 layers on 512 chips.

    Source:
        Miao et al., "Galvatron", 2022; Wang et al., 2023 (Galvatron-BMW); Luo et al.,
        "StreamBP", 2025.

    Example:
        >>> found = plan("llama-3.2-1b", "v5e:4x4", batch=64)
        >>> all(found.best.step_seconds <= other.step_seconds for other in found.runners_up)
        True
    """
    return searched(model, chips, batch, sequence_length, memory, reserve, constants)


def searched(
    model: LoopedConfig | str,
    chips: str,
    batch: int,
    sequence_length: int,
    memory: float | None = None,
    reserve: float = 0.1,
    constants: Constants | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """`plan`, which after each cut of the chips tells how many are weighed, and of how many."""
    config, where = model_of(model), cluster(chips)
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be positive; got {memory:,.0f} bytes")
    check_model(config, Strategy(), batch, sequence_length)
    constants = constants_of(where, constants)
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve must lie in [0, 1); got {reserve}")
    limit = (where.chip.memory_bytes if memory is None else memory) * (1 - reserve)
    considered, fitting, smallest, staged = 0, {}, None, []
    tried = list(cuts(config, where, batch, sequence_length))
    for done, strategy in enumerate(tried, 1):
        found = [
            prediction_of(
                config, where, dataclasses.replace(strategy, recompute=recompute),
                batch, sequence_length, limit, constants,
            )
            for recompute in RECOMPUTE
        ]  # fmt: skip
        found += _streamed(found[-1])
        considered += len(found)
        least = min(found, key=lambda each: each.memory.total)
        if smallest is None or least.memory.total < smallest.memory.total:
            smallest = least
        fits = [each for each in found if each.fits]
        staged += found if strategy.pipeline > 1 else []
        for each in fits:
            fitting[each.strategy] = each
        if fits and not found[0].fits:  # what recomputes nothing
            mixed = _mixed(least)
            if mixed is not None and mixed.fits:
                fitting[mixed.strategy] = mixed
                considered += 1
        tell(done, len(tried))
    if smallest is None:
        shards = where.chips
        raise ValueError(
            f"batch {batch} on {where.chips} chips: no cut divides the batch and the model; "
            f"nearest batch that works: {nearest_multiple(batch, shards)}"
        )
    for each in sorted(staged, key=lambda each: each.step_seconds)[:BALANCED]:
        uneven = _balanced(each)
        if uneven is not None and uneven.fits:
            fitting[uneven.strategy] = uneven
        considered += uneven is not None
    if not fitting:
        raise ValueError(_nothing_fits(smallest, memory, reserve))
    ranked = sorted(fitting.values(), key=lambda each: (each.step_seconds, each.memory.total))
    others, seen = [], {_degrees(ranked[0].strategy)}
    for each in ranked[1:]:
        if len(others) < RUNNERS_UP and _degrees(each.strategy) not in seen:
            others.append(each)
            seen.add(_degrees(each.strategy))
    return Plan(ranked[0], tuple(others), considered, len(fitting))


def cuts(config: LoopedConfig, where: Cluster, batch: int, length: int) -> Iterator[Strategy]:
    """Every strategy without recomputing that divides the model, the batch and the chips."""
    chunks = length // CHUNK if length % CHUNK == 0 else 1
    for pipeline in _divisors(where.chips):
        for tensor in _divisors(where.chips // pipeline):
            if tensor > LARGEST_TENSOR:
                continue
            shards = where.chips // pipeline // tensor
            if batch % shards:
                continue
            for data in _divisors(shards):
                for parts in _microbatches(batch // shards, pipeline):
                    strategy = Strategy(
                        data=data, fsdp=shards // data, tensor=tensor, pipeline=pipeline,
                        shard_optimizer=data > 1, microbatches=parts, head_chunks=chunks,
                    )  # fmt: skip
                    try:
                        check_model(config, strategy, batch, length)
                    except ValueError:
                        break
                    yield strategy


def _microbatches(sequences, pipeline):
    """Numbers of microbatches worth trying: few without stages to fill, several with them."""
    wanted = [1, 2, 4, 8] if pipeline == 1 else [pipeline * times for times in (1, 2, 4, 8)]
    return [parts for parts in wanted if sequences % parts == 0]


def _streamed(layer: Prediction) -> list[Prediction]:
    """Where layers that are recomputed whole do not fit, in as few parts as do (StreamBP)."""
    memory, strategy = layer.memory, layer.strategy
    smallest = memory.total - memory.gathered - memory.working
    if layer.fits or strategy.tensor > 1 or smallest > layer.limit:
        return []
    found = []
    for chunks in BLOCK_CHUNKS:
        streamed = dataclasses.replace(strategy, block_chunks=chunks)
        try:
            check_model(layer.config, streamed, layer.batch, layer.sequence_length)
        except ValueError:
            break
        found.append(
            prediction_of(
                layer.config, layer.cluster, streamed, layer.batch, layer.sequence_length,
                layer.limit, layer.constants,
            )
        )  # fmt: skip
        if found[-1].fits:
            break
    return found


def _mixed(least: Prediction) -> Prediction | None:
    """Which layers recompute what, by a knapsack over the layers of one stage."""
    config, strategy = least.config, least.strategy
    words = set(config.layers)
    if len(words) > 1 or strategy.pipeline > 1 or least.strategy.recompute != "layer":
        return None
    sequences = least.batch // (strategy.batch_shards * strategy.microbatches)
    word, layers = words.pop(), len(config.layers)
    sizes = (strategy, sequences, least.sequence_length)
    kept = [layer_memory(config, word, each, *sizes).kept * config.loops for each in RECOMPUTE]
    free = least.limit - least.memory.total + layers * kept[RECOMPUTE.index("layer")]
    seconds = [
        layer_seconds(
            config, word, each, strategy, least.cluster, sequences, least.sequence_length,
            least.constants,
        ).total(least.constants.slowdown)
        for each in RECOMPUTE
    ]  # fmt: skip
    unit = free / UNITS
    units = [math.ceil(size / unit) for size in kept]
    found = assign_layers([units] * layers, [seconds] * layers, budget=UNITS)
    if found is None:
        return None
    count = {name: found.choices.count(index) for index, name in enumerate(RECOMPUTE)}
    runs = [f"{count[name]} {name}" for name in reversed(RECOMPUTE) if count[name]]
    if len(runs) < 2:
        return None
    mixed = dataclasses.replace(strategy, recompute=", ".join(runs))
    return prediction_of(
        config, least.cluster, mixed, least.batch, least.sequence_length, least.limit,
        least.constants,
    )  # fmt: skip


def _balanced(even: Prediction) -> Prediction | None:
    """The same with stages that take as long as each other, as far as memory allows."""
    config, strategy, sizes = even.config, even.strategy, (even.batch, even.sequence_length)
    kinds = tuple(layer_kinds(config, strategy))
    if len(set(kinds)) > 1:
        return None
    slowdown, count = even.constants.slowdown, len(kinds)

    @functools.cache
    def seconds(stage, layers):
        return even.stage_seconds(stage, 0, layers).total(slowdown)

    @functools.cache
    def memory(stage, layers):
        return stage_memory(config, strategy, *sizes, stage, kinds[:layers]).total

    found = balanced(
        count,
        strategy.pipeline,
        lambda stage, start, end: seconds(stage, end - start),
        lambda stage, start, end: memory(stage, end - start),
        even.limit,
    )
    if found is None or found == even.stages:
        return None
    return prediction_of(
        config, even.cluster, dataclasses.replace(strategy, stages=found), *sizes, even.limit,
        even.constants,
    )  # fmt: skip


def _nothing_fits(smallest: Prediction, memory: float | None, reserve: float) -> str:
    needed = math.ceil(100 * smallest.memory.total / (1 - reserve) / 2**30) / 100
    asked = "memory" if memory is not None else f"chips {smallest.cluster.name!r}: memory"
    had = in_words(smallest.limit / (1 - reserve), "bytes")
    return (
        f"{asked} of {had} per chip, {in_words(reserve, 'share')} kept free, is too little for any "
        f"of the strategies; nearest that works: {needed:.2f} GiB with {smallest.strategy}"
    )


def _degrees(strategy):
    return strategy.data, strategy.fsdp, strategy.tensor, strategy.pipeline


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
