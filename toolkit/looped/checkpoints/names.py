"""Where each number of a published checkpoint goes: the names of its tensors and of our parameters.

A style has a table of rules for every kind of layer it knows; those of softmax layers are in
`softmax_names.py`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from toolkit.looped.checkpoints.inkling2_names import RELATIVE
from toolkit.looped.checkpoints.rules import (
    WeightRule,
    as_it_is,
    by_head,
    convolution,
    projection,
    vector,
)
from toolkit.looped.checkpoints.softmax_names import QWEN_ATTENTION, SOFTMAX_STYLES


def _qwen3_next_projections(layer: Any, fused: Array) -> list[Array]:
    sizes = layer.sizes
    values = sizes.values // sizes.heads
    q, k, v, gate = by_head(fused, sizes.key_size, sizes.key_size, values, values)
    return [jnp.concatenate([q, k, v], axis=-1), gate]


def _qwen3_next_gates(layer: Any, fused: Array) -> list[Array]:
    each = layer.sizes.value_heads // layer.sizes.heads
    return by_head(fused, each, each)


def _channels(layer: Any) -> tuple[int, int, int]:
    """Those of the queries, keys and values of a layer."""
    return layer.sizes.keys, layer.sizes.keys, layer.sizes.values


_DECAY = (vector("log_rate", "A_log"), vector("step_bias", "dt_bias"))

_SEPARATE_DELTA = (
    projection("query_key_value", "q_proj.weight", "k_proj.weight", "v_proj.weight")._replace(
        rows=_channels
    ),
    convolution("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")._replace(rows=_channels),
    projection("write", "b_proj.weight"),
    vector("norm.scale", "o_norm.weight"),
    projection("output", "o_proj.weight"),
)

_QWEN_DELTA = (
    convolution("conv1d.weight"),
    vector("norm.scale", "norm.weight"),
    projection("output", "out_proj.weight"),
    *_DECAY,
)


def _neighbours(channels: Array, size: int) -> Array:
    """The last `size` of the channels in halves -> pairs of neighbours."""
    order = np.arange(size).reshape(2, -1).T.ravel()
    still, turned = jnp.split(channels, [channels.shape[-1] - size], axis=-1)
    return jnp.concatenate([still, turned[..., order]], axis=-1)


def _halved_query(layer: Any, tensor: Array) -> list[Array]:
    by_head = tensor.T.reshape(tensor.shape[1], layer.sizes.heads, -1)
    return [_neighbours(by_head, layer.sizes.rope_size).reshape(tensor.T.shape)]


def _halved_latent(layer: Any, fused: Array) -> list[Array]:
    turned = _neighbours(fused.T, layer.sizes.rope_size)
    return jnp.split(turned, [layer.sizes.latent_size], axis=-1)


_LATENT = (
    WeightRule(
        ("kv_a_proj_with_mqa.weight",),
        ("latent_down.kernel", "rope_key.kernel"),
        lambda layer, fused: jnp.split(fused.T, [layer.sizes.latent_size], axis=-1),
    ),
    vector("latent_norm.scale", "kv_a_layernorm.weight"),
    WeightRule(
        ("kv_b_proj.weight",),
        ("key_up.kernel", "value_up.kernel"),
        lambda layer, fused: by_head(fused, layer.sizes.key_size, layer.sizes.value_size),
    ),
    projection("output", "o_proj.weight"),
)

_LATENT_QUERY = (
    projection("query_down", "q_a_proj.weight"),
    vector("query_norm.scale", "q_a_layernorm.weight"),
)

MAMBA2 = (
    projection("input", "in_proj.weight"),
    convolution("conv1d.weight"),
    vector("convolution.bias", "conv1d.bias"),
    vector("skip", "D"),
    vector("norm.scale", "norm.weight"),
    projection("output", "out_proj.weight"),
    *_DECAY,
)

_SHIFTS = {"query": "r", "decay": "w", "key": "k", "value": "v", "rate": "a", "gate": "g"}
_LOW_RANK = {"decay": "w", "rate": "a", "value_mix": "v", "gate": "g"}
"""RWKV-7's maps of low rank and their letters; the gate's has no bias."""

_RWKV7 = (
    *(
        vector(f"shift_{ours}", f"x_{letter}")._replace(stored=(1, 1, -1))
        for ours, letter in _SHIFTS.items()
    ),
    vector("removal_scale", "k_k"),
    vector("replacement", "k_a"),
    vector("bonus", "r_k")._replace(stored=lambda layer: (layer.sizes.heads, layer.sizes.key_size)),
)


def _rwkv7(
    projections: tuple[str, ...], norm: str, low_rank: Callable[[str, str], tuple[WeightRule, ...]]
) -> tuple[WeightRule, ...]:
    """The rules of time mixing, by the names that a spelling has."""
    parts = zip(("query", "key", "value", "output"), projections, strict=True)
    ranked = (rule for pair in _LOW_RANK.items() for rule in low_rank(*pair))
    return (
        *_RWKV7,
        *(projection(ours, f"{theirs}.weight") for ours, theirs in parts),
        *(rule for rule in ranked if rule.ours != ("gate.bias",)),
        vector("norm.scale", f"{norm}.weight"),
        vector("norm.bias", f"{norm}.bias"),
    )


def _grouped(layer: Any, tensor: Array) -> list[Array]:
    """[groups * outputs, inputs] -> [groups, inputs, outputs]."""
    groups, inputs, outputs = layer.output_down.shape
    return [tensor.reshape(groups, outputs, inputs).swapaxes(1, 2)]


def _grouped_shape(layer: Any) -> tuple[int, int]:
    groups, inputs, outputs = layer.output_down.shape
    return groups * outputs, inputs


def _compressor(ours: str, theirs: str) -> tuple[WeightRule, ...]:
    return (
        projection(f"{ours}.value", f"{theirs}.kv_proj.weight"),
        projection(f"{ours}.gate", f"{theirs}.gate_proj.weight"),
        as_it_is(f"{ours}.bias", f"{theirs}.position_bias"),
        vector(f"{ours}.norm.scale", f"{theirs}.kv_norm.weight"),
    )


_SHARED_KEY = (
    projection("query_down", "q_a_proj.weight"),
    vector("query_norm.scale", "q_a_norm.weight"),
    projection("query_up", "q_b_proj.weight"),
    projection("key", "kv_proj.weight"),
    vector("key_norm.scale", "kv_norm.weight"),
    vector("sinks", "sinks"),
    WeightRule(("o_a_proj.weight",), ("output_down",), _grouped, stored=_grouped_shape),
    projection("output_up", "o_b_proj.weight"),
)
_HEAVY = (*_SHARED_KEY, *_compressor("compressor", "compressor"))

STYLES: dict[str, dict[str, tuple[WeightRule, ...]]] = SOFTMAX_STYLES | {
    "deepseek_v2_lite": {"mla": (projection("query_up", "q_proj.weight"), *_LATENT)},
    "deepseek_v3": {"mla": (*_LATENT_QUERY, projection("query_up", "q_b_proj.weight"), *_LATENT)},
    "deepseek_v4": {
        "shared_window": _SHARED_KEY,
        "hca": _HEAVY,
        "csa": (
            *_HEAVY,
            *_compressor("indexer.compressor", "compressor.indexer"),
            projection("indexer.query", "compressor.indexer.q_b_proj.weight"),
            projection("indexer.weights", "compressor.indexer.scorer.weights_proj.weight"),
        ),
    },
    "minicpm3": {
        "mla": (
            *_LATENT_QUERY,
            WeightRule(("q_b_proj.weight",), ("query_up.kernel",), _halved_query),
            WeightRule(
                ("kv_a_proj_with_mqa.weight",),
                ("latent_down.kernel", "rope_key.kernel"),
                _halved_latent,
            ),
            *_LATENT[1:],
        )
    },
    "qwen3_next": {
        "gdn": (
            WeightRule(
                ("in_proj_qkvz.weight",),
                ("query_key_value.kernel", "gate.kernel"),
                _qwen3_next_projections,
            ),
            WeightRule(("in_proj_ba.weight",), ("write.kernel", "decay.kernel"), _qwen3_next_gates),
            *_QWEN_DELTA,
        ),
        "full": QWEN_ATTENTION,
    },
    "qwen3_5": {
        "gdn": (
            projection("query_key_value", "in_proj_qkv.weight"),
            projection("gate", "in_proj_z.weight"),
            projection("write", "in_proj_b.weight"),
            projection("decay", "in_proj_a.weight"),
            *_QWEN_DELTA,
        ),
        "full": QWEN_ATTENTION,
    },
    "olmo_hybrid": {
        "gdn": (
            *_SEPARATE_DELTA,
            projection("gate", "g_proj.weight"),
            projection("decay", "a_proj.weight"),
            *_DECAY,
        )
    },
    "kimi_linear": {
        "kda": (
            *_SEPARATE_DELTA,
            _DECAY[0]._replace(stored=(1, 1, -1, 1)),
            _DECAY[1],
            projection("decay.down", "f_a_proj.weight"),
            projection("decay.up", "f_b_proj.weight"),
            projection("gate.down", "g_a_proj.weight"),
            projection("gate.up", "g_b_proj.weight"),
        )
    },
    "rwkv7": {
        "rwkv7": _rwkv7(
            ("receptance", "key", "value", "output"),
            "ln_x",
            lambda ours, letter: (
                as_it_is(f"{ours}.down.kernel", f"{letter}1"),
                as_it_is(f"{ours}.up.kernel", f"{letter}2"),
                vector(f"{ours}.bias", f"{letter}0"),
            ),
        )
    },
    "rwkv7_of_fla": {
        "rwkv7": _rwkv7(
            ("r_proj", "k_proj", "v_proj", "o_proj"),
            "g_norm",
            lambda ours, letter: (
                projection(f"{ours}.down", f"{letter}_lora.lora.0.weight"),
                projection(f"{ours}.up", f"{letter}_lora.lora.2.weight"),
                vector(f"{ours}.bias", f"{letter}_lora.lora.2.bias"),
            ),
        ),
        "channel_mix": (
            vector("shift", "x_k"),
            projection("up", "key.weight"),
            projection("down", "value.weight"),
        ),
    },
    "inkling2_loop": RELATIVE,
    "lfm2": {
        "full": SOFTMAX_STYLES["qwen3"]["full"],
        "conv": (
            projection("input", "in_proj.weight"),
            vector("input.bias", "in_proj.bias"),
            convolution("conv.weight"),
            vector("convolution.bias", "conv.bias"),
            projection("output", "out_proj.weight"),
            vector("output.bias", "out_proj.bias"),
        ),
    },
    "granitemoehybrid": {
        "full": SOFTMAX_STYLES["llama"]["full"],
        "nope": SOFTMAX_STYLES["llama"]["full"],
        "mamba2": MAMBA2,
    },
    "mamba2": {"mamba2": MAMBA2},
    "falcon_h1": {
        "hybrid": tuple(
            rule._replace(
                theirs=tuple(f"{folder}.{name}" for name in rule.theirs),
                ours=tuple(f"{part}.{path}" for path in rule.ours),
            )
            for part, folder, rules in (
                ("attention", "self_attn", SOFTMAX_STYLES["llama"]["full"]),
                ("mamba", "mamba", MAMBA2),
            )
            for rule in rules
        )
    },
    "nemotron_h": {"nope": SOFTMAX_STYLES["llama"]["full"], "mamba2": MAMBA2},
    "minimax": {
        "full": SOFTMAX_STYLES["llama"]["full"],
        "lightning": (
            WeightRule(
                ("qkv_proj.weight",),
                ("query.kernel", "key.kernel", "value.kernel"),
                lambda layer, fused: by_head(fused, *(3 * (layer.sizes.key_size,))),
            ),
            projection("gate", "output_gate.weight"),
            vector("norm.scale", "norm.weight"),
            projection("output", "out_proj.weight"),
        ),
    },
}
"""Rules by style and the layer's word: every tensor and every parameter of the layer, once. A style
has the name that Hugging Face transformers gives the architecture; "rwkv7" has the names of the
authors' own files ("blocks.0.att."), "rwkv7_of_fla" those of flash-linear-attention."""
