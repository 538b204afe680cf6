"""The gradients of a planned step in the order of back-propagation, and when each is ready."""

from dataclasses import dataclass

from toolkit.parallel.gradients.exchange import DENSE_BELOW
from toolkit.planning.memory.categories import layer_kinds
from toolkit.planning.memory.sizes import (
    layer_parts,
    layer_tensors,
    mixture_tensors,
    rest_tensors,
    share_of,
    table_tensors,
)
from toolkit.planning.predict import Prediction
from toolkit.planning.time.seconds import Seconds
from toolkit.planning.time.step import transfer_seconds
from toolkit.planning.time.traffic import Transfer, of_parameters


@dataclass(frozen=True)
class Tensors:
    """Gradients in the order of back-propagation.

    Tensors that are small travel as they are, and are left out.

    Attributes:
        names: layer and shape.
        numbers: that a chip exchanges of each.
        ready: seconds from the start of the last backward pass.
        others: seconds that the link needs for other traffic of each.
        layers: where the tensors of a layer end.
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    ready: tuple[float, ...]
    others: tuple[float, ...]
    layers: tuple[int, ...]


def degrees_of(step: Prediction) -> tuple[int, int, bool]:
    """Replicas, the distance between neighbours, and whether each shall have a part only."""
    strategy = step.strategy
    if strategy.data > 1:
        return strategy.data, strategy.tensor * strategy.fsdp, strategy.shard_optimizer
    return strategy.fsdp, strategy.tensor, True


def tensors_of(step: Prediction) -> Tensors:
    """The gradients of a step. Those of a looped layer are complete after its first loop, which is
    the last of the backward pass; those of micro-batches after the last of them."""
    config, strategy = step.config, step.strategy
    _, _, is_cut = degrees_of(step)
    names, numbers, ready, others, ends = [], [], [], [], []
    runs = strategy.microbatches * config.loops
    table = _backward(step.seconds_of_tables) / strategy.microbatches
    layers = layer_kinds(config, strategy)
    each = {kind: _backward(step.seconds_by_kind[kind]) / runs for kind in set(layers)}
    now = 0.75 * table + (config.loops - 1) * sum(each[kind] for kind in layers)

    def add(label: str, shapes: tuple, seconds: float, waits: float) -> None:
        nonlocal now
        found = []
        for shape, cut in shapes:
            share = share_of(((shape, cut),), strategy)
            kept = share.used if is_cut and strategy.data == 1 else share.kept
            found.append((" x ".join(map(str, shape)), kept))
        total = sum(kept for _, kept in found)
        found = [each for each in found if each[1] >= DENSE_BELOW]
        for shape, kept in reversed(found):
            now += seconds * kept / total
            names.append(f"{label}: {shape}")
            numbers.append(kept)
            ready.append(now)
            others.append(waits * kept / total)
        if found:
            ends.append(len(names))

    tables = table_tensors(config, strategy.tensor)
    add("head", (*tables[1:], *rest_tensors(config)), 0.0, 0.0)
    for at, (word, fed, recompute) in reversed([*enumerate(layers)]):
        kind = word, fed, recompute
        shapes = layer_tensors(config, word, fed)
        parts = layer_parts(config, word, fed, strategy)
        if fed == "moe":
            shapes = sum(mixture_tensors(config, False), shapes)
        waits = sum(
            seconds_of(step, transfer)
            for part in parts
            for transfer in of_parameters(part.strategy, part.share, part.itemsize, 1)
            if transfer.part == "fsdp" and transfer.phase == "backward"
            if transfer.kind == "all-gather" or strategy.data > 1
        )
        add(f"layer {at}", shapes, each[kind], waits)
    add("embedding", tables[:1], 0.25 * table, 0.0)
    return Tensors(*map(tuple, (names, numbers, ready, others, ends)))


def _backward(seconds: Seconds) -> float:
    """What computes, or waits for other chips, in the backward pass."""
    waits = seconds.tensor_backward + seconds.expert_backward
    return seconds.backward + seconds.recomputed + waits


def seconds_of(step: Prediction, each: Transfer) -> float:
    """Seconds of one transfer of a step on its links."""
    link = step.cluster.link(each.inner, each.degree, each.kind)
    return transfer_seconds(link, each.bytes_sent, each.degree, step.constants)


def shape_of(name: str) -> tuple[int, ...]:
    """The shape in a tensor's name."""
    return tuple(map(int, name.partition(": ")[2].split(" x ")))
