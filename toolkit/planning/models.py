"""Models by name or configuration, and the check that a strategy divides them."""

import dataclasses
import functools

from toolkit.looped import PRESETS, LoopedConfig
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
}
MODELS: dict[str, LoopedConfig] = DENSE | PRESETS


def model_of(model: LoopedConfig | str) -> LoopedConfig:
    """A configuration, given directly or by name."""
    if isinstance(model, LoopedConfig):
        config = model
    elif isinstance(model, str):
        if model not in MODELS:
            raise ValueError(f"model {model!r} is not known; known: {', '.join(MODELS)}")
        config = MODELS[model]
    else:
        raise TypeError(f"model must be a LoopedConfig or a name; got {type(model).__name__}.")
    if set(config.feed_forward_words) != {"swiglu"}:
        raise ValueError(
            f"model: feed_forwards={config.feed_forwards!r} is not modelled; want 'swiglu'"
        )
    return config


@functools.lru_cache(maxsize=256)
def layers_of(config: LoopedConfig) -> tuple[tuple[str, ...], int]:
    """The shortest group of layers that the pattern repeats, and its number of repetitions."""
    layers = config.layers
    for size in range(1, len(layers) + 1):
        if len(layers) % size == 0 and layers[:size] * (len(layers) // size) == layers:
            return layers[:size], len(layers) // size
    raise AssertionError("a pattern repeats itself once at least")


@functools.lru_cache(maxsize=256)
def local_config(config: LoopedConfig, tensor: int) -> LoopedConfig:
    """The configuration of a layer's share on one of `tensor` chips."""
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
    hidden = config.feed_forward_size // tensor
    return dataclasses.replace(
        config, heads=config.heads // tensor, feed_forward=hidden, options=options
    )


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
    for name in ("tensor", "head_chunks", "block_chunks"):
        parts = getattr(strategy, name)
        if sequence_length % parts:
            raise ValueError(
                f"sequence_length {sequence_length} is not divisible by {name} {parts}; "
                f"nearest that works: {nearest_multiple(sequence_length, parts)}"
            )
    _check_tensor(config, strategy.tensor)
    if strategy.block_chunks > 1:
        _check_streaming(config, strategy)
    group_runs(config, strategy)
    if strategy.pipeline > len(config.layers):
        raise ValueError(
            f"pipeline {strategy.pipeline} is more than the {len(config.layers)} layers; "
            f"nearest that works: {len(config.layers)}"
        )
    if strategy.stages and sum(strategy.stages) != len(config.layers):
        raise ValueError(
            f"stages {strategy.stages} have {sum(strategy.stages)} layers, and the model has "
            f"{len(config.layers)}"
        )
    if strategy.pipeline > 1 and config.loops > 1:
        raise ValueError(
            f"pipeline {strategy.pipeline} cuts a model of {config.loops} loops, whose "
            "layers run more than once; want 1"
        )


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
    ):
        if getattr(config, name):
            raise ValueError(
                f"model: {name}={getattr(config, name)!r} is not modelled; want it off"
            )
    for name in ("pre_norm", "norm", "embedding_scale", "residual_scale", "head_scale"):
        if getattr(config, name) != getattr(LoopedConfig, name):
            raise ValueError(
                f"model: {name}={getattr(config, name)!r} is not modelled; want "
                f"{getattr(LoopedConfig, name)!r}"
            )
    other = sorted({"nope", "conv"} & {*config.layers})
    if other or config.swiglu != type(config.swiglu)():
        named = f"the layer {other[0]!r}" if other else "options of swiglu"
        raise ValueError(f"model: {named} are not modelled; want 'full' layers and plain SwiGLUs")
    if config.loops_differ:
        raise ValueError("model: windows that differ between loops are not modelled")


def nearest_multiple(value: int, parts: int) -> int:
    """The multiple of `parts` nearest to a value, at least one."""
    return max(1, round(value / parts)) * parts


def _check_tensor(config, tensor):
    if tensor == 1:
        return
    words = set(config.layers) - {"full", "window"}
    if words:
        raise ValueError(
            f"tensor {tensor} cuts softmax layers only, and the pattern has "
            f"{', '.join(sorted(words))}; nearest that works: 1"
        )
    sizes = {"heads": config.heads, "feed_forward": config.feed_forward_size}
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
    for word in set(config.layers):
        if not (LAYERS[word].has_rows or LAYERS[word].is_recurrent):
            raise ValueError(
                f"block_chunks {strategy.block_chunks}: not modelled for {word}, which mixes all "
                "tokens at once; nearest that works: 1"
            )


def group_runs(config: LoopedConfig, strategy: Strategy) -> tuple[tuple[str, int], ...]:
    """Runs of consecutive groups of layers with the same recomputation."""
    size = len(layers_of(config)[0])
    runs = strategy.runs(len(config.layers))
    for recompute, count in runs:
        if count % size:
            raise ValueError(
                f"recompute {strategy.recompute!r} cuts a group of {size} layers; "
                f"{recompute} wants a multiple, nearest: {nearest_multiple(count, size)}"
            )
    return tuple((recompute, count // size) for recompute, count in runs)
