"""What a strategy becomes where it does not fit, or its stages are unequal: layers in chunks, or
that recompute differently, and stages balanced in time."""

import bisect
import dataclasses
import functools
import math

from toolkit.planning.memory.categories import layer_kinds, layer_memory
from toolkit.planning.memory.pipelines import stage_memory
from toolkit.planning.model_checks import check_model
from toolkit.planning.models import kinds_of
from toolkit.planning.predict import Prediction
from toolkit.planning.search.layers import assign_layers
from toolkit.planning.strategy import RECOMPUTE
from toolkit.planning.time.pipelines import balanced, cuts_by_size
from toolkit.planning.time.step import layer_seconds

UNITS = 512  # of memory in the knapsack over layers
BLOCK_CHUNKS = (2, 4, 8, 16)  # chunks of a sequence in the backward pass of a layer


def streamed(layer: Prediction) -> list[Prediction]:
    """If fully recomputed layers do not fit, use the fewest chunks that do (StreamBP)."""
    memory, strategy = layer.memory, layer.strategy
    smallest = memory.total - memory.gathered - memory.working
    if layer.fits or strategy.tensor > 1 or smallest > layer.limit:
        return []
    found = []
    for chunks in BLOCK_CHUNKS:
        cut = strategy.changed(block_chunks=chunks)
        try:
            check_model(layer.config, cut, layer.batch, layer.sequence_length)
        except ValueError:
            break
        found.append(dataclasses.replace(layer, strategy=cut))
        if found[-1].fits:
            break
    return found


def mixed_over_layers(least: Prediction) -> Prediction | None:
    """Choose what each layer recomputes, by a knapsack over the layers of one stage."""
    config, strategy = least.config, least.strategy
    kinds = set(kinds_of(config))
    if len(kinds) > 1 or strategy.pipeline > 1 or least.strategy.recompute != "layer":
        return None
    sequences = least.batch // (strategy.batch_shards * strategy.microbatches)
    kind, layers = kinds.pop(), len(config.layers)
    sizes = (strategy, sequences, least.sequence_length)
    kept = [layer_memory(config, *kind, each, *sizes).kept * config.loops for each in RECOMPUTE]
    free = least.limit - least.memory.total + layers * kept[RECOMPUTE.index("layer")]
    seconds = [
        layer_seconds(
            config, *kind, each, strategy, least.cluster, sequences, least.sequence_length,
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
    return dataclasses.replace(least, strategy=strategy.changed(recompute=", ".join(runs)))


def balanced_in_memory(even: Prediction) -> Prediction | None:
    """The same with stages balanced in time, as far as memory allows."""
    config, strategy, sizes = even.config, even.strategy, (even.batch, even.sequence_length)
    kinds = tuple(layer_kinds(config, strategy))
    if len(set(kinds)) > 1 or config.loops > 1:
        return None
    slowdown, count, last = even.constants.slowdown, len(kinds), strategy.pipeline - 1
    sizes_of_stage = range(1, count + 1)

    @functools.cache
    def seconds(stage):
        if 1 < stage < last:  # inner stages are alike
            return seconds(1)
        took = (even.stage_seconds(stage, 0, size) for size in sizes_of_stage)
        return cuts_by_size([each.total(slowdown) for each in took])

    @functools.cache
    def memory(stage):
        found = [math.inf] * count
        for size in sizes_of_stage:  # of more layers than one too many nothing need be known
            found[size - 1] = stage_memory(config, strategy, *sizes, stage, kinds[:size]).total
            if found[size - 1] > even.limit:
                break
        return cuts_by_size(found)

    found = balanced(count, strategy.pipeline, seconds, memory, even.limit)
    if found is None or found == even.stages:
        return None
    return dataclasses.replace(even, strategy=strategy.changed(stages=found))


def even_in_time(even: Prediction) -> Prediction | None:
    """The same with stages balanced in time, whatever their memory: all full to the least limit at
    which all layers find a stage, then the longest shortened."""
    strategy, kinds = even.strategy, layer_kinds(even.config, even.strategy)
    count, stages, slowdown = len(kinds), strategy.stage_count, even.constants.slowdown
    if len(set(kinds)) > 1 or even.config.loops > 1:
        return None

    @functools.cache
    def seconds(stage, layers):
        return even.stage_seconds(stage, 0, layers).total(slowdown)

    like = [0, *[1] * (stages - 2), stages - 1]  # inner stages are alike
    limits = sorted(seconds(s, k) for s in {*like} for k in range(1, 2 + count // stages * 2))
    ways = [seconds(s, 1) for s in like]

    def full(limit):
        room = {s: [k for k in range(1, count + 1) if seconds(s, k) <= limit] for s in {*like}}
        return [max(room[s], default=0) for s in like]

    fits = [limit for limit in limits if limit >= max(ways)]
    at = bisect.bisect_left(fits, count, key=lambda limit: sum(full(limit)))
    if at == len(fits):
        return None
    sizes = full(fits[at])
    while sum(sizes) > count:
        sizes[max(range(stages), key=lambda s: (sizes[s] > 1, seconds(like[s], sizes[s])))] -= 1
    if tuple(sizes) == even.stages:
        return None
    return dataclasses.replace(even, strategy=strategy.changed(stages=tuple(sizes)))
