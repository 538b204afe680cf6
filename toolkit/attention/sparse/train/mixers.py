"""The rows of trained sparse attention in the table of mixers."""

from types import MappingProxyType

from toolkit.attention.inputs import FRACTION, TOKEN, Input, K, Mixer, Q, V
from toolkit.attention.sparse.train import costs
from toolkit.attention.sparse.train.cache import BlockCache, IndexedCache
from toolkit.attention.sparse.train.deepseek_reference import deepseek_sparse_attention_reference
from toolkit.attention.sparse.train.deepseek_sparse_attention import (
    deepseek_sparse_attention,
    deepseek_sparse_attention_step,
)
from toolkit.attention.sparse.train.mixture_of_block_attention import (
    mixture_of_block_attention,
    mixture_of_block_attention_reference,
    mixture_of_block_attention_step,
)
from toolkit.attention.sparse.train.native_sparse_attention import (
    native_sparse_attention,
    native_sparse_attention_reference,
    native_sparse_attention_step,
)

INDEX = (
    Input("index_q", ("batch", "time", "index_heads", "key")),
    Input("index_k", ("batch", "time", "key")),
)
WEIGHTS = Input("index_weights", ("batch", "time", "index_heads"))


def _block_empty_state(batch, heads, key, value, capacity, dtype, *, block_size=64, **_):
    return BlockCache.empty(batch, heads, key, value, capacity, dtype, block_size=block_size)


def indexed_empty_state(batch, heads, key, value, capacity, dtype, **_):
    """An `IndexedCache` for a row of the table."""
    # A caller that treats all rows alike gets an index of the size of a key.
    return IndexedCache.empty(batch, heads, key, value, key, capacity, dtype)


NATIVE = Mixer(
    name="nsa", title="Native sparse attention",
    paper="Yuan et al., Native Sparse Attention (arXiv:2502.11089)",
    is_linear_time=False,
    inputs=(
        Q, K, V,
        Input("compressed_gate", TOKEN, FRACTION),
        Input("selected_gate", TOKEN, FRACTION),
        Input("window_gate", TOKEN, FRACTION),
    ),
    implementations=("masked", "gathered"),
    options=MappingProxyType({"block_size": 64, "selected_blocks": 16, "sliding_window": 512}),
    function=native_sparse_attention, step=native_sparse_attention_step,
    reference=native_sparse_attention_reference,
    empty_state=_block_empty_state,
    forward_flops=costs.native_forward_flops, forward_bytes=costs.native_forward_bytes,
    step_flops=costs.native_step_flops, step_bytes=costs.native_step_bytes,
    state_bytes=costs.native_state_bytes,
)  # fmt: skip
MIXTURE = Mixer(
    name="moba", title="Mixture of block attention",
    paper="Lu et al., MoBA: Mixture of Block Attention (arXiv:2502.13189)",
    is_linear_time=False,
    inputs=(Q, K, V),
    implementations=("masked", "gathered"),
    options=MappingProxyType({"block_size": 512, "selected_blocks": 3}),
    function=mixture_of_block_attention, step=mixture_of_block_attention_step,
    reference=mixture_of_block_attention_reference,
    empty_state=_block_empty_state,
    forward_flops=costs.mixture_forward_flops, forward_bytes=costs.mixture_forward_bytes,
    step_flops=costs.mixture_step_flops, step_bytes=costs.mixture_step_bytes,
    state_bytes=costs.native_state_bytes,
)  # fmt: skip
DEEPSEEK = Mixer(
    name="dsa", title="DeepSeek sparse attention",
    paper="DeepSeek-AI, DeepSeek-V3.2 (arXiv:2512.02556)",
    is_linear_time=False,
    inputs=(Q, K, V, *INDEX, WEIGHTS),
    implementations=("masked", "gathered"),
    options=MappingProxyType({"selected_tokens": 2048}),
    function=deepseek_sparse_attention, step=deepseek_sparse_attention_step,
    reference=deepseek_sparse_attention_reference,
    empty_state=indexed_empty_state,
    forward_flops=costs.deepseek_forward_flops, forward_bytes=costs.deepseek_forward_bytes,
    step_flops=costs.deepseek_step_flops, step_bytes=costs.deepseek_step_bytes,
    state_bytes=costs.deepseek_state_bytes,
)  # fmt: skip
ROWS = (NATIVE, MIXTURE, DEEPSEEK)
"""The rows of `MIXERS`."""
