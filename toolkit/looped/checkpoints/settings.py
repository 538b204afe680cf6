"""The config.json of a model: `fields_of` and `mixture_fields`, the other way round."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from toolkit.experts import ROUTERS
from toolkit.looped.checkpoints.families import FAMILIES, SOFTMAX, WORDS, Family
from toolkit.looped.checkpoints.mixtures import HIDDEN_IS_OF_EXPERTS
from toolkit.looped.checkpoints.reading import fields_of
from toolkit.looped.checkpoints.spelling import spelled_settings
from toolkit.looped.config import LoopedConfig
from toolkit.looped.mixing import LAYERS

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "gpt_oss": "GptOss",
    "kimi_k2": "DeepseekV3",
    "kimi_linear": "KimiLinear",
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "ouro": "Ouro",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
}
"""What transformers calls the families' classes, before "ForCausalLM"."""

WITHOUT_LAYER_TYPES = ("llama", "mistral", "mixtral", "olmoe", "qwen3_moe", "ouro", "glm4_moe")
"""Families whose layers are all alike: windowed where `sliding_window` is set."""

LLAMA3_TURNS = ("low_freq_factor", "high_freq_factor")

LISTS_FEED_FORWARDS = ("glm4_moe_lite",)
"""Families whose config.json names the feed-forward layer of every layer."""

OF_TRAINING = {
    "dtype", "remat", "embedding_std", "feed_forward_multiple_of", "backward_loops", "options",
}  # fmt: skip
"""Fields of `LoopedConfig` that change nothing in what a trained model computes."""


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
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embedding,
        "hidden_act": "silu",
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
    softmax = next((getattr(config, word) for word in config.layers if word in SOFTMAX), None)
    if softmax is not None:
        found["num_key_value_heads"] = softmax.key_value_heads or config.heads
        found["head_dim"] = softmax.head_size or config.width // config.heads
        if softmax.rotary_factor is not None:
            is_yarn = softmax.rotary_rule == "yarn"
            low, high = ("beta_slow", "beta_fast") if is_yarn else LLAMA3_TURNS
            rope |= {
                "rope_type": softmax.rotary_rule,
                "factor": softmax.rotary_factor,
                low: softmax.rotary_low,
                high: softmax.rotary_high,
                "original_max_position_embeddings": softmax.rotary_original_length,
            }
            if is_yarn:
                rope["truncate"] = softmax.rotary_truncate
        if softmax.rotary_fraction != 1:
            rope["partial_rotary_factor"] = softmax.rotary_fraction
        if style == "glm4_moe":
            found["attention_bias"] = softmax.projection_biases
            found["use_qk_norm"] = softmax.query_key_norm
    if family.word == "mla":
        found |= _latent_settings(config)
        if config.mla.yarn_factor is not None:
            own = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            rope |= {name: getattr(config.mla, f"yarn_{name}") for name in own}
            rope["rope_type"] = "yarn"
            rope["original_max_position_embeddings"] = config.mla.yarn_original_length
    elif style not in WITHOUT_LAYER_TYPES:
        words = {ours: theirs for theirs, ours in WORDS.items()}
        found["layer_types"] = [words.get(word, word) for word in config.layers]
    windows = "window" in config.layers
    found["sliding_window"] = config.window.sliding_window if windows else None
    if style in ("qwen2", "qwen3"):
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
    return found | {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}


def _spelled(family: Family, config: LoopedConfig) -> dict[str, Any]:
    spelling: Any = family.spelling
    found = spelled_settings(spelling, config)
    if family.router is not None and "moe" in config.feed_forward_words:
        kinds = {"moe": "sparse", "swiglu": "dense"}
        usual = _mixture_settings(family.router, config)
        del usual["first_k_dense_replace"]
        usual["mlp_layer_types"] = [kinds[word] for word in config.feed_forward_words]
        theirs = {usual: own for own, usual in spelling.renamed.items()}
        found |= {theirs.get(name, name): value for name, value in usual.items()}
    return found


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
    if "swiglu" not in config.feed_forward_words:
        del ours["feed_forward"]
    # What is None follows from other sizes, and was written out as what follows.
    spelling = FAMILIES[style].spelling
    without_use = {"heads", "rope_theta"} - {*(ours if spelling is None else spelling.sizes)}
    odd = [
        name
        for name, value in ours.items()
        if name not in OF_TRAINING | without_use and value is not None and value != theirs[name]
    ]
    used = sorted({*config.layers} | ({"moe"} & {*config.feed_forward_words}))
    for word in used:
        mine, other = (dataclasses.asdict(getattr(c, word)) for c in (config, read))
        odd += [
            f"{word}.{name}"
            for name, value in mine.items()
            if value is not None and value != other.get(name) and name != "quantised_cache"
        ]
    if odd:
        name = odd[0]
        word, _, option = name.rpartition(".")
        held = getattr(getattr(config, word) if word else config, option)
        raise ValueError(f"style {style!r} cannot express {name} {held!r} of this model.")
