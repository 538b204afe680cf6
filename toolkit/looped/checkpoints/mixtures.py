"""Mixtures of experts in published checkpoints: what config.json says of them, and their names.

A file has one tensor per expert and projection; what a module's own `state_dict` writes has them
fused, all experts in one tensor. Both spellings are read.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from toolkit.experts import ROUTERS
from toolkit.looped.checkpoints.rules import WeightRule, as_it_is, projection, stacked, vector
from toolkit.looped.checkpoints.tensors import TABLE
from toolkit.looped.feed_forward import MIXTURES

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Where config.json says the number of experts."""

READS_NORM_TOPK = (
    "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v3", "kimi_k2", "glm4_moe",
    "nemotron_h",
)  # fmt: skip
"""Families whose models read `norm_topk_prob`; all others have the rule of their row."""

HIDDEN_IS_OF_EXPERTS = ("mixtral", "olmoe", "gpt_oss")
"""Families whose `intermediate_size` is that of an expert."""

OF_MIXTURES = "block_sparse_moe"
"""What Mixtral and Kimi Linear call a feed-forward layer."""

UNUSABLE = {
    "weight_scale_inv": "FP8",
    "_weight_scale": "NVFP4 or MXFP8",
    "_blocks": "MXFP4",
    "_scales": "MXFP4",
}
"""Endings of tensors' names that show numbers of a format which is not read."""


def mixture_fields(router: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`feed_forwards`, the options of "moe" layers and the dense hidden size, by a config.json."""
    count = next((settings[name] for name in COUNTS if settings.get(name)), None)
    hidden = settings.get("moe_intermediate_size")
    words = _words(settings)
    if count is None or not MIXTURES & {*words}:
        return {"feed_forwards": "swiglu"}
    if router in HIDDEN_IS_OF_EXPERTS:
        hidden = settings.get("intermediate_size")
    for name, value in (
        ("moe_intermediate_size", hidden),
        ("num_experts_per_tok", settings.get("num_experts_per_tok")),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"config.json does not say {name!r} in a whole number.")
    row, shared = ROUTERS[router], None
    if row.shared == "gated":
        shared = settings.get("shared_expert_intermediate_size")
    if row.shared == "added":
        shared = (settings.get("n_shared_experts") or 0) * int(hidden or 0)
    options = {
        **row.switches,
        **_switches(router, settings),
        "experts": count,
        "chosen": settings["num_experts_per_tok"],
        "hidden": hidden,
        "shared_hidden": shared or None,
        "shared_gate": row.shared == "gated" and bool(shared),
        "choice_bias": row.has_choice_bias,
        "router_bias": row.has_logit_bias,
        "activation": row.activation,
        "biases": row.has_biases,
    }
    return {"feed_forwards": " ".join(words), "options": {"moe": options}}


def _words(settings) -> list[str]:
    layers = range(settings["num_hidden_layers"])
    if (kinds := settings.get("fed_types")) is not None:
        return kinds.split()
    kinds = settings.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == len(layers):
        return ["moe" if kind == "sparse" else "swiglu" for kind in kinds]
    first = settings.get("first_k_dense_replace") or 0
    step = settings.get("decoder_sparse_step") or 1
    dense = settings.get("mlp_only_layers") or ()
    is_moe = [n >= first and n not in dense and (n + 1) % step == 0 for n in layers]
    return ["moe" if moe else "swiglu" for moe in is_moe]


def _switches(router: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says beyond the family's row."""
    found: dict[str, Any] = {}
    if router in READS_NORM_TOPK and settings.get("norm_topk_prob") is not None:
        found["normalise"] = bool(settings["norm_topk_prob"])
    scale = settings.get("routed_scaling_factor")
    has_scale = "scale" in ROUTERS[router].switches
    if scale is not None and has_scale:
        found["scale"] = float(scale)
    if router == "deepseek_v2":
        method = settings.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(
                f"config.json has topk_method {method!r}; known are 'greedy' and "
                "'group_limited_greedy'."
            )
        if method == "greedy":
            return found | {"groups": 1, "chosen_groups": 1}
    if has_scale:
        groups = settings.get("n_group") or 1
        chosen = settings.get("topk_group") or 1
        found |= {"groups": groups, "chosen_groups": chosen}
    return found


def mixture_rules(
    router: str, fed: str, options: Any, here: str, names: Collection[str]
) -> tuple[WeightRule, ...]:
    """The rules of one layer with experts, in the spelling that the checkpoint has."""
    if router == "gpt_oss":
        return _GPT_OSS
    if router == "nemotron_h":
        return _nemotron_rules(options, f"{here}mixer.experts.up_proj" in names)
    if f"{here}{OF_MIXTURES}.input_linear.weight" in names:
        return _GRANITE
    is_mixtral = any(name.startswith(f"{here}{OF_MIXTURES}.") for name in names)
    folder = OF_MIXTURES if is_mixtral else "mlp"
    parts = {"gate": "w1", "up": "w3", "down": "w2"} if is_mixtral else _PARTS
    rules = [projection("router", f"{folder}.gate.weight")]
    if fed == "hash_moe":
        rules.append(as_it_is("router.table", f"{folder}.gate.{TABLE}"))
    elif options.choice_bias:
        rules.append(vector("router.choice_bias", f"{folder}.gate.e_score_correction_bias"))
    if f"{here}{folder}.experts.gate_up_proj" in names:
        rules += [_fused_gate_up(folder), _fused_down(folder)]
    else:
        every = range(options.experts)
        rules += [
            stacked(f"experts.{ours}", [f"{folder}.experts.{n}.{theirs}.weight" for n in every])
            for ours, theirs in parts.items()
        ]
    if options.shared_hidden is not None:
        shared = f"{folder}.shared_expert" + ("" if options.shared_gate else "s")
        rules += [projection(f"shared.{o}", f"{shared}.{t}.weight") for o, t in _PARTS.items()]
    if options.shared_gate:
        gate = f"{folder}.shared_expert_gate.weight"
        rules.append(WeightRule((gate,), ("shared_gate",), lambda _, tensor: [tensor.T]))
    return tuple(rules)


_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _fused_gate_up(folder: str) -> WeightRule:
    """[experts, gate and up, width] -> two of [experts, width, hidden]."""
    return WeightRule(
        (f"{folder}.experts.gate_up_proj",),
        ("experts.gate", "experts.up"),
        lambda _, fused: jnp.split(jnp.swapaxes(fused, 1, 2), 2, axis=-1),
    )


def _fused_down(folder: str) -> WeightRule:
    """[experts, width, hidden] -> [experts, hidden, width]."""
    return WeightRule(
        (f"{folder}.experts.down_proj",),
        ("experts.down",),
        lambda _, fused: [jnp.swapaxes(fused, 1, 2)],
    )


def _alternating(_: Any, fused: Array) -> list[Array]:
    """Gate and up in turn -> apart."""
    return [fused[..., ::2], fused[..., 1::2]]


_GPT_OSS = (
    projection("router", "mlp.router.weight"),
    vector("router.bias", "mlp.router.bias"),
    WeightRule(("mlp.experts.gate_up_proj",), ("experts.gate", "experts.up"), _alternating),
    WeightRule(
        ("mlp.experts.gate_up_proj_bias",), ("experts.gate_bias", "experts.up_bias"), _alternating
    ),
    as_it_is("experts.down", "mlp.experts.down_proj"),
    as_it_is("experts.down_bias", "mlp.experts.down_proj_bias"),
)


def _nemotron_rules(options: Any, is_fused: bool) -> tuple[WeightRule, ...]:
    """Experts without a gate, perhaps between two projections of all tokens."""
    rules = [
        projection("router", "mlp.gate.weight"),
        vector("router.choice_bias", "mlp.gate.e_score_correction_bias"),
    ]
    for part in ("up", "down"):
        theirs = [f"mlp.experts.{n}.{part}_proj.weight" for n in range(options.experts)]
        fused = _renamed(_fused_down(""), f"mlp.experts.{part}_proj")._replace(
            ours=(f"experts.{part}",)
        )
        rules.append(fused if is_fused else stacked(f"experts.{part}", theirs))
        if options.shared_hidden is not None:
            rules.append(projection(f"shared.{part}", f"mlp.shared_experts.{part}_proj.weight"))
    if options.latent_size is not None:
        rules.append(projection("latent_down", "mlp.fc1_latent_proj.weight"))
        rules.append(projection("latent_up", "mlp.fc2_latent_proj.weight"))
    return tuple(rules)


def _renamed(rule: WeightRule, theirs: str) -> WeightRule:
    return rule._replace(theirs=(theirs,))


_GRANITE = (
    projection("router", f"{OF_MIXTURES}.router.layer.weight"),
    _renamed(_fused_gate_up(""), f"{OF_MIXTURES}.input_linear.weight"),
    _renamed(_fused_down(""), f"{OF_MIXTURES}.output_linear.weight"),
    WeightRule(
        ("shared_mlp.input_linear.weight",),
        ("shared.gate.kernel", "shared.up.kernel"),
        lambda _, fused: jnp.split(fused.T, 2, axis=-1),
    ),
    projection("shared.down", "shared_mlp.output_linear.weight"),
)


def check_format(names: Collection[str], settings: Mapping[str, Any]) -> None:
    """Refuse numbers in a format that is not read, by its name."""
    method = settings.get("quantization_config")
    method = method.get("quant_method") if isinstance(method, dict) else None
    for ending, named in UNUSABLE.items():
        if found := next((name for name in sorted(names) if name.endswith(ending)), None):
            raise ValueError(
                f"the checkpoint is quantised in {named} ({found}), which is not read; wanted a "
                "copy in bfloat16 or float32."
            )
    if method is not None:
        raise ValueError(
            f"config.json says that the checkpoint is quantised by {str(method).upper()}, which is "
            "not read; wanted a copy in bfloat16 or float32."
        )
