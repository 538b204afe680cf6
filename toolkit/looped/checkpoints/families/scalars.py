"""Settings of config.json that are fields of ours, and how one becomes the other.

A path such as "softmax.score_scale" is an option of every softmax layer, "fed.biases" one of every
dense feed-forward layer; a path without a dot is a field of `LoopedConfig`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Read = Callable[[Any, Mapping[str, Any]], Any]


class Setting(NamedTuple):
    """A setting that becomes one or more fields.

    Attributes:
        ours: paths of the fields.
        kind: what it must be: float (or int), bool or str.
        read: (its value, all settings) -> the fields' value.
        write: (the fields' value, all settings) -> its value.
    """

    ours: tuple[str, ...]
    kind: type = float
    read: Read = lambda value, _: value
    write: Read = lambda value, _: value


def _same(*ours: str, kind: type = float) -> Setting:
    return Setting(ours, kind)


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


EPSILON = _same("norm_epsilon")
ACTIVATION = Setting(("fed.activation",), str, _activation, _their_activation)
# Gemma's first files say "gelu" and mean its tanh form.
GEMMA_ACTIVATION = ACTIVATION._replace(
    read=lambda value, _: "gelu_tanh" if value == "gelu" else _activation(value, _)
)
QKV_BIAS = _same("softmax.projection_biases", kind=bool)
OUTPUT_BIAS = _same("softmax.output_bias", kind=bool)
ATTENTION_BIAS = _same("softmax.projection_biases", "softmax.output_bias", kind=bool)
FED_BIAS = _same("fed.biases", kind=bool)
ALL_BIASES = _same(*ATTENTION_BIAS.ours, "fed.biases", kind=bool)
QK_NORM = _same("softmax.query_key_norm", kind=bool)
SCORE_CAP = _same("softmax.logits_soft_cap")
HEAD_CAP = _same("head_soft_cap")
SCORE_SCALE = _same("softmax.score_scale")
SCORE_SIZE = _inverse("softmax.score_scale", lambda x, _: x**-0.5, lambda x, _: x**-2)
EMBEDDING_SCALE = _same("embedding_scale")
EMBEDDING_ROOT = Setting(
    ("embedding_scale",), float, lambda x, _: x**0.5, lambda _, all_: all_["hidden_size"]
)
RESIDUAL_SCALE = _same("residual_scale")
RESIDUAL_DEPTH = _inverse(
    "residual_scale", lambda x, all_: x / _depth(all_), lambda x, all_: x * _depth(all_)
)
HEAD_SCALE = _same("head_scale")
HEAD_DIVISOR = _inverse("head_scale", lambda x, _: 1 / x, lambda x, _: 1 / x)
HEAD_BASE = _inverse(
    "head_scale",
    lambda x, all_: x / all_["hidden_size"],
    lambda x, all_: x * all_["hidden_size"],
)
PARALLEL = _same("parallel_residual", kind=bool)
PARALLEL_ONE_NORM = _same("parallel_residual", "shared_norm", kind=bool)


def values_of(setting: Setting, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a setting makes, by path; none where config.json has none."""
    value = settings.get(name)
    if value is None:
        return {}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number if setting.kind is float else isinstance(value, setting.kind)):
        wanted = "number" if setting.kind is float else setting.kind.__name__
        raise ValueError(f"config.json has {name} {value!r}; it must be a {wanted}.")
    try:
        found = setting.read(value, settings)
    except (ArithmeticError, TypeError):
        raise ValueError(f"config.json has {name} {value!r}; it must be positive.") from None
    return dict.fromkeys(setting.ours, float(found) if setting.kind is float else found)
