"""What a config.json says of a model, as fields of `LoopedConfig`."""

from collections.abc import Mapping
from typing import Any

from toolkit._kinds import shown
from toolkit.experts import ROUTERS
from toolkit.looped.checkpoints.families import PARTS, SOFTMAX
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.rope import numbers, rope_options
from toolkit.looped.checkpoints.families.scalars import (
    USUAL,
    Setting,
    check_kind,
    owner_of,
    value_of,
)
from toolkit.looped.checkpoints.mixtures import COUNTS, mixture_fields

OTHERS: dict[type, str] = {
    int: "num_hidden_layers full_attention_interval max_window_layers num_experts "
    "num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size "
    "shared_expert_intermediate_size n_shared_experts n_group topk_group first_k_dense_replace "
    "decoder_sparse_step num_nextn_predict_layers max_position_embeddings sliding_window",
    float: "routed_scaling_factor",
    bool: "rope_interleave use_sliding_window norm_topk_prob",
    dict: "rope_parameters rope_scaling",
    list: "layer_types mlp_only_layers mlp_layer_types",
}
"""The types of settings that `reads_of` lacks."""

ENDS = ("prelude", "coda")
"""Settings that hold the words of the layers before and after the loops."""

LATENT_EPSILON = 1e-6
"""That of the norms of latents, which no config.json changes."""

_HARMLESS = (
    "architectures attention_dropout attn_implementation attn_pdrop auto_map aux_loss_alpha "
    "bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout "
    "decoder_start_token_id dtype embd_pdrop embedding_dropout eos_token_id ep_size "
    "experts_implementation finetuning_task gradient_checkpointing hidden_dropout id2label "
    "image_token_id initializer_factor initializer_range is_decoder is_encoder_decoder label2id "
    "language_model_only max_position_embeddings model_max_length model_type mtp_num_hidden_layers "
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
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "moe_layer_freq": (1, None),
}
"""Settings that may have these values only, in families that do not read them."""

WHY = {
    "attention_bias": "the layer has no biases of this kind",
    "attn_logit_softcapping": "the family's own model does not read it",
    "clip_qkv": "queries, keys and values are not clipped",
    "hidden_act": "its layers have no other activation",
    "early_exit_threshold": "`generate(exit=...)` chooses where to stop",
    "mlp_bias": "the layer has no biases of this kind",
    "hc_eps": "the weights of residual streams have this number",
    "moe_layer_freq": "`first_k_dense_replace` alone says which layers are dense",
    "n_shared_experts": "the family's own model does not read it",
    "num_key_value_heads": "all heads share one key",
    "qk_layernorm": "there is no layer norm of queries and keys",
    "mlp_gate_softcap": "the experts' activation has this bound",
    "mlp_up_softcap": "the experts' activation has this bound",
    "swiglu_alpha": "the experts' activation has this number",
    "swiglu_limit": "the experts' activation has this bound",
    "tie_word_embeddings": "transformers has a head of its own for these models, whatever is asked",
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
    if not settings:
        options = {word: of_owner("softmax", family.switches) for word in SOFTMAX}
        return {"residual_gate": False, **of_owner("", family.switches), "options": options}
    given = family.prepared({**family.defaults, **settings})
    given |= {new: given[old] for old, new in family.older.items() if old in given}
    given = {family.renamed.get(name, name): value for name, value in given.items()}
    _check_settings(given, most_layers)
    settings = Settings(given)
    settings.known.update(family.older)
    values, options = _values(family, settings)
    if odd := settings.unread(HARMLESS | {*family.harmless.split()}):
        raise ValueError(
            f"config.json has {odd[0]} {shown(settings[odd[0]])}, which models of this family do "
            "not have here; remove it if it changes no number."
        )
    return {"residual_gate": False, **_given(**values), "options": options}


def _values(family: Family, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `LoopedConfig`, and options by word."""
    reads = reads_of(family)
    read = {name for name, _ in reads}
    for name, allowed in {**FIXED, **family.fixed}.items():
        if name in family.fixed or (
            name not in read and not (name == "hidden_act" and "hidden_activation" in read)
        ):
            _only(name, settings.get(name), allowed)
    pattern = _layers(family, settings)
    ends = " ".join(str(settings.get(name) or "") for name in ENDS if name in family.reads)
    every = [*pattern, *ends.split()]
    words = [part for word in every for part in PARTS.get(word, (word,))]
    fed = _experts(family, settings)
    experts = fed.pop("options", {})
    made = _made(family, settings, {"", "softmax", "fed", *words, *experts})
    values = {
        "pattern": " ".join(pattern),
        "feed_forwards": family.fed,
        **fed,
        **of_owner("", made),
    }
    has_rope = "rope_parameters" not in family.harmless
    ropes = {
        w: _rope(family, settings if has_rope else Settings(), w) for w in dict.fromkeys(words)
    }
    turned = [rope.get("rope_theta") for word, rope in ropes.items() if word in (*SOFTMAX, "mla")]
    base = next(iter(turned), None)
    values.setdefault("rope_theta", base)
    options = {word: of_owner(word, made) for word in words}
    turning = {*family.defaults, *family.switches}
    longest = dict.get(settings, "max_position_embeddings")
    for word, rope in ropes.items():
        if word in SOFTMAX:
            own = {} if word == "nope" else rope_options(rope, longest)
            fraction, theta = rope.get("partial_rotary_factor"), rope.get("rope_theta")
            if not {"partial_rotary_factor", "softmax.rotary_fraction"} & turning:
                _only("partial_rotary_factor", fraction, (1, None))
            own |= _given(rotary_fraction=fraction, rope_theta=None if theta == base else theta)
            options[word] = of_owner("softmax", made) | own | options[word]
        elif word == "mla":
            options[word] |= _yarn_options(settings, rope)
        if word in (*SOFTMAX, "mla") and (odd := rope.unread(HARMLESS_OF_ROPE)):
            raise ValueError(
                f"config.json has {odd[0]} {shown(rope[odd[0]])} in its rotary settings, which "
                "nothing here reads; remove it if it changes no number."
            )
    if "moe" in experts:
        options["moe"] = experts["moe"] | of_owner("moe", made)
    if family.fed in values["feed_forwards"].split():
        options[family.fed] = of_owner("fed", made)
    return values, options


def _made(family: Family, settings: Settings, owners: set[str]) -> dict[str, Any]:
    """The values of paths that these owners have."""
    made = {"mla.latent_epsilon": LATENT_EPSILON, **family.switches}
    names: dict[str, str] = {}
    for name, setting in reads_of(family):
        paths = [path for path in setting.ours if owner_of(path) in owners]
        if not paths and name not in family.reads:
            continue
        value = value_of(setting, name, settings)
        if value is None and paths and setting.is_required:
            # Where every layer is a mixture, config.json has no other size.
            if paths == ["feed_forward"] and "moe_intermediate_size" in settings:
                continue
            raise ValueError(f"config.json does not say {name!r}.")
        for path in paths if value is not None else ():
            if names.setdefault(path, name) != name and made[path] != value:
                raise ValueError(
                    f"config.json has {name} {settings[name]!r}; known is {names[path]}, "
                    f"{made[path]!r}."
                )
            made[path] = value
    return made


def _experts(family: Family, settings: Settings) -> dict[str, Any]:
    """`feed_forwards` and the options of "moe" layers."""
    if family.router is None:
        return {}
    settings.known |= OF_EXPERTS
    scores = ROUTERS[family.router].switches.get("scores", "softmax")
    _only("scoring_func", settings.get("scoring_func"), (scores, None))
    method = settings.get("topk_method")
    if family.router != "deepseek_v2":
        _only("topk_method", method, ("noaux_tc", None))
    return mixture_fields(family.router, settings)


def reads_of(family: Family) -> list[tuple[str, Setting]]:
    """The settings of a family that are fields of ours, by their names; some make two fields."""
    own = [(name, setting) for name, setting in family.reads.items() if setting is not None]
    elsewhere = {path: name for name, setting in own for path in setting.ours}
    usual = [
        (name, setting)
        for name, setting in USUAL.items()
        if elsewhere.get(setting.ours[0], name) == name and family.reads.get(name, setting)
    ]
    return [pair for pair in usual if pair not in own] + own


def of_owner(owner: str, made: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one owner's paths."""
    return {
        path.rpartition(".")[2]: value for path, value in made.items() if owner_of(path) == owner
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


def _yarn_options(settings: Settings, rope: Settings) -> dict[str, Any]:
    """Options of "mla" layers that stretch rotary wavelengths."""
    kind = rope.get("rope_type", rope.get("type"))
    _only("rope_type", kind, ("default", "yarn", None))
    _only("partial_rotary_factor", rope.get("partial_rotary_factor"), (1, None))
    _only("rope_interleave", settings.get("rope_interleave"), (True, None))
    if kind != "yarn":
        return {}
    own = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    fields = {f"yarn_{name}": name for name in own}
    fields["yarn_original_length"] = "original_max_position_embeddings"
    return numbers(rope, fields, "YaRN") | {"yarn_truncate": rope.get("truncate", True)}


def _check_settings(settings, most_layers):
    if settings.get("num_hidden_layers") is None:
        raise ValueError("config.json does not say 'num_hidden_layers'.")
    for kind, names in OTHERS.items():
        for name in names.split():
            value = settings.get(name)
            if value is not None:
                check_kind(kind, name, value)
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
    count, known = settings["num_hidden_layers"], [*family.words]
    if family.word is not None:
        return [family.word] * count
    if family.layers == "listed" and settings.get("layer_types") is None:
        raise ValueError("config.json does not say 'layer_types'.")
    types = settings.get("layer_types")
    _only("layer_types", next((t for t in types or () if t not in known), None), [*known, None])
    if family.layers == "listed":
        return [family.words[kind] for kind in types or ()]
    window, is_used = settings.get("sliding_window"), settings.get("use_sliding_window", True)
    slides, first = window and is_used, settings.get("max_window_layers") or 0
    if family.layers == "alike":
        for kind in types or ():
            _only("layer_types", kind, ("full_attention", None))
        _only("sliding_window", window if slides else None, (None,))
        return ["full"] * count
    periods = ["full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern"]
    every = [settings.get(name) for name in periods if family.layers == "types"]
    period = next((n for n in every if n and isinstance(n, int)), family.period)
    first = first if slides else count
    words = ["full" if layer < first else "window" for layer in range(count)]
    if family.layers == "types" and types is not None:
        words = [family.words[kind] for kind in types]
    elif family.layers == "types" and family.period > 1:
        words = [family.between if (layer + 1) % period else "full" for layer in range(count)]
    return words if family.pattern is None else family.pattern(settings, words)


def _only(name, value, known):
    if value not in known:
        named = [*map(repr, known[:-1] or known)]
        verb = "are" if len(named) > 1 else "is"
        raise ValueError(f"config.json has {name} {value!r}; known {verb} {', '.join(named)}.")
