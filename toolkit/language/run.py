"""The settings of a run, and its result."""

import dataclasses
import math
from typing import Any, Literal

import optax

from toolkit._checks import check_fields
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.training import adamw

SCHEMES = ("data", "zero1", "zero2", "zero3", "tensor", "ring", "zigzag", "ulysses")
HOW_IT_RUNS = ("layout", "tensor_devices", "context_devices", "loss_chunks", "block_chunks")
"""Fields of a run that affect only where and in which parts it is computed."""


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """The settings that determine a run.

    Attributes:
        config: the model.
        text: "prose", "code", paths of files and folders, or of one token array (.npy).
        steps: optimiser steps.
        batch: sequences per step.
        sequence_length: bytes per sequence.
        learning_rate: peak of the warm-up and cosine schedule; or "search", to search a schedule
            during training, with `steps` then including the gradient evaluations of candidates.
        weight_decay: of matrices.
        balance: weight of the balance loss, in models with a mixture of experts; the loss that is
            evaluated is without it.
        router_z: weight of the router z-loss, likewise.
        bias_rate: by how much each step moves the biases that choose experts towards even loads
            (balance without a loss), in models with `moe.choice_bias`; 1e-3 in DeepSeek-V3.
        init_from: a published checkpoint whose model, with its tokenizer, is trained on: a folder,
            or "owner/name"; `config` is that of `load_checkpoint`. None draws a model.
        seed: seed of the initialisation and of the order of the data.
        layout: "single" (one device), or over all devices a scheme of `toolkit.parallel.layout`:
            "data", "zero1", "zero2", "zero3", "tensor", or one of the former with "+tensor"; or
            "ring", "zigzag", "ulysses", which shard time, likewise. The batch must be a multiple of
            the data parallel devices.
        tensor_devices: devices that share each head-wise cut under "tensor"; the others are data
            parallel.
        context_devices: devices that share each sequence under "ring", "zigzag" or "ulysses".
        loss_chunks: parts of time whose logits are computed one after the other, for large
            vocabularies: less memory, a third more work in the head.
        block_chunks: pieces of each sequence in the backward pass of every block (StreamBP): less
            memory, a third more work.
        cores: cores of a CPU that share every batch under layout "single", after
            `toolkit.parallel.use_cores`; their number affects rounding and is therefore part of the
            run.

    Example:
        >>> from toolkit.looped import LoopedConfig
        >>> run = TrainingRun(LoopedConfig.tiny("window"), steps=1, batch=1, sequence_length=8)
        >>> run.steps * run.batch * run.sequence_length  # bytes it reads
        8
    """

    config: LoopedConfig
    text: str | tuple[str, ...] = "prose"
    steps: int = 1000
    batch: int = 16
    sequence_length: int = 256
    learning_rate: float | Literal["search"] = 3e-3
    weight_decay: float = 0.1
    balance: float = 0.01
    router_z: float = 0.0
    bias_rate: float = 0.0
    init_from: str | None = None
    seed: int = 0
    layout: str = "single"
    tensor_devices: int = 1
    context_devices: int = 1
    loss_chunks: int = 1
    block_chunks: int = 1
    cores: int = 1

    def __post_init__(self):
        check_fields(self)
        if self.layout != "single" and not {*self.layout.split("+")} <= {*SCHEMES}:
            known = ", ".join(SCHEMES)
            raise ValueError(
                f"layout: got {self.layout!r}, wanted single, or {known} joined by '+'"
            )
        for name, schemes in (("tensor", SCHEMES[4:5]), ("context", SCHEMES[5:])):
            devices = getattr(self, f"{name}_devices")
            if (devices > 1) != bool({*schemes} & {*self.layout.split("+")}):
                raise ValueError(
                    f"{name}_devices: got {devices} and layout {self.layout!r}; wanted 2 or more "
                    f"with {' or '.join(map(repr, schemes))}, and 1 without"
                )
        sizes = ("steps", "batch", "sequence_length", "cores", "tensor_devices", "context_devices")
        for name in (*sizes, "loss_chunks", "block_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")
        for name in ("loss_chunks", "block_chunks"):
            chunks = getattr(self, name)
            if self.sequence_length % chunks or chunks > 1 < self.context_devices:
                raise ValueError(
                    f"{name}: got {chunks}, wanted a divisor of {self.sequence_length} "
                    "(sequence_length), and 1 under a layout that cuts time"
                )
        has_experts = "moe" in self.config.feed_forward_words
        has_bias = has_experts and self.config.moe.choice_bias
        if self.bias_rate > 0 and not has_bias:
            raise ValueError(
                f"bias_rate: got {self.bias_rate}, wanted 0 for a model without moe.choice_bias"
            )
        if has_bias and self.learning_rate == "search":
            raise ValueError("learning_rate: got 'search', wanted a number with moe.choice_bias")
        reads_loads = has_bias or (has_experts and (self.balance > 0 or self.router_z > 0))
        if reads_loads and self.block_chunks > 1:
            raise ValueError(
                f"block_chunks: got {self.block_chunks}, wanted 1 with a balance loss, a z-loss or "
                "a choice bias, which read whole sequences; or balance=0"
            )
        if has_experts and self.context_devices > 1:
            raise ValueError(
                f"context_devices: got {self.context_devices}, wanted 1 for a model with a mixture "
                "of experts, which reads whole sequences"
            )
        if self.sequence_length % self.context_devices:
            raise ValueError(
                f"sequence_length: got {self.sequence_length}, wanted a multiple of "
                f"{self.context_devices} context_devices"
            )
        rate = self.learning_rate
        if rate != "search" and not rate > 0:
            raise ValueError(f"learning_rate: got {rate!r}, wanted more than 0, or 'search'")
        for name in ("weight_decay", "balance", "router_z", "bias_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted 0 or more")


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """The result of training.

    Attributes:
        model: the model with its last parameters.
        step: steps done.
        parameters: number of parameters.
        history: metrics rows; those with "evaluation_loss" were evaluated: nats per token, and
            "evaluation_bits_per_byte" where the bytes are known.
        stopped_by: the cause of a stop; None when the run is complete.
        bytes_per_token: of the held-out text; 1 if tokens are bytes, None if unknown.

    Example:
        >>> rows = [{"step": 10, "evaluation_loss": 2.5}, {"step": 20, "evaluation_loss": 2.25}]
        >>> trained = TrainedModel(None, 20, 836_864, rows, stopped_by=None, bytes_per_token=4.0)
        >>> trained.evaluation_loss, trained.loss_in_words
        (2.25, '2.2500 nats per token, 0.8115 bits per byte')
    """

    model: LoopedLM
    step: int
    parameters: int
    history: list[dict[str, Any]]
    stopped_by: str | None
    bytes_per_token: float | None = 1.0

    @property
    def evaluation_loss(self) -> float:
        """Last held-out loss in nats per token; NaN before the first evaluation."""
        losses = [row["evaluation_loss"] for row in self.history if "evaluation_loss" in row]
        return losses[-1] if losses else float("nan")

    @property
    def loss_in_words(self) -> str:
        """The last held-out loss with its unit, and in bits per byte if possible."""
        loss = f"{self.evaluation_loss:.4f} {loss_unit(self.bytes_per_token)}"
        if self.bytes_per_token is None:
            return loss
        return (
            f"{loss}, {bits_per_byte(self.evaluation_loss, self.bytes_per_token):.4f} bits per byte"
        )


def loss_unit(bytes_per_token: float | None) -> str:
    """The unit of a loss: nats per token or per byte."""
    return "nats per byte" if bytes_per_token == 1 else "nats per token"


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token, in bits per byte of the text."""
    return loss / math.log(2) / bytes_per_token


def make_optimizer(run: TrainingRun) -> optax.GradientTransformation:
    """AdamW with the run's warm-up and cosine schedule; with rate 1 for a search."""
    schedule = 1.0
    if run.learning_rate != "search":
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, run.learning_rate, max(1, run.steps // 20), max(2, run.steps)
        )
    return adamw(schedule, weight_decay=run.weight_decay)
