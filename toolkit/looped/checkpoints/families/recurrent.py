"""Families with recurrent layers, one row each, and what the config.json of each of them says."""

from typing import Any

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.hybrids import HYBRIDS, whole_of, without_limit


def refuse_others(settings: dict[str, Any], **wanted: Any) -> None:
    """Take settings that have one value out, if they have it."""
    for name, value in wanted.items():
        found = settings.pop(name, value)
        if found not in (value, None):
            raise ValueError(f"config.json has {name} {found!r}; known is {value!r}.")


def _mamba2(settings: dict[str, Any]) -> dict[str, Any]:
    count = settings.get("num_hidden_layers")
    settings["layer_types"] = ["linear_attention"] * (count if isinstance(count, int) else 0)
    inner = whole_of(settings, "num_heads") * whole_of(settings, "head_dim")
    width = whole_of(settings, "hidden_size")
    if whole_of({"expand": 2} | settings, "expand") * width != inner:
        raise ValueError(
            f"config.json has an expand other than num_heads head_dim / hidden_size, {inner} / "
            f"{width}."
        )
    settings.pop("expand", None)
    without_limit(settings)
    return settings


def _written_mamba2(settings: dict[str, Any]) -> dict[str, Any]:
    inner, width = settings["num_heads"] * settings["head_dim"], settings["hidden_size"]
    if inner % width:
        raise ValueError(
            f"style 'mamba2' cannot express mamba2 layers of {inner} channels: wanted a multiple "
            f"of width {width}."
        )
    del settings["layer_types"]
    return settings | {"expand": inner // width}


def _lfm2(settings: dict[str, Any]) -> dict[str, Any]:
    """The hidden size is said by a rule; the published files repeat sizes by older names."""
    width, heads = settings.get("hidden_size"), settings.get("num_attention_heads")
    refuse_others(
        settings, block_dim=width, conv_dim=width, conv_dim_out=width, num_heads=heads,
        block_norm_eps=settings.get("norm_eps"), block_use_swiglu=True, use_pos_enc=True,
    )  # fmt: skip
    tied = settings.pop("tie_embedding", None)
    settings.setdefault("tie_word_embeddings", True if tied is None else tied)
    older = settings.pop("block_ff_dim", None)
    hidden = settings.get("intermediate_size") if older is None else older
    multiplier = settings.pop("block_ffn_dim_multiplier", 1.0)
    multiple = whole_of({"block_multiple_of": 256} | settings, "block_multiple_of")
    settings.pop("block_multiple_of", None)
    if settings.pop("block_auto_adjust_ff_dim", True) and isinstance(hidden, int):
        hidden = int((1.0 if multiplier is None else multiplier) * int(2 * hidden / 3))
        hidden = multiple * -(-hidden // multiple)
    settings["intermediate_size"] = hidden
    softmax = settings.pop("full_attn_idxs", None)
    if settings.get("layer_types") is None and softmax is not None:
        every = range(settings.get("num_hidden_layers") or 0)
        settings["layer_types"] = ["full_attention" if n in softmax else "conv" for n in every]
    return settings


def _granite(settings: dict[str, Any]) -> dict[str, Any]:
    """One word for attention with and one without positions; factors in place of a divisor."""
    position = settings.pop("position_embedding_type", None)
    if position not in ("rope", "nope", None):
        raise ValueError(
            f"config.json has position_embedding_type {position!r}; known are 'rope' and 'nope'."
        )
    softmax = "rotary" if position == "rope" else "full_attention"
    kinds = {"mamba": "linear_attention", "attention": softmax, "full_attention": softmax}
    settings["layer_types"] = [kinds.get(k, k) for k in settings.get("layer_types") or ()]
    if position != "rope":
        refuse_others(settings, rope_parameters=settings.get("rope_parameters"), rope_scaling=None)
        settings["rope_theta"] = 10_000.0
    width, heads = whole_of(settings, "hidden_size"), whole_of(settings, "mamba_n_heads")
    inner = whole_of({"mamba_expand": 2} | settings, "mamba_expand") * width
    settings.pop("mamba_expand", None)
    size = settings.get("mamba_d_head", "auto")
    settings["mamba_d_head"] = inner // heads if size == "auto" else size
    if whole_of(settings, "mamba_d_head") * heads != inner:
        raise ValueError(
            f"config.json has mamba_d_head {size!r} and mamba_n_heads {heads}, which do not make "
            f"{inner} channels."
        )
    without_limit(settings)
    return settings


def _written_granite(settings: dict[str, Any]) -> dict[str, Any]:
    inner, width = settings["mamba_n_heads"] * settings["mamba_d_head"], settings["hidden_size"]
    kinds = {*settings["layer_types"]}
    if inner % width or {"rotary", "full_attention"} <= kinds:
        raise ValueError(
            "style 'granitemoehybrid' wants mamba2 layers of a multiple of width, and attention "
            'that is "full" everywhere or "nope" everywhere.'
        )
    types = ["full_attention" if kind == "rotary" else kind for kind in settings["layer_types"]]
    settings.pop("norm_topk_prob", None)
    position = "rope" if "rotary" in kinds else None
    return {
        "num_local_experts": 0, **settings, "layer_types": types, "mamba_expand": inner // width,
        "position_embedding_type": position,
    }  # fmt: skip


def _kimi_linear(settings: dict[str, Any]) -> dict[str, Any]:
    """The published files say the layers in groups, counted from 1."""
    own = settings.pop("linear_attn_config", None)
    if own is not None:
        settings |= {
            "linear_head_dim": own.get("head_dim"),
            "linear_num_heads": own.get("num_heads"),
            "linear_conv_kernel_dim": own.get("short_conv_kernel_size"),
        }
        softmax = own.get("full_attn_layers") or ()
        every = range(1, (settings.get("num_hidden_layers") or 0) + 1)
        kinds = ["full_attention" if n in softmax else "linear_attention" for n in every]
        if sorted([*softmax, *(own.get("kda_layers") or ())]) != [*every]:
            raise ValueError(
                "config.json has a linear_attn_config whose full_attn_layers and kda_layers are "
                f"not the layers 1 to {len(every)}, each once."
            )
        settings["layer_types"] = kinds
    if "mlp_layer_types" not in settings:
        settings.setdefault("first_k_dense_replace", 1)
    return settings


_MINIMAX = ("full_attn", "linear_attn", "mlp")
_MINIMAX_ALPHAS = tuple(f"{part}_alpha_factor" for part in _MINIMAX)
_MINIMAX_BETAS = tuple(f"{part}_beta_factor" for part in _MINIMAX)

RECURRENT: dict[str, Family] = {
    **HYBRIDS,
    "granitemoehybrid": Family(
        "granitemoehybrid", router="mixtral", layers="listed", is_fused=True,
        reads={
            "head_dim": None,
            "shared_intermediate_size": scalars.size("moe.shared_hidden", "feed_forward"),
            "embedding_multiplier": scalars.EMBEDDING_SCALE,
            "residual_multiplier": scalars.RESIDUAL_SCALE,
            "attention_multiplier": scalars.SCORE_SCALE,
            "logits_scaling": scalars.HEAD_DIVISOR,
            "mamba_n_groups": scalars.size("mamba2.heads"),
            "mamba_n_heads": scalars.size("mamba2.value_heads"),
            "mamba_d_state": scalars.size("mamba2.key_size"),
            "mamba_d_head": scalars.size("mamba2.value_size"),
            "mamba_d_conv": scalars.size("mamba2.convolution_size"),
        },
        defaults={"attention_multiplier": 1.0},
        fixed={
            "mamba_proj_bias": (False, None), "mamba_conv_bias": (True, None),
            "normalization_function": ("rmsnorm", None),
        },
        harmless="intermediate_size mamba_chunk_size init_method",
        words={"linear_attention": "mamba2", "full_attention": "nope", "rotary": "full"},
        names={
            r"\.mixer\.": ".mamba.",
            r"\.mlp\.gate_up_proj": ".shared_mlp.input_linear",
            r"\.mlp\.down_proj": ".shared_mlp.output_linear",
        },
        prepared=_granite, written=_written_granite,
    ),
    "kimi_linear": Family(
        "kimi_linear", router="kimi_linear", layers="listed",
        switches={"mla.rotary": False}, defaults={"rms_norm_eps": 1e-5},
        reads={
            "num_attention_heads": scalars.size("heads"),
            "num_key_value_heads": scalars.whole("heads"),
            "linear_num_heads": scalars.size("kda.heads"),
            "linear_head_dim": scalars.size("kda.key_size", "kda.value_size"),
            "linear_conv_kernel_dim": scalars.size("kda.convolution_size"),
        },
        fixed={
            "mla_use_nope": (True, None), "moe_router_activation_func": ("sigmoid", None),
            "use_grouped_topk": (True, None), "moe_layer_freq": (1, None),
            "tie_word_embeddings": (False, None),
        },
        harmless="head_dim rope_theta rope_scaling rope_parameters",
        words={"linear_attention": "kda", "full_attention": "mla"},
        renamed={
            "num_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
            "num_expert_group": "n_group",
            "moe_renormalize": "norm_topk_prob",
        },
        prepared=_kimi_linear,
    ),
    "lfm2": Family(
        "lfm2", layers="listed", switches={"softmax.query_key_norm": True},
        reads={
            "head_dim": None,
            "norm_eps": scalars.EPSILON,
            "conv_L_cache": scalars.size("conv.convolution_size"),
            "conv_bias": scalars.truth("conv.biases"),
        },
        defaults={"rope_theta": 1e6, "norm_eps": 1e-5},
        harmless="block_mlp_init_scale block_out_init_scale block_use_xavier_init "
        "conv_use_xavier_init",
        words={"conv": "conv", "full_attention": "full"},
        names={
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "ffn_norm",
            r"^model\.norm": "model.embedding_norm",
            r"mlp\.gate_proj": "feed_forward.w1",
            r"mlp\.up_proj": "feed_forward.w3",
            r"mlp\.down_proj": "feed_forward.w2",
            r"self_attn\.o_proj": "self_attn.out_proj",
            r"(self_attn\.[qk])_norm": r"\1_layernorm",
        },
        prepared=_lfm2, written=lambda settings: settings | {"block_auto_adjust_ff_dim": False},
    ),
    "mamba2": Family(
        "mamba2", layers="listed", fed="none", prefix="backbone.",
        defaults={"layer_norm_epsilon": 1e-5},
        reads={
            "layer_norm_epsilon": scalars.EPSILON,
            "intermediate_size": None,
            "num_heads": scalars.size("heads", "mamba2.value_heads"),
            "n_groups": scalars.size("mamba2.heads"),
            "state_size": scalars.size("mamba2.key_size"),
            "head_dim": scalars.size("mamba2.value_size"),
            "conv_kernel": scalars.size("mamba2.convolution_size"),
        },
        fixed={"use_bias": (False, None), "use_conv_bias": (True, None)},
        harmless="chunk_size residual_in_fp32 rescale_prenorm_residual time_step_rank "
        "time_step_min time_step_max time_step_floor rope_parameters",
        words={"linear_attention": "mamba2"},
        names={
            "embed_tokens": "embeddings",
            r"^backbone\.norm": "backbone.norm_f",
            "input_layernorm": "norm",
        },
        prepared=_mamba2, written=_written_mamba2,
    ),
    "minimax": Family(
        "minimax", router="mixtral", layers="listed", switches={"carry_norm": True},
        reads={
            "head_dim": scalars.whole(
                "softmax.head_size", "lightning.key_size", "lightning.value_size"
            ),
            **dict.fromkeys(_MINIMAX_ALPHAS, scalars.number("stream_scale")),
            **dict.fromkeys(_MINIMAX_BETAS, scalars.number("residual_scale")),
        },
        defaults=dict.fromkeys(_MINIMAX_ALPHAS + _MINIMAX_BETAS, 1.0)
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        fixed={"sliding_window": (None,)}, harmless="block_size",
        words={"linear_attention": "lightning", "full_attention": "full"},
    ),
}  # fmt: skip
"""A part of `FAMILIES`."""
