"""What a config.json says of a model, as fields of `LoopedConfig`."""

from collections.abc import Mapping
from typing import Any

from toolkit._kinds import shown
from toolkit.experts import ROUTERS
from toolkit.looped.checkpoints.families import SOFTMAX, WORDS
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.rope import numbers, rope_options
from toolkit.looped.checkpoints.families.scalars import EPSILON, values_of
from toolkit.looped.checkpoints.families.spelling import prepared, spelled_fields
from toolkit.looped.checkpoints.mixtures import COUNTS, mixture_fields

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

_HARMLESS = (
    "architectures attention_dropout attn_implementation attn_pdrop auto_map aux_loss_alpha "
    "bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout "
    "decoder_start_token_id dtype embd_pdrop embedding_dropout eos_token_id ep_size "
    "experts_implementation finetuning_task gradient_checkpointing hidden_dropout id2label "
    "image_token_id initializer_factor initializer_range is_decoder is_encoder_decoder label2id "
    "language_model_only max_position_embeddings model_type mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings num_nextn_predict_layers output_attentions output_hidden_states "
    "output_router_logits pad_token_id pretraining_tp problem_type qk_head_dim quantization_config "
    "resid_pdrop residual_dropout return_dict router_aux_loss_coef router_jitter_noise "
    "router_z_loss_coef sep_token_id seq_aux task_specific_params tokenizer_class torch_dtype "
    "transformers_version unk_token_id use_cache video_token_id vision_config vision_end_token_id "
    "vision_start_token_id"
)
HARMLESS = frozenset(_HARMLESS.split())
"""Settings that change no number of a trained model."""

HARMLESS_OF_ROPE = frozenset(
    ("rope_type", "type", "mrope_section", "mrope_interleaved", "original_max_position_embeddings")
)
"""The same in its rotary settings: the sections of images are alike in a text, and a rule that
needs a length reads it."""

FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "clip_qkv": (None,),
    "mlp_bias": (False, None),
    "moe_layer_freq": (1, None),
}
"""Settings that may have these values only, in families that do not read them."""

WHY = {
    "attention_bias": "the layer has no biases of this kind",
    "attn_logit_softcapping": "the family's own model does not read it",
    "clip_qkv": "queries, keys and values are not clipped",
    "early_exit_threshold": "`generate(exit=...)` chooses where to stop",
    "mlp_bias": "the layer has no biases of this kind",
    "moe_layer_freq": "`first_k_dense_replace` alone says which layers are dense",
    "qk_layernorm": "there is no layer norm of queries and keys",
    "swiglu_alpha": "the experts' activation has this number",
    "swiglu_limit": "the experts' activation has this bound",
    "use_bidirectional_attention": "a token does not see later ones",
    "use_qk_norm": "there is no norm with a scale per head",
}
"""Why other values of a setting are refused."""

OF_EXPERTS = frozenset(
    (*COUNTS, "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "norm_topk_prob",
     "shared_expert_intermediate_size", "n_group", "topk_group", "routed_scaling_factor",
     "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "mlp_layer_types")
)  # fmt: skip
"""Settings of mixtures: `mixture_fields` reads those that its router has."""

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


class Settings(dict):
    """A config.json that knows which of its settings were read."""

    def __init__(self, *given: Mapping[str, Any]):
        super().__init__({name: value for part in given for name, value in part.items()})
        self.known: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.known.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.known.add(name)
        return super().__getitem__(name)

    def unread(self, harmless: frozenset[str]) -> list[str]:
        """The settings that were not read and say something."""
        return [
            name
            for name, value in self.items()
            if value is not None and name not in self.known | harmless and name[0] != "_"
        ]


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
        options = fields["options"]
        if "moe" in fed.get("options", {}):
            options["moe"] = fed["options"]["moe"] | options.get("moe", {})
        return fields | fed | {"options": options}
    has_experts = family.router is not None and "moe_intermediate_size" in settings
    # Where every layer is a mixture, config.json has no other size.
    required = [name for name in REQUIRED if name != "intermediate_size" or not has_experts]
    _check_settings(settings, most_layers, required)
    older = {new: settings[old] for old, new in family.older.items() if old in settings}
    settings = Settings(settings, older)
    settings.known.update(family.older)
    values, options = _values(family, settings)
    odd = settings.unread(HARMLESS)
    if odd:
        raise ValueError(
            f"config.json has {odd[0]} {shown(settings[odd[0]])}, which models of this family do "
            "not have here; remove it if it changes no number."
        )
    return fixed | _given(**values) | {"options": options}


def _values(family: Family, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `LoopedConfig`, and options by word."""
    if not any(name in family.reads for name in ("hidden_act", "hidden_activation")):
        _only("hidden_act", settings.get("hidden_act"), ("silu", None))
    for name, allowed in {**FIXED, **family.fixed}.items():
        if name not in family.reads:
            _only(name, settings.get(name), allowed)
    values = {
        "vocabulary": settings["vocab_size"],
        "width": settings["hidden_size"],
        "pattern": " ".join(_layers(family, settings)),
        "loops": settings.get("total_ut_steps"),
        "heads": settings["num_attention_heads"],
        "feed_forward": settings.get("intermediate_size"),
        "tied_embedding": settings.get("tie_word_embeddings"),
        "feed_forwards": family.fed,
    }
    words, made = values["pattern"].split(), {}
    for name, setting in reads_of(family).items():
        made |= values_of(setting, name, settings)
    values |= {name: value for name, value in made.items() if "." not in name}
    ropes = {word: _rope(family, settings, word) for word in dict.fromkeys(words)}
    base = next(iter(ropes.values())).get("rope_theta")
    values["rope_theta"] = base
    attention = {
        **family.attention,
        **_given(
            key_value_heads=settings.get("num_key_value_heads"),
            head_size=settings.get("head_dim"),
        ),
        **_of("softmax", made),
    }
    options: dict[str, dict[str, Any]] = {family.fed: {**family.dense, **_of("fed", made)}}
    longest = dict.get(settings, "max_position_embeddings")
    for word, rope in ropes.items():
        if word in SOFTMAX:
            turned = {} if word == "nope" else rope_options(rope, longest)
            fraction, own = rope.get("partial_rotary_factor"), rope.get("rope_theta")
            turned |= _given(rotary_fraction=fraction, rope_theta=None if own == base else own)
            options[word] = attention | turned
            if word == "window":
                options[word] |= _given(sliding_window=settings.get("sliding_window"))
        elif word == "mla":
            kind = rope.get("rope_type", rope.get("type"))
            _only("rope_type", kind, ("default", "yarn", None))
            _only("partial_rotary_factor", rope.get("partial_rotary_factor"), (1, None))
            options[word] = _latent_options(settings, rope if kind == "yarn" else None)
        elif word == "gdn":
            options[word] = _delta_options(settings)
    for word, rope in ropes.items():
        if word not in (*SOFTMAX, "mla"):
            continue
        if odd := rope.unread(HARMLESS_OF_ROPE):
            raise ValueError(
                f"config.json has {odd[0]} {shown(rope[odd[0]])} in its rotary settings, which "
                "nothing here reads; remove it if it changes no number."
            )
    if family.router is not None:
        settings.known |= OF_EXPERTS
        scores = ROUTERS[family.router].switches.get("scores", "softmax")
        _only("scoring_func", settings.get("scoring_func"), (scores, None))
        method = settings.get("topk_method")
        if family.router != "deepseek_v2":
            _only("topk_method", method, ("noaux_tc", None))
        fed = mixture_fields(family.router, settings)
        options |= fed.pop("options", {})
        values |= fed
    if family.fed not in values["feed_forwards"].split():
        del options[family.fed]
    return values, options


def reads_of(family: Family) -> dict[str, Any]:
    """The settings of a family that are fields of ours."""
    named = any(setting is EPSILON for setting in family.reads.values())
    return {**({} if named else {"rms_norm_eps": EPSILON}), **family.reads}


def _of(owner: str, made: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one owner's paths."""
    return {
        name.partition(".")[2]: value
        for name, value in made.items()
        if name.startswith(f"{owner}.")
    }


def _rope(family: Family, settings: Settings, word: str) -> Settings:
    """The rotary settings of one kind of layer."""
    own = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    plain = {n: value for n in names if (value := settings.get(n)) is not None}
    if not family.ropes:
        return Settings(plain, own)
    local = settings.get("rope_local_base_freq")
    theirs = "sliding_attention" if word == "window" else "full_attention"
    is_nested = any(isinstance(value, dict) for value in own.values())
    if word == "window" and local is not None:
        plain["rope_theta"] = local
    if is_nested:
        return Settings(plain, own.get(theirs) or {})
    return Settings(plain, {} if word == "window" else own)


def _delta_options(settings: Settings) -> dict[str, Any]:
    return _given(
        heads=settings.get("linear_num_key_heads"),
        value_heads=settings.get("linear_num_value_heads"),
        key_size=settings.get("linear_key_head_dim"),
        value_size=settings.get("linear_value_head_dim"),
        convolution_size=settings.get("linear_conv_kernel_dim"),
    )


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
    return found | numbers(yarn, fields, "YaRN") | truncate


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


def _layers(family: Family, settings: Settings) -> list[str]:
    count, types = settings["num_hidden_layers"], None
    if family.word is not None:
        return [family.word] * count
    window, is_used = settings.get("sliding_window"), settings.get("use_sliding_window", True)
    slides, first = window and is_used, settings.get("max_window_layers") or 0
    if family.layers == "alike":
        for kind in settings.get("layer_types") or ():
            _only("layer_types", kind, ("full_attention", None))
        _only("sliding_window", window if slides else None, (None,))
        return ["full"] * count
    if family.layers == "types":
        types = settings.get("layer_types")
        every = ["full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern"]
        every = next((n for name in every if (n := settings.get(name))), family.period)
        period = every if isinstance(every, int) else family.period
    if types is not None:
        _only("layer_types", next((t for t in types if t not in [*WORDS]), None), [*WORDS, None])
        words = [WORDS[kind] for kind in types]
    elif family.layers == "types" and family.period > 1:
        words = [family.between if (layer + 1) % period else "full" for layer in range(count)]
    else:
        first = first if slides else count
        words = ["full" if layer < first else "window" for layer in range(count)]
    return words if family.pattern is None else family.pattern(settings, words)


def _only(name, value, known):
    if value not in known:
        named = ", ".join(map(repr, known[:-1] or known))
        raise ValueError(f"config.json has {name} {value!r}; known are {named}.")
