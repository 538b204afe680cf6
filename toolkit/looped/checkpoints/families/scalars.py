"""Settings of config.json that are fields of ours, and how one becomes the other.

A path such as "softmax.score_scale" is an option of every softmax layer, "fed.biases" one of every
dense feed-forward layer; a path without a dot is a field of `LoopedConfig`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from toolkit._kinds import shown

Read = Callable[[Any, Mapping[str, Any]], Any]


class Setting(NamedTuple):
    """A setting that becomes one or more fields."""

    ours: tuple[str, ...]  # paths of the fields; the first that a model has is written
    kind: type = float  # what it must be: float (or int), int, bool or str
    read: Read = lambda value, _: value  # (its value, all settings) -> the fields' value
    write: Read = lambda value, _: value  # (the fields' value, all settings) -> its value
    is_required: bool = False  # whether a model with one of these fields must say it


def number(*ours: str) -> Setting:
    """A number that is the fields' value."""
    return Setting(ours)


def size(*ours: str) -> Setting:
    """A whole number that a config.json must say."""
    return Setting(ours, int, is_required=True)


def whole(*ours: str) -> Setting:
    """A whole number that may be absent."""
    return Setting(ours, int)


def truth(*ours: str) -> Setting:
    """A switch."""
    return Setting(ours, bool)


def _inverse(ours: str, read: Read, write: Read) -> Setting:
    """A number whose formula is inverted: to a whole number where that reads back the same."""

    def exact(value: Any, settings: Mapping[str, Any]) -> Any:
        found = write(value, settings)
        tries = (round(found), round(found, 6), found)
        return next((n for n in tries if n and read(n, settings) == value), found)

    return Setting((ours,), float, read, exact)


ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
"""Names of functions in transformers, and ours."""


def _activation(value: str, _: Mapping[str, Any]) -> str:
    if value not in ACTIVATIONS:
        raise ValueError(
            f"config.json has the activation {value!r}; known are {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[value]


def _their_activation(value: str, _: Mapping[str, Any]) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == value)


def _depth(settings: Mapping[str, Any]) -> float:
    return settings["num_hidden_layers"] ** 0.5


EPSILON = number("norm_epsilon")
ACTIVATION = Setting(("fed.activation",), str, _activation, _their_activation)
# Gemma's first files say "gelu" and mean its tanh form.
GEMMA_ACTIVATION = ACTIVATION._replace(
    read=lambda value, _: "gelu_tanh" if value == "gelu" else _activation(value, _)
)
QKV_BIAS = truth("softmax.projection_biases")
OUTPUT_BIAS = truth("softmax.output_bias")
ATTENTION_BIAS = truth("softmax.projection_biases", "softmax.output_bias")
FED_BIAS = truth("fed.biases")
ALL_BIASES = truth(*ATTENTION_BIAS.ours, "fed.biases")
QK_NORM = truth("softmax.query_key_norm")
SCORE_CAP = number("softmax.logits_soft_cap")
HEAD_CAP = number("head_soft_cap")
SCORE_SCALE = number("softmax.score_scale")
SCORE_SIZE = _inverse("softmax.score_scale", lambda x, _: x**-0.5, lambda x, _: x**-2)
EMBEDDING_SCALE = number("embedding_scale")
EMBEDDING_ROOT = Setting(
    ("embedding_scale",), float, lambda x, _: x**0.5, lambda _, all_: all_["hidden_size"]
)
RESIDUAL_SCALE = number("residual_scale")
RESIDUAL_DEPTH = _inverse(
    "residual_scale", lambda x, all_: x / _depth(all_), lambda x, all_: x * _depth(all_)
)
HEAD_SCALE = number("head_scale")
HEAD_DIVISOR = _inverse("head_scale", lambda x, _: 1 / x, lambda x, _: 1 / x)
HEAD_BASE = _inverse(
    "head_scale", lambda x, all_: x / all_["hidden_size"], lambda x, all_: x * all_["hidden_size"]
)
PARALLEL = truth("parallel_residual")
PARALLEL_ONE_NORM = truth("parallel_residual", "shared_norm")


USUAL: dict[str, Setting] = {
    "vocab_size": size("vocabulary"),
    "hidden_size": size("width"),
    "num_attention_heads": size("heads"),
    "intermediate_size": size("feed_forward"),
    "tie_word_embeddings": truth("tied_embedding"),
    "rms_norm_eps": EPSILON,
    "num_key_value_heads": whole("softmax.key_value_heads"),
    "head_dim": whole("softmax.head_size"),
    "sliding_window": whole("window.sliding_window"),
    "linear_num_key_heads": whole("gdn.heads"),
    "linear_num_value_heads": whole("gdn.value_heads"),
    "linear_key_head_dim": whole("gdn.key_size"),
    "linear_value_head_dim": whole("gdn.value_size"),
    "linear_conv_kernel_dim": whole("gdn.convolution_size"),
    "kv_lora_rank": size("mla.latent_size"),
    "q_lora_rank": whole("mla.query_latent_size"),
    "qk_nope_head_dim": size("mla.key_size"),
    "qk_rope_head_dim": size("mla.rope_size"),
    "v_head_dim": size("mla.value_size"),
}
"""Settings that most families spell alike."""


KINDS = {
    float: "number", int: "whole number", bool: "bool", str: "string", dict: "dict", list: "list",
}  # fmt: skip


def owner_of(path: str) -> str:
    """The word that has this option; "" if it is a field of `LoopedConfig`."""
    return path.rpartition(".")[0]


def check_kind(kind: type, name: str, value: Any) -> None:
    """Refuse a setting of another kind; a whole number is a number, and True is none."""
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or isinstance(value, bool) != (kind is bool):
        raise ValueError(f"config.json has {name} {shown(value)}; it must be a {KINDS[kind]}.")


def value_of(setting: Setting, name: str, settings: Mapping[str, Any]) -> Any:
    """The fields' value; None where config.json has none."""
    value = settings.get(name)
    if value is None:
        return None
    check_kind(setting.kind, name, value)
    try:
        found = setting.read(value, settings)
    except (ArithmeticError, TypeError):
        raise ValueError(f"config.json has {name} {value!r}; it must be positive.") from None
    return float(found) if setting.kind is float else found
