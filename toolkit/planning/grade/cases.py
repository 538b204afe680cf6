"""The configurations that libtpu grades: a hundred dense models, looped, hybrid and latent ones,
and mixtures of experts, small enough to compile in a minute."""

import dataclasses
import functools
import itertools
import random
from typing import Any

from toolkit.looped import LoopedConfig, parameter_count
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.model_checks import check_model
from toolkit.planning.models import DENSE, model_of
from toolkit.planning.strategy import Strategy

TOPOLOGIES = ("v5e:2x2", "v5e:4x4", "v5e:8x8", "v6e:4x4", "v5p:2x2x2")
LARGEST_SHARE = 0.8  # of a chip's memory that a graded configuration may need, by a rough count
# A rough count of bytes kept per token and channel of a layer: the list must not depend on the
# model of memory that it grades.
ROUGHLY_KEPT = {"layer": 2, "elementwise": 24, "none": 60}
COUNT = 100


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration to grade."""

    model: str
    topology: str
    strategy: Strategy
    batch: int
    length: int

    @property
    def config(self) -> LoopedConfig:
        """The model by its name."""
        return (LOOPED | ROUTED).get(self.model) or model_of(self.model)

    @property
    def key(self) -> str:
        """Its name in the record."""
        words = f"{self.strategy}".replace(",", ";")
        return f"{self.model} | {self.topology} | {words} | {self.batch} x {self.length}"


@functools.lru_cache(maxsize=2)
def cases(count: int = COUNT) -> tuple[Case, ...]:
    """The configurations in the order of compilation, drawn with a fixed seed."""
    found = []
    for model, name, tensor, recompute, rows, length in itertools.product(
        DENSE, TOPOLOGIES, (1, 2, 4, 8), ("layer", "elementwise", "none"), (1, 2, 4), (2048, 4096)
    ):
        where = cluster(name)
        if tensor > where.chips:
            continue
        shards = where.chips // tensor
        cuts: list[dict[str, Any]] = [{"fsdp": shards}]
        if shards > 1:
            cuts.append({"data": shards, "shard_optimizer": True})
        if shards >= 4:
            cuts.append({"data": 2, "fsdp": shards // 2})
        for cut in cuts:
            strategy = Strategy(
                **cut, tensor=tensor, recompute=recompute, head_chunks=length // 256
            )
            if is_possible(case := Case(model, name, strategy, rows * shards, length), where):
                found.append(case)
    random.Random(14).shuffle(found)
    taken, left = [], found
    while left and len(taken) < count:  # round robin, so that no model or strategy fills the list
        seen: set[Any] = set()
        rest = []
        for case in left:
            kind = (case.model, case.strategy.recompute)
            (rest if kind in seen else taken).append(case)
            seen.add(kind)
        left = rest
    return tuple(taken[:count])


def is_possible(case: Case, where: Cluster) -> bool:
    """Whether the strategy divides the model and, by a rough count, fits."""
    config, strategy = case.config, case.strategy
    try:
        check_model(config, strategy, case.batch, case.length)
    except ValueError:
        return False
    shards = strategy.tensor * strategy.fsdp
    moments = shards * (strategy.data if strategy.shard_optimizer else 1)
    numbers = _numbers(case.model)
    table = config.vocabulary * config.width / strategy.tensor
    streams = case.batch * case.length / strategy.batch_shards / strategy.tensor * config.width
    kept = streams * len(config.layers) * ROUGHLY_KEPT[strategy.recompute]
    needed = 8 * numbers / shards + 8 * numbers / moments + 6 * table + kept
    return needed <= LARGEST_SHARE * where.chip.memory_bytes


@functools.lru_cache(maxsize=64)
def _numbers(model: str) -> int:
    return parameter_count(model_of(model))


def _looped(pattern: str, width: int, loops: int, **fields: Any) -> LoopedConfig:
    return LoopedConfig(
        vocabulary=32_000, width=width, pattern=pattern, loops=loops, heads=width // 128,
        dtype="bfloat16", **fields,
    )  # fmt: skip


# Models with loops, with layers of several kinds, or both.
LOOPED: dict[str, LoopedConfig] = {
    "dense, four loops": _looped("full full full full", 2048, 4),
    "dense, two loops": _looped("full full full full full full", 1536, 2, residual_gate=False),
    "dense, a norm after each of four loops": _looped(
        "full full full full", 2048, 4,
        residual_gate=False, norm_every_loop=True, tied_embedding=False,
    ),
    "windows, three loops": _looped(
        "window full window full", 1024, 3, options={"window": {"sliding_window": 1024}}
    ),
    "hybrid, four loops": _looped("gdn full gdn full", 1024, 4),
    "hybrid, one loop": _looped("gdn full gdn full", 1024, 1, residual_gate=False),
    "linear, two loops": _looped("gdn gdn gdn", 1024, 2),
    "latent, one loop": _looped("mla mla mla mla", 1024, 1, residual_gate=False),
    "latent, three loops": _looped("mla mla mla", 1024, 3),
}  # fmt: skip
_CUTS = (
    ("v5e:2x2", {"fsdp": 4, "recompute": "layer"}, 2, 2048),
    ("v5e:2x4", {"fsdp": 8, "recompute": "elementwise"}, 4, 2048),
    ("v6e:2x2", {"data": 2, "fsdp": 2, "recompute": "none"}, 2, 2048),
    ("v5e:2x2", {"data": 4, "shard_optimizer": True, "recompute": "layer"}, 4, 4096),
)


# Published models whose head is in one piece: the logits of all tokens exist at a time.
_WHOLE_HEADS = (
    ("lt2-hybrid-1.3b", "v5e:2x4", {"data": 2, "fsdp": 4, "recompute": "layer"}, 16),
    ("lt2-hybrid-1.3b", "v5e:2x4", {"fsdp": 8, "recompute": "layer"}, 16),
    ("llama-3.2-1b", "v5e:2x2", {"fsdp": 4, "recompute": "layer"}, 8),
    ("llama-3.2-1b", "v5e:2x4", {"fsdp": 4, "tensor": 2, "recompute": "elementwise"}, 8),
)


@functools.cache
def looped_cases() -> tuple[Case, ...]:
    """The configurations of `LOOPED`, each under four strategies, in the order of compilation; then
    those of published models with a head in one piece."""
    return (
        *(
            Case(
                model,
                name,
                Strategy(**cut, head_chunks=length // 256),
                rows * cluster(name).chips,
                length,
            )
            for name, cut, rows, length in _CUTS
            for model in LOOPED
        ),
        *(
            Case(model, name, Strategy(**cut), batch, 2048)
            for model, name, cut, batch in _WHOLE_HEADS
        ),
    )


def _routed(pattern: str, moe: dict[str, Any], **fields: Any) -> LoopedConfig:
    options = {"moe": moe} | fields.pop("options", {})
    given: dict[str, Any] = {"width": 1024, "feed_forwards": "moe"} | fields
    return LoopedConfig(
        vocabulary=32_000, pattern=pattern, heads=8, residual_gate=False, dtype="bfloat16",
        options=options, **given,
    )  # fmt: skip


# Small mixtures of experts, after Mixtral, DeepSeek, Qwen3 and gpt-oss.
ROUTED: dict[str, LoopedConfig] = {
    "2 of 8 experts": _routed(
        "full full full full", {"experts": 8, "chosen": 2, "hidden": 2048},
        options={"full": {"key_value_heads": 4}},
    ),
    "6 of 64 experts and a shared one": _routed(
        "full full full full full",
        {"experts": 64, "chosen": 6, "hidden": 512, "shared_hidden": 1024, "scores": "sigmoid"},
        feed_forwards="swiglu moe moe moe moe",
    ),
    "8 of 128 experts": _routed(
        "full full full full", {"experts": 128, "chosen": 8, "hidden": 384},
        options={"full": {"key_value_heads": 4, "query_key_norm": True}},
    ),
    "4 of 32 experts, windows": _routed(
        "window full window full",
        {"experts": 32, "chosen": 4, "hidden": 1024, "activation": "clamped", "biases": True,
         "router_bias": True},
        options={"window": {"sliding_window": 512}},
    ),
    "8 of 64 experts, latents": _routed(
        "mla mla mla", {"experts": 64, "chosen": 8, "hidden": 512, "shared_hidden": 512},
    ),
}  # fmt: skip
_DISPATCHED = (
    ("2 of 8 experts", "v5e:2x4", {"fsdp": 8, "expert": 8, "recompute": "layer"}, 2),
    ("2 of 8 experts", "v5e:2x4", {"fsdp": 4, "tensor": 2, "expert": 2, "recompute": "none"}, 2),
    ("2 of 8 experts", "v5e:2x2", {"fsdp": 4, "recompute": "layer"}, 2),
    ("2 of 8 experts", "v5e:2x4",
     {"fsdp": 8, "expert": 8, "dispatch": "gather", "recompute": "layer"}, 2),
    ("6 of 64 experts and a shared one", "v5e:2x4",
     {"fsdp": 8, "expert": 8, "recompute": "layer"}, 2),
    ("6 of 64 experts and a shared one", "v5e:2x4",
     {"data": 2, "fsdp": 4, "expert": 4, "shard_optimizer": True, "recompute": "elementwise"}, 2),
    ("8 of 128 experts", "v5e:2x4",
     {"fsdp": 8, "expert": 8, "dispatch": "ragged", "recompute": "layer"}, 2),
    ("8 of 128 experts", "v5e:4x4", {"fsdp": 16, "expert": 16, "recompute": "layer"}, 2),
    ("8 of 128 experts", "v5e:2x4",
     {"fsdp": 8, "expert": 8, "capacity": 2.0, "recompute": "none"}, 1),
    ("8 of 64 experts, latents", "v5e:2x4", {"fsdp": 8, "expert": 8, "recompute": "layer"}, 2),
    ("4 of 32 experts, windows", "v5e:2x4", {"fsdp": 8, "expert": 8, "recompute": "layer"}, 2),
    ("2 of 8 experts", "v5e:2x4", {"fsdp": 4, "tensor": 2, "recompute": "layer"}, 2),
    ("6 of 64 experts and a shared one", "v5e:2x4",
     {"fsdp": 2, "tensor": 4, "expert": 4, "recompute": "layer"}, 4),
    ("6 of 64 experts and a shared one", "v5e:2x4",
     {"data": 2, "fsdp": 2, "tensor": 2, "expert": 4, "dispatch": "gather", "recompute": "none"},
     2),
    ("8 of 128 experts", "v5e:2x4",
     {"data": 2, "fsdp": 4, "expert": 8, "recompute": "layer", "microbatches": 2}, 4),
    ("4 of 32 experts, windows", "v5e:2x4",
     {"fsdp": 4, "tensor": 2, "expert": 8, "recompute": "elementwise"}, 2),
    ("4 of 32 experts, windows", "v5e:2x2", {"fsdp": 4, "recompute": "none"}, 1),
    ("8 of 128 experts", "v6e:2x2", {"data": 2, "fsdp": 2, "expert": 4, "recompute": "none"}, 1),
    ("8 of 64 experts, latents", "v5e:2x4",
     {"data": 2, "fsdp": 4, "expert": 4, "recompute": "elementwise"}, 2),
    ("6 of 64 experts and a shared one", "v5e:2x4",
     {"fsdp": 2, "tensor": 4, "expert": 4, "dispatch": "ragged", "recompute": "layer"}, 4),
)  # fmt: skip


@functools.cache
def mixture_cases() -> tuple[Case, ...]:
    """The configurations of `ROUTED` under twenty strategies, each way of dispatch among them, in
    the order of compilation; sequences of 2,048 tokens."""
    found = []
    for model, name, cut, rows in _DISPATCHED:
        strategy = Strategy(**cut, head_chunks=8)
        found.append(Case(model, name, strategy, rows * strategy.batch_shards, 2048))
    return tuple(found)
