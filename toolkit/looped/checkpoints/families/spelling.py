"""Families whose config.json is said by a table, which is read and written alike."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from toolkit.looped.config import LoopedConfig
from toolkit.looped.mixing import LAYERS

WITHOUT_EFFECT = (
    "architectures model_type transformers_version dtype torch_dtype auto_map _name_or_path "
    "bos_token_id eos_token_id pad_token_id use_cache initializer_range max_position_embeddings "
    "model_max_length attention_dropout output_router_logits router_aux_loss_coef pretraining_tp "
    "num_nextn_predict_layers quantization_config num_hidden_layers layer_types"
)
"""Settings that change nothing in what a model computes, or that are read for every family."""

OF_EXPERTS = (
    "n_routed_experts num_local_experts num_experts_per_tok moe_intermediate_size "
    "n_shared_experts n_group topk_group routed_scaling_factor norm_topk_prob mlp_layer_types "
    "first_k_dense_replace"
)
"""Settings that `mixture_fields` reads."""

MAY_BE_NONE = ("q_lora_rank",)

STREAM = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "norm_epsilon": "rms_norm_eps",
    "tied_embedding": "tie_word_embeddings",
}
"""Sizes that most families spell alike."""


class Spelling(NamedTuple):
    """How the config.json of a family says what a `LoopedConfig` says.

    Attributes:
        sizes: fields of `LoopedConfig`, and options such as "kda.key_size", by our name: theirs, or
            several that have to be equal.
        words: their word in `layer_types`: our word.
        fixed: options that all models of the family have.
        only: settings that have one value in what is read; others are refused.
        renamed: their name of a setting of experts: the usual one.
        without_effect: further settings that change nothing.
        prepared: their settings in this spelling, where there are several.
        written: what `spelled_settings` found, completed for their own configuration class.
    """

    sizes: Mapping[str, str]
    words: Mapping[str, str]
    fixed: Mapping[str, Any] = {}
    only: Mapping[str, Any] = {}
    renamed: Mapping[str, str] = {}
    without_effect: str = ""
    prepared: Callable[[dict[str, Any]], dict[str, Any]] = dict
    written: Callable[[dict[str, Any]], dict[str, Any]] = dict


def prepared(spelling: Spelling, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json in the usual names, without what has no effect; refuses what is unknown."""
    found = spelling.prepared(dict(settings))
    if "rope_theta" in spelling.sizes:
        rope = found.pop("rope_parameters", None) or found.pop("rope_scaling", None) or {}
        kind = {name: value for name, value in rope.items() if name != "rope_theta"}
        if kind not in ({}, {"rope_type": "default"}):
            raise ValueError(f"config.json has the rotary settings {kind}; known is 'default'.")
        found.setdefault("rope_theta", rope.get("rope_theta"))
    for name, wanted in spelling.only.items():
        if found.get(name, wanted) not in (wanted, None):
            raise ValueError(f"config.json has {name} {found[name]!r}; known is {wanted!r}.")
    found = {spelling.renamed.get(name, name): value for name, value in found.items()}
    known = {*spelling.only}
    for names in (
        *spelling.sizes.values(),
        spelling.without_effect,
        WITHOUT_EFFECT,
        OF_EXPERTS if spelling.renamed else "",
    ):
        known |= {*names.split()}
    for name in sorted(set(found) - known):
        if found[name] is not None:
            raise ValueError(
                f"config.json has {name} {found[name]!r}, which is not known of this family."
            )
    return found


def spelled_fields(spelling: Spelling, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `LoopedConfig` from a prepared config.json."""
    kinds = settings.get("layer_types")
    if kinds is None:
        raise ValueError("config.json does not say 'layer_types'.")
    for kind in kinds:
        if kind not in [*spelling.words]:
            known = ", ".join(map(repr, spelling.words))
            raise ValueError(f"config.json has layer_types {kind!r}; known are {known}.")
    words = [spelling.words[kind] for kind in kinds]
    has_experts = bool(settings.get("num_local_experts"))
    found: dict[str, Any] = {"pattern": " ".join(words)}
    options: dict[str, dict[str, Any]] = {word: {} for word in words}
    values = dict(spelling.fixed)
    for path, names in spelling.sizes.items():
        name, *others = names.split()
        if "." not in path or path.split(".")[0] in options or (has_experts and path[:4] == "moe."):
            if settings.get(name) is None and name not in MAY_BE_NONE:
                raise ValueError(f"config.json does not say {name!r}.")
            values[path] = value = settings.get(name)
            for other in others:
                if settings.get(other, value) not in (value, None):
                    raise ValueError(
                        f"config.json has {other} {settings[other]!r}; known is {name}, {value!r}."
                    )
    for path, value in values.items():
        word, _, option = path.rpartition(".")
        if word in options or word == "moe":
            options.setdefault(word, {})[option] = value
        elif not word:
            found[path] = value
    return found | {"options": options}


def spelled_settings(spelling: Spelling, config: LoopedConfig) -> dict[str, Any]:
    """The settings of config.json that say this configuration, but for those of experts."""
    kinds = {ours: theirs for theirs, ours in spelling.words.items()}
    found: dict[str, Any] = dict(spelling.only)
    found["layer_types"] = [kinds.get(word, word) for word in config.layers]
    found["num_hidden_layers"] = len(config.layers)
    for path, names in spelling.sizes.items():
        word, _, option = path.rpartition(".")
        if not word:
            own = config.feed_forward_size if option == "feed_forward" else getattr(config, option)
            found |= dict.fromkeys(names.split(), own)
        elif word == "moe" and word in config.feed_forward_words:
            found[names] = getattr(config.moe, option)
        elif word in config.layers:
            sizes = LAYERS[word].sizes_of(config)
            own = getattr(sizes, option, getattr(getattr(config, word), option, None))
            found |= dict.fromkeys(names.split(), own)
    if "rope_theta" in found:
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": found["rope_theta"]}
    return found
