"""The settings of a run, and its result."""

import dataclasses
import math
from typing import Any

from toolkit.language.settings import TrainingSettings
from toolkit.looped import LoopedConfig, LoopedLM


@dataclasses.dataclass(frozen=True)
class TrainingRun(TrainingSettings):
    """The settings that determine a run: those of `TrainingSettings`, the model and its text.

    Attributes:
        config: the model; with `init_from` that of `load_checkpoint`.
        text: "prose", "code", paths of files and folders, or of one token array (.npy).
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
    cores: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.cores < 1:
            raise ValueError(f"cores: got {self.cores}, wanted at least 1")
        has_experts = "moe" in self.config.feed_forward_words
        usual = {"balance": TrainingSettings.balance, "router_z": 0.0}
        for name, value in usual.items():
            if not has_experts and getattr(self, name) not in (0.0, value):
                raise ValueError(
                    f"{name}: got {getattr(self, name)}, and feed_forwards has no 'moe'; wanted 0"
                )
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
        if self.config.dtype == "float16" and not self.loss_scaling:
            raise ValueError(
                "loss_scaling: got False with dtype 'float16', whose small gradients are zero; "
                "wanted True"
            )

    def passes(self, devices: int = 1) -> int:
        """Passes per update, as `TrainingSettings.passes`; one if experts' loads are evened."""
        passes = super().passes(devices)
        has_experts = "moe" in self.config.feed_forward_words
        if passes > 1 and has_experts and (self.balance > 0 or self.config.moe.choice_bias):
            raise ValueError(
                f"accumulate: got {passes} passes with a balance loss or a choice bias, which "
                "read the loads of the whole batch; wanted 1, or balance=0"
            )
        return passes


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
