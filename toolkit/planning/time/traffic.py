"""Communication of a step: every collective of `train_program` with its bytes, axis and count.

An array of V bytes (whole) on n chips: all-gather and reduce-scatter send V (n-1)/n per chip, an
all-reduce twice that. `as_compiled` applies the compiler's substitutions.
"""

from typing import NamedTuple

from toolkit.looped import LoopedConfig
from toolkit.planning.clusters import Cluster
from toolkit.planning.memory.sizes import (
    FLOAT32,
    channels,
    layer_parts,
    rest_tensors,
    share_of,
    table_tensors,
)
from toolkit.planning.mixtures import dispatch_of
from toolkit.planning.strategy import Strategy

# All-gathers and reduce-scatters of the residual stream around the two halves of a layer; the
# backward pass gathers again where only a shard was kept, and recomputation repeats one sum.
_FORWARD = {"all-gather": 2, "reduce-scatter": 2}
_BACKWARD = {
    "none": {"all-gather": 4, "reduce-scatter": 2},
    "elementwise": {"all-gather": 4, "reduce-scatter": 3},
    "layer": {"all-gather": 4, "reduce-scatter": 3},
}
SMALLEST_RING = 4  # chips of a slice of 2x2
# A folded mixture of experts has no part in them.
_HALF_FORWARD = {"all-gather": 1, "reduce-scatter": 1}
_HALF_BACKWARD = {
    "none": {"all-gather": 2, "reduce-scatter": 1},
    "elementwise": {"all-gather": 2, "reduce-scatter": 2},
    "layer": {"all-gather": 2, "reduce-scatter": 2},
}
_TABLE = ({"all-gather": 1, "reduce-scatter": 1},) * 2


class Transfer(NamedTuple):
    """A kind of collective in a step.

    Attributes:
        part: "tensor", "context", "fsdp", "data", "expert" or "pipeline".
        kind: the compiler's name.
        phase: "forward", "backward" or "update".
        bytes_sent: per chip and run.
        runs: per step.
        degree: chips per group.
        inner: distance between neighbours of a group, in chips.
        is_odd: whether a chip's share of columns is an odd number of a TPU's tiles.

    Example:
        >>> Transfer("data", "all-reduce", "backward", 8.0, 2, 4, 1).total
        16.0
    """

    part: str
    kind: str
    phase: str
    bytes_sent: float
    runs: int
    degree: int
    inner: int
    is_odd: bool = False

    @property
    def total(self) -> float:
        """Bytes sent per chip and step."""
        return self.bytes_sent * self.runs


def layer_transfers(
    config: LoopedConfig,
    word: str,
    fed: str,
    recompute: str,
    strategy: Strategy,
    sequences: int,
    length: int,
    cluster: Cluster,
) -> list[Transfer]:
    """Collectives of one layer, over all microbatches and loops of a step."""
    size, runs = config.compute_dtype.itemsize, strategy.parts * config.loops
    tokens = sequences * length // strategy.context // strategy.slices
    stream = tokens * config.width * size
    is_folded = fed == "moe" and strategy.expert > 1
    counts = (_HALF_FORWARD, _HALF_BACKWARD) if is_folded else (_FORWARD, _BACKWARD)
    transfers = over_tensor(strategy, stream, runs, counts[0], counts[1][recompute])
    if strategy.products == "float8":  # what products read is cast before it is gathered
        transfers = [
            each._replace(bytes_sent=each.bytes_sent / size) if each.kind == "all-gather" else each
            for each in transfers
        ]
    transfers += _of_keys(config, word, strategy, tokens, runs)
    for part in layer_parts(config, word, fed, strategy):
        transfers += of_parameters(part.strategy, part.share, part.itemsize, runs)
    if is_folded:
        transfers += _of_experts(config, recompute, strategy, tokens, runs, cluster)
    return transfers


def _of_keys(config, word, strategy, tokens, runs):
    """Keys and values of a sequence, gathered in both passes by the chips of "context", and the
    sums of their gradients."""
    n = strategy.context
    if n == 1:
        return []
    both = 2 * channels(config, word)[1] // strategy.tensor
    sent = float(config.compute_dtype.itemsize * tokens * both * (n - 1))
    passes = ("all-gather", "forward"), ("all-gather", "backward"), ("reduce-scatter", "backward")
    return [Transfer("context", *each, sent, runs, n, strategy.tensor) for each in passes]


_TRANSPOSED = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}


def _of_experts(config, recompute, strategy, tokens, runs, cluster):
    """A mixture's collectives, their transposes, and once more what is computed anew: gathers are
    never kept, and the sums of a reduce-scatter are not needed again."""
    transfers, (degree, inner) = [], (strategy.expert, 1)
    if strategy.dispatch == "by_host":
        degree, inner = cluster.domains(strategy.expert)
    recomputed = recompute != "none" and not strategy.keeps_products
    for kind, count, sent in dispatch_of(config, strategy, tokens // strategy.tensor, degree):
        # Whole numbers, the experts' indices and loads, have no gradient.
        back = (strategy.dispatch == "gather") if kind == "all-gather" else count
        is_anew = kind == "all-gather" or (recomputed and kind != "reduce-scatter")
        for name, phase, number in (
            (kind, "forward", count),
            (kind, "backward", count * is_anew),
            (_TRANSPOSED.get(kind, kind), "backward", back),
        ):
            if number:
                each = "expert", name, phase, float(sent), number * runs, degree, inner
                transfers.append(Transfer(*each))
    return transfers


def table_transfers(
    config: LoopedConfig, strategy: Strategy, sequences: int, length: int
) -> list[Transfer]:
    """Collectives of the embedding, the head and small parameters, over all microbatches."""
    size, runs = config.compute_dtype.itemsize, strategy.microbatches
    stream = sequences * length // strategy.context * config.width * size
    transfers = over_tensor(strategy, stream, runs, *_TABLE)
    tables, cut = table_tensors(config, strategy.tensor), strategy.for_parameters
    for tensors in (*((table,) for table in tables), rest_tensors(config)):
        transfers += of_parameters(cut, share_of(tensors, strategy), size, runs)
    # Gathered tables are kept: no layer recomputes from them.
    return [each for each in transfers if each[:3] != ("fsdp", "all-gather", "backward")]


def as_compiled(transfers: list[Transfer], cluster: Cluster, sequences: int) -> list[Transfer]:
    """Collectives as the cluster's compiler makes them, for `sequences` per microbatch.

    libtpu scatters by an all-reduce, which sends twice, what has a single sequence, what goes to
    all chips of a slice that is no ring, and columns of which a chip's share is an odd number of
    tiles: it cannot be halved for the two ways around a ring.
    """
    if not cluster.chip.name.startswith("TPU"):
        return transfers
    return [
        each._replace(kind="all-reduce", bytes_sent=2 * each.bytes_sent)
        if each.kind == "reduce-scatter"
        and (
            each.is_odd
            or (each.degree == cluster.chips // cluster.slices and not _is_ring(cluster))
            or (sequences == 1 and each.part == "tensor")
        )
        else each
        for each in transfers
    ]


def _is_ring(cluster: Cluster) -> bool:
    """Whether libtpu scatters over a slice as over one ring: 2x2, and a flat one of two sizes, 2x4,
    4x8 or 8x16; not 4x4, 8x8 or 2x2x2."""
    sizes = {size for size in cluster.name.partition(":")[2].split("x") if size != "1"}
    is_flat = cluster.name.replace("x1", "").count("x") == 1
    return cluster.chips // cluster.slices <= SMALLEST_RING or (is_flat and len(sizes) == 2)


def over_tensor(strategy, stream, runs, forward, backward):
    """Collectives of the residual stream over "tensor", by kind in each pass."""
    n = strategy.tensor
    if n == 1:
        return []
    sent = stream * (n - 1) / n
    return [
        Transfer("tensor", kind, phase, sent, count * runs, n, 1)
        for phase, counts in (("forward", forward), ("backward", backward))
        for kind, count in counts.items()
    ]


def of_parameters(strategy, found, size, runs):
    """Gathers of parameters and sums of gradients, over the axes that cut or copy them."""
    transfers, inner = [], strategy.tensor
    n = strategy.fsdp
    if n > 1 and found.used > found.kept:
        # What is not cut is not gathered: of g cut numbers used - kept = g (n - 1) / n are missing.
        missing, odd = found.used - found.kept, found.odd * (n - 1) / n
        for kind, phase, numbers, is_odd in (
            ("all-gather", "forward", missing, False),
            ("all-gather", "backward", missing, False),
            ("reduce-scatter", "backward", missing - odd, False),
            ("reduce-scatter", "backward", odd, True),
        ):
            if numbers:
                sent = size * numbers
                transfers.append(Transfer("fsdp", kind, phase, sent, runs, n, inner, is_odd))
    inner, n = inner * strategy.fsdp, strategy.data
    if n > 1:
        number = FLOAT32 if strategy.summed == "float32" else 2
        each, times = number * found.kept * (n - 1) / n, strategy.parts
        if strategy.shard_gradients and found.moment < found.kept:
            scatter = "data", "reduce-scatter", "backward", each, times, n, inner
            transfers.append(Transfer(*scatter))
        else:
            transfers.append(Transfer("data", "all-reduce", "backward", 2 * each, 1, n, inner))
        if found.moment < found.kept:
            transfers.append(Transfer("data", "all-gather", "update", each, 1, n, inner))
    return transfers
