"""Attention to a selection of tokens: exact, trainable, memory linear in time.

native_sparse_attention       block means, selected blocks and a window, gated (NSA)
deepseek_sparse_attention     the tokens an indexer picks (DSA); each with a `_reference` and
                              a `_step` (native_sparse_attention_reference,
                              native_sparse_attention_step, deepseek_sparse_attention_reference,
                              deepseek_sparse_attention_step)
indexer_loss                  what teaches the indexer: divergence from the attention it replaces
index_scores                  the indexer's scores of one sequence
BlockCache, IndexedCache      what each remembers while it decodes

What they are made of, for any method that selects
top_mask                      exactly the k largest, of equal ones the first
selected_indices              where a mask is true
attend                        exact softmax attention over a selection, masked or gathered
"""

from toolkit.attention._attend import attend
from toolkit.attention.sparse.cache import BlockCache, IndexedCache
from toolkit.attention.sparse.deepseek_sparse_attention import (
    deepseek_sparse_attention,
    deepseek_sparse_attention_reference,
    deepseek_sparse_attention_step,
)
from toolkit.attention.sparse.indexer import index_scores, indexer_loss
from toolkit.attention.sparse.native_sparse_attention import (
    native_sparse_attention,
    native_sparse_attention_reference,
    native_sparse_attention_step,
)
from toolkit.attention.sparse.selection import selected_indices, top_mask

__all__ = [
    "BlockCache",
    "IndexedCache",
    "attend",
    "deepseek_sparse_attention",
    "deepseek_sparse_attention_reference",
    "deepseek_sparse_attention_step",
    "index_scores",
    "indexer_loss",
    "native_sparse_attention",
    "native_sparse_attention_reference",
    "native_sparse_attention_step",
    "selected_indices",
    "top_mask",
]
