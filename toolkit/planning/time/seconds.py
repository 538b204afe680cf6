"""Seconds of a step by part, and the shares of published rates from which they are modelled."""

import dataclasses

from toolkit._checks import check_choice, check_fields, checked
from toolkit.planning.clusters import Cluster

# Kernels of attention, and how fast they are beside FlashAttention-2: FlashAttention-3 is 1.5 to 2
# times as fast on Hopper (Shah et al., 2024, arXiv:2407.08608).
KERNELS = {"stored": 1.0, "flash-2": 1.0, "flash-3": 1.75}

# Computing is so much slower beside exchanges that kernels of their own carry: these take 20 of the
# 132 multiprocessors of an H800 (DeepSeek-V3, 2024, arXiv:2412.19437, section 3.2.2), and 16 where
# Transformer Engine's userbuffers carry those of "tensor" (the default of its `initialize_ub`).
BESIDE = 132 / 112


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """The share of published rates that chips and links achieve; `calibrate` fits them.

    Attributes:
        matmul: share of the peak that matrix products reach, aside from reading and writing.
        attention: the same of the products of queries, keys and values.
        grouped: share of that which products of experts reach, each with few of the rows.
        elementwise: share of the memory bandwidth at which layers read and write.
        memory: the same of the update.
        launch: seconds until the kernels of one layer's forward pass have started.
        link: share of a link's bandwidth that collectives reach.
        latency: delay of a message, as a multiple of the published one.
        slowdown: factor on computing and communicating while they overlap.
        imbalance: load of the chip whose experts are chosen most, over the mean; the others wait
            for it. Not of the chips but of the model and its text, and 1 if not known.
        host_link: bytes per second between a chip and its host, one way, for what is offloaded; by
            default those of a TPU's PCIe.
        host: seconds that a program which is not compiled takes to start the kernels of one layer's
            forward pass; the layer takes at least as long.
        attention_kernels: "stored" scores, and the residual stream whole on every chip of "tensor":
            as before FlashAttention and sequence parallelism, of 2022; fused ones as fast as
            "flash-2" on GPUs, as splash attention on TPUs; or, on Hopper, as "flash-3" and cuDNN.

    Example:
        >>> Constants().slowdown
        1.3
    """

    matmul: float = 0.8
    attention: float = 0.35
    grouped: float = 0.3
    elementwise: float = 0.6
    memory: float = 0.8
    launch: float = 3e-5
    link: float = 0.8
    latency: float = 1.0
    slowdown: float = 1.3
    imbalance: float = 1.0
    host_link: float = 1.5e10
    host: float = 0.0
    attention_kernels: str = "flash-2"

    def __post_init__(self):
        check_fields(self)
        for name in ("matmul", "attention", "grouped", "elementwise", "memory", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1]; got {getattr(self, name)}")
        for name in ("launch", "host"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1] seconds; got {getattr(self, name)}")
        if not 0 <= self.latency <= 1e4:
            raise ValueError(f"latency must lie in [0, 10000]; got {self.latency}")
        if not 1 <= self.slowdown <= 10:
            raise ValueError(f"slowdown must lie in [1, 10]; got {self.slowdown}")
        if not self.host_link > 0:
            raise ValueError(f"host_link must be above 0 bytes per second; got {self.host_link}")
        check_choice("attention_kernels", self.attention_kernels, KERNELS)
        if not 1 <= self.imbalance <= 1e4:
            raise ValueError(f"imbalance must lie in [1, 10000]; got {self.imbalance}")


# Fitted to published step times, by `toolkit.planning.grade.published.fit_chip`.
CALIBRATED = {
    "A100 40GB SXM": Constants(matmul=0.759, attention=0.314, elementwise=0.752),
    "A100 80GB SXM": Constants(
        matmul=0.85, attention=0.307, elementwise=0.59, link=0.63, slowdown=2.0
    ),
    "B200": Constants(grouped=0.31, link=0.715),
    "B300": Constants(grouped=0.299),
    "GB200": Constants(grouped=0.287),
    "GB300": Constants(grouped=0.379),
    "H100 SXM": Constants(
        matmul=0.766,
        attention=0.192,
        grouped=0.319,
        elementwise=0.558,
        link=0.792,
        latency=0.482,
        slowdown=1.703,
    ),
    "TPU v4": Constants(matmul=0.855, grouped=0.8, elementwise=0.8),
    "TPU v5e": Constants(matmul=1.0, grouped=0.8, elementwise=0.8, link=1.0, slowdown=1.27),
    "TPU v5p": Constants(matmul=1.0, grouped=0.8, elementwise=0.8),
    "TPU v6e": Constants(
        matmul=0.843, attention=0.392, grouped=0.8, elementwise=0.8, slowdown=1.353
    ),
    "TPU v7x": Constants(matmul=0.929, grouped=0.8, elementwise=0.8),
}


def constants_of(where: Cluster, given: Constants | None) -> Constants:
    """The given constants, or those of the chip; measured rates count in full."""
    if given is not None:
        return given
    if where.is_measured:
        return Constants(
            matmul=1.0,
            attention=1.0,
            grouped=1.0,
            elementwise=1.0,
            memory=1.0,
            link=1.0,
            launch=0.0,
        )
    return CALIBRATED.get(where.chip.name, Constants())


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
    return overlapped(compute, communication, slowdown)


def overlapped(compute: float, communication: float, slowdown: float) -> float:
    """`overlapped_seconds` without its checks, for searches."""
    return max(compute, communication) + min(compute, communication) * (slowdown - 1)


def _together(compute: float, hidden: float, beside: float, slowdown: float) -> float:
    """Computing with both kinds of communication that hide behind it."""
    if not beside:
        return overlapped(compute, hidden, slowdown)
    mean = (hidden * slowdown + beside * BESIDE) / (hidden + beside)
    return overlapped(compute, hidden + beside, mean)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of one step on one chip, or of some of its layers.

    Attributes:
        forward, backward: computing; the backward pass without recomputation.
        recomputed: recomputation.
        tensor_forward, tensor_backward: exposed communication.
        expert_forward, expert_backward: the same of tokens on their way to experts and back.
        hidden_forward, hidden_backward: communication of parameters and gradients that can overlap
            with computing; seconds without overlap.
        update: the optimiser, with the parameters it gathers.
        weight_gradient: the part of `backward` that a pipeline can run later, because no other
            stage waits for it.
        beside_forward, beside_backward: tokens on their way to experts and back, or between the
            chips of "tensor", that kernels of their own carry beside computing, which is slower by
            `BESIDE`.
    """

    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    hidden_forward: float = 0.0
    hidden_backward: float = 0.0
    update: float = 0.0
    expert_forward: float = 0.0
    expert_backward: float = 0.0
    weight_gradient: float = 0.0
    beside_forward: float = 0.0
    beside_backward: float = 0.0

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
            self.expert_forward + other.expert_forward,
            self.expert_backward + other.expert_backward,
            self.weight_gradient + other.weight_gradient,
            self.beside_forward + other.beside_forward,
            self.beside_backward + other.beside_backward,
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
            self.expert_forward * count,
            self.expert_backward * count,
            self.weight_gradient * count,
            self.beside_forward * count,
            self.beside_backward * count,
        )

    def exposed(self, slowdown: float) -> float:
        """Communication of parameters and gradients that computing does not hide."""
        shown = self.total(slowdown) - self.computing - self.tensor - self.expert - self.update
        return max(0.0, shown)  # not below, by rounding

    @property
    def tensor(self) -> float:
        """Exposed tensor-parallel communication."""
        return self.tensor_forward + self.tensor_backward

    @property
    def expert(self) -> float:
        """Exposed communication of tokens with their experts."""
        return self.expert_forward + self.expert_backward

    @property
    def computing(self) -> float:
        """Forward, backward and recomputation."""
        return self.forward + self.backward + self.recomputed

    def forward_total(self, slowdown: float) -> float:
        """The forward pass, with overlap."""
        waits = self.tensor_forward + self.expert_forward
        hidden = self.hidden_forward, self.beside_forward
        return _together(self.forward, *hidden, slowdown) + waits

    def backward_total(self, slowdown: float) -> float:
        """The backward pass, with recomputation and overlap."""
        backward = self.backward + self.recomputed
        waits = self.tensor_backward + self.expert_backward
        hidden = self.hidden_backward, self.beside_backward
        return _together(backward, *hidden, slowdown) + waits

    def total(self, slowdown: float) -> float:
        """The whole step, with overlap."""
        return self.forward_total(slowdown) + self.backward_total(slowdown) + self.update
