"""The rows of attention to compressed blocks in the table of mixers."""

from functools import partial
from types import MappingProxyType

from toolkit.attention.inputs import TOKEN, Input, K, Mixer, Q, V
from toolkit.attention.sparse.compressed import costs
from toolkit.attention.sparse.compressed.cache import CompressedCache
from toolkit.attention.sparse.compressed.compressed_attention import (
    compressed_sparse_attention,
    compressed_sparse_attention_step,
    heavily_compressed_attention,
    heavily_compressed_attention_step,
)
from toolkit.attention.sparse.compressed.qwen_sparse_attention import (
    qwen_sparse_attention,
    qwen_sparse_attention_step,
)
from toolkit.attention.sparse.compressed.references import (
    compressed_sparse_attention_reference,
    heavily_compressed_attention_reference,
    qwen_sparse_attention_reference,
)
from toolkit.attention.sparse.train.costs import deepseek_state_bytes
from toolkit.attention.sparse.train.mixers import INDEX, WEIGHTS, indexed_empty_state

ENTRIES = (
    Input("block_k", (*TOKEN, "key"), is_gate=False),
    Input("block_v", (*TOKEN, "value"), is_gate=False),
)


def _empty_state(batch, heads, key, value, capacity, dtype, *, has_index=False, **options):
    # A caller that treats all rows alike gets an index of the size of a key.
    sizes = {name: options[name] for name in ("block_size", "sliding_window")}
    sizes["index_size"] = key if has_index else None
    return CompressedCache.empty(batch, heads, key, value, capacity, dtype, **sizes)


HEAVY = Mixer(
    name="hca", title="Heavily compressed attention",
    paper="DeepSeek-AI, DeepSeek-V4 technical report (2026)",
    is_linear_time=False,
    inputs=(Q, K, V, *ENTRIES),
    implementations=("masked",),
    options=MappingProxyType({"block_size": 128, "sliding_window": 128}),
    function=heavily_compressed_attention, step=heavily_compressed_attention_step,
    reference=heavily_compressed_attention_reference,
    empty_state=_empty_state,
    forward_flops=costs.forward_flops, forward_bytes=costs.forward_bytes,
    step_flops=costs.step_flops, step_bytes=costs.step_bytes,
    state_bytes=costs.state_bytes,
)  # fmt: skip
SPARSE = Mixer(
    name="csa", title="Compressed sparse attention",
    paper="DeepSeek-AI, DeepSeek-V4 technical report (2026)",
    is_linear_time=False,
    inputs=(Q, K, V, *ENTRIES, *INDEX, WEIGHTS),
    implementations=("masked", "gathered"),
    options=MappingProxyType({"block_size": 4, "selected_entries": 512, "sliding_window": 128}),
    function=compressed_sparse_attention, step=compressed_sparse_attention_step,
    reference=compressed_sparse_attention_reference,
    empty_state=partial(_empty_state, has_index=True),
    forward_flops=costs.forward_flops, forward_bytes=partial(costs.forward_bytes, has_index=True),
    step_flops=costs.step_flops, step_bytes=partial(costs.step_bytes, has_index=True),
    state_bytes=partial(costs.state_bytes, has_index=True),
)  # fmt: skip
QWEN = Mixer(
    name="qsa", title="Qwen sparse attention",
    paper="Qwen Team, Qwen4-Exp (2026)",
    is_linear_time=False,
    inputs=(Q, K, V, *INDEX),
    implementations=("masked", "gathered"),
    options=MappingProxyType({"block_size": 64, "selected_tokens": 2048}),
    function=qwen_sparse_attention, step=qwen_sparse_attention_step,
    reference=qwen_sparse_attention_reference,
    empty_state=indexed_empty_state,
    forward_flops=costs.qwen_forward_flops, forward_bytes=costs.qwen_forward_bytes,
    step_flops=costs.qwen_step_flops, step_bytes=costs.qwen_step_bytes,
    state_bytes=deepseek_state_bytes,
)  # fmt: skip
ROWS = (HEAVY, SPARSE, QWEN)
"""The rows of `MIXERS`."""
