"""What a config.json says of a model, as fields of `LoopedConfig`."""

from collections.abc import Iterable, Mapping
from typing import Any

from toolkit._kinds import shown
from toolkit.looped.checkpoints.families import SOFTMAX, WORDS, Family
from toolkit.looped.checkpoints.mixtures import mixture_fields
from toolkit.looped.checkpoints.spelling import prepared, spelled_fields

KINDS = {
    int: "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
    "total_ut_steps num_key_value_heads head_dim sliding_window linear_num_key_heads "
    "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
    "full_attention_interval max_window_layers kv_lora_rank q_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim num_experts num_local_experts n_routed_experts "
    "num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size n_shared_experts "
    "n_group topk_group first_k_dense_replace decoder_sparse_step num_nextn_predict_layers",
    bool: "rope_interleave tie_word_embeddings use_sliding_window norm_topk_prob attention_bias "
    "use_qk_norm",
    dict: "rope_parameters rope_scaling",
    list: "layer_types mlp_only_layers mlp_layer_types",
}
"""The type of each setting of config.json that is read."""

LATENT_EPSILON = 1e-6
"""That of the norms of latents, which no config.json changes."""

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


def fields_of(
    family: Family, settings: Mapping[str, Any], most_layers: int | None = None
) -> dict[str, Any]:
    """Fields of `LoopedConfig` from a config.json with at most `most_layers` layers."""
    fixed = {"residual_gate": False, **family.switches}
    if not settings:
        return fixed | {"options": dict.fromkeys(SOFTMAX, family.attention)}
    settings = {**family.defaults, **settings}
    if family.spelling is not None:
        settings = prepared(family.spelling, settings)
        _check_settings(settings, most_layers, ("num_hidden_layers",))
        fields = fixed | spelled_fields(family.spelling, settings)
        fed = {} if family.router is None else mixture_fields(family.router, settings)
        return fields | fed | {"options": fields["options"] | fed.get("options", {})}
    has_experts = family.router is not None and "moe_intermediate_size" in settings
    # Where every layer is a mixture, config.json has no other size.
    required = [name for name in REQUIRED if name != "intermediate_size" or not has_experts]
    _check_settings(settings, most_layers, required)
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    known = ("default", "yarn", *(() if family.word == "mla" else ("llama3",)), None)
    _only("rope_type", kind, known)
    _only("hidden_act", settings.get("hidden_act"), ("silu", None))
    rope = {**settings, **rope}
    if family.router == "gpt_oss":
        _only("swiglu_limit", settings.get("swiglu_limit"), (7.0, None))
        _only("swiglu_alpha", settings.get("swiglu_alpha"), (1.702, None))
        _only("attention_bias", settings.get("attention_bias"), (True, None))
    _only("clip_qkv", settings.get("clip_qkv"), (None,))
    values = {
        "vocabulary": settings["vocab_size"],
        "width": settings["hidden_size"],
        "pattern": " ".join(_layers(family, settings)),
        "loops": settings.get("total_ut_steps"),
        "heads": settings["num_attention_heads"],
        "feed_forward": settings.get("intermediate_size"),
        "rope_theta": rope.get("rope_theta"),
        "norm_epsilon": settings.get("rms_norm_eps"),
        "tied_embedding": settings.get("tie_word_embeddings"),
    }
    attention = {
        **family.attention,
        **_given(
            key_value_heads=settings.get("num_key_value_heads"),
            head_size=settings.get("head_dim"),
            rotary_fraction=rope.get("partial_rotary_factor"),
        ),
        **(_rotary_options(rope) if kind == "llama3" else {}),
        **(_yarn_options(rope) if kind == "yarn" and family.word != "mla" else {}),
    }
    if family.mixers == "glm4_moe":
        attention |= _given(
            projection_biases=settings.get("attention_bias"),
            query_key_norm=settings.get("use_qk_norm"),
        )
    options = {
        "full": attention,
        "window": attention | _given(sliding_window=settings.get("sliding_window")),
        "gdn": _given(
            heads=settings.get("linear_num_key_heads"),
            value_heads=settings.get("linear_num_value_heads"),
            key_size=settings.get("linear_key_head_dim"),
            value_size=settings.get("linear_value_head_dim"),
            convolution_size=settings.get("linear_conv_kernel_dim"),
        ),
    }
    if family.word == "mla":
        _only("partial_rotary_factor", rope.get("partial_rotary_factor"), (1, None))
        options["mla"] = _latent_options(settings, rope if kind == "yarn" else None)
    used = {word: options[word] for word in values["pattern"].split()}
    fed = {} if family.router is None else mixture_fields(family.router, settings)
    used |= fed.pop("options", {})
    return fixed | _given(**values) | fed | {"options": used}


def _rotary_options(rope) -> dict[str, Any]:
    """Options of softmax layers whose wavelengths are those of Llama 3.1."""
    fields = {
        "rotary_factor": "factor",
        "rotary_low": "low_freq_factor",
        "rotary_high": "high_freq_factor",
        "rotary_original_length": "original_max_position_embeddings",
    }
    return _numbers(rope, fields, "llama3 rope")


def _yarn_options(rope) -> dict[str, Any]:
    """Options of softmax layers whose wavelengths are those of YaRN, with its own sharpening."""
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        _only(name, rope.get(name), (None,))
    fields = {"rotary_factor": "factor", "rotary_low": "beta_slow", "rotary_high": "beta_fast"}
    fields["rotary_original_length"] = "original_max_position_embeddings"
    numbers = _numbers({"beta_slow": 1, "beta_fast": 32} | rope, fields, "YaRN")
    return numbers | {"rotary_rule": "yarn", "rotary_truncate": rope.get("truncate", True)}


def _numbers(settings, fields: Mapping[str, str], owner: str) -> dict[str, Any]:
    """Numbers of a config.json by our names for them, lengths as integers."""
    for name in fields.values():
        if not isinstance(settings.get(name), int | float):
            raise ValueError(f"config.json does not say {name!r} of its {owner} in a number.")
    return {
        ours: int(settings[theirs]) if ours.endswith("original_length") else float(settings[theirs])
        for ours, theirs in fields.items()
    }


def _latent_options(settings, yarn) -> dict[str, Any]:
    """Options of "mla" layers."""
    _only("rope_interleave", settings.get("rope_interleave"), (True, None))
    names = {
        "latent_size": "kv_lora_rank",
        "key_size": "qk_nope_head_dim",
        "rope_size": "qk_rope_head_dim",
        "value_size": "v_head_dim",
    }
    for name in names.values():
        if settings.get(name) is None:
            raise ValueError(f"config.json does not say {name!r}.")
    found = {ours: settings[theirs] for ours, theirs in names.items()}
    found |= {"latent_epsilon": LATENT_EPSILON}
    found |= _given(query_latent_size=settings.get("q_lora_rank"))
    if yarn is None:
        return found
    own = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    fields = {f"yarn_{name}": name for name in own}
    fields["yarn_original_length"] = "original_max_position_embeddings"
    truncate = {"yarn_truncate": yarn.get("truncate", True)}
    return found | _numbers(yarn, fields, "YaRN") | truncate


def _check_settings(settings, most_layers, required):
    for name in required:
        if settings.get(name) is None:
            raise ValueError(f"config.json does not say {name!r}.")
    for kind, names in KINDS.items():
        for name in names.split():
            value = settings.get(name)
            is_kind = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
            if value is not None and not is_kind:
                raise ValueError(
                    f"config.json has {name} {shown(value)}; it must be a {kind.__name__}."
                )
    layers = settings["num_hidden_layers"]
    if layers < 1 or (most_layers is not None and layers > most_layers):
        raise ValueError(
            f"config.json has num_hidden_layers {layers}; the checkpoint has {most_layers} tensors."
        )
    if len(settings.get("layer_types") or range(layers)) != layers:
        raise ValueError(
            f"config.json has {len(settings['layer_types'])} layer_types; num_hidden_layers is "
            f"{layers}."
        )


def _given(**fields):
    return {name: value for name, value in fields.items() if value is not None}


def _layers(family, settings) -> Iterable[str]:
    count, types = settings["num_hidden_layers"], settings.get("layer_types")
    if family.word is not None:
        return [family.word] * count
    if types is not None:
        _only("layer_types", next((t for t in types if t not in [*WORDS]), None), [*WORDS, None])
        return (WORDS[kind] for kind in types)
    if family.period > 1:
        period = settings.get("full_attention_interval", family.period)
        return ("gdn" if (layer + 1) % period else "full" for layer in range(count))
    slides = settings.get("sliding_window") and settings.get("use_sliding_window", True)
    first = settings.get("max_window_layers", 0) if slides else count
    return ("full" if layer < first else "window" for layer in range(count))


def _only(name, value, known):
    if value not in known:
        raise ValueError(
            f"config.json has {name} {value!r}; known are {', '.join(map(repr, known[:-1]))}."
        )
