"""Every rule of a published model, from the embedding to the head."""

from collections.abc import Collection
from typing import NamedTuple

from toolkit.looped.checkpoints.families import PREFIXES, SOFTMAX, Family
from toolkit.looped.checkpoints.mixtures import OF_MIXTURES, mixture_rules
from toolkit.looped.checkpoints.names import STYLES, WeightRule, as_it_is, projection, vector
from toolkit.looped.config import LoopedConfig

DENSE = ("gate", "up", "down")

SANDWICH = {
    "mixer_norm": "input_layernorm",
    "mixer_end_norm": "input_layernorm_2",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward_end_norm": "post_attention_layernorm_2",
}


class Part(NamedTuple):
    """Rules, and the module to which they apply.

    Attributes:
        module: path of the module in the model; "" for the model itself.
        prefix: prefix of the tensors' names.
        rules: the rules.
    """

    module: str
    prefix: str
    rules: tuple[WeightRule, ...]


def parts(family: Family, config: LoopedConfig, prefix: str, names: Collection[str]) -> list[Part]:
    """Every rule of a model, from the embedding to the head, in the spelling of these `names`."""
    styles = STYLES[family.mixers]
    if "mla" in config.layers:
        own = "deepseek_v2_lite" if config.mla.query_latent_size is None else "deepseek_v3"
        styles = {**styles, "mla": STYLES[own]["mla"]}
    if unknown := set(config.layers) - set(styles):
        raise ValueError(
            f"pattern {config.pattern!r} has {', '.join(sorted(unknown))}; layers of these "
            f"checkpoints are {', '.join(styles)}."
        )
    ends = (
        as_it_is("embedding.embedding", "embed_tokens.weight"),
        family.norm("norm.scale", "norm.weight"),
    )
    if config.exit_gate:
        ends += (
            projection("exit_gate", "early_exit_gate.weight"),
            vector("exit_gate.bias", "early_exit_gate.bias"),
        )
    norms = tuple(
        family.norm(f"{ours}.scale", f"{theirs}.weight")
        for ours, theirs in SANDWICH.items()
        if config.sandwich_norm or not ours.endswith("end_norm")
    )
    found = [Part("", prefix, ends)]
    if not config.tied_embedding:
        found.append(Part("", "", (as_it_is("unembedding", "lm_head.weight"),)))
    for layer, (word, fed) in enumerate(zip(config.layers, config.feed_forward_words, strict=True)):
        here = f"{prefix}layers.{layer}."
        is_named_moe = f"{here}{OF_MIXTURES}.gate_proj.weight" in names  # a dense layer of Kimi's
        folder = OF_MIXTURES if is_named_moe else "mlp"
        rules = tuple(projection(own, f"{folder}.{own}_proj.weight") for own in DENSE)
        if fed == "moe" and family.router is not None:
            rules = mixture_rules(family.router, config.moe, here, names)
        mixer = tuple(rule for rule in styles[word] if _has(config, word, rule))
        found.append(Part(f"blocks.{layer}", here, norms))
        found.append(Part(f"blocks.{layer}.feed_forward", here, rules))
        found.append(Part(f"blocks.{layer}.mixer", here + PREFIXES[word], mixer))
    return found


def _has(config: LoopedConfig, word: str, rule: WeightRule) -> bool:
    """Whether layers have the parameters of an optional rule of GLM."""
    options = getattr(config, word)
    is_norm, is_bias = (rule.ours[0].endswith(end) for end in ("_norm.scale", ".bias"))
    if word not in SOFTMAX or not (is_norm or is_bias):
        return True
    if is_norm:
        return options.query_key_norm or options.projection_norm
    return options.projection_biases or rule.ours[0] == "output.bias"
