"""Models by name or configuration, and the check that a strategy divides them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from toolkit._kinds import shown
from toolkit.looped import PRESETS, LoopedConfig
from toolkit.looped.checkpoints.load import configuration_of
from toolkit.looped.mixing import LAYERS
from toolkit.planning.strategy import Strategy

# Most tokens per step; no cluster exists for more.
MOST_TOKENS = 1 << 32


def _dense(layers, width, heads, key_value_heads, hidden, vocabulary, tied=False, head_size=None):
    return LoopedConfig(
        vocabulary=vocabulary,
        width=width,
        pattern=" ".join(["full"] * layers),
        heads=heads,
        feed_forward=hidden,
        options={"full": {"key_value_heads": key_value_heads, "head_size": head_size}},
        residual_gate=False,
        tied_embedding=tied,
        rope_theta=5e5,
        dtype="bfloat16",
    )


# Sizes of published dense models, from their configuration files.
DENSE: dict[str, LoopedConfig] = {
    "llama-3.2-1b": _dense(16, 2048, 32, 8, 8192, 128_256, tied=True, head_size=64),
    "llama-3.2-3b": _dense(28, 3072, 24, 8, 8192, 128_256, tied=True, head_size=128),
    "llama-2-7b": _dense(32, 4096, 32, 32, 11_008, 32_000),
    "llama-3-8b": _dense(32, 4096, 32, 8, 14_336, 128_256),
    "llama-2-13b": _dense(40, 5120, 40, 40, 13_824, 32_000),
    "qwen-3-14b": _dense(40, 5120, 40, 8, 17_408, 151_936, head_size=128),
    "qwen-3-32b": _dense(64, 5120, 64, 8, 25_600, 151_936, head_size=128),
    "llama-3-70b": _dense(80, 8192, 64, 8, 28_672, 128_256),
    "llama-3.1-405b": _dense(126, 16_384, 128, 8, 53_248, 128_256),
}
MODELS: dict[str, LoopedConfig] = DENSE | PRESETS

NEAREST = {
    "conv": "window", "channel_mix": "full", "hybrid": "mamba2", "hca": "dsa", "csa": "dsa",
    "qsa": "dsa",
}  # fmt: skip
"""Layers of which nothing here knows the memory or the time, and those that are most like them. A
layer that is computed by the mixer of another word is not modelled either."""


def model_of(model: Any) -> LoopedConfig:
    """A configuration, given directly or by name; or as the path of a config.json or its folder, or
    as the configuration of a model of Hugging Face transformers, or such a model."""
    if isinstance(model, LoopedConfig):
        config = model
    elif isinstance(model, str | Path):
        if str(model) in MODELS:
            config = MODELS[str(model)]
        elif Path(model).exists():
            config = dataclasses.replace(configuration_of(model), dtype="bfloat16")
        else:
            raise ValueError(
                f"model {str(model)!r} is neither a file, nor a folder, nor a known name: "
                f"{', '.join(MODELS)}"
            )
    elif hasattr(own := getattr(model, "config", model), "to_dict"):
        config = dataclasses.replace(configuration_of(own.to_dict()), dtype="bfloat16")
    else:
        raise TypeError(
            "model must be a LoopedConfig, a name, a path or a configuration of transformers; got "
            f"{type(model).__name__}."
        )
    if set(config.feed_forward_words) - {"swiglu", "moe"}:
        raise ValueError(
            f"model: feed_forwards={config.feed_forwards!r} is not modelled; want 'swiglu', 'moe'"
        )
    if "moe" in config.feed_forward_words:
        for name, wanted in (("has_gate", True), ("latent_size", None)):
            if (value := getattr(config.moe, name)) != wanted:
                raise ValueError(
                    f"model: experts with {name} {value!r} are not modelled; want {wanted!r}"
                )
    return config


def kinds_of(config: LoopedConfig) -> tuple[tuple[str, str], ...]:
    """The words of every layer, of its mixer and of its feed-forward layer."""
    return tuple(zip(config.layers, config.feed_forward_words, strict=True))


@functools.lru_cache(maxsize=256)
def sections_of(config: LoopedConfig) -> tuple[tuple[tuple[tuple[str, str], ...], int], ...]:
    """Groups of layers with their repetitions: the shortest that repeats, after the dense layers
    with which a mixture of experts may begin."""
    kinds = kinds_of(config)
    whole = _repeated(kinds)
    dense = next((i for i, (_, fed) in enumerate(kinds) if fed == "moe"), 0)
    if whole[1] > 1 or not dense:
        return (whole,)
    return _repeated(kinds[:dense]), _repeated(kinds[dense:])


def _repeated(kinds):
    for size in range(1, len(kinds) + 1):
        if len(kinds) % size == 0 and kinds[:size] * (len(kinds) // size) == kinds:
            return kinds[:size], len(kinds) // size
    raise AssertionError("layers repeat themselves once at least")


@functools.lru_cache(maxsize=256)
def local_config(config: LoopedConfig, tensor: int, *, is_folded: bool) -> LoopedConfig:
    """The configuration of a layer's share on one of `tensor` chips; if folded, these cut the
    number of experts instead of their hidden size."""
    if tensor == 1:
        return config
    options = {}
    for word in set(config.layers):
        own = config.options[word]
        options[word] = dataclasses.replace(
            own,
            head_size=own.head_size or config.width // config.heads,
            key_value_heads=(own.key_value_heads or config.heads) // tensor,
        )
    if "moe" in config.feed_forward_words:
        own, parts = config.moe, 1 if is_folded else tensor
        options["moe"] = dataclasses.replace(
            own,
            hidden=expert_hidden(config) // parts,
            shared_hidden=own.shared_hidden and own.shared_hidden // parts,
        )
    hidden = config.feed_forward_size // tensor
    return dataclasses.replace(
        config, heads=config.heads // tensor, feed_forward=hidden, options=options
    )


def expert_hidden(config: LoopedConfig) -> int:
    """Hidden size of an expert."""
    return config.moe.hidden or config.feed_forward_size


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
    shards = strategy.context
    for name in ("tensor", "head_chunks", "block_chunks"):
        parts = shards * getattr(strategy, name)
        name = f"context {shards} x {name}" if shards > 1 else name
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


def nearest_multiple(value: int, parts: int) -> int:
    """The multiple of `parts` nearest to a value, at least one."""
    return max(1, round(value / parts)) * parts


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


def group_runs(
    config: LoopedConfig, strategy: Strategy
) -> tuple[tuple[tuple[tuple[str, str], ...], str, int], ...]:
    """Runs of consecutive groups of layers with the same recomputation: (group, recomputation,
    number of groups)."""
    found, start = [], 0
    for group, count in sections_of(config):
        end, at, size = start + len(group) * count, 0, len(group)
        for recompute, layers in strategy.runs(len(config.layers)):
            own = min(end, at + layers) - max(start, at)
            at += layers
            if own > 0 and own % size:
                raise ValueError(
                    f"recompute {strategy.recompute!r} cuts a group of {size} layers; {recompute} "
                    f"wants a multiple, nearest: {nearest_multiple(own, size)}"
                )
            if own > 0:
                found.append((group, recompute, own // size))
        start = end
    return tuple(found)
