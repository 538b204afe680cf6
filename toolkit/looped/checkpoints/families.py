"""The families of published models, one row each: their layers, names and switches.

Around the token mixers all use the same names: "embed_tokens", "layers.N" with two norms (four with
sandwich norms) and a SwiGLU, "norm", "lm_head". They differ in the mixers, in whether a norm stores
its scale or the scale minus one, and in the fields of `Family`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from toolkit.looped.checkpoints.names import WeightRule, from_zero, vector
from toolkit.looped.checkpoints.spelling import KIMI_LINEAR, Spelling

PREFIXES = {
    "full": "self_attn.",
    "window": "self_attn.",
    "mla": "self_attn.",
    "gdn": "linear_attn.",
    "kda": "self_attn.",
}
"""Prefix of the mixer's tensors in a layer."""

SOFTMAX = ("full", "window")
WORDS = {"full_attention": "full", "sliding_attention": "window", "linear_attention": "gdn"}
"""Words of config.json's `layer_types` and ours."""


class Family(NamedTuple):
    """What all models of one `model_type` share.

    Attributes:
        mixers: the style of their mixers, a key of `STYLES`.
        norm: the function that makes the rule of a norm.
        switches: fields of `LoopedConfig` that all of them share.
        attention: options of softmax layers that all of them share.
        period: every how many layers softmax attention comes, if config.json does not say.
        word: the word of all layers if they are alike; None leaves it to config.json.
        router: the row of `ROUTERS` of its mixtures of experts, or None.
        defaults: settings where config.json has none.
        spelling: how its config.json is said; None: as most families say theirs.
    """

    mixers: str
    norm: Callable[[str, str], WeightRule] = vector
    switches: Mapping[str, Any] = {}
    attention: Mapping[str, Any] = {}
    period: int = 1
    word: str | None = None
    router: str | None = None
    defaults: Mapping[str, Any] = {}
    spelling: Spelling | None = None


_QWEN = {"query_key_norm": True, "output_gate": True, "rotary_fraction": 0.25}
_OSS = {"projection_biases": True, "output_bias": True, "sinks": True}
_LITE = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8}
_LOOPS = {"norm_every_loop": True, "exit_gate": True, "sandwich_norm": True}

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("deepseek_v3", word="mla", router="deepseek_v2"),
    "deepseek_v3": Family("deepseek_v3", word="mla", router="deepseek_v3"),
    "glm4_moe": Family("glm4_moe", router="glm4_moe"),
    "glm4_moe_lite": Family("deepseek_v3", word="mla", router="glm4_moe", defaults=_LITE),
    "gpt_oss": Family("gpt_oss", attention=_OSS, router="gpt_oss"),
    "kimi_k2": Family("deepseek_v3", word="mla", router="kimi_k2"),
    "kimi_linear": Family("kimi_linear", router="kimi_linear", spelling=KIMI_LINEAR),
    "llama": Family("llama"),
    "mistral": Family("llama"),
    "mixtral": Family("llama", router="mixtral"),
    "olmoe": Family("qwen3", attention={"projection_norm": True}, router="olmoe"),
    "qwen2": Family("qwen2", attention={"projection_biases": True}),
    "qwen3": Family("qwen3", attention={"query_key_norm": True}),
    "qwen3_moe": Family("qwen3", attention={"query_key_norm": True}, router="qwen3_moe"),
    "ouro": Family("llama", switches=_LOOPS),
    "qwen3_next": Family("qwen3_next", from_zero, attention=_QWEN, period=4, router="qwen3_next"),
    "qwen3_5": Family("qwen3_5", from_zero, attention=_QWEN, period=4),
    "qwen3_5_text": Family("qwen3_5", from_zero, attention=_QWEN, period=4),
    "qwen3_5_moe": Family("qwen3_5", from_zero, attention=_QWEN, period=4, router="qwen3_5_moe"),
    "qwen3_5_moe_text": Family(
        "qwen3_5", from_zero, attention=_QWEN, period=4, router="qwen3_5_moe"
    ),
}
"""Families by the `model_type` of config.json."""
