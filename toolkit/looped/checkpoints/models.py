"""Every rule of a published model, from the embedding to the head."""

import itertools
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from toolkit.looped.checkpoints.families import PREFIXES, SOFTMAX
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.inkling2_names import SEPARATE, end_rules, residual_rules
from toolkit.looped.checkpoints.mixtures import OF_MIXTURES, mixture_rules
from toolkit.looped.checkpoints.names import STYLES
from toolkit.looped.checkpoints.rules import WeightRule, as_it_is, projection, vector
from toolkit.looped.config import LoopedConfig
from toolkit.looped.feed_forward import MIXTURES
from toolkit.looped.mixing import LAYERS


class Part(NamedTuple):
    """Rules, and the module to which they apply."""

    module: str  # path of the module in the model; "" for the model itself
    prefix: str  # prefix of the tensors' names
    rules: tuple[WeightRule, ...]  # the rules


def parts(family: Family, config: LoopedConfig, prefix: str, names: Collection[str]) -> list[Part]:
    """Every rule of a model, from the embedding to the head, in the spelling of these `names`."""
    styles = STYLES[family.mixers]
    if "mla" in config.layers and family.mixers != "minicpm3":
        own = "deepseek_v2_lite" if config.mla.query_latent_size is None else "deepseek_v3"
        styles = {**styles, "mla": STYLES[own]["mla"]}
    if unknown := set(config.layers) - set(styles):
        raise ValueError(
            f"pattern {config.pattern!r} has {', '.join(sorted(unknown))}; layers of these "
            f"checkpoints are {', '.join(styles)}."
        )
    has_bias = config.norm == "layer"

    def norm(ours: str, theirs: str) -> list[WeightRule]:
        bias = [vector(f"{ours}.bias", f"{theirs}.bias")] if has_bias else []
        return [family.norm(f"{ours}.scale", f"{theirs}.weight"), *bias]

    ends = (as_it_is("embedding.embedding", "embed_tokens.weight"), *norm("norm", "norm"))
    if config.embedding_norm:
        ends += tuple(norm("embedding.norm", "layers.0.pre_norm"))
    if config.exit_gate:
        ends += (
            projection("exit_gate", "early_exit_gate.weight"),
            vector("exit_gate.bias", "early_exit_gate.bias"),
        )
    if config.input_injection and config.injection == "diagonal":
        ends += (
            vector("adapter.log_rate", "adapter.A_log"),
            vector("adapter.step_bias", "adapter.dt_bias"),
            projection("adapter", "adapter.B"),
        )
    elif config.input_injection:
        ends += (projection("adapter", "adapter.weight"),)
    if config.coda_projection:
        ends += (projection("leaving", "C.weight"),)
    if config.prelude_norm:
        last = len(config.prelude_layers) - 1
        ends += tuple(norm(f"prelude.{last}.end_norm", "ln_prelude"))
    there = {
        "mixer_norm": config.pre_norm,
        "feed_forward_norm": config.pre_norm and not config.shared_norm,
        "mixer_end_norm": config.sandwich_norm,
        "feed_forward_end_norm": config.sandwich_norm,
    }

    def norms(word: str, fed: str, layer: int) -> tuple[WeightRule, ...]:
        own = [name for name, is_there in there.items() if is_there]
        own = [name for name in own if fed != "none" or name.startswith("mixer")]
        theirs = dict(family.norms)
        if layer % family.per_layer:
            theirs["mixer_norm"] = theirs["feed_forward_norm"]
        if not LAYERS[word].reads_separately:
            return tuple(rule for ours in own for rule in norm(ours, theirs[ours]))
        separate = {f"mixer_norm.{w}": f"{w[0]}_{theirs['mixer_norm']}" for w in SEPARATE}
        names = [*separate.items(), *((o, theirs[o]) for o in own if o != "mixer_norm")]
        return tuple(rule for pair in names for rule in norm(*pair))

    found = [Part("", prefix, ends)]
    if not config.tied_embedding:
        found.append(Part("", "", (as_it_is("unembedding", "lm_head.weight"),)))
    if config.head_bias:
        found.append(Part("", "", (vector("head_bias", "lm_head.bias"),)))
    stacks = {"prelude": config.prelude_layers, "blocks": config.layers, "coda": config.coda_layers}
    words, number, tables = iter(config.feed_forward_words), 0, itertools.count()
    for stack, layer, word in ((s, n, w) for s, own in stacks.items() for n, w in enumerate(own)):
        fed, place = next(words), f"{stack}.{layer}"
        here = f"{prefix}{stack}.{layer // family.per_layer}.".replace("blocks", "layers")
        beside = here
        if family.is_flat:
            here, beside = f"{prefix}layers.{number}.", f"{prefix}layers.{number + 1}."
            number += 1 + (fed != "none")
        if family.is_counted_through:
            here = beside = f"{prefix}layers.{number}."
            number += 1
        is_named_moe = f"{here}{OF_MIXTURES}.gate_proj.weight" in names  # a dense layer of Kimi's
        folder = OF_MIXTURES if is_named_moe else "mlp"
        rules = () if fed in (*MIXTURES, "none") else _dense(family, fed, config, folder)
        if fed in MIXTURES and family.router is not None:
            rules = mixture_rules(family.router, fed, config.moe, beside, names)
        mixer = tuple(rule for rule in styles[word] if _has(config, word, rule, layer))
        own = norms(word, fed, layer)
        fed_norms = tuple(r for r in own if beside != here and r.ours[0].startswith("feed"))
        found.append(Part(place, here, tuple(rule for rule in own if rule not in fed_norms)))
        found.append(Part(place, beside, fed_norms))
        found.append(Part(f"{place}.feed_forward", beside, rules))
        found.append(Part(f"{place}.mixer", here + PREFIXES[word], mixer))
        table = as_it_is("table.embedding", f"value_embeds.{next(tables)}.weight")
        if word == "value_embedding":
            found.append(Part(f"{place}.mixer", "", (table,)))
        if config.streams is not None:
            found.append(Part(f"{place}.connections", here, STREAMS))
        if config.attention_residual is not None:
            looped = config.message_rank is not None and stack == "blocks"
            own = residual_rules(LAYERS[word], reads=bool(number > 1), is_looped=looped)
            found.append(Part(f"{place}.connections", here, own))
    if config.streams is not None:
        end = f"blocks.{len(config.layers) - 1}.connections.end"
        found.append(Part(end, prefix, _stream_weights("weights", "hc_head.hc_")))
    if config.attention_residual is not None:
        found += [Part(*part) for part in end_rules(config, prefix)]
    return [_spelled(part, family.names, names) for part in found] if family.names else found


def _stream_weights(ours: str, theirs: str) -> tuple[WeightRule, ...]:
    """Weights of residual streams, of which the kernel is [outputs, inputs]."""
    kernel = WeightRule((f"{theirs}fn",), (f"{ours}.kernel",), lambda _, tensor: [tensor.T])
    others = {"bias": "base", "scale": "scale"}
    return kernel, *(vector(f"{ours}.{o}", f"{theirs}{t}") for o, t in others.items())


STREAMS = (
    *_stream_weights("mixer.weights", "attn_hc."),
    *_stream_weights("feed_forward.weights", "ffn_hc."),
)


def _dense(family: Family, word: str, config: LoopedConfig, folder: str) -> tuple[WeightRule, ...]:
    """The rules of a dense feed-forward layer."""
    names = ("up", "down") if word == "mlp" else ("gate", "up", "down")
    rules = [projection(name, f"{folder}.{name}_proj.weight") for name in names]
    if family.is_fused:
        fused = WeightRule(
            ("mlp.gate_up_proj.weight",),
            ("gate.kernel", "up.kernel"),
            lambda _, tensor: jnp.split(tensor.T, 2, axis=-1),
        )
        rules = [fused, rules[-1]]
    if not getattr(config, word).biases:
        return tuple(rules)
    return (*rules, *(vector(f"{name}.bias", f"{folder}.{name}_proj.bias") for name in names))


def _spelled(part: Part, names: Mapping[str, str], there: Collection[str]) -> Part:
    """The same rules with the family's own names of tensors, where the checkpoint has them."""

    def spelled(name: str) -> str:
        other = part.prefix + name
        for pattern, replacement in names.items():
            if other in there:  # some files have a part of the family's names
                break
            other = re.sub(pattern, replacement, other)
        return other

    rules = [rule._replace(theirs=tuple(map(spelled, rule.theirs))) for rule in part.rules]
    return Part(part.module, "", tuple(rules))


def _has(config: LoopedConfig, word: str, rule: WeightRule, layer: int) -> bool:
    """Whether a layer has the parameters of an optional rule."""
    options, name = getattr(config, word), rule.ours[0]
    if word == "rwkv7":
        return not name.startswith("value_mix") or (options.value_residual and layer > 0)
    if word == "conv":
        return options.biases or not name.endswith(".bias")
    if word == "hybrid":
        return config.mamba2.gated_norm or name != "mamba.norm.scale"
    if word not in SOFTMAX:
        return True
    if name.endswith("_norm.scale"):
        return options.query_key_norm or options.projection_norm
    if name == "output.bias":
        return options.output_bias
    if name == "sinks":
        return options.sinks
    return options.projection_biases or not name.endswith(".bias")
