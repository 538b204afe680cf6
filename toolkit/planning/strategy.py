"""One way to train a model on many chips: how work is divided, and what is recomputed."""

import dataclasses
import itertools
import math
import re

from toolkit._checks import check_fields
from toolkit._kinds import shown
from toolkit.parallel.stream_backward import MOST_CHUNKS

RECOMPUTE = ("none", "elementwise", "layer")
_RUN = rf"[1-9]\d{{0,5}} ({'|'.join(RECOMPUTE)})"
_RUNS = re.compile(rf"{_RUN}(, {_RUN}){{0,7}}")
# No cluster is larger, and the bound keeps every search short.
MOST_CHIPS = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a train step is distributed over `chips` = data x fsdp x tensor x pipeline.

    Attributes:
        data: replicas of the parameters; their gradients are all-reduced (DDP).
        fsdp: shards of parameters, gradients and optimiser state (ZeRO-3); also cuts the batch.
        tensor: shards of heads, hidden units and vocabulary, the residual stream cut along time
            (Megatron's tensor and sequence parallelism).
        pipeline: stages of consecutive layers.
        shard_optimizer: cut the optimiser's state over `data` as well (ZeRO-1).
        recompute: what the backward pass recomputes: "none"; "elementwise" (norms, rotations,
            activations and attention, keeping the products with weights); the whole "layer",
            keeping only its input; or runs of layers, as "20 layer, 12 none".
        microbatches: parts of the batch that run one after another.
        head_chunks: chunks of a sequence in the head; the logits of one chunk exist at a time.
        block_chunks: chunks of a sequence in the backward pass of each fully recomputed layer; the
            intermediates of one chunk exist at a time (StreamBP).
        stages: layers of each pipeline stage; empty: as equal as possible.

    Source: Rajbhandari et al., "ZeRO", 2020; Korthikanti et al., "Reducing Activation
        Recomputation in Large Transformer Models", 2022; Luo et al., "StreamBP", 2025.

    Example:
        >>> strategy = Strategy(fsdp=8, tensor=4, recompute="layer")
        >>> strategy.chips, str(strategy)
        (32, 'fsdp 8 x tensor 4, recompute layer')
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1
    shard_optimizer: bool = False
    recompute: str = "none"
    microbatches: int = 1
    head_chunks: int = 1
    block_chunks: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self):
        if isinstance(self.stages, list):  # as a file has it
            object.__setattr__(self, "stages", tuple(self.stages))
        check_fields(self)
        for name in ("data", "fsdp", "tensor", "pipeline", "microbatches", "head_chunks"):
            if not 1 <= getattr(self, name) <= MOST_CHIPS:
                raise ValueError(f"{name} must be 1 to {MOST_CHIPS:,}; got {getattr(self, name)}")
        if not 1 <= self.block_chunks <= MOST_CHUNKS:
            raise ValueError(f"block_chunks must be 1 to {MOST_CHUNKS}; got {self.block_chunks}")
        if self.stages and (len(self.stages) != self.pipeline or min(self.stages) < 1):
            raise ValueError(
                f"stages must have a number of layers, 1 or more, for each of pipeline "
                f"{self.pipeline}; got {shown(self.stages)}"
            )
        if self.recompute not in RECOMPUTE and not _RUNS.fullmatch(self.recompute):
            raise ValueError(
                f"recompute must be one of {', '.join(RECOMPUTE)}, or runs of layers such as "
                f"'20 layer, 12 none'; got {self.recompute!r}"
            )
        if self.block_chunks > 1 and "layer" not in self.recompute:
            raise ValueError(
                f"block_chunks {self.block_chunks} wants layers that are recomputed whole; "
                f"got recompute {self.recompute!r}, nearest that works: 'layer'"
            )

    def changed(self, **changes) -> "Strategy":
        """A copy with other fields, unchecked because a search makes thousands."""
        strategy = object.__new__(Strategy)
        strategy.__dict__.update(self.__dict__, **changes)
        return strategy

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod((self.data, self.fsdp, self.tensor, self.pipeline))

    @property
    def batch_shards(self) -> int:
        """Number of shards of the batch."""
        return self.data * self.fsdp

    @property
    def stage_words(self) -> str:
        """Layers per stage in words, equal consecutive ones as "3 x 8"."""
        runs = ((layers, len([*run])) for layers, run in itertools.groupby(self.stages))
        return ", ".join(
            f"{count} x {layers}" if count > 1 else f"{layers}" for layers, count in runs
        )

    def runs(self, layers: int) -> tuple[tuple[str, int], ...]:
        """Runs (recomputation, number of consecutive layers) over all layers."""
        if self.recompute in RECOMPUTE:
            return ((self.recompute, layers),)
        parts = (part.split() for part in self.recompute.split(", "))
        found = tuple((word, int(count)) for count, word in parts)
        if sum(count for _, count in found) != layers:
            raise ValueError(
                f"recompute {self.recompute!r} names {sum(count for _, count in found)} layers, "
                f"and the model has {layers}"
            )
        return found

    def __str__(self) -> str:
        cuts = [
            f"{name} {getattr(self, name)}"
            for name in ("data", "fsdp", "tensor", "pipeline")
            if getattr(self, name) > 1
        ]
        words = [" x ".join(cuts) or "one chip"]
        if self.stages:
            words.append(f"stages of {self.stage_words} layers")
        if self.shard_optimizer:
            words.append("optimiser sharded")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        if self.block_chunks > 1:
            words.append(f"layers in {self.block_chunks} chunks")
        if self.head_chunks > 1:
            words.append(f"head in {self.head_chunks} chunks")
        return ", ".join(words)
