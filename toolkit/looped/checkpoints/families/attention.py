"""Families of attention alone, one row each."""

from collections.abc import Mapping
from typing import Any

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.rules import from_zero

NORMS_AFTER = {
    "mixer_end_norm": "post_attention_layernorm",
    "feed_forward_end_norm": "post_feedforward_layernorm",
}
GEMMA_NORMS = NORMS_AFTER | {
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
}
GLM_NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_end_norm": "post_self_attn_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward_end_norm": "post_mlp_layernorm",
}


def _smollm3(settings: Mapping[str, Any], words: list[str]) -> list[str]:
    """Every fourth layer has no positions, or those of a list of zeros and ones."""
    every, listed = settings.get("no_rope_layer_interval") or 4, settings.get("no_rope_layers")
    turned = listed or [(layer + 1) % every != 0 for layer in range(len(words))]
    if len(turned) != len(words) or any(
        word != "full" for word, turns in zip(words, turned, strict=True) if not turns
    ):
        raise ValueError(
            "config.json has no_rope_layers that are not one per layer, or name a layer with a "
            "window; wanted full layers among them."
        )
    return [word if turns else "nope" for word, turns in zip(words, turned, strict=True)]


def _unrotated(settings: Mapping[str, Any], words: list[str]) -> list[str]:
    """Layers without a window have no positions."""
    return ["nope" if word == "full" else word for word in words]


def _exaone4(settings: Mapping[str, Any], words: list[str]) -> list[str]:
    """The same, where there are windows at all."""
    return words if settings.get("sliding_window") is None else _unrotated(settings, words)


ACT = {"hidden_act": scalars.ACTIVATION}
LLAMA = ACT | {"attention_bias": scalars.ATTENTION_BIAS, "mlp_bias": scalars.FED_BIAS}
_AFTER = {"pre_norm": False, "sandwich_norm": True}
_LAYER_NORM = {"norm": "layer"}
_QK_NORM = {"softmax.query_key_norm": True}
_FULL_BIASES = {"softmax.projection_biases": True, "softmax.output_bias": True}
_EPSILON = {"layer_norm_eps": scalars.EPSILON}
_BIASES = {"attention_bias": scalars.ATTENTION_BIAS, "mlp_bias": scalars.FED_BIAS}
_COHERE = {"norm": "layer_without_bias", "parallel_residual": True, "shared_norm": True}
_GEMMA = {
    "query_pre_attn_scalar": scalars.SCORE_SIZE,
    "final_logit_softcapping": scalars.HEAD_CAP,
    "hidden_activation": scalars.ACTIVATION,
    "hidden_size": scalars.EMBEDDING_ROOT,
    "attention_bias": scalars.ATTENTION_BIAS,
}
_CAPPED = _GEMMA | {"attn_logit_softcapping": scalars.SCORE_CAP}
_GEMMA2 = {
    "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}  # fmt: skip
_GEMMA3 = _GEMMA2 | {
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}  # fmt: skip
_TANH = {"hidden_act": "gelu_pytorch_tanh"}
_GLM4 = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
_ONE_WAY = {"use_bidirectional_attention": (False, None)}
_GATELESS = {"fed": "mlp", "switches": _LAYER_NORM}
_MINICPM3 = {
    "rms_norm_eps": 1e-5, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
}  # fmt: skip

ATTENTION: dict[str, Family] = {
    "arcee": Family(
        "softmax", reads=LLAMA, layers="alike", fed="mlp",
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    "cohere": Family(
        "interleaved", switches=_COHERE, layers="alike", fixed={"use_qk_norm": (False, None)},
        reads=ACT | _EPSILON | _BIASES | {"logit_scale": scalars.HEAD_SCALE},
        defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 5e5},
    ),
    "cohere2": Family(
        "interleaved", switches=_COHERE, pattern=_unrotated, period=4, between="window",
        reads=ACT | _EPSILON | _BIASES | {"logit_scale": scalars.HEAD_SCALE},
        defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096},
    ),
    "ernie4_5": Family(
        "interleaved", layers="alike", reads=ACT | {"use_bias": scalars.ALL_BIASES},
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    "exaone4": Family(
        "softmax", switches=_AFTER | _QK_NORM, norms=NORMS_AFTER,
        pattern=_exaone4, period=4, between="window", reads=ACT,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "gemma": Family(
        "softmax", from_zero, layers="alike", fixed=_ONE_WAY, defaults={"head_dim": 256} | _TANH,
        reads={
            "hidden_act": scalars.GEMMA_ACTIVATION,
            "attention_bias": scalars.ATTENTION_BIAS, "hidden_size": scalars.EMBEDDING_ROOT,
        },
    ),
    "gemma2": Family(
        "softmax", from_zero, switches={"sandwich_norm": True}, norms=GEMMA_NORMS, period=2,
        between="window", reads=_CAPPED, defaults=_GEMMA2, fixed=_ONE_WAY, harmless="hidden_act",
    ),
    "gemma3_text": Family(
        "gemma3", from_zero, switches=_QK_NORM | {"sandwich_norm": True}, norms=GEMMA_NORMS,
        period=6, between="window", ropes=True, reads=_GEMMA,
        defaults=_GEMMA3, fixed=_ONE_WAY | {"attn_logit_softcapping": (None,)},
        harmless="hidden_act",
    ),
    "glm": Family(
        "interleaved", layers="alike", is_fused=True, defaults=_GLM4 | {"attention_bias": True},
        reads=ACT | {"attention_bias": scalars.QKV_BIAS},
    ),
    "glm4": Family(
        "interleaved", layers="alike", is_fused=True, switches={"sandwich_norm": True},
        norms=GLM_NORMS, reads=ACT | {"attention_bias": scalars.QKV_BIAS},
        defaults=_GLM4 | {"attention_bias": True},
    ),
    "gpt_neox": Family(
        "gpt_neox", fed="mlp", switches=_LAYER_NORM | _FULL_BIASES | {"fed.biases": True},
        layers="alike", prefix="gpt_neox.",
        reads=ACT | _EPSILON | {
            "use_parallel_residual": scalars.PARALLEL,
            "attention_bias": scalars.ATTENTION_BIAS,
        },
        defaults={
            "layer_norm_eps": 1e-5, "hidden_act": "gelu", "partial_rotary_factor": 0.25,
            "use_parallel_residual": True, "attention_bias": True,
        },
        older={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        names={
            r"\bembed_tokens\.": "embed_in.", r"\bself_attn\.": "attention.",
            r"\bo_proj\.": "dense.",
            r"\bup_proj\.": "dense_h_to_4h.", r"\bdown_proj\.": "dense_4h_to_h.",
            r"\bnorm\.": "final_layer_norm.", r"^lm_head\.": "embed_out.",
        },
    ),
    "granite": Family(
        "softmax", layers="alike",
        reads=LLAMA | {
            "embedding_multiplier": scalars.EMBEDDING_SCALE,
            "residual_multiplier": scalars.RESIDUAL_SCALE,
            "attention_multiplier": scalars.SCORE_SCALE,
            "logits_scaling": scalars.HEAD_DIVISOR,
        },
        defaults={"attention_multiplier": 1.0},
    ),
    "helium": Family(
        "interleaved", layers="alike", reads=LLAMA | {"attention_bias": scalars.QKV_BIAS},
        defaults={"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
    ),
    "jais2": Family(
        "softmax", **_GATELESS, layers="alike", reads=LLAMA | _EPSILON,
        defaults={
            "layer_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True,
        },
    ),
    "minicpm3": Family(
        "minicpm3", word="mla", layers="alike", fixed={
            "attention_bias": (False, None), "mlp_bias": (False, None),
        },
        reads=ACT | {
            "scale_emb": scalars.EMBEDDING_SCALE, "scale_depth": scalars.RESIDUAL_DEPTH,
            "dim_model_base": scalars.HEAD_BASE,
        },
        defaults=_MINICPM3,
    ),
    "ministral": Family("softmax", reads=ACT, defaults={"sliding_window": 4096}),
    "nemotron": Family(
        "softmax", from_zero, **_GATELESS, layers="alike",
        reads=LLAMA | {"norm_eps": scalars.EPSILON},
        defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    ),
    "olmo2": Family(
        "softmax", switches=_AFTER | {"softmax.projection_norm": True}, norms=NORMS_AFTER,
        layers="alike", reads=ACT | {"attention_bias": scalars.ATTENTION_BIAS},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        "softmax", switches=_AFTER | {"softmax.projection_norm": True}, norms=NORMS_AFTER,
        period=4, between="window", ropes=True,
        reads=ACT | {"attention_bias": scalars.ATTENTION_BIAS},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "phi": Family(
        "softmax", switches=_LAYER_NORM | _FULL_BIASES | {
            "parallel_residual": True, "shared_norm": True, "head_bias": True, "fed.biases": True,
        },
        fed="mlp", layers="alike", fixed={"qk_layernorm": (False, None)}, reads=ACT | _EPSILON,
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        names={
            r"\bo_proj\.": "dense.", r"\bup_proj\.": "fc1.", r"\bdown_proj\.": "fc2.",
            r"\bnorm\.": "final_layernorm.",
        },
    ),
    "phi3": Family(
        "phi3", layers="window", is_fused=True, reads=ACT,
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    ),
    "seed_oss": Family(
        "softmax", layers="alike",
        reads=ACT | {
            "attention_bias": scalars.QKV_BIAS, "attention_out_bias": scalars.OUTPUT_BIAS,
            "mlp_bias": scalars.FED_BIAS,
        },
        defaults={"head_dim": 128, "attention_bias": True},
    ),
    "smollm3": Family(
        "softmax", pattern=_smollm3, reads=LLAMA, defaults={"rope_theta": 2e6},
    ),
    "stablelm": Family(
        "softmax", switches=_LAYER_NORM, layers="alike", fixed={"qk_layernorm": (False, None)},
        reads=ACT | _EPSILON | {
            "use_qkv_bias": scalars.QKV_BIAS, "use_parallel_residual": scalars.PARALLEL_ONE_NORM,
        },
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    ),
    "starcoder2": Family(
        "softmax", **_GATELESS, layers="window",
        reads=ACT | {"norm_epsilon": scalars.EPSILON, "use_bias": scalars.ALL_BIASES},
        defaults={"norm_epsilon": 1e-5, "use_bias": True} | _TANH,
        names={r"\bup_proj\.": "c_fc.", r"\bdown_proj\.": "c_proj."},
    ),
    "vaultgemma": Family(
        "softmax", from_zero, norms=GEMMA_NORMS, period=2, between="window", reads=_CAPPED,
        defaults=_GEMMA2, harmless="hidden_act",
    ),
}  # fmt: skip
"""Rows of `FAMILIES`."""
