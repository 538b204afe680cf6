"""Memory of the devices of a pipeline, for what their schedule holds at once.

Pipelines run as one program on all devices (`toolkit.parallel.pipeline`). So every device holds the
tables and the head's intermediates, whichever stage it has.
"""

import itertools
from collections import Counter
from collections.abc import Sequence

from toolkit.looped import LoopedConfig
from toolkit.planning.memory.categories import (
    SOFTMAX,
    Memory,
    channels,
    layer_kinds,
    layer_memory,
    memory_of,
)
from toolkit.planning.strategy import SPLIT, Strategy
from toolkit.planning.time.orders import most_held, steps_of

Kinds = Sequence[tuple[str, str, str]]


def pipeline_memory(
    config: LoopedConfig, strategy: Strategy, batch: int, length: int, stages: Sequence[int]
) -> Memory:
    """Memory of the chip that holds most; `stages` are the layers of each stage."""
    kinds, sizes = layer_kinds(config, strategy), (config, strategy, batch, length)
    if strategy.pipeline == 1:
        return memory_of(*sizes)
    ends = itertools.accumulate(stages)
    layers = [kinds[end - size : end] for end, size in zip(ends, stages, strict=True)]
    if strategy.chunks == 1 and strategy.schedule not in SPLIT:
        # Of equal stages, the first has the most microbatches in flight.
        few = {*range(len(stages) if strategy.stages else 2), len(stages) - 1}
        found = [stage_memory(*sizes, stage, layers[stage]) for stage in few]
        return max(found, key=lambda memory: memory.total)
    sequences = batch // (strategy.batch_shards * strategy.microbatches)
    each = {
        kind: (
            layer_memory(config, *kind, strategy, sequences, length).kept,
            split_bytes(config, *kind, strategy, sequences * length),
        )
        for kind in set(kinds)
    }
    kept, split = (
        [sum(each[kind][at] * n for kind, n in Counter(mine).items()) for mine in layers]
        for at in (0, 1)
    )
    most, found = most_held(steps_of(strategy), kept, split), []
    for device, mine in enumerate(strategy.stages_by_device):
        own = [kind for stage in mine for kind in layers[stage]]
        share = most[device] / sum(kept[stage] for stage in mine)
        found.append(memory_of(*sizes, layers=tuple(own), in_flight=share))
    return max(found, key=lambda memory: memory.total)


def stage_memory(
    config: LoopedConfig, strategy: Strategy, batch: int, length: int, stage: int, layers: Kinds
) -> Memory:
    """Memory of one stage with these layers, alone on its device; weight gradients that wait are
    left out."""
    ahead = {"gpipe": strategy.microbatches, "zb-h2": 2 * (strategy.pipeline - stage) - 1}
    memory = min(strategy.microbatches, ahead.get(strategy.schedule, strategy.pipeline - stage))
    return memory_of(config, strategy, batch, length, layers=tuple(layers), in_flight=memory)


def split_bytes(
    config: LoopedConfig, word: str, fed: str, recompute: str, strategy: Strategy, tokens: int
) -> float:
    """Bytes that a layer holds between the gradient of its input and that of its weights: the
    inputs of all products with weights, and the gradients of their outputs."""
    if recompute != "none":
        return 0.0
    if word not in SOFTMAX or fed != "swiglu":
        sequences = max(1, tokens)
        return layer_memory(config, word, fed, recompute, strategy, sequences, 1).kept
    size, n = config.compute_dtype.itemsize, strategy.tensor
    queries, keys = channels(config, word)
    width, hidden = config.width / n, config.feed_forward_size / n
    inputs = 2 * width + queries / n + hidden
    gradients = (queries + 2 * keys) / n + 2 * width + 2 * hidden
    return tokens * size * (inputs + gradients)
