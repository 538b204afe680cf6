"""Families that mix tokens by attention and by Mamba-2, one row each."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.family import Family

UNLIMITED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Limits of time steps that are none, as files say them."""


def whole_of(settings: dict[str, Any], name: str) -> int:
    """A setting that has to be a whole number."""
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config.json does not say {name!r} in a whole number.")
    return value


def without_limit(settings: dict[str, Any]) -> None:
    """Take limits of time steps out, if they are none."""
    limit = settings.pop("time_step_limit", None)
    if limit is not None and limit not in UNLIMITED:
        raise ValueError(f"config.json has time_step_limit {limit!r}; known is {UNLIMITED[0]}.")


_NEMOTRON = {
    "M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe",
    "mamba": "linear_attention", "attention": "full_attention",
}  # fmt: skip


def _nemotron_h(settings: dict[str, Any]) -> dict[str, Any]:
    """A sub-layer is a layer of theirs; one of ours is a mixer and the MLP after it, if any."""
    pattern, listed = (
        settings.pop("hybrid_override_pattern", None),
        settings.pop("layer_types", None),
    )
    listed = settings.pop("layers_block_type", None) or listed or pattern
    if not listed:
        raise ValueError("config.json does not say 'layers_block_type'.")
    kinds: list[str] = []
    fed: list[str] = []
    for kind in (_NEMOTRON.get(kind, kind) for kind in listed):
        if kind in ("linear_attention", "full_attention"):
            kinds.append(kind)
            fed.append("none")
        elif kind in ("mlp", "moe") and fed and fed[-1] == "none":
            fed[-1] = kind
        else:
            raise ValueError(
                f"config.json has a layer {kind!r}, which follows no mixer: it is not read."
            )
    if "moe" in fed and settings.get("mlp_bias"):
        raise ValueError("config.json has mlp_bias True; known of layers 'moe' is False.")
    own = {"layer_types": kinds, "fed_types": " ".join(fed), "num_hidden_layers": len(kinds)}
    return settings | own


def _written_nemotron_h(settings: dict[str, Any]) -> dict[str, Any]:
    fed, kinds = settings.pop("fed_types").split(), settings.pop("layer_types")
    for name in ("num_hidden_layers", "first_k_dense_replace", "n_shared_experts"):
        settings.pop(name, None)
    pairs = zip(kinds, fed, strict=True)
    listed = [k for kind, word in pairs for k in (kind, word) if k != "none"]
    return settings | {"layers_block_type": listed}


_FALCON_ONE = (
    "ssm_in_multiplier", "ssm_out_multiplier", "attention_in_multiplier", "key_multiplier",
    "attention_out_multiplier",
)  # fmt: skip


def _falcon_h1(settings: dict[str, Any]) -> dict[str, Any]:
    count = settings.get("num_hidden_layers")
    settings["layer_types"] = ["hybrid"] * (count if isinstance(count, int) else 0)
    settings.pop("layers_block_type", None)
    heads, width = whole_of(settings, "mamba_n_heads"), whole_of(settings, "hidden_size")
    inner, expand = settings.pop("mamba_d_ssm", 1024), settings.pop("mamba_expand", 2)
    inner = expand * width if inner is None else inner
    size = settings.get("mamba_d_head", "auto")
    settings["mamba_d_head"] = inner // heads if size == "auto" else size
    if whole_of(settings, "mamba_d_head") * heads != inner:
        raise ValueError(f"config.json has a mamba_d_ssm {inner}; mamba_n_heads are {heads}.")
    if settings.get("mamba_rms_norm") and settings.get("mamba_norm_before_gate", True):
        raise ValueError("config.json has mamba_norm_before_gate True; known is False.")
    without_limit(settings)
    return settings


def _falcon_factors(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What multiplies activations there is multiplied into the weights before them."""
    factor = {name: settings.get(name) or 1.0 for name in _FALCON_ONE}
    gate, down = settings.get("mlp_multipliers") or (1.0, 1.0)
    own = _falcon_h1(dict(settings))
    inner = own["mamba_n_heads"] * own["mamba_d_head"]
    keys = own["mamba_n_groups"] * own["mamba_d_state"]
    rows = np.repeat(
        settings.get("ssm_multipliers") or (1.0,) * 5,
        [inner, inner, keys, keys, own["mamba_n_heads"]],
    )
    into = factor["attention_in_multiplier"]
    return {
        r"\.mamba\.in_proj\.weight$": rows * factor["ssm_in_multiplier"],
        r"\.mamba\.out_proj\.weight$": factor["ssm_out_multiplier"],
        r"\.self_attn\.[qv]_proj\.weight$": into,
        r"\.self_attn\.k_proj\.weight$": into * factor["key_multiplier"],
        r"\.self_attn\.o_proj\.weight$": factor["attention_out_multiplier"],
        r"\.feed_forward\.gate_proj\.weight$": gate,
        r"\.feed_forward\.down_proj\.weight$": down,
    }


def _written_falcon_h1(settings: dict[str, Any]) -> dict[str, Any]:
    del settings["layer_types"]
    return settings | {
        "mamba_d_ssm": settings["mamba_n_heads"] * settings["mamba_d_head"],
        "mamba_norm_before_gate": False,
    }


HYBRIDS: dict[str, Family] = {
    "falcon_h1": Family(
        "falcon_h1", layers="listed",
        reads={
            "embedding_multiplier": scalars.EMBEDDING_SCALE,
            "lm_head_multiplier": scalars.HEAD_SCALE,
            "mamba_n_groups": scalars.size("mamba2.heads"),
            "mamba_n_heads": scalars.size("mamba2.value_heads"),
            "mamba_d_state": scalars.size("mamba2.key_size"),
            "mamba_d_head": scalars.size("mamba2.value_size"),
            "mamba_d_conv": scalars.size("mamba2.convolution_size"),
            "mamba_rms_norm": scalars.truth("mamba2.gated_norm"),
        },
        defaults={"rms_norm_eps": 1e-5, "mamba_rms_norm": False},
        fixed={
            "mamba_proj_bias": (False, None), "mamba_conv_bias": (True, None),
            "projectors_bias": (False, None),
        },
        harmless="mamba_chunk_size mamba_norm_before_gate num_logits_to_keep mlp_multipliers "
        "mamba_use_mlp ssm_multipliers " + " ".join(_FALCON_ONE),
        words={"hybrid": "hybrid"},
        names={
            r"\.mlp\.": ".feed_forward.", "post_attention_layernorm": "pre_ff_layernorm",
            r"^model\.norm\.": "model.final_layernorm.",
        },
        factors=_falcon_factors, prepared=_falcon_h1, written=_written_falcon_h1,
    ),
    "nemotron_h": Family(
        "nemotron_h", router="nemotron_h", layers="listed", fed="mlp", is_flat=True,
        prefix="backbone.",
        reads={
            "layer_norm_epsilon": scalars.EPSILON,
            "mlp_hidden_act": scalars.ACTIVATION,
            "mlp_bias": scalars.FED_BIAS,
            "fed_types": scalars.Setting(("feed_forwards",), str),
            "n_groups": scalars.size("mamba2.heads"),
            "mamba_num_heads": scalars.size("mamba2.value_heads"),
            "ssm_state_size": scalars.size("mamba2.key_size"),
            "mamba_head_dim": scalars.size("mamba2.value_size"),
            "conv_kernel": scalars.size("mamba2.convolution_size"),
            "time_step_min": scalars.number("mamba2.shortest_step"),
            "moe_shared_expert_intermediate_size": scalars.size("moe.shared_hidden"),
            "moe_latent_size": scalars.whole("moe.latent_size"),
        },
        defaults={
            "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "time_step_min": 1e-3,
            "head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        },
        fixed={
            "use_bias": (False, None), "use_conv_bias": (True, None), "sliding_window": (None,),
            "mamba_hidden_act": ("silu", None), "mamba_proj_bias": (False, None),
            "hidden_act": ("silu", None), "tie_word_embeddings": (False, None),
        },
        harmless="expand chunk_size use_mamba_kernels mamba_ssm_cache_dtype time_step_max "
        "time_step_floor time_step_limit rescale_prenorm_residual residual_in_fp32 rope_theta "
        "num_logits_to_keep moe_shared_expert_overlap mtp_layers_block_type rope_parameters "
        "mtp_hybrid_override_pattern",
        words={"linear_attention": "mamba2", "full_attention": "nope"},
        norms={"mixer_norm": "norm", "feed_forward_norm": "norm"},
        names={
            "embed_tokens": "embeddings",
            r"^backbone\.norm\.": "backbone.norm_f.",
            r"\.(self_attn|mlp)\.": ".mixer.",
        },
        prepared=_nemotron_h, written=_written_nemotron_h,
    ),
}  # fmt: skip
"""A part of `RECURRENT`."""
