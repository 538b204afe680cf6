"""The table of token mixers: every variant once, with its functions and what it costs.

The contract suite iterates over `MIXERS`; panels, the tour and benchmarks look rows up in it. All
call every row alike:

    row = mixer("window", sliding_window=128)
    out, state = row.function(*draw_inputs(row, time), **row.options)  # one for each of row.inputs
    state = row.empty_state(batch, heads, key, value, capacity, dtype)
    out_t, state = row.step(*inputs_t, state, **row.options)
    row.forward_flops(batch, time, heads, key, value, **row.options)

A new mixer is a file of mathematics and a row here; a form of its FLOPs may be in `costs.py`.
"""

import math
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from toolkit._checks import checked
from toolkit.attention import sparse
from toolkit.attention.costs import (
    additive_forward_flops,
    additive_step_flops,
    delta_forward_flops,
    delta_step_flops,
    product_forward_flops,
    product_step_flops,
    rwkv7_forward_flops,
    rwkv7_step_flops,
    softmax_forward_bytes,
    softmax_forward_flops,
    softmax_state_bytes,
    softmax_step_bytes,
    softmax_step_flops,
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
    Mixer,
    Q,
    V,
    log_decay_above,
    per_step,
    recurrent,
)
from toolkit.attention.linear.comba import comba, comba_reference, comba_step
from toolkit.attention.linear.delta_net import delta_net, delta_net_reference, delta_net_step
from toolkit.attention.linear.gated_delta_net import (
    gated_delta_net,
    gated_delta_net_reference,
    gated_delta_net_step,
)
from toolkit.attention.linear.gated_delta_net_2 import (
    gated_delta_net_2,
    gated_delta_net_2_reference,
    gated_delta_net_2_step,
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
from toolkit.attention.softmax.reference import softmax_attention_reference
from toolkit.attention.softmax.softmax_attention import softmax_attention
from toolkit.attention.sparse.train import costs as sparse_costs


def _softmax_empty_state(batch, heads, key, value, capacity, dtype, *, sliding_window=None):
    # A window is a ring of exactly its tokens, however long the sequence becomes.
    return KVCache.empty(batch, heads, key, value, sliding_window or capacity, dtype)


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

_additive = partial(
    recurrent,
    transition="diagonal",
    forward_flops=additive_forward_flops,
    step_flops=additive_step_flops,
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
        recurrent(
            name="gdn",
            title="Gated DeltaNet",
            paper="Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv:2412.06464)",
            inputs=(Q, K, V, G, BETA),
            function=gated_delta_net,
            step=gated_delta_net_step,
            reference=gated_delta_net_reference,
            forward_flops=delta_forward_flops,
            step_flops=delta_step_flops,
        ),
        _additive(
            name="linear",
            title="Linear attention",
            paper="Katharopoulos, Vyas, Pappas, Fleuret, Transformers are RNNs (arXiv:2006.16236)",
            inputs=(Q, K, V),
            function=linear_attention,
            step=linear_attention_step,
            reference=linear_attention_reference,
            step_flops=partial(additive_step_flops, decays=False),
        ),
        _additive(
            name="retention",
            title="Retention",
            paper="Sun et al., Retentive Network (arXiv:2307.08621)",
            inputs=(Q, K, V),
            function=retention,
            step=retention_step,
            reference=retention_reference,
        ),
        _additive(
            name="mamba2",
            title="Mamba-2",
            paper="Dao, Gu, Transformers are SSMs (arXiv:2405.21060)",
            inputs=(Q, K, V, G, Input("dt", TOKEN, FRACTION)),
            function=mamba2,
            step=mamba2_step,
            reference=mamba2_reference,
        ),
        _additive(
            name="gla",
            title="Gated linear attention",
            paper="Yang, Wang, Shen, Panda, Kim, Gated Linear Attention (arXiv:2312.06635)",
            inputs=(Q, K, V, CHANNEL_G),
            function=gated_linear_attention,
            step=gated_linear_attention_step,
            reference=gated_linear_attention_reference,
        ),
        _additive(
            name="hgrn2",
            title="HGRN2",
            paper="Qin et al., HGRN2: Gated Linear RNNs with State Expansion (arXiv:2404.07904)",
            inputs=(Q, V, CHANNEL_G),  # its keys are made of g
            function=hgrn2,
            step=hgrn2_step,
            reference=hgrn2_reference,
        ),
        recurrent(
            name="delta",
            title="DeltaNet",
            paper="Yang, Wang, Zhang, Shen, Kim, DeltaNet in parallel (arXiv:2406.06484)",
            inputs=(Q, K, V, BETA),
            function=delta_net,
            step=delta_net_step,
            reference=delta_net_reference,
            forward_flops=delta_forward_flops,
            step_flops=delta_step_flops,
        ),
        recurrent(
            name="comba",
            title="Comba",
            paper="Hu et al., Bilinear RNNs with Closed-loop Control (arXiv:2506.02475)",
            inputs=(
                Q,
                K,
                V,
                G,
                BETA,
                Input("feedback", TOKEN, FRACTION),
                Input("correction", TOKEN, FRACTION),
            ),
            implementations=("xla", "scan"),
            function=comba,
            step=comba_step,
            reference=comba_reference,
            forward_flops=delta_forward_flops,
            step_flops=delta_step_flops,
        ),
        recurrent(
            name="kda",
            title="Kimi Delta Attention",
            paper="Kimi Team, Kimi Linear (arXiv:2510.26692)",
            inputs=(Q, K, V, CHANNEL_G, BETA),
            function=kimi_delta_attention,
            step=kimi_delta_attention_step,
            reference=kimi_delta_attention_reference,
            forward_flops=partial(delta_forward_flops, decays_channels=True),
            step_flops=delta_step_flops,
        ),
        recurrent(
            name="gdn2",
            title="Gated DeltaNet-2",
            paper="Hatamizadeh, Choi, Kautz, Gated DeltaNet-2 (arXiv:2605.22791)",
            inputs=(
                Q,
                K,
                V,
                CHANNEL_G,
                Input("erase", (*TOKEN, "key"), FRACTION),
                Input("write", (*TOKEN, "value"), FRACTION),
            ),
            implementations=("xla", "scan"),
            function=gated_delta_net_2,
            step=gated_delta_net_2_step,
            reference=gated_delta_net_2_reference,
            forward_flops=partial(delta_forward_flops, decays_channels=True),
            step_flops=delta_step_flops,
        ),
        recurrent(
            name="delta_product",
            title="Gated DeltaProduct",
            paper="Siems et al., DeltaProduct (arXiv:2502.10297)",
            inputs=(Q, per_step(K), per_step(V), G, per_step(BETA)),
            function=gated_delta_product,
            step=gated_delta_product_step,
            reference=gated_delta_product_reference,
            forward_flops=product_forward_flops,
            step_flops=product_step_flops,
        ),
        recurrent(
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
            step_flops=rwkv7_step_flops,
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
            name="moba",
            title="Mixture of block attention",
            paper="Lu et al., MoBA: Mixture of Block Attention (arXiv:2502.13189)",
            is_linear_time=False,
            inputs=(Q, K, V),
            implementations=("masked", "gathered"),
            options=MappingProxyType({"block_size": 512, "selected_blocks": 3}),
            function=sparse.mixture_of_block_attention,
            step=sparse.mixture_of_block_attention_step,
            reference=sparse.mixture_of_block_attention_reference,
            empty_state=_block_empty_state,
            forward_flops=sparse_costs.mixture_forward_flops,
            forward_bytes=sparse_costs.mixture_forward_bytes,
            step_flops=sparse_costs.mixture_step_flops,
            step_bytes=sparse_costs.mixture_step_bytes,
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


@checked
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

    Example:
        >>> mixer("window", sliding_window=128).options["sliding_window"]
        128
    """
    if name not in MIXERS:
        raise ValueError(f"mixer must be one of {', '.join(map(repr, MIXERS))}; got {name!r}.")
    row = MIXERS[name]
    unknown = sorted(set(options) - set(row.options))
    if unknown:
        known = ", ".join(row.options) or "none"
        raise ValueError(f"mixer {name!r} has the options: {known}; got {', '.join(unknown)}.")
    return replace(row, options=MappingProxyType({**row.options, **options}))
