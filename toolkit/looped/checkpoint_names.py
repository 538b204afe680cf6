"""Where each number of a published checkpoint goes: the names of its tensors and of our parameters.

A style is a table of rules. A rule takes some tensors and makes some parameters of them: PyTorch
keeps projections as [outputs, inputs] and convolutions as [channels, 1, taps]; checkpoints fuse
projections that are apart here, or the reverse. Heads, once apart, are in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


class Rule(NamedTuple):
    """How some tensors of a checkpoint become some parameters of a layer.

    Attributes:
        theirs: names of tensors, after the layer's prefix.
        ours: paths of parameters, such as "output.kernel".
        convert: (layer, *tensors) -> arrays, one a path.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    convert: Callable[..., Sequence[Array]]


class Style(NamedTuple):
    """One family of checkpoints.

    Attributes:
        words: the layers it can fill.
        rules: every tensor and every parameter, once.
    """

    words: tuple[str, ...]
    rules: tuple[Rule, ...]


def _projection(ours: str, *theirs: str) -> Rule:
    """[outputs, inputs] each -> [inputs, all outputs], side by side."""
    return Rule(theirs, (f"{ours}.kernel",), lambda _, *parts: [jnp.concatenate(parts).T])


def _convolution(*theirs: str) -> Rule:
    """[channels, 1, taps] each -> [taps, all channels]."""
    return Rule(theirs, ("convolution.kernel",), lambda _, *parts: [jnp.concatenate(parts)[:, 0].T])


def _vector(ours: str, theirs: str) -> Rule:
    """Any shape -> one axis."""
    return Rule((theirs,), (ours,), lambda _, tensor: [tensor.ravel()])


def _as_it_is(ours: str, theirs: str) -> Rule:
    return Rule((theirs,), (ours,), lambda _, tensor: [tensor])


def _by_key_head(layer: Any, fused: Array, *sizes: int) -> list[Array]:
    """[key heads * (a head's parts), width] -> one [width, channels] a part."""
    width = fused.shape[-1]
    fused = fused.T.reshape(width, layer.sizes.heads, -1)
    borders = [sum(sizes[:i]) for i in range(1, len(sizes))]
    return [part.reshape(width, -1) for part in jnp.split(fused, borders, axis=-1)]


def _qwen3_next_projections(layer: Any, fused: Array) -> list[Array]:
    sizes = layer.sizes
    values = sizes.values // sizes.heads
    q, k, v, gate = _by_key_head(layer, fused, sizes.key_size, sizes.key_size, values, values)
    return [jnp.concatenate([q, k, v], axis=-1), gate]


def _qwen3_next_gates(layer: Any, fused: Array) -> list[Array]:
    each = layer.sizes.value_heads // layer.sizes.heads
    return _by_key_head(layer, fused, each, each)


_DECAY = (_vector("log_rate", "A_log"), _vector("step_bias", "dt_bias"))

_SEPARATE_DELTA = (
    _projection("query_key_value", "q_proj.weight", "k_proj.weight", "v_proj.weight"),
    _convolution("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
    _projection("write", "b_proj.weight"),
    _vector("norm.scale", "o_norm.weight"),
    _projection("output", "o_proj.weight"),
    *_DECAY,
)

_QWEN_DELTA = (
    _convolution("conv1d.weight"),
    _vector("norm.scale", "norm.weight"),
    _projection("output", "out_proj.weight"),
    *_DECAY,
)

STYLES: dict[str, Style] = {
    "llama": Style(
        ("full", "window"),
        (
            _projection("query", "q_proj.weight"),
            _projection("key", "k_proj.weight"),
            _projection("value", "v_proj.weight"),
            _projection("output", "o_proj.weight"),
        ),
    ),
    "qwen3_next": Style(
        ("gdn",),
        (
            Rule(
                ("in_proj_qkvz.weight",),
                ("query_key_value.kernel", "gate.kernel"),
                _qwen3_next_projections,
            ),
            Rule(("in_proj_ba.weight",), ("write.kernel", "decay.kernel"), _qwen3_next_gates),
            *_QWEN_DELTA,
        ),
    ),
    "qwen3_5": Style(
        ("gdn",),
        (
            _projection("query_key_value", "in_proj_qkv.weight"),
            _projection("gate", "in_proj_z.weight"),
            _projection("write", "in_proj_b.weight"),
            _projection("decay", "in_proj_a.weight"),
            *_QWEN_DELTA,
        ),
    ),
    "olmo_hybrid": Style(
        ("gdn",),
        (
            *_SEPARATE_DELTA,
            _projection("gate", "g_proj.weight"),
            _projection("decay", "a_proj.weight"),
        ),
    ),
    "kimi_linear": Style(
        ("kda",),
        (
            *_SEPARATE_DELTA,
            _projection("decay.down", "f_a_proj.weight"),
            _projection("decay.up", "f_b_proj.weight"),
            _projection("gate.down", "g_a_proj.weight"),
            _projection("gate.up", "g_b_proj.weight"),
        ),
    ),
    "rwkv7": Style(
        ("rwkv7",),
        (
            _projection("query", "receptance.weight"),
            _projection("key", "key.weight"),
            _projection("value", "value.weight"),
            _projection("output", "output.weight"),
            _vector("shift_query", "x_r"),
            _vector("shift_decay", "x_w"),
            _vector("shift_key", "x_k"),
            _vector("shift_value", "x_v"),
            _vector("shift_rate", "x_a"),
            _vector("shift_gate", "x_g"),
            _vector("decay.bias", "w0"),
            _as_it_is("decay.down.kernel", "w1"),
            _as_it_is("decay.up.kernel", "w2"),
            _vector("rate.bias", "a0"),
            _as_it_is("rate.down.kernel", "a1"),
            _as_it_is("rate.up.kernel", "a2"),
            _as_it_is("gate.down.kernel", "g1"),
            _as_it_is("gate.up.kernel", "g2"),
            _vector("removal_scale", "k_k"),
            _vector("replacement", "k_a"),
            _vector("bonus", "r_k"),
            _vector("norm.scale", "ln_x.weight"),
            _vector("norm.bias", "ln_x.bias"),
        ),
    ),
    "mamba2": Style(
        ("mamba2",),
        (
            _projection("input", "in_proj.weight"),
            _convolution("conv1d.weight"),
            _vector("convolution.bias", "conv1d.bias"),
            _vector("skip", "D"),
            _vector("norm.scale", "norm.weight"),
            _projection("output", "out_proj.weight"),
            *_DECAY,
        ),
    ),
}
"""Every style by the name that Hugging Face transformers gives the architecture; "rwkv7" has the
names of the authors' own files ("blocks.0.att.")."""
