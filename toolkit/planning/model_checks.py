"""Which strategies a model cannot be trained by; they are refused in one line."""

import functools

from toolkit._kinds import shown
from toolkit.looped import LoopedConfig
from toolkit.looped.feed_forward import FEED_FORWARDS
from toolkit.looped.mixing import LAYERS
from toolkit.planning.models import expert_hidden, group_runs, nearest_multiple
from toolkit.planning.strategy import Strategy

# Most tokens per step; no cluster exists for more.
MOST_TOKENS = 1 << 32

NEAREST = {
    "conv": "window", "channel_mix": "full", "hybrid": "mamba2", "hca": "dsa", "csa": "dsa",
    "qsa": "dsa",
}  # fmt: skip
"""Layers of which nothing here knows the memory or the time, and those that are most like them. A
layer that is computed by the mixer of another word is not modelled either."""


def check_model(config: LoopedConfig, strategy: Strategy, batch: int, sequence_length: int) -> None:
    """Raise ValueError for sizes that the strategy does not divide, naming the nearest that it
    does."""
    _check_config(config)
    for name, value in (("batch", batch), ("sequence_length", sequence_length)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if batch * sequence_length > MOST_TOKENS:
        raise ValueError(
            f"batch x sequence_length must be at most {MOST_TOKENS:,} tokens; "
            f"got {batch * sequence_length:,}"
        )
    parts = strategy.batch_shards * strategy.microbatches
    if batch % parts:
        raise ValueError(
            f"batch {batch} is not divisible by {parts} (data x fsdp x microbatches); "
            f"nearest that works: {nearest_multiple(batch, parts)}"
        )
    shards = strategy.context * strategy.slices  # only one of them cuts
    axis = "slices" if strategy.slices > 1 else "context"
    for name in ("tensor", "head_chunks", "block_chunks"):
        parts = shards * getattr(strategy, name)
        name = f"{axis} {shards} x {name}" if shards > 1 else name
        if sequence_length % parts:
            raise ValueError(
                f"sequence_length {sequence_length} is not divisible by {name} {parts}; "
                f"nearest that works: {nearest_multiple(sequence_length, parts)}"
            )
    if others := strategy.context > 1 and set(config.layers) - {"full", "window"}:
        raise ValueError(
            f"context {strategy.context} cuts sequences of softmax layers only, and the pattern "
            f"has {', '.join(sorted(others))}; nearest that works: 1"
        )
    _check_experts(config, strategy)
    _check_tensor(config, strategy)
    if strategy.slices > 1:
        _check_slices(config, strategy)
    if strategy.block_chunks > 1:
        _check_streaming(config, strategy)
    group_runs(config, strategy)
    if wrong := stages_fault(config, strategy):
        raise ValueError(wrong)


def stages_fault(config: LoopedConfig, strategy: Strategy) -> str:
    """Why the layers and loops of a model are no stages of the strategy; empty if they are."""
    layers, loops, count = len(config.layers), config.loops, strategy.stage_count
    if strategy.pipeline == 1:
        return ""
    if strategy.pipeline > layers:
        return (
            f"pipeline {strategy.pipeline} is more than the {layers} layers; "
            f"nearest that works: {layers}"
        )
    rows = max(1, count // loops)
    homes = {s: device for device, mine in enumerate(strategy.stages_by_device) for s in mine}
    if count % loops or any(homes[stage] != homes[stage % rows] for stage in range(count)):
        return (
            f"chunks {strategy.chunks} of {strategy.schedule_words}: every loop of "
            f"{loops} passes all devices in the same order, as its weights lie where they are; "
            f"nearest that works: schedule 'breadth-first' or 'interleaved' with chunks "
            f"{nearest_multiple(strategy.chunks, loops)}"
        )
    if count > layers * loops:
        return (
            f"pipeline {strategy.pipeline} x chunks {strategy.chunks} are more stages than the "
            f"{layers}{f' x {loops}' if loops > 1 else ''} layers; nearest that works: a pipeline "
            f"of {max(1, layers * loops // strategy.chunks)}"
        )
    if strategy.stages and sum(strategy.stages) != layers * loops:
        times = f" in each of {loops} loops" if loops > 1 else ""
        return (
            f"stages {strategy.stages} have {sum(strategy.stages)} layers, and the model has "
            f"{layers}{times}"
        )
    if strategy.stages != strategy.stages[:rows] * (len(strategy.stages) // rows):
        return f"stages {strategy.stages} differ between loops; want those of one loop repeated"
    return ""


@functools.lru_cache(maxsize=256)
def _check_config(config: LoopedConfig) -> None:
    for name in (
        "prelude",
        "coda",
        "input_injection",
        "loop_embedding",
        "exit_gate",
        "sandwich_norm",
        "residual_group",
        "random_start",
        "backward_loops",
        "parallel_residual",
        "head_bias",
        "head_soft_cap",
        "streams",
        "attention_residual",
        "recursion",
    ):
        if getattr(config, name):
            raise ValueError(
                f"model: {name}={getattr(config, name)!r} is not modelled; want it off"
            )
    for name in (
        "pre_norm",
        "carry_norm",
        "stream_scale",
        "norm",
        "embedding_norm",
        "embedding_scale",
        "residual_scale",
        "head_scale",
    ):
        if getattr(config, name) != getattr(LoopedConfig, name):
            raise ValueError(
                f"model: {name}={getattr(config, name)!r} is not modelled; want "
                f"{getattr(LoopedConfig, name)!r}"
            )
    for word in sorted({*config.layers}):
        near = NEAREST.get(word) or LAYERS[word].mixer or word
        if near != word:
            raise ValueError(
                f"model: {word!r} layers are not modelled; the nearest that are: {near!r}"
            )
    if config.swiglu != type(config.swiglu)():
        raise ValueError("model: options of swiglu are not modelled; want a plain SwiGLU")
    if config.loops_differ:
        raise ValueError("model: windows that differ between loops are not modelled")


def _check_experts(config, strategy):
    if strategy.expert == 1:
        return
    if "moe" not in config.feed_forward_words:
        raise ValueError(
            f"expert {strategy.expert}: the model has no mixture of experts (feed_forwards "
            f"{shown(config.feed_forwards)}); nearest that works: 1"
        )
    count = config.moe.experts
    if count % strategy.expert:
        fits = [degree for degree in strategy.expert_degrees if count % degree == 0]
        nearest = min(fits, key=lambda degree: abs(degree - strategy.expert))
        raise ValueError(
            f"expert {strategy.expert} does not divide {count} experts; nearest that works with "
            f"{strategy.changed(expert=1)}: {nearest}"
        )


def _check_tensor(config, strategy):
    tensor = strategy.tensor
    if tensor == 1:
        return
    words = set(config.layers) - {"full", "window"}
    if words:
        raise ValueError(
            f"tensor {tensor} cuts softmax layers only, and the pattern has "
            f"{', '.join(sorted(words))}; nearest that works: 1"
        )
    sizes, fed = {"heads": config.heads}, set(config.feed_forward_words)
    if "swiglu" in fed:
        sizes["feed_forward"] = config.feed_forward_size
    if "moe" in fed and strategy.expert == 1:
        sizes |= {"moe.hidden": expert_hidden(config)}
        sizes |= {"moe.shared_hidden": config.moe.shared_hidden or tensor}
    for word in set(config.layers):
        sizes[f"{word}.key_value_heads"] = config.options[word].key_value_heads or config.heads
    for name, size in sizes.items():
        if size % tensor:
            fits = max(n for n in range(1, tensor) if all(s % n == 0 for s in sizes.values()))
            raise ValueError(
                f"tensor {tensor} does not divide {name} {size}; nearest that works: {fits}"
            )


def _check_slices(config, strategy):
    for word in config.feed_forward_words:
        if not FEED_FORWARDS[word].can_cut_time:
            raise ValueError(
                f"slices {strategy.slices}: {word!r} layers sort the tokens of whole sequences; "
                "nearest that works: 1"
            )


def _check_streaming(config, strategy):
    if strategy.tensor > 1:
        raise ValueError(
            f"block_chunks {strategy.block_chunks} cuts time, and so does tensor "
            f"{strategy.tensor}; nearest that works: 1"
        )
    if "moe" in config.feed_forward_words:
        raise ValueError(
            f"block_chunks {strategy.block_chunks}: not modelled for mixtures of experts; nearest "
            "that works: 1"
        )
    for word in set(config.layers):
        if not (LAYERS[word].has_rows or LAYERS[word].is_recurrent):
            raise ValueError(
                f"block_chunks {strategy.block_chunks}: not modelled for {word}, which mixes all "
                "tokens at once; nearest that works: 1"
            )
