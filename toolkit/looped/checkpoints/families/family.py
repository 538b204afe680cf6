"""What all models of one `model_type` share: the columns of the table of families."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from toolkit.looped.checkpoints.families.scalars import Setting
from toolkit.looped.checkpoints.rules import WeightRule, vector
from toolkit.looped.checkpoints.tensors import StoredTensor

OURO_NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_end_norm": "input_layernorm_2",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward_end_norm": "post_attention_layernorm_2",
}
"""The norms of a block, and their names in Ouro; without sandwich norms, in most others."""

WORDS = {"full_attention": "full", "sliding_attention": "window", "linear_attention": "gdn"}
"""Words of config.json's `layer_types` and ours."""

PARTS = {"hybrid": ("full", "mamba2")}
"""Layers whose options are those of others."""

Change = Callable[[dict[str, Any]], dict[str, Any]]


class Family(NamedTuple):
    """What all models of one `model_type` share.

    A path names a field of `LoopedConfig`, or an option as "word.option"; "softmax" stands for
    every softmax layer, "fed" for the dense feed-forward layers.

    Attributes:
        mixers: the style of their mixers, a key of `STYLES`.
        norm: the function that makes the rule of a norm.
        switches: values that all of them share, by path.
        period: every how many layers softmax attention comes, if config.json does not say.
        between: the word of the layers between those of `period`.
        word: the word of all layers if they are alike; None leaves it to config.json.
        router: the row of `ROUTERS` of its mixtures of experts, or None.
        defaults: settings where config.json has none.
        reads: settings that are fields of ours, beside those of `USUAL` or in place of the ones
            that would make the same fields; None: there is no such setting.
        fixed: settings that may have these values only, None among them where they may be absent.
        harmless: further settings that change no number.
        layers: how config.json names layers: "types", by `layer_types`, or by `period`; "listed",
            by `layer_types` alone; "window", all have one if `sliding_window` is set; "alike",
            there are no windows.
        words: their words in `layer_types`, and ours.
        pattern: (settings, words by `layers`) -> the words of all layers.
        ropes: whether each kind of softmax layer has rotary settings of its own.
        norms: the norms of a block, and their names.
        fed: the word of its dense feed-forward layers.
        is_fused: whether gate and up are one tensor.
        is_flat: whether mixers and feed-forward layers are counted as layers of their own.
        is_counted_through: whether the layers of prelude, loops and coda have one numbering.
        per_layer: how many blocks of ours are one layer; the second has the norm of a feed-forward
            layer.
        names: patterns of our names for tensors, and what replaces them, in this order.
        prefix: prefix of all tensors but the head's.
        older: older names of settings.
        renamed: their names of settings of experts, and the usual ones.
        factors: settings -> factors of tensors by a pattern of their names, one or one per row,
            which are multiplied into the weights.
        prepared: a config.json in several spellings -> in the one of this row.
        opened: (settings, tensors in another spelling of their files) -> in that of `names`.
        written: settings that say a model -> those that their configuration class takes.
    """

    mixers: str
    norm: Callable[[str, str], WeightRule] = vector
    switches: Mapping[str, Any] = {}
    period: int = 1
    between: str = "gdn"
    word: str | None = None
    router: str | None = None
    defaults: Mapping[str, Any] = {}
    reads: Mapping[str, Setting | None] = {}
    fixed: Mapping[str, tuple[Any, ...]] = {}
    harmless: str = ""
    layers: Literal["types", "listed", "window", "alike"] = "types"
    words: Mapping[str, str] = WORDS
    pattern: Callable[[Mapping[str, Any], list[str]], list[str]] | None = None
    ropes: bool = False
    norms: Mapping[str, str] = OURO_NORMS
    fed: str = "swiglu"
    is_fused: bool = False
    is_flat: bool = False
    is_counted_through: bool = False
    per_layer: int = 1
    names: Mapping[str, str] = {}
    prefix: str = "model."
    older: Mapping[str, str] = {}
    renamed: Mapping[str, str] = {}
    factors: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    prepared: Change = dict
    written: Change = dict
    opened: Callable[[Mapping[str, Any], Mapping[str, StoredTensor]], dict[str, StoredTensor]] = (
        lambda _, tensors: dict(tensors)
    )
