"""Attention to a selection of tokens: trained sparse (`train/`), or decoded sparsely (`decode/`).

Trained: exact, memory linear in time
native_sparse_attention       block means, selected blocks and a window, gated (NSA)
deepseek_sparse_attention     the tokens an indexer picks (DSA); each with a `_reference` and
                              a `_step` (native_sparse_attention_reference,
                              native_sparse_attention_step, deepseek_sparse_attention_reference,
                              deepseek_sparse_attention_step)
mixture_of_block_attention    the blocks whose mean key suits a query (MoBA), likewise
                              (mixture_of_block_attention_reference,
                              mixture_of_block_attention_step)
heavily_compressed_attention  a window, and an entry per block before it (HCA), likewise
                              (heavily_compressed_attention_reference,
                              heavily_compressed_attention_step)
compressed_sparse_attention   a window, and the entries an indexer picks (CSA), likewise
                              (compressed_sparse_attention_reference,
                              compressed_sparse_attention_step)
qwen_sparse_attention         the blocks an indexer picks (QSA), likewise
                              (qwen_sparse_attention_reference, qwen_sparse_attention_step)
block_pooling                 how the rows of a block become one
indexer_loss                  what teaches the indexer: divergence from the attention it replaces
index_scores                  the indexer's scores of one sequence
BlockCache, IndexedCache, CompressedCache
                              what each remembers while it decodes

Decoded: any model trained dense, its cache read in part (`protocol.py`)
SELECTORS                     the systems by name: some rank keys by the query (`decode/`), others
                              evict tokens before they see it (`evict/`)
Selector                      what a system is: an index of the keys, and how a query ranks them
choose, Choice                a system and its budget in one word, such as "oracle:mass=0.9"
build                         the cache of a prompt, with a system's index
update                        append one token
decode_step                   attend to what a system selects, and say what was read
observe                       show a system what a step attended to, for those that evict by it
SparseCache, Decoded          what these take and return
train_hash                    HATA's projections, learned from a model's queries and keys
offloaded_step, Offloaded     PQCache with keys and values on the host: bytes over the link, seconds
cached_share                  what a cache of blocks on the accelerator holds of the selected tokens
hidden_iterations             k-means iterations that reading the prompt hides
FixedTokens, Ratio, PerHead, MassTarget, Threshold
                              budgets: how much may be read, whatever the system
AdaKV                         a budget that the heads of a layer share out by their scores
split_heads, head_gates       DuoAttention: which heads read everything, and by what they are told
recovered_mass, output_error  how good a selection is

What they are made of, for any method that selects
top_mask                      exactly the k largest, of equal ones the first
selected_indices              where a mask is true
attend                        exact softmax attention over a selection, masked or gathered
combine                       merge what attention to disjoint parts gave
"""

from toolkit.attention._attend import attend
from toolkit.attention.softmax.merge import combine
from toolkit.attention.sparse.budget import FixedTokens, MassTarget, PerHead, Ratio, Threshold
from toolkit.attention.sparse.cache import SparseCache
from toolkit.attention.sparse.compressed.cache import CompressedCache
from toolkit.attention.sparse.compressed.compressed_attention import (
    compressed_sparse_attention,
    compressed_sparse_attention_step,
    heavily_compressed_attention,
    heavily_compressed_attention_step,
)
from toolkit.attention.sparse.compressed.pooling import block_pooling
from toolkit.attention.sparse.compressed.qwen_sparse_attention import (
    qwen_sparse_attention,
    qwen_sparse_attention_step,
)
from toolkit.attention.sparse.compressed.references import (
    compressed_sparse_attention_reference,
    heavily_compressed_attention_reference,
    qwen_sparse_attention_reference,
)
from toolkit.attention.sparse.decode.hash_training import train_hash
from toolkit.attention.sparse.decode.offload import (
    Offloaded,
    cached_share,
    hidden_iterations,
    offloaded_step,
)
from toolkit.attention.sparse.evict.ada_kv import AdaKV
from toolkit.attention.sparse.evict.duo_attention import head_gates, split_heads
from toolkit.attention.sparse.protocol import Decoded, build, decode_step, observe, update
from toolkit.attention.sparse.quality import output_error, recovered_mass
from toolkit.attention.sparse.selection import selected_indices, top_mask
from toolkit.attention.sparse.selector import Selector
from toolkit.attention.sparse.selectors import SELECTORS, Choice, choose
from toolkit.attention.sparse.train.cache import BlockCache, IndexedCache
from toolkit.attention.sparse.train.deepseek_reference import deepseek_sparse_attention_reference
from toolkit.attention.sparse.train.deepseek_sparse_attention import (
    deepseek_sparse_attention,
    deepseek_sparse_attention_step,
)
from toolkit.attention.sparse.train.indexer import index_scores, indexer_loss
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

__all__ = [
    "SELECTORS", "AdaKV", "BlockCache", "Choice", "CompressedCache", "Decoded", "FixedTokens",
    "IndexedCache", "MassTarget", "Offloaded", "PerHead", "Ratio", "Selector", "SparseCache",
    "Threshold", "attend", "block_pooling", "build", "cached_share", "choose", "combine",
    "compressed_sparse_attention", "compressed_sparse_attention_reference",
    "compressed_sparse_attention_step", "decode_step", "deepseek_sparse_attention",
    "deepseek_sparse_attention_reference", "deepseek_sparse_attention_step", "head_gates",
    "heavily_compressed_attention", "heavily_compressed_attention_reference",
    "heavily_compressed_attention_step", "hidden_iterations", "index_scores", "indexer_loss",
    "mixture_of_block_attention", "mixture_of_block_attention_reference",
    "mixture_of_block_attention_step", "native_sparse_attention",
    "native_sparse_attention_reference", "native_sparse_attention_step", "observe",
    "offloaded_step", "output_error", "qwen_sparse_attention", "qwen_sparse_attention_reference",
    "qwen_sparse_attention_step", "recovered_mass", "selected_indices", "split_heads", "top_mask",
    "train_hash", "update",
]  # fmt: skip
