"""Names of the tensors of softmax layers: `names.py` for these layers alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from toolkit.looped.checkpoints.rules import WeightRule, by_head, from_zero, projection, vector

_ATTENTION = (
    projection("query", "q_proj.weight"),
    projection("key", "k_proj.weight"),
    projection("value", "v_proj.weight"),
    projection("output", "o_proj.weight"),
)

_QWEN2_ATTENTION = (
    *_ATTENTION,
    vector("query.bias", "q_proj.bias"),
    vector("key.bias", "k_proj.bias"),
    vector("value.bias", "v_proj.bias"),
)

_QWEN3_ATTENTION = (
    *_ATTENTION,
    vector("query_norm.scale", "q_norm.weight"),
    vector("key_norm.scale", "k_norm.weight"),
)

QWEN_ATTENTION = (
    WeightRule(
        ("q_proj.weight",),
        ("query.kernel", "gate.kernel"),
        lambda layer, fused: by_head(fused, layer.head_size, layer.head_size),
    ),
    *_ATTENTION[1:],
    from_zero("query_norm.scale", "q_norm.weight"),
    from_zero("key_norm.scale", "k_norm.weight"),
)

_GLM_ATTENTION = (
    *_QWEN2_ATTENTION,
    vector("query_norm.scale", "q_norm.weight"),
    vector("key_norm.scale", "k_norm.weight"),
)

_GPT_OSS_ATTENTION = (
    *_QWEN2_ATTENTION,
    vector("output.bias", "o_proj.bias"),
    vector("sinks", "sinks"),
)

_SOFTMAX = (*_GLM_ATTENTION, vector("output.bias", "o_proj.bias"), vector("sinks", "sinks"))


def _halves(layer: Any, tensor: Array) -> Array:
    """Rows of heads whose rotary pairs are neighbours -> their first channels, then the second."""
    size, turned = layer.head_size, round(layer.rotary_fraction * layer.head_size)
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, size)]
    by_head = tensor.reshape(-1, size, *tensor.shape[1:])
    return by_head[:, np.array(order)].reshape(tensor.shape)


def _interleaved(rule: WeightRule) -> WeightRule:
    """The rule of a projection to queries or keys in whose rows rotary pairs are neighbours."""
    if rule.ours[0].split(".")[0] not in ("query", "key"):
        return rule
    convert = rule.convert
    return rule._replace(convert=lambda layer, tensor: convert(layer, _halves(layer, tensor)))


def _side_by_side(layer: Any, fused: Array) -> list[Array]:
    """[queries, keys and values, ...] -> three parts."""
    ends = [layer.query.out_features, layer.query.out_features + layer.key.out_features]
    return [part.T for part in jnp.split(fused, ends)]


def _head_by_head(layer: Any, fused: Array) -> list[Array]:
    """[heads * (query, key, value), ...] -> three parts."""
    parts = by_head(fused.reshape(len(fused), -1), *(3 * (layer.head_size,)))
    return [part.reshape(*fused.shape[1:], -1) for part in parts]


def _fused(theirs: str, convert: Callable[..., Sequence[Array]]) -> tuple[WeightRule, ...]:
    parts = ("query", "key", "value")
    return tuple(
        WeightRule((f"{theirs}.{suffix}",), tuple(f"{part}.{other}" for part in parts), convert)
        for suffix, other in (("weight", "kernel"), ("bias", "bias"))
    )


def _huginn_projections(layer: Any, fused: Array) -> list[Array]:
    """`_side_by_side`, with queries and keys in whose rows rotary pairs are neighbours."""
    q, k, v = _side_by_side(layer, fused)
    return [_halves(layer, q.T).T, _halves(layer, k.T).T, v]


def _huginn_biases(layer: Any, biases: Array) -> list[Array]:
    """Biases [2, 1, heads, size] of queries and keys; the values have none."""
    q, k = (_halves(layer, bias.ravel()) for bias in biases)
    return [q, k, jnp.zeros(layer.value.out_features, biases.dtype)]


_OUTPUT = (projection("output", "o_proj.weight"), vector("output.bias", "o_proj.bias"))


def _everywhere(rules: Sequence[WeightRule]) -> dict[str, tuple[WeightRule, ...]]:
    """The same rules for every softmax layer."""
    return dict.fromkeys(("full", "window", "nope"), tuple(rules))


def _parcae(value: str) -> tuple[WeightRule, ...]:
    gates = (projection("value.gate", "ve_gate.weight"),) if value != "value" else ()
    return (
        _interleaved(projection("query", "c_q.weight")),
        _interleaved(projection("key", "c_k.weight")),
        projection(value, "c_v.weight"),
        projection("output", "c_proj.weight"),
        *gates,
    )


FLEXIBLE = ("softmax", "interleaved", "gemma3", "phi3", "gpt_neox")
"""Styles with rules for what a layer may have: biases, norms of queries and keys, sinks."""

SOFTMAX_STYLES: dict[str, dict[str, tuple[WeightRule, ...]]] = {
    "softmax": _everywhere(_SOFTMAX),
    "interleaved": _everywhere([_interleaved(rule) for rule in _SOFTMAX]),
    "gemma3": _everywhere(
        (*_QWEN2_ATTENTION, *QWEN_ATTENTION[-2:], vector("output.bias", "o_proj.bias"))
    ),
    "phi3": _everywhere((*_fused("qkv_proj", _side_by_side), *_OUTPUT)),
    "gpt_neox": _everywhere((*_fused("query_key_value", _head_by_head), *_OUTPUT)),
    "huginn": {
        "full": (
            WeightRule(
                ("Wqkv.weight",),
                ("query.kernel", "key.kernel", "value.kernel"),
                _huginn_projections,
            ),
            WeightRule(
                ("qk_bias",),
                ("query.bias", "key.bias", "value.bias"),
                _huginn_biases,
                stored=lambda layer: (
                    2,
                    1,
                    layer.query.out_features // layer.head_size,
                    layer.head_size,
                ),
            ),
            projection("output", "proj.weight"),
        )
    },
    "parcae": {"full": _parcae("value"), "value_embedding": _parcae("value.projection")},
    "glm4_moe": {"full": _GLM_ATTENTION},
    "gpt_oss": {"full": _GPT_OSS_ATTENTION, "window": _GPT_OSS_ATTENTION},
    "llama": {"full": _ATTENTION, "window": _ATTENTION},
    "qwen2": {"full": _QWEN2_ATTENTION, "window": _QWEN2_ATTENTION},
    "qwen3": {"full": _QWEN3_ATTENTION, "window": _QWEN3_ATTENTION},
}
"""Rules by style and the layer's word, a part of `STYLES`."""
