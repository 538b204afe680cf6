"""The families of published models, one row each: their layers, names and switches.

Around the token mixers most use the same names: "embed_tokens", "layers.N" with two norms and a
SwiGLU, "norm", "lm_head". They differ in the mixers, in whether a norm stores its scale or the
scale minus one, and in the fields of `Family`.
"""

from typing import Any

from toolkit.looped.checkpoints.families import scalars
from toolkit.looped.checkpoints.families.attention import ACT, ATTENTION, LLAMA
from toolkit.looped.checkpoints.families.deepseek_v4 import DEEPSEEK_V4
from toolkit.looped.checkpoints.families.family import Family
from toolkit.looped.checkpoints.families.huginn import HUGINN
from toolkit.looped.checkpoints.families.inkling2 import INKLING2_LOOP
from toolkit.looped.checkpoints.families.parcae import PARCAE
from toolkit.looped.checkpoints.families.recurrent import RECURRENT
from toolkit.looped.checkpoints.families.rwkv7 import RWKV7
from toolkit.looped.checkpoints.rules import from_zero

PREFIXES = {
    "full": "self_attn.",
    "window": "self_attn.",
    "nope": "self_attn.",
    "mla": "self_attn.",
    "gdn": "linear_attn.",
    "kda": "self_attn.",
    "mamba2": "mixer.",
    "conv": "conv.",
    "hybrid": "",
    "lightning": "self_attn.",
    "rwkv7": "attn.",
    "channel_mix": "ffn.",
    "relative": "",
    "relative_window": "",
    "shared_window": "self_attn.",
    "hca": "self_attn.",
    "csa": "self_attn.",
    "value_embedding": "self_attn.",
}
"""Prefix of the mixer's tensors in a layer."""

SOFTMAX = ("full", "window", "nope")
_NORMED = {"softmax.query_key_norm": True}
_QWEN = _NORMED | {"softmax.output_gate": True, "softmax.rotary_fraction": 0.25}
_OSS = {
    "softmax.projection_biases": True, "softmax.output_bias": True, "softmax.sinks": True,
}  # fmt: skip
_OSS_FIXED = {
    "swiglu_limit": (7.0, None),
    "swiglu_alpha": (1.702, None),
    "attention_bias": (True, None),
}
_EPSILON = {"rms_norm_eps": 1e-5}
_LITE = _EPSILON | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8}
_GLM_MOE = _EPSILON | {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5}
_LOOPS = {"norm_every_loop": True, "exit_gate": True, "sandwich_norm": True}
_QWEN3 = ACT | {"attention_bias": scalars.ATTENTION_BIAS}
_GLM = {"attention_bias": scalars.QKV_BIAS, "use_qk_norm": scalars.QK_NORM}


def _stretched(settings: dict[str, Any]) -> dict[str, Any]:
    """Without a word on positions, theirs would be stretched, and by which rule is not obvious."""
    if not (settings.get("rope_parameters") or settings.get("rope_scaling")):
        raise ValueError("config.json does not say 'rope_parameters'.")
    return settings


FAMILIES: dict[str, Family] = {
    **ATTENTION,
    **RECURRENT,
    "deepseek_v2": Family(
        "deepseek_v3", word="mla", router="deepseek_v2", defaults={"routed_scaling_factor": 1.0}
    ),
    "deepseek_v3": Family(
        "deepseek_v3", word="mla", router="deepseek_v3", defaults={"first_k_dense_replace": 3}
    ),
    "deepseek_v4": DEEPSEEK_V4,
    "glm4_moe": Family(
        "glm4_moe", router="glm4_moe", reads=_GLM, layers="alike", defaults=_GLM_MOE
    ),
    "glm4_moe_lite": Family("deepseek_v3", word="mla", router="glm4_moe", defaults=_LITE),
    "gpt_oss": Family(
        "gpt_oss", switches=_OSS, router="gpt_oss", fixed=_OSS_FIXED, period=2, between="window",
        defaults=_EPSILON | {"sliding_window": 128}, prepared=_stretched,
    ),
    "huginn_raven": HUGINN,
    **dict.fromkeys(("inkling2_loop", "inkling2_loop_text"), INKLING2_LOOP),
    "kimi_k2": Family(
        "deepseek_v3", word="mla", router="kimi_k2",
        defaults={"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    ),
    "llama": Family("softmax", reads=LLAMA, layers="alike"),
    "mistral": Family("softmax", reads=ACT, layers="window", defaults={"sliding_window": 4096}),
    "mixtral": Family(
        "llama", router="mixtral", layers="window", defaults=_EPSILON | {"rope_theta": 1e6}
    ),
    "olmoe": Family(
        "qwen3", switches={"softmax.projection_norm": True}, router="olmoe", layers="alike",
        defaults=_EPSILON,
    ),
    "qwen2": Family("softmax", switches={"softmax.projection_biases": True}, reads=ACT),
    "qwen3": Family("softmax", switches=_NORMED, reads=_QWEN3),
    "qwen3_moe": Family(
        "qwen3", switches=_NORMED, router="qwen3_moe", layers="window",
        defaults={"norm_topk_prob": False},
    ),
    "ouro": Family(
        "llama", switches=_LOOPS, layers="alike", reads={"total_ut_steps": scalars.size("loops")},
        fixed={"early_exit_threshold": (1.0, None)},
    ),
    "qwen3_next": Family("qwen3_next", from_zero, switches=_QWEN, period=4, router="qwen3_next"),
    "qwen3_5": Family("qwen3_5", from_zero, switches=_QWEN, period=4),
    "qwen3_5_text": Family("qwen3_5", from_zero, switches=_QWEN, period=4),
    "parcae": PARCAE,
    "rwkv7": RWKV7,
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        Family("qwen3_5", from_zero, switches=_QWEN, period=4, router="qwen3_5_moe"),
    ),
}  # fmt: skip
"""Families by the `model_type` of config.json."""

NOT_READ = {
    "apertus": "its activation has learned parameters",
    "bitnet": "it has norms inside its sub-layers, and its products are of one bit",
    "bloom": "its positions are slopes (ALiBi)",
    "diffllama": "each of its heads is a difference of two softmaxes",
    "falcon": "its configurations name several architectures, some with slopes (ALiBi)",
    "gpt2": "its positions are a learned table",
    "granite_swa": "each of its layers has a rotary base of its own",
    "hunyuan_v1_dense": "its queries and keys are normalised after they are turned",
    "ministral3": "its queries are scaled by their position",
    "mpt": "its positions are slopes (ALiBi)",
    "nanochat": "its norms have no parameters",
    "olmo": "its norms have no parameters",
    "opt": "its positions are a learned table",
    "persimmon": "its queries and keys have layer norms",
    "qwen2_moe": "its router has no row in `toolkit.experts.ROUTERS`",
}
"""Families that were looked at and are not read, and why."""
