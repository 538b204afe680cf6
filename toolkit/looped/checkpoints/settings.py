"""The config.json of a model: `fields_of` and `mixture_fields`, the other way round."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from toolkit.experts import ROUTERS
from toolkit.looped.checkpoints.families import FAMILIES, SOFTMAX, WORDS
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.rope import rope_settings
from toolkit.looped.checkpoints.families.spelling import spelled_settings
from toolkit.looped.checkpoints.mixtures import HIDDEN_IS_OF_EXPERTS
from toolkit.looped.checkpoints.reading import fields_of, reads_of
from toolkit.looped.config import LoopedConfig
from toolkit.looped.mixing import LAYERS

ARCHITECTURES = {
    "arcee": "Arcee",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "ernie4_5": "Ernie4_5",
    "exaone4": "Exaone4",
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
    "jais2": "Jais2",
    "kimi_k2": "DeepseekV3",
    "kimi_linear": "KimiLinear",
    "lfm2": "Lfm2",
    "llama": "Llama",
    "mamba2": "Mamba2",
    "minicpm3": "MiniCPM3",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "ouro": "Ouro",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "vaultgemma": "VaultGemma",
}
"""What transformers calls the families' classes, before "ForCausalLM"."""

LISTS_FEED_FORWARDS = ("glm4_moe_lite",)
"""Families whose config.json names the feed-forward layer of every layer."""

OF_TRAINING = {
    "dtype", "remat", "embedding_std", "feed_forward_multiple_of", "backward_loops", "options",
}  # fmt: skip
"""Fields of `LoopedConfig` that change nothing in what a trained model computes."""


NONE_IS_NONE = (
    "head_soft_cap", "logits_soft_cap", "rotary_factor", "rotary_divisors", "rotary_amplitude",
    "longest",
)  # fmt: skip
"""Fields whose None means that there is none; elsewhere it means what follows from other sizes."""


def settings_of(style: str, config: LoopedConfig) -> dict[str, Any]:
    """The settings of config.json with which this family would be this model."""
    family = FAMILIES[style]
    if family.spelling is not None:
        named = {"model_type": style, "architectures": [f"{ARCHITECTURES[style]}ForCausalLM"]}
        return named | _spelled(family, config)
    found = {
        "model_type": style,
        "architectures": [f"{ARCHITECTURES[style]}ForCausalLM"],
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward_size,
        "tie_word_embeddings": config.tied_embedding,
        "pad_token_id": None,  # some families would have one beyond a small vocabulary
    }
    if "hidden_activation" not in family.reads:
        found["hidden_act"] = "silu"
    softmax = next((getattr(config, word) for word in config.layers if word in SOFTMAX), None)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
    if softmax is not None:
        found["num_key_value_heads"] = softmax.key_value_heads or config.heads
        found["head_dim"] = softmax.head_size or config.width // config.heads
        turned = [word for word in config.layers if word in SOFTMAX and word != "nope"]
        rope = _rope(config, turned[0]) if turned else rope
    if family.ropes:
        kinds = {"full_attention": "full", "sliding_attention": "window"}
        rope = {theirs: _rope(config, ours) for theirs, ours in kinds.items()}
    for name, setting in reads_of(family).items():
        value = _value_of(setting.ours[0], family.fed, config)
        found[name] = None if value is None else setting.write(value, found)
    if family.word == "mla":
        found |= _latent_settings(config)
        if config.mla.yarn_factor is not None:
            own = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            rope |= {name: getattr(config.mla, f"yarn_{name}") for name in own}
            rope["rope_type"] = "yarn"
            rope["original_max_position_embeddings"] = config.mla.yarn_original_length
    elif family.layers == "types":
        words = {ours: theirs for theirs, ours in WORDS.items()} | {"nope": "full_attention"}
        found["layer_types"] = [words.get(word, word) for word in config.layers]
    if style == "smollm3":
        found["no_rope_layers"] = [int(word != "nope") for word in config.layers]
    windows = "window" in config.layers
    if windows or family.layers != "alike":
        found["sliding_window"] = config.window.sliding_window if windows else None
    if style in ("qwen2", "qwen3", "smollm3"):
        found["use_sliding_window"] = windows
        found["max_window_layers"] = list(config.layers).index("window") if windows else 0
    if "gdn" in config.layers:
        sizes = LAYERS["gdn"].sizes_of(config)
        found |= {
            "linear_num_key_heads": sizes.heads,
            "linear_num_value_heads": sizes.value_heads,
            "linear_key_head_dim": sizes.key_size,
            "linear_value_head_dim": sizes.values // sizes.value_heads,
            "linear_conv_kernel_dim": config.gdn.convolution_size,
        }
    if style == "ouro":
        found["total_ut_steps"] = config.loops
    if family.router is not None:
        found |= _mixture_settings(family.router, config)
    if style in LISTS_FEED_FORWARDS:
        kinds = {"moe": "sparse", "swiglu": "dense"}
        found["mlp_layer_types"] = [kinds[word] for word in config.feed_forward_words]
    if family.ropes:
        return found | {"rope_parameters": rope}
    return found | {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}


def _rope(config: LoopedConfig, word: str) -> dict[str, Any]:
    options = getattr(config, word)
    return rope_settings(options, options.rope_theta or config.rope_theta)


def _value_of(path: str, fed: str, config: LoopedConfig) -> Any:
    """The value of a path of `scalars.py`."""
    owner, _, name = path.rpartition(".")
    if not owner:
        return getattr(config, name)
    words = [word for word in config.layers if word in SOFTMAX] if owner == "softmax" else [fed]
    value = getattr(getattr(config, words[0]), name) if words else None
    if name == "score_scale" and value is None and words:
        return LAYERS[words[0]].sizes_of(config).head_size ** -0.5
    return value


def _spelled(family: Family, config: LoopedConfig) -> dict[str, Any]:
    spelling: Any = family.spelling
    found = spelled_settings(spelling, config)
    if family.router is not None and "moe" in config.feed_forward_words:
        kinds = {"moe": "sparse", "swiglu": "dense"}
        usual = _mixture_settings(family.router, config)
        usual.pop("first_k_dense_replace", None)
        usual["mlp_layer_types"] = [kinds[word] for word in config.feed_forward_words]
        theirs = {usual: own for own, usual in spelling.renamed.items()}
        found |= {theirs.get(name, name): value for name, value in usual.items()}
    return spelling.written(found)


def _latent_settings(config: LoopedConfig) -> dict[str, Any]:
    options = config.mla
    return {
        "kv_lora_rank": options.latent_size,
        "q_lora_rank": options.query_latent_size,
        "qk_nope_head_dim": options.key_size,
        "qk_rope_head_dim": options.rope_size,
        "v_head_dim": options.value_size,
        "num_key_value_heads": config.heads,
        "rope_interleave": True,
    }


def _mixture_settings(router: str, config: LoopedConfig) -> dict[str, Any]:
    words, row = list(config.feed_forward_words), ROUTERS[router]
    dense = [layer for layer, word in enumerate(words) if word != "moe"]
    options = config.moe
    hidden = options.hidden or config.feed_forward_size
    count = "num_local_experts" if router in ("mixtral", "gpt_oss") else None
    count = count or ("n_routed_experts" if row.shared == "added" else "num_experts")
    found: dict[str, Any] = {
        count: options.experts,
        "num_experts_per_tok": options.chosen,
        "norm_topk_prob": options.normalise,
    }
    if router in HIDDEN_IS_OF_EXPERTS:
        found["intermediate_size"] = hidden
    else:
        found["moe_intermediate_size"] = hidden
    if row.shared == "added":
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
    for held, model in ((ours, config), (theirs, read)):
        held["feed_forwards"] = model.feed_forward_words
    if {*config.feed_forward_words} == {"moe"}:
        del ours["feed_forward"]
    # What is None follows from other sizes, and was written out as what follows.
    spelling = FAMILIES[style].spelling
    without_use = (
        {"rope_theta"} if spelling is None else {"heads", "rope_theta"} - {*spelling.sizes}
    )
    odd = [
        name
        for name, value in ours.items()
        if name not in OF_TRAINING | without_use and _differs(name, value, theirs[name])
    ]
    for word in sorted({*config.layers, *config.feed_forward_words}):
        mine, other = (dataclasses.asdict(getattr(c, word)) for c in (config, read))
        for held, model in ((mine, config), (other, read)):
            held["rope_theta"] = held.get("rope_theta") or model.rope_theta
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
        held = getattr(owner, option, None) or getattr(config, option, None)
        raise ValueError(f"style {style!r} cannot express {name} {held!r} of this model.")


def _differs(name: str, ours: Any, theirs: Any) -> bool:
    return ours != theirs and (ours is not None or name in NONE_IS_NONE)
