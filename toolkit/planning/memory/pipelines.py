"""Memory of the devices of a pipeline, for what their schedule holds at once.

Pipelines run as one program on all devices (`toolkit.parallel.pipeline`). So every device holds the
tables and the head's intermediates, whichever stage it has, and places for the layers and the
waiting activations of every kind of stage.
"""

import functools
import itertools
from collections.abc import Sequence

from toolkit.looped import LoopedConfig
from toolkit.planning.memory.categories import (
    Memory,
    layer_kinds,
    layer_memory,
    memory_of,
)
from toolkit.planning.memory.kept import waiting_per_token
from toolkit.planning.memory.placing import places_in, rows_of, stores_of
from toolkit.planning.memory.sizes import SOFTMAX, cache_bytes, channels
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.orders import most_waiting

CARRIED = 2  # caches between slices: one on its way forward, and one of gradients on its way back
# Activations that arrived and wait: of schedules that run all forward passes first, every
# microbatch's. And those that a tick moves: one sent, two that arrive, one that is overwritten.
LATE, WAITS, MOVING = ("gpipe", "breadth-first"), 2, 4
Kinds = tuple[tuple[str, str, str], ...]


def pipeline_memory(
    config: LoopedConfig, strategy: Strategy, batch: int, length: int, stages: Sequence[int]
) -> Memory:
    """Memory of the chip that holds most of several stages, of which `stages` are the layers."""
    sizes = config, strategy, batch, length
    kinds, by_device = layer_kinds(config, strategy), strategy.stages_by_device
    stores, largest, devices = _placed(kinds, config.loops, (*stages,), by_device)
    sequences = batch // (strategy.batch_shards * strategy.microbatches)
    each = {kind: waiting_bytes(config, *kind, strategy, sequences, length) for kind in set(kinds)}
    alone = {kind: layer_memory(config, *kind, strategy, sequences, length).kept for kind in each}
    # A tick takes one slot of every store out and puts it back.
    waiting = sum(
        (slots + 1) * sum(each[kind][at] for kind in largest[store])
        for store, both in slots_of(strategy, stores).items()
        for at, slots in enumerate(both)
        if slots
    )
    tokens = sequences * length // strategy.context // strategy.slices
    arrives = strategy.parts if strategy.schedule in LATE else WAITS
    sent = tokens * config.width * config.compute_dtype.itemsize / strategy.tensor
    waiting += (arrives + MOVING) * sent * (2 if config.residual_gate else 1)
    if strategy.slices > 1:
        stored = (
            sum(sequences * cache_bytes(config, word, strategy.tensor, length) for word, *_ in each)
            for each in largest.values()
        )
        waiting += CARRIED * max(stored)
    found = (
        (layers, waiting / (config.loops * sum(alone[kind] for kind in layers)))
        for layers in devices
    )
    memories = (memory_of(*sizes, layers=layers, in_flight=share) for layers, share in found)
    return max(memories, key=lambda memory: memory.total)


@functools.lru_cache(maxsize=1024)
def _placed(kinds: Kinds, loops: int, stages: tuple[int, ...], by_device: tuple):
    """Each stage's store, the kinds of the layers of the largest stage in each store, and what
    different devices have: the kinds of the layers in all their places."""
    ends, looped = itertools.accumulate(stages), kinds * loops
    words = tuple(looped[end - size : end] for end, size in zip(ends, stages, strict=True))
    each, rows = len(by_device[0]) // loops, rows_of(stages, loops, by_device)
    places = places_in([(word, fed) for word, fed, _ in kinds], rows)
    devices = {
        tuple(
            kinds[next(other for other in (layer, *place) if other is not None)]
            for _, place in places
            for layer in place[device * each : (device + 1) * each]
        )
        for device in range(len(by_device))
    }
    stores, largest = stores_of(words), {}
    for store, mine in zip(stores, words, strict=True):
        largest[store] = max(mine, largest.get(store, ()), key=len)
    return stores, largest, devices


def slots_of(strategy: Strategy, stores: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For each store the most microbatches that wait in it on a device for their backward pass, and
    for the gradients of weights; `stores` are those of the stages."""
    if strategy.schedule not in ("1f1b", "gpipe"):
        return most_waiting(strategy, stores)
    if strategy.schedule == "gpipe":
        return dict.fromkeys(stores, (strategy.parts, 0))
    ahead = strategy.pipeline + strategy.slices - 1
    return {store: (min(ahead - stores.index(store), strategy.parts), 0) for store in {*stores}}


def stage_memory(
    config: LoopedConfig, strategy: Strategy, batch: int, length: int, stage: int, layers: Kinds
) -> Memory:
    """Memory of one stage with these layers, alone on its device; weight gradients that wait are
    left out."""
    ahead = {"gpipe": strategy.parts, "zb-h2": 2 * (strategy.pipeline - stage) - 1}
    usual = strategy.pipeline - stage + strategy.slices - 1
    memory = min(strategy.parts, ahead.get(strategy.schedule, usual))
    return memory_of(config, strategy, batch, length, layers=tuple(layers), in_flight=memory)


def waiting_bytes(
    config: LoopedConfig,
    word: str,
    fed: str,
    recompute: str,
    strategy: Strategy,
    sequences: int,
    length: int,
) -> tuple[float, float]:
    """Bytes that a layer of a pipeline keeps for its backward pass, and between the gradient of its
    input and those of its weights: the inputs of all products with weights, and the gradients of
    their outputs. What `toolkit.parallel.pipeline` makes anew by cheap operations is not kept."""
    kept = layer_memory(config, word, fed, recompute, strategy, sequences, length).kept
    if recompute != "none":
        return kept, 0.0
    tokens = sequences * length // strategy.context // strategy.slices
    if fed != "swiglu":
        return kept, kept
    cache = sequences * cache_bytes(config, word, strategy.tensor, length) * (strategy.slices > 1)
    if word not in SOFTMAX:
        per_token = waiting_per_token(config, word, length)
        return tokens * per_token[0] + cache, tokens * per_token[1]
    size, n = config.compute_dtype.itemsize, strategy.tensor
    queries, keys = channels(config, word)
    width, hidden = config.width, config.feed_forward_size
    # Inputs of both norms, rotated queries and keys, values, the heads' outputs; gate, its sigmoid
    # and up. Then the inputs of both norms and, gathered, the gradients of both sums; both of
    # queries and outputs, gradients of keys and values, gate and up with theirs.
    waits = 2 * width + 2 * queries + 2 * keys + 3 * hidden
    split = 2 * width * (1 + n) + 2 * queries + 2 * keys + 4 * hidden
    return tokens * size * waits / n + cache, tokens * size * split / n
