"""The time of a step by part, modelled from published rates and the achieved share of them.

Source: Austin et al., How to Scale Your Model, 2025 (rooflines); Hetu-Galvatron's cost model for
communication that hides behind the backward pass.
"""

import dataclasses

from toolkit._checks import check_fields, checked
from toolkit.looped import LoopedConfig
from toolkit.measure import Link
from toolkit.planning.clusters import Cluster
from toolkit.planning.memory.categories import FLOAT32, channels
from toolkit.planning.memory.sizes import Held, held, layer_tensors, rest_tensors, table_tensors
from toolkit.planning.strategy import Strategy
from toolkit.planning.time.traffic import (
    Transfer,
    as_compiled,
    layer_transfers,
    table_transfers,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """The share of published rates that chips and links achieve; `calibrate` fits them.

    Attributes:
        matmul: share of the peak that matrix products reach.
        memory: share of the memory bandwidth that the update reaches.
        link: share of a link's bandwidth that collectives reach.
        latency: delay of a message, as a multiple of the published one.
        slowdown: factor on computing and communicating while they overlap.

    Example:
        >>> Constants().slowdown
        1.3
    """

    matmul: float = 0.6
    memory: float = 0.8
    link: float = 0.8
    latency: float = 1.0
    slowdown: float = 1.3

    def __post_init__(self):
        check_fields(self)
        for name in ("matmul", "memory", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1]; got {getattr(self, name)}")
        if not 0 <= self.latency <= 1e4:
            raise ValueError(f"latency must lie in [0, 10000]; got {self.latency}")
        if not 1 <= self.slowdown <= 10:
            raise ValueError(f"slowdown must lie in [1, 10]; got {self.slowdown}")


def constants_of(where: Cluster, given: Constants | None) -> Constants:
    """The given constants, or the defaults; measured rates count in full."""
    measured = Constants(matmul=1.0, memory=1.0, link=1.0)
    return given or (measured if where.is_measured else Constants())


@checked
def overlapped_seconds(compute: float, communication: float, *, slowdown: float = 1.3) -> float:
    """The time of overlapping computation and communication, which slow each other down.

        both are slowed while they overlap; the rest of the longer runs at full speed

    Args:
        compute: seconds of the computation alone.
        communication: seconds of the communication alone.
        slowdown: factor on both while they overlap.

    Returns:
        Seconds until both have ended.

    Source: Hetu-Galvatron, cost model.

    Example:
        >>> overlapped_seconds(2.0, 1.0), overlapped_seconds(2.0, 3.0)
        (2.3, 3.6)
    """
    for name, value, least in (
        ("compute", compute, 0), ("communication", communication, 0), ("slowdown", slowdown, 1),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
    return _overlapped(compute, communication, slowdown)


def _overlapped(compute: float, communication: float, slowdown: float) -> float:
    return max(compute, communication) + min(compute, communication) * (slowdown - 1)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of one step on one chip, or of some of its layers.

    Attributes:
        forward, backward: computing; the backward pass without recomputation.
        recomputed: recomputation.
        tensor_forward, tensor_backward: exposed communication.
        hidden_forward, hidden_backward: communication of parameters and gradients that can overlap
            with computing; seconds without overlap.
        update: the optimiser, with the parameters it gathers.
    """

    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    hidden_forward: float = 0.0
    hidden_backward: float = 0.0
    update: float = 0.0

    # Written out field by field, because a search does this ten thousand times.
    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recomputed + other.recomputed,
            self.tensor_forward + other.tensor_forward,
            self.tensor_backward + other.tensor_backward,
            self.hidden_forward + other.hidden_forward,
            self.hidden_backward + other.hidden_backward,
            self.update + other.update,
        )

    def times(self, count: float) -> "Seconds":
        """`count` times this."""
        return Seconds(
            self.forward * count,
            self.backward * count,
            self.recomputed * count,
            self.tensor_forward * count,
            self.tensor_backward * count,
            self.hidden_forward * count,
            self.hidden_backward * count,
            self.update * count,
        )

    def exposed(self, slowdown: float) -> float:
        """Communication of parameters and gradients that computing does not hide."""
        shown = self.total(slowdown) - self.computing - self.tensor - self.update
        return max(0.0, shown)  # not below, by rounding

    @property
    def tensor(self) -> float:
        """Exposed tensor-parallel communication."""
        return self.tensor_forward + self.tensor_backward

    @property
    def computing(self) -> float:
        """Forward, backward and recomputation."""
        return self.forward + self.backward + self.recomputed

    def forward_total(self, slowdown: float) -> float:
        """The forward pass, with overlap."""
        return _overlapped(self.forward, self.hidden_forward, slowdown) + self.tensor_forward

    def backward_total(self, slowdown: float) -> float:
        """The backward pass, with recomputation and overlap."""
        backward = self.backward + self.recomputed
        return _overlapped(backward, self.hidden_backward, slowdown) + self.tensor_backward

    def total(self, slowdown: float) -> float:
        """The whole step, with overlap."""
        return self.forward_total(slowdown) + self.backward_total(slowdown) + self.update


def layer_seconds(
    config: LoopedConfig,
    word: str,
    recompute: str,
    strategy: Strategy,
    cluster: Cluster,
    sequences: int,
    length: int,
    constants: Constants,
) -> Seconds:
    """One layer, over all microbatches and loops of a step."""
    found = held(layer_tensors(config, word), strategy)
    tokens, runs = sequences * length, strategy.microbatches * config.loops
    seen = min(length, config.options[word].sliding_window) if word == "window" else length / 2
    # Scores and weighted values: two products of 2 FLOPs per visible key and channel. Recurrent
    # layers see about one chunk of keys.
    keys = seen if word in ("full", "window") else 64
    mixing = 4 * tokens * keys * channels(config, word)[0] / strategy.tensor
    products = 2 * tokens * found.used
    rate = cluster.chip.flops_per_second * constants.matmul
    anew = {"none": 0, "elementwise": mixing, "layer": products + mixing}[recompute]
    forward = runs * (products + mixing) / rate
    again = runs * anew / rate
    if recompute == "layer" and strategy.block_chunks > 1:
        again += runs * _streaming_seconds(config, word, strategy, cluster, tokens, constants)
    transfers = layer_transfers(config, word, recompute, strategy, sequences, length)
    return (
        Seconds(forward, 2 * forward, again)
        + _communication(as_compiled(transfers, cluster, sequences), cluster, constants)
        + _update(found, cluster, constants)
    )


def _streaming_seconds(
    config: LoopedConfig,
    word: str,
    strategy: Strategy,
    cluster: Cluster,
    tokens: int,
    constants: Constants,
) -> float:
    """Extra seconds of chunked layers: each chunk projects all earlier keys and values again
    (forward, recomputation and twice backward) and adds its gradients to float32 sums."""
    keys = channels(config, word)[1] if word in ("full", "window") else 0
    times = (strategy.block_chunks - 1) / 2
    flops = 4 * times * 2 * tokens * config.width * 2 * keys
    used = held(layer_tensors(config, word), strategy).used
    moved = strategy.block_chunks * used * (config.compute_dtype.itemsize + 2 * FLOAT32)
    return flops / (cluster.chip.flops_per_second * constants.matmul) + moved / (
        cluster.chip.bytes_per_second * constants.memory
    )


def table_seconds(
    config: LoopedConfig,
    strategy: Strategy,
    cluster: Cluster,
    sequences: int,
    length: int,
    constants: Constants,
) -> Seconds:
    """Embedding, final norm and head, over all microbatches of a step."""
    tables = table_tensors(config, strategy.tensor)
    found = held((*tables, *rest_tensors(config)), strategy)
    used = held(tables[:1], strategy).used
    forward = 2 * sequences * length * used * strategy.microbatches
    forward /= cluster.chip.flops_per_second * constants.matmul
    anew = forward if strategy.head_chunks > 1 else 0.0
    transfers = table_transfers(config, strategy, sequences, length)
    return (
        Seconds(forward, 2 * forward, anew)
        + _communication(as_compiled(transfers, cluster, sequences), cluster, constants)
        + _update(found, cluster, constants)
    )


def transfer_seconds(link: Link, sent: float, degree: int, constants: Constants) -> float:
    """A collective among `degree` chips: a delay per other chip, and the bytes."""
    delay = link.seconds * constants.latency * (degree - 1)
    return delay + sent / (link.bytes_per_second * constants.link)


def _communication(transfers: list[Transfer], cluster: Cluster, constants: Constants) -> Seconds:
    parts: dict[str, float] = dict.fromkeys(
        ("tensor forward", "tensor backward", "forward", "backward", "update"), 0.0
    )
    for each in transfers:
        link = cluster.link(each.inner, each.degree)
        one = transfer_seconds(link, each.bytes_sent, each.degree, constants)
        waits = "tensor " if each.part == "tensor" else ""
        parts[waits + each.phase] += one * each.runs
    return Seconds(
        tensor_forward=parts["tensor forward"],
        tensor_backward=parts["tensor backward"],
        hidden_forward=parts["forward"],
        hidden_backward=parts["backward"],
        update=parts["update"],
    )


def _update(found: Held, cluster: Cluster, constants: Constants) -> Seconds:
    """Adam reads and writes a parameter and two moments, and reads a gradient."""
    moved = FLOAT32 * (3 * found.moment + 4 * found.moment)
    return Seconds(update=moved / (cluster.chip.bytes_per_second * constants.memory))
