"""Rotary positions in config.json: options of softmax layers, and the other way."""

import math
from collections.abc import Mapping
from typing import Any

LLAMA3 = {
    "rotary_factor": "factor",
    "rotary_low": "low_freq_factor",
    "rotary_high": "high_freq_factor",
    "rotary_original_length": "original_max_position_embeddings",
}
YARN = LLAMA3 | {"rotary_low": "beta_slow", "rotary_high": "beta_fast"}
RULES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
"""The values of `rope_type` that softmax layers can have."""


def rope_options(rope: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    """Options of softmax layers from the rotary settings of a model of `longest` tokens.

    "dynamic" and "longrope" turn every token otherwise once a text is longer than the original
    length; up to there they are read, and a longer text is refused.
    """
    kind = rope.get("rope_type", rope.get("type")) or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in RULES:
        raise ValueError(f"config.json has rope_type {kind!r}; known are {', '.join(RULES)}.")
    if kind == "llama3":
        return numbers(rope, LLAMA3, "llama3 rope")
    if kind == "linear":
        fields = {"rotary_factor": "factor"}
        return numbers(rope, fields, "linear rope") | {"rotary_rule": "linear"}
    if kind == "yarn":
        return _yarn(rope, longest)
    if kind == "dynamic":
        numbers(rope, {"rotary_factor": "factor"}, "dynamic rope")
        if longest is None:
            raise ValueError("config.json does not say 'max_position_embeddings'.")
        return {"longest": longest}
    if kind == "longrope":
        return _longrope(rope, longest)
    return {}


def _yarn(rope, longest) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings")
    implied = longest / original if longest and original else None
    given = {name: rope.get(name) for name in YARN.values()}
    given = {"beta_slow": 1, "beta_fast": 32, "factor": implied} | {
        name: value for name, value in given.items() if value
    }
    found = numbers(given, YARN, "YaRN") | {"rotary_rule": "yarn"}
    found["rotary_truncate"] = rope.get("truncate", True)
    two = rope.get("mscale"), rope.get("mscale_all_dim")
    if (amplitude := rope.get("attention_factor")) is None and all(two):
        scores, other = (_sharpened(float(found["rotary_factor"]), scale) for scale in two)
        amplitude = scores / other
    return found if amplitude is None else found | {"rotary_amplitude": float(amplitude)}


def _sharpened(factor: float, scale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1


def _longrope(rope, longest) -> dict[str, Any]:
    found = numbers(rope, {"longest": "original_max_position_embeddings"}, "longrope")
    original, divisors = int(found["longest"]), rope.get("short_factor")
    rope.get("long_factor")
    is_list = isinstance(divisors, list) and all(isinstance(n, int | float) for n in divisors)
    if not divisors or not is_list:
        raise ValueError("config.json does not say 'short_factor' of its longrope in numbers.")
    factor, amplitude = rope.get("factor"), rope.get("attention_factor")
    factor = factor or (longest or original) / original
    if amplitude is None:
        grown = math.log(factor) / math.log(original) if factor > 1 else 0
        amplitude = math.sqrt(1 + grown)
    divisors = tuple(map(float, divisors))
    return {"rotary_divisors": divisors, "rotary_amplitude": amplitude, "longest": original}


def numbers(settings, fields: Mapping[str, str], owner: str) -> dict[str, Any]:
    """Numbers of a config.json by our names for them, lengths as integers."""
    for name in fields.values():
        value = settings.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"config.json does not say {name!r} of its {owner} in a number.")
    return {
        ours: int(settings[theirs]) if ours.endswith("original_length") else float(settings[theirs])
        for ours, theirs in fields.items()
    }


def rope_settings(options: Any, theta: float) -> dict[str, Any]:
    """The rotary settings of softmax layers with these options."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(theta)}
    if options.rotary_fraction != 1:
        found["partial_rotary_factor"] = options.rotary_fraction
    if options.rotary_factor is None:
        return found
    fields = {"llama3": LLAMA3, "yarn": YARN, "linear": {"rotary_factor": "factor"}}
    found["rope_type"] = options.rotary_rule
    found |= {t: getattr(options, ours) for ours, t in fields[options.rotary_rule].items()}
    if options.rotary_rule == "yarn":
        found["truncate"] = options.rotary_truncate
        if options.rotary_amplitude is not None:
            found["attention_factor"] = options.rotary_amplitude
    return found
