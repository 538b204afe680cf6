"""The config.json of a model: `fields_of` and `mixture_fields`, the other way round."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from toolkit.experts import ROUTERS
from toolkit.looped.checkpoints.families import FAMILIES, PARTS, SOFTMAX
from toolkit.looped.checkpoints.families.rope import rope_settings
from toolkit.looped.checkpoints.families.scalars import owner_of
from toolkit.looped.checkpoints.mixtures import HIDDEN_IS_OF_EXPERTS
from toolkit.looped.checkpoints.reading import fields_of, reads_of
from toolkit.looped.config import LoopedConfig
from toolkit.looped.feed_forward import MIXTURES
from toolkit.looped.mixing import LAYERS

ARCHITECTURES = {
    "arcee": "Arcee",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v4": "DeepseekV4",
    "ernie4_5": "Ernie4_5",
    "exaone4": "Exaone4",
    "falcon_h1": "FalconH1",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "glm": "Glm",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "gpt_neox": "GPTNeoX",
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "granitemoehybrid": "GraniteMoeHybrid",
    "helium": "Helium",
    "huginn_raven": "Raven",
    "inkling2_loop_text": "Inkling2Loop",
    "jais2": "Jais2",
    "kimi_k2": "DeepseekV3",
    "kimi_linear": "KimiLinear",
    "lfm2": "Lfm2",
    "llama": "Llama",
    "mamba2": "Mamba2",
    "minicpm3": "MiniCPM3",
    "minimax": "MiniMax",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron",
    "nemotron_h": "NemotronH",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "ouro": "Ouro",
    "parcae": "Parcae",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "rwkv7": "RWKV7",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "vaultgemma": "VaultGemma",
}
"""What transformers calls the families' classes, before "ForCausalLM"."""

LISTS_FEED_FORWARDS = ("glm4_moe_lite", "kimi_linear")
"""Families whose config.json names the feed-forward layer of every layer."""

OF_TRAINING = {
    "dtype", "remat", "embedding_std", "feed_forward_multiple_of", "backward_loops", "options",
}  # fmt: skip
"""Fields of `LoopedConfig` that change nothing in what a trained model computes."""

ROTARY = ("full", "window", "mla")
"""Layers whose positions turn."""

NONE_IS_NONE = (
    "head_soft_cap", "logits_soft_cap", "rotary_factor", "rotary_divisors", "rotary_amplitude",
    "longest",
)  # fmt: skip
"""Fields whose None means that there is none; elsewhere it means what follows from other sizes."""


def settings_of(style: str, config: LoopedConfig) -> dict[str, Any]:
    """The settings of config.json with which this family would be this model."""
    family = FAMILIES[style]
    found: dict[str, Any] = {
        "model_type": style,
        "architectures": [f"{ARCHITECTURES[style]}ForCausalLM"],
        "num_hidden_layers": len(config.layers),
        "pad_token_id": None,  # some families would have one beyond a small vocabulary
        **{name: allowed[0] for name, allowed in family.fixed.items()},
    }
    if not {"hidden_act", "hidden_activation"} & {*family.reads, *family.fixed}:
        found["hidden_act"] = "silu"
    for name, setting in reads_of(family):
        values = [v for path in setting.ours for v in _values_of(path, family.fed, config)]
        if values:
            found[name] = None if values[0] is None else setting.write(values[0], found)
    if family.word == "mla":
        found |= {"num_key_value_heads": config.heads, "rope_interleave": True}
    elif family.layers in ("types", "listed"):
        kinds = {ours: theirs for theirs, ours in family.words.items()}
        kinds = {"nope": "full_attention"} | kinds
        found["layer_types"] = [kinds.get(word, word) for word in config.layers]
    if style == "smollm3":
        found["no_rope_layers"] = [int(word != "nope") for word in config.layers]
    windows = "window" in config.layers
    if family.layers in ("types", "window") and family.word is None:
        found.setdefault("sliding_window", None)
    if style in ("qwen2", "qwen3", "smollm3"):
        found["use_sliding_window"] = windows
        found["max_window_layers"] = list(config.layers).index("window") if windows else 0
    if family.router is not None and MIXTURES & {*config.feed_forward_words}:
        found |= _mixture_settings(family.router, config)
        if style in LISTS_FEED_FORWARDS:
            del found["first_k_dense_replace"]
            kinds = {"moe": "sparse", "swiglu": "dense"}
            found["mlp_layer_types"] = [kinds[word] for word in config.feed_forward_words]
        theirs = {usual: own for own, usual in family.renamed.items()}
        found = {theirs.get(name, name): value for name, value in found.items()}
    if family.ropes:
        kinds = {"full_attention": "full", "sliding_attention": "window"}
        rope = {theirs: _rope(config, ours) for theirs, ours in kinds.items()}
        return family.written(found | {"rope_parameters": rope})
    words = [part for word in config.layers for part in PARTS.get(word, (word,))]
    turned = next((word for word in words if word in ROTARY), None)
    if turned and "rope_parameters" not in family.harmless:
        rope = _rope(config, turned)
        found |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    return family.written(found)


def _rope(config: LoopedConfig, word: str) -> dict[str, Any]:
    options = getattr(config, word)
    if word != "mla":
        return rope_settings(options, options.rope_theta or config.rope_theta)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
    if options.yarn_factor is None:
        return rope
    own = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    original = {"original_max_position_embeddings": options.yarn_original_length}
    return rope | {n: getattr(options, f"yarn_{n}") for n in own} | original | {"rope_type": "yarn"}


def _values_of(path: str, fed: str, config: LoopedConfig) -> list[Any]:
    """The value of a path in a list; none if the model has no such layer."""
    owner, name = owner_of(path), path.rpartition(".")[2]
    if name == "feed_forwards":
        return [" ".join(config.feed_forward_words)]
    if not owner:
        return [config.feed_forward_size if name == "feed_forward" else getattr(config, name)]
    word = fed if owner == "fed" else owner
    every = (*config.layers, *config.prelude_layers, *config.coda_layers)
    layers = [part for own in every for part in PARTS.get(own, (own,))]
    if owner == "softmax":
        word = next((word for word in layers if word in SOFTMAX), "")
    if word in config.feed_forward_words:
        return [getattr(getattr(config, word), name)]
    if word not in layers:
        return []
    sizes = LAYERS[word].sizes_of(config)
    if name == "score_scale":
        return [getattr(config, word).score_scale or sizes.head_size**-0.5]
    # What is None follows from other sizes, and is written out as what follows.
    own = getattr(sizes, name, None)
    return [getattr(getattr(config, word), name) if own is None else own]


def _mixture_settings(router: str, config: LoopedConfig) -> dict[str, Any]:
    words, row = list(config.feed_forward_words), ROUTERS[router]
    dense = [layer for layer, word in enumerate(words) if word not in MIXTURES]
    options = config.moe
    hidden = options.hidden or config.feed_forward_size
    count = "num_local_experts" if router in ("mixtral", "gpt_oss") else None
    has_scale = "scale" in row.switches
    count = count or ("n_routed_experts" if has_scale else "num_experts")
    found: dict[str, Any] = {
        count: options.experts,
        "num_experts_per_tok": options.chosen,
        "norm_topk_prob": options.normalise,
    }
    if router in HIDDEN_IS_OF_EXPERTS:
        found["intermediate_size"] = hidden
    else:
        found["moe_intermediate_size"] = hidden
    if has_scale:
        found |= {
            "first_k_dense_replace": len(dense),
            "n_shared_experts": (options.shared_hidden or 0) // hidden,
            "routed_scaling_factor": options.scale,
            "n_group": options.groups,
            "topk_group": options.chosen_groups,
        }
        if router == "deepseek_v2":
            is_greedy = options.groups == 1
            found["topk_method"] = "greedy" if is_greedy else "group_limited_greedy"
    elif router not in HIDDEN_IS_OF_EXPERTS:
        found |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    if row.shared == "gated":
        found["shared_expert_intermediate_size"] = options.shared_hidden
    return found


def check_settings(style: str, config: LoopedConfig, settings: Mapping[str, Any]) -> None:
    """Refuse a model that these settings do not describe: reading them must give it back."""
    fields = {"tied_embedding": config.tied_embedding, **fields_of(FAMILIES[style], settings)}
    try:
        read = LoopedConfig(**fields)
    except ValueError as error:
        raise ValueError(f"style {style!r} cannot express this model: {error}") from error
    ours, theirs = dataclasses.asdict(config), dataclasses.asdict(read)
    for facts, model in ((ours, config), (theirs, read)):
        facts["feed_forwards"] = model.feed_forward_words
    if {*config.feed_forward_words} <= MIXTURES:
        del ours["feed_forward"]
    # What is None follows from other sizes, and was written out as what follows.
    odd = [
        name
        for name, value in ours.items()
        if name not in OF_TRAINING | {"rope_theta"} and _differs(name, value, theirs[name])
    ]
    for word in sorted({*config.options, *read.options}):
        mine, other = (dataclasses.asdict(getattr(c, word)) for c in (config, read))
        for facts, model in ((mine, config), (other, read)) if word in ROTARY else ():
            facts["rope_theta"] = facts.get("rope_theta") or model.rope_theta
        odd += [
            f"{word}.{name}"
            for name, value in mine.items()
            if _differs(name, value, other.get(name))
            and name != "quantised_cache"
            and not (word == "nope" and name.startswith("ro"))
        ]
    if odd:
        name = odd[0]
        word, _, option = name.rpartition(".")
        owner = getattr(config, word) if word else config
        facts = getattr(owner, option, None) or getattr(config, option, None)
        raise ValueError(f"style {style!r} cannot express {name} {facts!r} of this model.")


def _differs(name: str, ours: Any, theirs: Any) -> bool:
    return ours != theirs and (ours is not None or name in NONE_IS_NONE)
