"""The routers of published families: one row of switches of `route` each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from toolkit._registry import Registry


class Router(NamedTuple):
    """A family's router.

    Attributes:
        switches: keywords of `route`; groups as in its models.
        has_choice_bias: whether a bias for balance takes part in the choice.
        has_logit_bias: whether the logits have a bias.
        activation: of its experts, a key of `ACTIVATIONS`.
        has_biases: whether the experts' projections have biases.
        shared: "none"; "added", a shared expert; "gated", a shared expert times a sigmoid.
        paper: its paper.

    Example:
        >>> row = ROUTERS["deepseek_v3"]
        >>> route(jnp.ones((3, 16)), 4, **row.switches).weights.shape
        (3, 4)
    """

    switches: Mapping[str, Any]
    paper: str
    has_choice_bias: bool = False
    has_logit_bias: bool = False
    activation: str = "silu"
    has_biases: bool = False
    shared: str = "none"


def _row(paper: str, *, shared: str = "none", **switches: Any) -> Router:
    return Router(MappingProxyType(switches), paper, shared=shared)


_V3 = _row(
    "DeepSeek-V3, 2024, arXiv:2412.19437",
    shared="added",
    scores="sigmoid",
    groups=8,
    chosen_groups=4,
    scale=2.5,
)._replace(has_choice_bias=True)


def _like_v3(paper: str, **switches: Any) -> Router:
    ungrouped = {"scores": "sigmoid", "scale": 1.0}
    return _V3._replace(switches=MappingProxyType(ungrouped | switches), paper=paper)


_QWEN = "Qwen3, 2025, arXiv:2505.09388"

ROUTERS: Registry[Router] = Registry(
    {
        "mixtral": _row("Mixtral of Experts, 2024, arXiv:2401.04088"),
        "olmoe": _row("OLMoE, 2024, arXiv:2409.02060", normalise=False),
        "qwen3_moe": _row(_QWEN),
        "qwen3_next": _row(_QWEN, shared="gated"),
        "qwen3_5_moe": _row(_QWEN, shared="gated"),
        "deepseek_v2": _row(
            "DeepSeek-V2, 2024, arXiv:2405.04434",
            shared="added",
            groups=8,
            chosen_groups=3,
            group_score="max",
            normalise=False,
            scale=16.0,
        ),
        "deepseek_v3": _V3,
        "deepseek_v4": _like_v3(
            "DeepSeek-V4 technical report, 2026", scores="sqrtsoftplus", scale=1.5
        )._replace(activation="clamped_silu"),
        "inkling2_loop": _like_v3(
            "Inkling-2, 2026, its modelling file in transformers", scale=8.0
        )._replace(shared="none", activation="capped_silu"),
        "kimi_k2": _like_v3("Kimi K2, 2025, arXiv:2507.20534", scale=2.827),
        "kimi_linear": _like_v3("Kimi Linear, 2025, arXiv:2510.26692", scale=2.446),
        "glm4_moe": _like_v3("GLM-4.5, 2025, arXiv:2508.06471"),
        "nemotron_h": _like_v3("Nemotron 3 Nano, 2025, arXiv:2512.20848")._replace(
            activation="relu2"
        ),
        "gpt_oss": _row("gpt-oss model card, 2025, arXiv:2508.10925")._replace(
            has_logit_bias=True, activation="clamped", has_biases=True
        ),
    }.items()
)
"""Routers by `model_type`. gpt-oss takes the softmax after the choice, which equals a normalised
softmax before it."""
