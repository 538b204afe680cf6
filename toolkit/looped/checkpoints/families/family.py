"""What all models of one `model_type` share: the columns of the table of families."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from toolkit.looped.checkpoints.families.scalars import Setting
from toolkit.looped.checkpoints.families.spelling import Spelling
from toolkit.looped.checkpoints.rules import WeightRule, vector

OURO_NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_end_norm": "input_layernorm_2",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward_end_norm": "post_attention_layernorm_2",
}
"""The norms of a block, and their names in Ouro; without sandwich norms, in most others."""


class Family(NamedTuple):
    """What all models of one `model_type` share.

    Attributes:
        mixers: the style of their mixers, a key of `STYLES`.
        norm: the function that makes the rule of a norm.
        switches: fields of `LoopedConfig` that all of them share.
        attention: options of softmax layers that all of them share.
        period: every how many layers softmax attention comes, if config.json does not say.
        word: the word of all layers if they are alike; None leaves it to config.json.
        router: the row of `ROUTERS` of its mixtures of experts, or None.
        defaults: settings where config.json has none.
        spelling: how its config.json is said; None: by the settings that most families share, and
            the following.
        reads: further settings that are fields of ours; in place of "rms_norm_eps" and "hidden_act"
            where they name others.
        fixed: settings that may have these values only, None among them where they may be absent.
        layers: how config.json names layers with a window: "types", by `layer_types`; "window", all
            of them if `sliding_window` is set; "alike", there are none.
        pattern: (settings, words by `layers`) -> the words of all layers.
        between: the word of the layers between those of `period`.
        ropes: whether each kind of softmax layer has rotary settings of its own.
        norms: the norms of a block, and their names.
        fed: the word of its dense feed-forward layers.
        dense: options of theirs that all of them share.
        is_fused: whether gate and up are one tensor.
        names: patterns of our names for tensors, and what replaces them, in this order.
        prefix: prefix of all tensors but the head's.
        older: older names of settings.
    """

    mixers: str
    norm: Callable[[str, str], WeightRule] = vector
    switches: Mapping[str, Any] = {}
    attention: Mapping[str, Any] = {}
    period: int = 1
    between: str = "gdn"
    word: str | None = None
    router: str | None = None
    defaults: Mapping[str, Any] = {}
    spelling: Spelling | None = None
    reads: Mapping[str, Setting] = {}
    fixed: Mapping[str, tuple[Any, ...]] = {}
    layers: Literal["types", "window", "alike"] = "types"
    pattern: Callable[[Mapping[str, Any], list[str]], list[str]] | None = None
    ropes: bool = False
    norms: Mapping[str, str] = OURO_NORMS
    fed: str = "swiglu"
    dense: Mapping[str, Any] = {}
    is_fused: bool = False
    names: Mapping[str, str] = {}
    prefix: str = "model."
    older: Mapping[str, str] = {}
