"""What a GPU's tools show while PyTorch trains: predicted memory, and what stands beside it.

    PyTorch's reserved peak  = (model + activations + working) (1 + slack)
    nvidia-smi's total       = reserved + communication + framework

Programs with sharded optimisers (ZeRO-1) keep weights and gradients whole, in 16 bits, and float32
copies of both only in shards; but gradients in bfloat16 are added up in whole float32 copies.
Before 2022 the residual stream was whole on every chip of "tensor", and attention stored its
scores.
"""

from typing import NamedTuple

from toolkit.looped import LoopedConfig
from toolkit.planning.clusters import Cluster
from toolkit.planning.memory.categories import Memory
from toolkit.planning.strategy import Strategy

GIB = 2**30
SLACK = 0.08
"""Of PyTorch's caching allocator: reserved beyond allocated (fitted to torchtitan's reports)."""
FRAMEWORK = round(1.5 * GIB)
"""The CUDA context and kernels, by BigScience's own count on an A100."""
COMMUNICATION = round(6.5 * GIB)
"""NCCL's buffers of all groups and DeepSpeed's gradient buckets (fitted to BigScience's runs)."""
COMMUNICATOR = 32 * 4 * 2**22
"""NCCL's buffers of one group: 32 channels, each with 4 MiB (`NCCL_BUFFSIZE`) for both neighbours
of a ring and of a tree; modelled from its documented defaults, and graded by nothing."""

CONTEXT = 631 * 2**20
"""CUDA's context and the kernels of JAX 0.11.2, measured on an H100: nvidia-smi less JAX's pool."""
JAX_SHARE = 0.75  # of a GPU's memory that JAX takes by itself, measured on an H100
GROUPS = ("data", "fsdp", "context", "tensor", "pipeline", "expert")
# MiB that nvidia-smi shows, where that is more than the name says.
_SHOWN = {
    "H100 SXM": 81_559, "H800 SXM": 81_559, "H200 SXM": 143_771, "A100 80GB SXM": 81_920,
    "A100 40GB SXM": 40_960,
}  # fmt: skip
_MOST_GROUPS = 4  # of a plan that trains: data, FSDP, tensor and pipeline


def shown_bytes(where: Cluster) -> float:
    """Memory of a chip as its driver counts it."""
    name = where.chip.name
    return 2.0**20 * _SHOWN[name] if name in _SHOWN else where.chip.memory_bytes


def usable_bytes(where: Cluster) -> float:
    """Memory of a chip for a program's arrays: of a GPU, without CUDA's context and kernels and,
    for several, NCCL's buffers; never more than its name says."""
    if where.is_measured or where.chip.name.startswith("TPU"):
        return where.chip.memory_bytes
    beside = CONTEXT + _MOST_GROUPS * COMMUNICATOR * (where.chips > 1)
    return min(where.chip.memory_bytes, shown_bytes(where) - beside)


def memory_setting(where: Cluster, total: float) -> str:
    """The environment variable with which JAX takes as much of a GPU as a plan needs, to be written
    before a command; empty where its usual three quarters do."""
    share = total / shown_bytes(where) + 0.02
    if where.is_measured or where.chip.name.startswith("TPU") or share < JAX_SHARE:
        return ""
    return f"XLA_PYTHON_CLIENT_MEM_FRACTION={min(share, 0.97):.2f} "


class GpuPeak(NamedTuple):
    """Bytes that a GPU's tools show at the peak of a step.

    Attributes:
        weights: as the forward pass reads them, with gathered copies.
        gradients: as they are added up.
        optimizer: moments, and float32 copies of the weights.
        activations: kept by the forward pass for the backward pass.
        working: intermediates of one layer, or logits.
        allocator: reserved by PyTorch beyond that.
        communication: buffers of NCCL and of gradients on their way.
        framework: the CUDA context and kernels.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    allocator: int
    communication: int
    framework: int

    @property
    def reserved(self) -> int:
        """What PyTorch reports."""
        return sum(self[:6])

    @property
    def total(self) -> int:
        """What nvidia-smi reports."""
        return sum(self)


def gpu_peak(
    memory: Memory,
    config: LoopedConfig,
    strategy: Strategy,
    batch: int,
    length: int,
    *,
    precision: str,
    old_kernels: bool,
) -> GpuPeak:
    """The memory predicted for a plan, as a GPU's tools show it; with `old_kernels` (`Constants`)
    layers must be computed anew whole."""
    weights, gradients = memory.parameters + memory.gathered, memory.gradients
    optimizer, activations, working = memory.optimizer, memory.activations, memory.working
    if strategy.shard_optimizer:
        numbers = memory.parameters // 4
        is_half = precision == "fp16"
        weights, gradients = 2 * numbers, (2 if is_half else 6) * numbers
        optimizer = memory.optimizer // 8 * (16 if is_half else 12)
    if old_kernels:
        activations *= strategy.tensor
        tokens = batch // (strategy.batch_shards * strategy.microbatches) * length
        scores = 5 * config.heads * length / config.width / strategy.tensor
        working = round(tokens * config.width * (10 + 24 / strategy.tensor + scores))
    inner = (weights, gradients, optimizer, activations, working)
    spread = strategy.chips > 1
    return GpuPeak(*inner, round(SLACK * sum(inner)), COMMUNICATION * spread, FRAMEWORK)
