"""The table of token mixers: every variant once, with its functions and what it costs.

The contract suite iterates over `MIXERS`; panels, the tour and benchmarks look rows up in it. All
call every row alike:

    row = mixer("window", sliding_window=128)
    out, state = row.function(q, k, v, *gates, **row.options)  # those of row.inputs, row.gates
    state = row.empty_state(batch, heads, key, value, capacity, dtype)
    out_t, state = row.step(q_t, k_t, v_t, *gates_t, state, **row.options)
    row.forward_flops(batch, time, heads, key, value, **row.options)

A new mixer is a file of mathematics and a row here. Cost formulas are closed forms in plain
integers. FLOPs count the matrix products of this implementation, two a multiply-add; bytes count
what must at least cross the memory bus: inputs and outputs once. `element_bytes` is the size of
one number of q, k, v and o; gates and recurrent states are float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from toolkit.attention.cache import KVCache, softmax_attention_step
from toolkit.attention.chunked_decay import BLOCK
from toolkit.attention.fading_memory import chunk_size as fading_chunk_size
from toolkit.attention.gated_delta_net import (
    chunk_size,
    gated_delta_net,
    gated_delta_net_reference,
    gated_delta_net_step,
)
from toolkit.attention.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_reference,
    gated_linear_attention_step,
)
from toolkit.attention.hgrn2 import hgrn2, hgrn2_reference, hgrn2_step
from toolkit.attention.linear_attention import (
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)
from toolkit.attention.mamba2 import mamba2, mamba2_reference, mamba2_step
from toolkit.attention.retention import retention, retention_reference, retention_step
from toolkit.attention.softmax import softmax_attention, softmax_attention_reference

STATE_BYTES = 4  # of one float32 number of a gate or a recurrent state


@dataclass(frozen=True)
class Mixer:
    """One token mixer: a row of `MIXERS`.

    Attributes:
        name: its key in `MIXERS` and in the layer patterns of looped models.
        title: for headings and legends.
        paper: where it was published.
        is_linear_time: whether its cost a token does not grow with the context.
        gates: names of the inputs after q, k and v, each [batch, time, heads] unless it is
            among `channel_gates`.
        options: keyword arguments that every function of the row takes, with their values.
        function: (q, k, v, *gates, initial_state, segment_ids, **options) -> (out, state).
        step: (q_t, k_t, v_t, *gates_t, state, **options) -> (out_t, state).
        reference: `function` as the bare equation.
        empty_state: (batch, heads, key, value, capacity, dtype, **options) -> state to decode
            from; heads are those of v.
        forward_flops: (batch, time, heads, key, value, **options) of one parallel pass.
        forward_bytes: likewise, and `element_bytes`.
        step_flops: (batch, context, heads, key, value, **options) of one decoded token.
        step_bytes: likewise, and `element_bytes`.
        state_bytes: likewise: what decoding keeps after `context` tokens.
        inputs: names of the inputs before the gates. HGRN2 takes no k: it makes its keys of g.
        channel_gates: the gates with one number a key channel, [batch, time, heads, key].
        substep_inputs: inputs and gates with one entry a delta step, when a token makes several:
            an axis after the heads.
    """

    name: str
    title: str
    paper: str
    is_linear_time: bool
    gates: tuple[str, ...]
    options: Mapping[str, int]
    function: Callable[..., Any]
    step: Callable[..., Any]
    reference: Callable[..., Any]
    empty_state: Callable[..., Any]
    forward_flops: Callable[..., int]
    forward_bytes: Callable[..., int]
    step_flops: Callable[..., int]
    step_bytes: Callable[..., int]
    state_bytes: Callable[..., int]
    inputs: tuple[str, ...] = ("q", "k", "v")
    channel_gates: tuple[str, ...] = ()
    substep_inputs: tuple[str, ...] = ()


def _attended_pairs(time: int, sliding_window: int | None) -> int:
    """Pairs of a query and a key it may see: sum over t of min(t, window)."""
    window = time if sliding_window is None else min(sliding_window, time)
    return window * (window + 1) // 2 + (time - window) * window


def _softmax_empty_state(batch, heads, key, value, capacity, dtype, *, sliding_window=None):
    # A window is a ring of exactly its tokens, however long the sequence becomes.
    return KVCache.empty(batch, heads, key, value, sliding_window or capacity, dtype)


def _softmax_forward_flops(batch, time, heads, key, value, *, sliding_window=None):
    return 2 * batch * heads * _attended_pairs(time, sliding_window) * (key + value)


def _softmax_forward_bytes(batch, time, heads, key, value, *, sliding_window=None, element_bytes=4):
    return 2 * batch * time * heads * (key + value) * element_bytes


def _softmax_step_flops(batch, context, heads, key, value, *, sliding_window=None):
    seen = context if sliding_window is None else min(context, sliding_window)
    return 2 * batch * heads * seen * (key + value)


def _softmax_state_bytes(
    batch, context, heads, key, value, *, sliding_window=None, element_bytes=4
):
    seen = context if sliding_window is None else min(context, sliding_window)
    return batch * heads * seen * (key + value) * element_bytes


def _softmax_step_bytes(batch, context, heads, key, value, *, sliding_window=None, element_bytes=4):
    seen = context if sliding_window is None else min(context, sliding_window)
    # The cache is read; q, o and this token's k and v (written to the cache) cross once.
    return batch * heads * (seen + 2) * (key + value) * element_bytes


def _recurrent_empty_state(batch, heads, key, value, capacity, dtype):
    precise = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.zeros((batch, heads, key, value), precise)


def _delta_forward_flops(batch, time, heads, key, value, *, chunk=None):
    size = chunk_size(time, key, value) if chunk is None else chunk
    chunks = -(-time // size)
    state = 3 * size * key * value  # read for k and for q, written once
    within = 2 * size**2 * (key + value)  # q k^T, k k^T; T R, scores N
    inverse = _inverse_multiply_adds(size)
    return 2 * batch * heads * chunks * (state + within + inverse)


def _inverse_multiply_adds(size: int) -> int:
    """Columns of a 16 x 16 block one by one, then two products a merge of two blocks."""
    if size <= 16:
        return (size - 1) * size**2
    half = size // 2
    return 2 * _inverse_multiply_adds(half) + 2 * half**3


def _delta_forward_bytes(batch, time, heads, key, value, *, chunk=None, element_bytes=4):
    tokens = batch * time * heads
    return tokens * (2 * (key + value) * element_bytes + 2 * STATE_BYTES)


def _delta_step_flops(batch, context, heads, key, value):
    # Read for k and for q, 4 K V; decay, outer product and sum, 3 K V.
    return 7 * batch * heads * key * value


def _recurrent_state_bytes(batch, context, heads, key, value, *, element_bytes=4):
    return batch * heads * key * value * STATE_BYTES


def _fading_forward_flops(batch, time, heads, key, value, *, decays_channels=False, chunk=None):
    size = fading_chunk_size(time, key, value) if chunk is None else chunk
    chunks = -(-time // size)
    state = 2 * size * key * value  # read for q, written once
    # Scores, and their product with v. By halves, scores above the diagonal are not computed.
    scores = (size + BLOCK) / 2 if decays_channels else size
    within = size * (int(scores) * key + size * value)
    return 2 * batch * heads * chunks * (state + within)


def _fading_step_flops(batch, context, heads, key, value, *, decays=True):
    # Read for q, 2 K V; decay, outer product and sum, 3 K V.
    return (5 if decays else 4) * batch * heads * key * value


def _fading_forward_bytes(
    batch, time, heads, key, value, *, keys=2, gates=0, channel_gates=0, element_bytes=4
):
    token = (keys * key + 2 * value) * element_bytes + (gates + channel_gates * key) * STATE_BYTES
    return batch * time * heads * token


def _fading_step_bytes(batch, context, heads, key, value, **sizes):
    state = _recurrent_state_bytes(batch, context, heads, key, value)
    return 2 * state + _fading_forward_bytes(batch, 1, heads, key, value, **sizes)


def _delta_step_bytes(batch, context, heads, key, value, *, element_bytes=4):
    state = _recurrent_state_bytes(batch, context, heads, key, value)
    token = batch * heads * (2 * (key + value) * element_bytes + 2 * STATE_BYTES)
    return 2 * state + token


_FULL = Mixer(
    name="full",
    title="Softmax attention",
    paper="Vaswani et al., Attention Is All You Need (arXiv:1706.03762)",
    is_linear_time=False,
    gates=(),
    options=MappingProxyType({}),
    function=softmax_attention,
    step=softmax_attention_step,
    reference=softmax_attention_reference,
    empty_state=_softmax_empty_state,
    forward_flops=_softmax_forward_flops,
    forward_bytes=_softmax_forward_bytes,
    step_flops=_softmax_step_flops,
    step_bytes=_softmax_step_bytes,
    state_bytes=_softmax_state_bytes,
)

_LINEAR = Mixer(
    name="linear",
    title="Linear attention",
    paper="Katharopoulos, Vyas, Pappas, Fleuret, Transformers are RNNs (arXiv:2006.16236)",
    is_linear_time=True,
    gates=(),
    options=MappingProxyType({}),
    function=linear_attention,
    step=linear_attention_step,
    reference=linear_attention_reference,
    empty_state=_recurrent_empty_state,
    forward_flops=_fading_forward_flops,
    forward_bytes=_fading_forward_bytes,
    step_flops=partial(_fading_step_flops, decays=False),
    step_bytes=_fading_step_bytes,
    state_bytes=_recurrent_state_bytes,
)

_CHANNELS = replace(
    _LINEAR,
    name="gla",
    title="Gated linear attention",
    paper="Yang, Wang, Shen, Panda, Kim, Gated Linear Attention (arXiv:2312.06635)",
    gates=("g",),
    channel_gates=("g",),
    function=gated_linear_attention,
    step=gated_linear_attention_step,
    reference=gated_linear_attention_reference,
    forward_flops=partial(_fading_forward_flops, decays_channels=True),
    forward_bytes=partial(_fading_forward_bytes, channel_gates=1),
    step_flops=_fading_step_flops,
    step_bytes=partial(_fading_step_bytes, channel_gates=1),
)

MIXERS: dict[str, Mixer] = {
    row.name: row
    for row in (
        _FULL,
        replace(
            _FULL,
            name="window",
            title="Sliding-window attention",
            paper="Beltagy, Peters, Cohan, Longformer (arXiv:2004.05150)",
            is_linear_time=True,
            options=MappingProxyType({"sliding_window": 256}),
        ),
        Mixer(
            name="gdn",
            title="Gated DeltaNet",
            paper="Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv:2412.06464)",
            is_linear_time=True,
            gates=("g", "beta"),
            options=MappingProxyType({}),
            function=gated_delta_net,
            step=gated_delta_net_step,
            reference=gated_delta_net_reference,
            empty_state=_recurrent_empty_state,
            forward_flops=_delta_forward_flops,
            forward_bytes=_delta_forward_bytes,
            step_flops=_delta_step_flops,
            step_bytes=_delta_step_bytes,
            state_bytes=_recurrent_state_bytes,
        ),
        _LINEAR,
        replace(
            _LINEAR,
            name="retention",
            title="Retention",
            paper="Sun et al., Retentive Network (arXiv:2307.08621)",
            function=retention,
            step=retention_step,
            reference=retention_reference,
            step_flops=_fading_step_flops,
        ),
        replace(
            _LINEAR,
            name="mamba2",
            title="Mamba-2",
            paper="Dao, Gu, Transformers are SSMs (arXiv:2405.21060)",
            gates=("g", "dt"),
            function=mamba2,
            step=mamba2_step,
            reference=mamba2_reference,
            forward_bytes=partial(_fading_forward_bytes, gates=2),
            step_flops=_fading_step_flops,
            step_bytes=partial(_fading_step_bytes, gates=2),
        ),
        _CHANNELS,
        replace(
            _CHANNELS,
            name="hgrn2",
            title="HGRN2",
            paper="Qin et al., HGRN2: Gated Linear RNNs with State Expansion (arXiv:2404.07904)",
            inputs=("q", "v"),
            function=hgrn2,
            step=hgrn2_step,
            reference=hgrn2_reference,
            forward_bytes=partial(_fading_forward_bytes, keys=1, channel_gates=1),
            step_bytes=partial(_fading_step_bytes, keys=1, channel_gates=1),
        ),
    )
}
"""Every token mixer by name: two forms of softmax attention, then the recurrent ones."""


def mixer(name: str, **options: int) -> Mixer:
    """Look a token mixer up, optionally with other values of its options.

    Args:
        name: a key of `MIXERS`.
        **options: replaces values of the row's `options`, such as `sliding_window=128`.

    Returns:
        The row of `MIXERS`, with those options.

    Raises:
        ValueError: an unknown name, or an option the row does not have.

    Cost:
        A dictionary look-up.
    """
    if name not in MIXERS:
        raise ValueError(f"mixer must be one of {', '.join(map(repr, MIXERS))}; got {name!r}.")
    row = MIXERS[name]
    unknown = sorted(set(options) - set(row.options))
    if unknown:
        known = ", ".join(row.options) or "none"
        raise ValueError(f"mixer {name!r} has the options: {known}; got {', '.join(unknown)}.")
    return replace(row, options=MappingProxyType({**row.options, **options}))
