"""Communication of a pipeline's devices, as one program on all of them has it.

Every tick of the schedule sends an activation along each channel, whether a task made one or not.
The tables are on every stage: the first uses the embedding, the last the head, and the gradients of
both are summed over all.
"""

import functools

from toolkit.looped import LoopedConfig
from toolkit.parallel.pipeline import program_of
from toolkit.planning.clusters import Cluster
from toolkit.planning.memory.categories import layer_kinds
from toolkit.planning.memory.placing import stage_places
from toolkit.planning.memory.sizes import FLOAT32, rest_tensors, share_of, table_tensors
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.orders import schedule_of
from toolkit.planning.time.traffic import (
    Transfer,
    layer_transfers,
    of_parameters,
    over_tensor,
)


def device_transfers(
    config: LoopedConfig,
    strategy: Strategy,
    sequences: int,
    length: int,
    device: int,
    cluster: Cluster,
) -> list[Transfer]:
    """Collectives of a step on a chip of one device of the pipeline."""
    kinds, rows = layer_kinds(config, strategy), strategy.chunks // config.loops
    found: list[Transfer] = []
    for kind, place in stage_places(config, strategy):
        for layer in place[device * rows : (device + 1) * rows]:
            recompute = "none" if layer is None else kinds[layer][2]
            sizes = recompute, strategy, sequences, length
            each = layer_transfers(config, *kind, *sizes, cluster)
            # The sum over "data" runs for every place of a layer, also where a row has none.
            found += each if layer is not None else [t for t in each if t.part == "data"]
    mine = strategy.stages_by_device[device]
    is_ends = 0 in mine, strategy.stage_count - 1 in mine
    found += _of_tables(config, strategy, sequences, length, *is_ends)
    return found + _between(config, strategy, sequences, length, device)


def _of_tables(config, strategy, sequences, length, is_first, is_last):
    size, runs = config.compute_dtype.itemsize, strategy.parts
    stream = sequences * length // strategy.context // strategy.slices * config.width * size
    found, tables = [], table_tensors(config, strategy.tensor)
    if is_first:
        found += over_tensor(strategy, stream, runs, {"reduce-scatter": 1}, {"all-gather": 1})
    if is_last:
        found += over_tensor(strategy, stream, runs, {"all-gather": 1}, {"reduce-scatter": 1})
    for at, tensors in enumerate([*((table,) for table in tables), rest_tensors(config)]):
        users = (is_first + is_last, 0) if config.tied_embedding else (is_first, is_last, 0)
        share = share_of(tensors, strategy)
        for each in of_parameters(strategy.for_parameters, share, size, runs):
            if each.part == "data":
                found.append(each)
            elif each[:3] != ("fsdp", "all-gather", "backward"):
                found += [each] * users[at]
        p, inner = strategy.pipeline, strategy.chips // strategy.pipeline
        summed = 2 * FLOAT32 * share.kept * (p - 1) / p
        found.append(Transfer("pipeline", "all-reduce", "update", summed, 1, p, inner))
    return found


def _between(config, strategy, sequences, length, device):
    """Activations, and for a gate over the loop its input beside them."""
    arrays = 2 if config.residual_gate else 1
    sent = sequences * length * config.width * config.compute_dtype.itemsize
    sent /= strategy.tensor * strategy.context * strategy.slices
    p, inner = strategy.pipeline, strategy.chips // strategy.pipeline
    ticks, channels = _ticks(strategy)
    return [
        Transfer("pipeline", "collective-permute", "forward", sent, arrays * ticks, p, inner)
        for channel in channels
        if any(source == device for source, _ in channel)
    ]


@functools.lru_cache(maxsize=32)
def _ticks(strategy: Strategy) -> tuple[int, tuple]:
    program = program_of(schedule_of(strategy))
    return program.length, program.channels
