"""The table of token mixers: every variant once, with its functions and what it costs.

The contract suite iterates over `MIXERS`; panels, the tour and benchmarks look rows up in it. All
call every row alike:

    row = mixer("window", sliding_window=128)
    out, state = row.function(*draw_inputs(row, time), **row.options)  # one for each of row.inputs
    state = row.empty_state(batch, heads, key, value, capacity, dtype)
    out_t, state = row.step(*inputs_t, state, **row.options)
    row.forward_flops(batch, time, heads, key, value, **row.options)

A new mixer is a file of mathematics and a row here; its cost formulas are in `costs.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from toolkit.attention import sparse
from toolkit.attention.costs import (
    delta_forward_flops,
    delta_step_flops,
    fading_forward_flops,
    fading_step_flops,
    product_forward_bytes,
    product_forward_flops,
    product_step_bytes,
    product_step_flops,
    recurrent_state_bytes,
    recurrent_step_bytes,
    rwkv7_forward_flops,
    rwkv7_step_flops,
    softmax_forward_bytes,
    softmax_forward_flops,
    softmax_state_bytes,
    softmax_step_bytes,
    softmax_step_flops,
    token_bytes,
)
from toolkit.attention.inputs import (
    BETA,
    CHANNEL_G,
    FRACTION,
    TOKEN,
    UNIT,
    G,
    Input,
    K,
    Q,
    V,
    log_decay_above,
    per_step,
)
from toolkit.attention.linear.delta_net import delta_net, delta_net_reference, delta_net_step
from toolkit.attention.linear.gated_delta_net import (
    gated_delta_net,
    gated_delta_net_reference,
    gated_delta_net_step,
)
from toolkit.attention.linear.gated_delta_product import (
    gated_delta_product,
    gated_delta_product_reference,
    gated_delta_product_step,
)
from toolkit.attention.linear.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_reference,
    gated_linear_attention_step,
)
from toolkit.attention.linear.hgrn2 import hgrn2, hgrn2_reference, hgrn2_step
from toolkit.attention.linear.kimi_delta_attention import (
    kimi_delta_attention,
    kimi_delta_attention_reference,
    kimi_delta_attention_step,
)
from toolkit.attention.linear.linear_attention import (
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)
from toolkit.attention.linear.mamba2 import mamba2, mamba2_reference, mamba2_step
from toolkit.attention.linear.retention import retention, retention_reference, retention_step
from toolkit.attention.linear.rwkv7 import rwkv7, rwkv7_reference, rwkv7_step
from toolkit.attention.softmax.cache import KVCache, softmax_attention_step
from toolkit.attention.softmax.dense import softmax_attention, softmax_attention_reference
from toolkit.attention.sparse import costs as sparse_costs


@dataclass(frozen=True)
class Mixer:
    """One token mixer: a row of `MIXERS`.

    Attributes:
        name: its key in `MIXERS` and in the layer patterns of looped models.
        title: for headings and legends.
        paper: where it was published.
        is_linear_time: whether its cost a token does not grow with the context.
        inputs: what `function` takes before its keywords, in its order: q, k, v, then gates.
        implementations: names that `implementation=` of `function` takes; None picks among them.
        options: keyword arguments that every function of the row takes, with their values.
        function: (*inputs, initial_state, segment_ids, **options) -> (out, state).
        step: (*inputs of one token, state, **options) -> (out_t, state).
        reference: `function` as the bare equation.
        empty_state: (batch, heads, key, value, capacity, dtype, **options) -> state to decode
            from; heads are those of v.
        forward_flops: (batch, time, heads, key, value, **options) of one parallel pass.
        forward_bytes: likewise, and `element_bytes`.
        step_flops: (batch, context, heads, key, value, **options) of one decoded token.
        step_bytes: likewise, and `element_bytes`.
        state_bytes: likewise: what decoding keeps after `context` tokens.
    """

    name: str
    title: str
    paper: str
    is_linear_time: bool
    inputs: tuple[Input, ...]
    implementations: tuple[str, ...]
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

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all inputs, in order."""
        return tuple(given.name for given in self.inputs)

    @property
    def gates(self) -> tuple[str, ...]:
        """Names of those that are gates."""
        return tuple(given.name for given in self.inputs if given.is_gate)

    def input(self, name: str) -> Input:
        """The input of that name."""
        return self.inputs[self.names.index(name)]


def _softmax_empty_state(batch, heads, key, value, capacity, dtype, *, sliding_window=None):
    # A window is a ring of exactly its tokens, however long the sequence becomes.
    return KVCache.empty(batch, heads, key, value, sliding_window or capacity, dtype)


def _recurrent_empty_state(batch, heads, key, value, capacity, dtype):
    precise = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.zeros((batch, heads, key, value), precise)


def _block_empty_state(batch, heads, key, value, capacity, dtype, *, block_size=64, **_):
    return sparse.BlockCache.empty(batch, heads, key, value, capacity, dtype, block_size=block_size)


def _indexed_empty_state(batch, heads, key, value, capacity, dtype, **_):
    # Whoever calls all rows alike gives the index the size of a key.
    return sparse.IndexedCache.empty(batch, heads, key, value, key, capacity, dtype)


_FULL = Mixer(
    name="full",
    title="Softmax attention",
    paper="Vaswani et al., Attention Is All You Need (arXiv:1706.03762)",
    is_linear_time=False,
    inputs=(Q, K, V),
    implementations=("dense", "blockwise"),
    options=MappingProxyType({}),
    function=softmax_attention,
    step=softmax_attention_step,
    reference=softmax_attention_reference,
    empty_state=_softmax_empty_state,
    forward_flops=softmax_forward_flops,
    forward_bytes=softmax_forward_bytes,
    step_flops=softmax_step_flops,
    step_bytes=softmax_step_bytes,
    state_bytes=softmax_state_bytes,
)

_DELTA = Mixer(
    name="gdn",
    title="Gated DeltaNet",
    paper="Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv:2412.06464)",
    is_linear_time=True,
    inputs=(Q, K, V, G, BETA),
    implementations=("xla", "scan", "pallas"),
    options=MappingProxyType({}),
    function=gated_delta_net,
    step=gated_delta_net_step,
    reference=gated_delta_net_reference,
    empty_state=_recurrent_empty_state,
    forward_flops=delta_forward_flops,
    forward_bytes=partial(token_bytes, gates=2),
    step_flops=delta_step_flops,
    step_bytes=partial(recurrent_step_bytes, gates=2),
    state_bytes=recurrent_state_bytes,
)

_LINEAR = Mixer(
    name="linear",
    title="Linear attention",
    paper="Katharopoulos, Vyas, Pappas, Fleuret, Transformers are RNNs (arXiv:2006.16236)",
    is_linear_time=True,
    inputs=(Q, K, V),
    implementations=("xla", "scan", "pallas"),
    options=MappingProxyType({}),
    function=linear_attention,
    step=linear_attention_step,
    reference=linear_attention_reference,
    empty_state=_recurrent_empty_state,
    forward_flops=fading_forward_flops,
    forward_bytes=token_bytes,
    step_flops=partial(fading_step_flops, decays=False),
    step_bytes=recurrent_step_bytes,
    state_bytes=recurrent_state_bytes,
)

_CHANNELS = replace(
    _LINEAR,
    name="gla",
    title="Gated linear attention",
    paper="Yang, Wang, Shen, Panda, Kim, Gated Linear Attention (arXiv:2312.06635)",
    inputs=(Q, K, V, CHANNEL_G),
    function=gated_linear_attention,
    step=gated_linear_attention_step,
    reference=gated_linear_attention_reference,
    forward_bytes=partial(token_bytes, channel_gates=1),
    step_flops=fading_step_flops,
    step_bytes=partial(recurrent_step_bytes, channel_gates=1),
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
        _DELTA,
        _LINEAR,
        replace(
            _LINEAR,
            name="retention",
            title="Retention",
            paper="Sun et al., Retentive Network (arXiv:2307.08621)",
            function=retention,
            step=retention_step,
            reference=retention_reference,
            step_flops=fading_step_flops,
        ),
        replace(
            _LINEAR,
            name="mamba2",
            title="Mamba-2",
            paper="Dao, Gu, Transformers are SSMs (arXiv:2405.21060)",
            inputs=(Q, K, V, G, Input("dt", TOKEN, FRACTION)),
            function=mamba2,
            step=mamba2_step,
            reference=mamba2_reference,
            forward_bytes=partial(token_bytes, gates=2),
            step_flops=fading_step_flops,
            step_bytes=partial(recurrent_step_bytes, gates=2),
        ),
        _CHANNELS,
        replace(
            _CHANNELS,
            name="hgrn2",
            title="HGRN2",
            paper="Qin et al., HGRN2: Gated Linear RNNs with State Expansion (arXiv:2404.07904)",
            inputs=(Q, V, CHANNEL_G),  # its keys are made of g
            function=hgrn2,
            step=hgrn2_step,
            reference=hgrn2_reference,
            forward_bytes=partial(token_bytes, keys=1, channel_gates=1),
            step_bytes=partial(recurrent_step_bytes, keys=1, channel_gates=1),
        ),
        replace(
            _DELTA,
            name="delta",
            title="DeltaNet",
            paper="Yang, Wang, Zhang, Shen, Kim, DeltaNet in parallel (arXiv:2406.06484)",
            inputs=(Q, K, V, BETA),
            function=delta_net,
            step=delta_net_step,
            reference=delta_net_reference,
            forward_bytes=partial(token_bytes, gates=1),
            step_bytes=partial(recurrent_step_bytes, gates=1),
        ),
        replace(
            _DELTA,
            name="kda",
            title="Kimi Delta Attention",
            paper="Kimi Team, Kimi Linear (arXiv:2510.26692)",
            inputs=(Q, K, V, CHANNEL_G, BETA),
            function=kimi_delta_attention,
            step=kimi_delta_attention_step,
            reference=kimi_delta_attention_reference,
            forward_flops=partial(delta_forward_flops, decays_channels=True),
            forward_bytes=partial(token_bytes, gates=1, channel_gates=1),
            step_bytes=partial(recurrent_step_bytes, gates=1, channel_gates=1),
        ),
        replace(
            _DELTA,
            name="delta_product",
            title="Gated DeltaProduct",
            paper="Siems et al., DeltaProduct (arXiv:2502.10297)",
            inputs=(Q, per_step(K), per_step(V), G, per_step(BETA)),
            function=gated_delta_product,
            step=gated_delta_product_step,
            reference=gated_delta_product_reference,
            forward_flops=product_forward_flops,
            forward_bytes=product_forward_bytes,
            step_flops=product_step_flops,
            step_bytes=product_step_bytes,
        ),
        replace(
            _CHANNELS,
            name="rwkv7",
            title="RWKV-7",
            paper="Peng et al., RWKV-7 Goose (arXiv:2503.14456)",
            inputs=(
                Q,
                K,
                V,
                replace(CHANNEL_G, values=log_decay_above(-(math.e**-0.5))),  # its layer's
                replace(CHANNEL_G, name="removal_key", values=UNIT),
                replace(CHANNEL_G, name="rate", values=FRACTION),
            ),
            implementations=("xla", "scan"),
            function=rwkv7,
            step=rwkv7_step,
            reference=rwkv7_reference,
            forward_flops=rwkv7_forward_flops,
            forward_bytes=partial(token_bytes, channel_gates=3),
            step_flops=rwkv7_step_flops,
            step_bytes=partial(recurrent_step_bytes, channel_gates=3),
        ),
        Mixer(
            name="nsa",
            title="Native sparse attention",
            paper="Yuan et al., Native Sparse Attention (arXiv:2502.11089)",
            is_linear_time=False,
            inputs=(
                Q,
                K,
                V,
                Input("compressed_gate", TOKEN, FRACTION),
                Input("selected_gate", TOKEN, FRACTION),
                Input("window_gate", TOKEN, FRACTION),
            ),
            implementations=("masked", "gathered"),
            options=MappingProxyType(
                {"block_size": 64, "selected_blocks": 16, "sliding_window": 512}
            ),
            function=sparse.native_sparse_attention,
            step=sparse.native_sparse_attention_step,
            reference=sparse.native_sparse_attention_reference,
            empty_state=_block_empty_state,
            forward_flops=sparse_costs.native_forward_flops,
            forward_bytes=sparse_costs.native_forward_bytes,
            step_flops=sparse_costs.native_step_flops,
            step_bytes=sparse_costs.native_step_bytes,
            state_bytes=sparse_costs.native_state_bytes,
        ),
        Mixer(
            name="dsa",
            title="DeepSeek sparse attention",
            paper="DeepSeek-AI, DeepSeek-V3.2 (arXiv:2512.02556)",
            is_linear_time=False,
            inputs=(
                Q,
                K,
                V,
                Input("index_q", ("batch", "time", "index_heads", "key")),
                Input("index_k", ("batch", "time", "key")),
                Input("index_weights", ("batch", "time", "index_heads")),
            ),
            implementations=("masked", "gathered"),
            options=MappingProxyType({"selected_tokens": 2048}),
            function=sparse.deepseek_sparse_attention,
            step=sparse.deepseek_sparse_attention_step,
            reference=sparse.deepseek_sparse_attention_reference,
            empty_state=_indexed_empty_state,
            forward_flops=sparse_costs.deepseek_forward_flops,
            forward_bytes=sparse_costs.deepseek_forward_bytes,
            step_flops=sparse_costs.deepseek_step_flops,
            step_bytes=sparse_costs.deepseek_step_bytes,
            state_bytes=sparse_costs.deepseek_state_bytes,
        ),
    )
}
"""Every token mixer by name: softmax attention, the recurrent ones, attention to a selection."""


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
