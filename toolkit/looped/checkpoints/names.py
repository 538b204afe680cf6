"""Where each number of a published checkpoint goes: the names of its tensors and of our parameters.

A style has a table of rules for every kind of layer it knows. A rule converts some tensors into
some parameters: PyTorch stores projections as [outputs, inputs] and convolutions as [channels, 1,
taps]; checkpoints fuse projections that are separate here, or the reverse. The order of the heads
is the same.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


class WeightRule(NamedTuple):
    """How some tensors of a checkpoint become some parameters of a layer.

    Attributes:
        theirs: names of tensors, after the prefix of the layer.
        ours: paths of parameters in the layer, such as "output.kernel".
        convert: (layer, *tensors) -> one array per path.
        is_stacked: whether `convert` makes of each tensor alone a part of one parameter, which are
            stacked: one tensor at a time is in memory.
        rows: (layer) -> rows of each tensor, where there are several and they are not stacked.
        stored: the shape of a vector in files, with one -1; None: one axis.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    convert: Callable[..., Sequence[Array]]
    is_stacked: bool = False
    rows: Callable[[Any], Sequence[int]] | None = None
    stored: tuple[int, ...] | None = None


def stacked(ours: str, theirs: Sequence[str]) -> WeightRule:
    """[outputs, inputs] of each expert -> [experts, inputs, outputs]."""
    return WeightRule(tuple(theirs), (ours,), lambda _, tensor: [tensor.T], is_stacked=True)


def projection(ours: str, *theirs: str) -> WeightRule:
    """[outputs, inputs] each -> [inputs, all outputs], side by side."""
    return WeightRule(theirs, (f"{ours}.kernel",), lambda _, *parts: [jnp.concatenate(parts).T])


def _convolution(*theirs: str) -> WeightRule:
    """[channels, 1, taps] each -> [taps, all channels]."""
    return WeightRule(
        theirs, ("convolution.kernel",), lambda _, *parts: [jnp.concatenate(parts)[:, 0].T]
    )


def vector(ours: str, theirs: str) -> WeightRule:
    """Any shape -> one axis."""
    return WeightRule((theirs,), (ours,), lambda _, tensor: [tensor.ravel()])


def from_zero(ours: str, theirs: str) -> WeightRule:
    """A scale stored as its difference from one."""
    return WeightRule((theirs,), (ours,), lambda _, tensor: [1 + tensor.astype(jnp.float32)])


def as_it_is(ours: str, theirs: str) -> WeightRule:
    """The same numbers in the same order: not transposed, as a projection would be."""
    return WeightRule((theirs,), (ours,), lambda _, tensor: [tensor])


def _by_head(fused: Array, *sizes: int) -> list[Array]:
    """[heads * (a head's parts), width] -> one [width, channels] per part."""
    width = fused.shape[-1]
    fused = fused.T.reshape(width, -1, sum(sizes))
    borders = [sum(sizes[:i]) for i in range(1, len(sizes))]
    return [part.reshape(width, -1) for part in jnp.split(fused, borders, axis=-1)]


def _qwen3_next_projections(layer: Any, fused: Array) -> list[Array]:
    sizes = layer.sizes
    values = sizes.values // sizes.heads
    q, k, v, gate = _by_head(fused, sizes.key_size, sizes.key_size, values, values)
    return [jnp.concatenate([q, k, v], axis=-1), gate]


def _qwen3_next_gates(layer: Any, fused: Array) -> list[Array]:
    each = layer.sizes.value_heads // layer.sizes.heads
    return _by_head(fused, each, each)


def _channels(layer: Any) -> tuple[int, int, int]:
    """Those of the queries, keys and values of a layer."""
    return layer.sizes.keys, layer.sizes.keys, layer.sizes.values


_DECAY = (vector("log_rate", "A_log"), vector("step_bias", "dt_bias"))

_SEPARATE_DELTA = (
    projection("query_key_value", "q_proj.weight", "k_proj.weight", "v_proj.weight")._replace(
        rows=_channels
    ),
    _convolution("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")._replace(rows=_channels),
    projection("write", "b_proj.weight"),
    vector("norm.scale", "o_norm.weight"),
    projection("output", "o_proj.weight"),
)

_QWEN_DELTA = (
    _convolution("conv1d.weight"),
    vector("norm.scale", "norm.weight"),
    projection("output", "out_proj.weight"),
    *_DECAY,
)

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

_QWEN_ATTENTION = (
    WeightRule(
        ("q_proj.weight",),
        ("query.kernel", "gate.kernel"),
        lambda layer, fused: _by_head(fused, layer.head_size, layer.head_size),
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
        lambda layer, fused: _by_head(fused, layer.sizes.key_size, layer.sizes.value_size),
    ),
    projection("output", "o_proj.weight"),
)

STYLES: dict[str, dict[str, tuple[WeightRule, ...]]] = {
    "deepseek_v2_lite": {"mla": (projection("query_up", "q_proj.weight"), *_LATENT)},
    "deepseek_v3": {
        "mla": (
            projection("query_down", "q_a_proj.weight"),
            vector("query_norm.scale", "q_a_layernorm.weight"),
            projection("query_up", "q_b_proj.weight"),
            *_LATENT,
        )
    },
    "glm4_moe": {"full": _GLM_ATTENTION},
    "gpt_oss": {"full": _GPT_OSS_ATTENTION, "window": _GPT_OSS_ATTENTION},
    "llama": {"full": _ATTENTION, "window": _ATTENTION},
    "qwen2": {"full": _QWEN2_ATTENTION, "window": _QWEN2_ATTENTION},
    "qwen3": {"full": _QWEN3_ATTENTION, "window": _QWEN3_ATTENTION},
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
        "full": _QWEN_ATTENTION,
    },
    "qwen3_5": {
        "gdn": (
            projection("query_key_value", "in_proj_qkv.weight"),
            projection("gate", "in_proj_z.weight"),
            projection("write", "in_proj_b.weight"),
            projection("decay", "in_proj_a.weight"),
            *_QWEN_DELTA,
        ),
        "full": _QWEN_ATTENTION,
    },
    "olmo_hybrid": {
        "gdn": (
            *_SEPARATE_DELTA,
            projection("gate", "g_proj.weight"),
            projection("decay", "a_proj.weight"),
            *_DECAY,
        ),
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
        ),
    },
    "rwkv7": {
        "rwkv7": (
            projection("query", "receptance.weight"),
            projection("key", "key.weight"),
            projection("value", "value.weight"),
            projection("output", "output.weight"),
            vector("shift_query", "x_r"),
            vector("shift_decay", "x_w"),
            vector("shift_key", "x_k"),
            vector("shift_value", "x_v"),
            vector("shift_rate", "x_a"),
            vector("shift_gate", "x_g"),
            vector("decay.bias", "w0"),
            as_it_is("decay.down.kernel", "w1"),
            as_it_is("decay.up.kernel", "w2"),
            vector("rate.bias", "a0"),
            as_it_is("rate.down.kernel", "a1"),
            as_it_is("rate.up.kernel", "a2"),
            as_it_is("gate.down.kernel", "g1"),
            as_it_is("gate.up.kernel", "g2"),
            vector("removal_scale", "k_k"),
            vector("replacement", "k_a"),
            vector("bonus", "r_k"),
            vector("norm.scale", "ln_x.weight"),
            vector("norm.bias", "ln_x.bias"),
        ),
    },
    "mamba2": {
        "mamba2": (
            projection("input", "in_proj.weight"),
            _convolution("conv1d.weight"),
            vector("convolution.bias", "conv1d.bias"),
            vector("skip", "D"),
            vector("norm.scale", "norm.weight"),
            projection("output", "out_proj.weight"),
            *_DECAY,
        ),
    },
}
"""Rules by style and the layer's word: every tensor and every parameter of the layer, once. A style
has the name that Hugging Face transformers gives the architecture; "rwkv7" has the names of the
authors' own files ("blocks.0.att.")."""
