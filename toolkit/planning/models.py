"""Models by name or configuration, and the check that a strategy divides them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from toolkit.looped import PRESETS, LoopedConfig
from toolkit.looped.checkpoints.load import configuration_of
from toolkit.planning.strategy import Strategy


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


@functools.lru_cache(maxsize=256)
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


def nearest_multiple(value: int, parts: int) -> int:
    """The multiple of `parts` nearest to a value, at least one."""
    return max(1, round(value / parts)) * parts


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
