"""The rows of softmax attention in the table of mixers: over everything, and over a window."""

from dataclasses import replace
from types import MappingProxyType

from toolkit.attention.costs import (
    softmax_forward_bytes,
    softmax_forward_flops,
    softmax_state_bytes,
    softmax_step_bytes,
    softmax_step_flops,
)
from toolkit.attention.inputs import K, Mixer, Q, V
from toolkit.attention.softmax.cache import KVCache, softmax_attention_step
from toolkit.attention.softmax.reference import softmax_attention_reference
from toolkit.attention.softmax.softmax_attention import softmax_attention


def _softmax_empty_state(batch, heads, key, value, capacity, dtype, *, sliding_window=None):
    # A window is a ring of exactly its tokens, however long the sequence becomes.
    return KVCache.empty(batch, heads, key, value, sliding_window or capacity, dtype)


FULL = Mixer(
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
WINDOW = replace(
    FULL,
    name="window",
    title="Sliding-window attention",
    paper="Beltagy, Peters, Cohan, Longformer (arXiv:2004.05150)",
    is_linear_time=True,
    options=MappingProxyType({"sliding_window": 256}),
)
ROWS = (FULL, WINDOW)
"""The rows of `MIXERS`."""
