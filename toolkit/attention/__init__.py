"""Token mixers as pure functions of arrays: one call for a sequence, one step for decoding.

Softmax attention, full, grouped or windowed (`softmax/`)
    softmax_attention            attend over a sequence; into a cache when given one
    softmax_attention_reference  the same as the bare equation
    merge_attention              join what attention to parts of the keys gave
    online_softmax               the softmax of tiles, and how often its sums are rescaled
    softmax_attention_step       decode one token against a cache
    KVCache                      the keys and values of earlier tokens, time last; in int8 if wanted
    quantisation_error           what int8 costs in exactness
    forgetting_attention         gates that the data choose weaken earlier tokens (FoX); with
                                 forgetting_attention_reference and forgetting_attention_step
    ForgettingCache              keys, values and gates of earlier tokens
    path_attention               reflections that the data choose take the place of positions
                                 (PaTH); with path_attention_reference and path_attention_step
    PathCache                    keys, values and reflections of earlier tokens

Delta rules, whose state corrects itself, each with a `_reference` and a `_step`
(delta_net_reference, delta_net_step, gated_delta_net_reference, gated_delta_net_step,
kimi_delta_attention_reference, kimi_delta_attention_step, gated_delta_net_2_reference,
gated_delta_net_2_step, gated_delta_product_reference, gated_delta_product_step, rwkv7_reference,
rwkv7_step, comba_reference, comba_step, error_free_linear_attention_reference,
error_free_linear_attention_step)
    delta_net                    no decay: replace what is held under a key
    error_free_linear_attention  likewise, by the exact solution of the rule's differential equation
    gated_delta_net              one decay per head and token before that
    comba                        likewise, with feedback of its own to the state and the output
    kimi_delta_attention         one decay per key channel and token
    gated_delta_net_2            likewise; erases by key channel, writes by value channel
    gated_delta_product          several corrections per token
    rwkv7                        erase under one key, add under another
    unit_lower_inverse           inverse of I + A, the delta rule's inner solve (`inverse.py`)

Additive rules, whose state decays and adds up, each with a `_reference` and a `_step`
(linear_attention_reference, linear_attention_step, retention_reference, retention_step,
mamba2_reference, mamba2_step, hgrn2_reference, hgrn2_step, gated_linear_attention_reference,
gated_linear_attention_step)
    linear_attention             no decay: the sum of all keys and values
    retention                    a constant decay in every head
    retention_log_decay          those constants
    mamba2                       one decay per head and token, tied to the input's time step
    gated_linear_attention       one decay per key channel and token
    hgrn2                        likewise, and keys of what the decay lets go

Memories of more than one matrix, each with a `_reference`, a `_step` and a state of its own
(mesa_net_reference, mesa_net_step, preconditioned_kda_reference, preconditioned_kda_step,
log_linear_mamba2_reference, log_linear_mamba2_step, log_linear_gated_delta_net_reference,
log_linear_gated_delta_net_step, mamba3_reference, mamba3_step)
    mesa_net                     least squares at every token; MesaState
    mamba3                       a trapezoid between two tokens, in a state that turns; Mamba3State
    log_linear_mamba2            Mamba-2 with a state per power of two that lies behind; LevelState
    log_linear_gated_delta_net   likewise Gated DeltaNet
    preconditioned_kda           KDA that writes more along channels with little behind them;
                                 PreconditionedState

What layers compute before them
    short_convolution            a causal convolution over a few tokens, and short_convolution_step
    log_decay                    log-decays from a projection, with a bound if wanted (`gates.py`)
    unit_length                  vectors of length one

All of these run on one engine (`linear/engine/`): what a token does (`rule.py`) in chunks
(`chunked.py`), with its decays (`decays.py`), or token by token (`recurrence.py`).

Attention to a selection, each with a `_reference` and a `_step` (`sparse/`)
(native_sparse_attention_reference, native_sparse_attention_step,
deepseek_sparse_attention_reference, deepseek_sparse_attention_step,
mixture_of_block_attention_reference, mixture_of_block_attention_step,
heavily_compressed_attention_reference, heavily_compressed_attention_step,
compressed_sparse_attention_reference, compressed_sparse_attention_step,
qwen_sparse_attention_reference, qwen_sparse_attention_step)
    native_sparse_attention      block means, selected blocks and a window, gated
    deepseek_sparse_attention    the tokens that an indexer picks
    mixture_of_block_attention   the blocks whose mean key suits a query
    heavily_compressed_attention a window, and an entry per block before it
    compressed_sparse_attention  a window, and the entries that an indexer picks
    qwen_sparse_attention        the blocks that an indexer picks
    block_pooling                how the rows of a block become one entry
    indexer_loss                 what teaches the indexer
    BlockCache, IndexedCache, CompressedCache  what each remembers while it decodes

Rooms within this one
    latent                       latent attention: MLA in two forms, and what can be cut out of it
    quantised                    keys and values in fewer than 8 bits: KIVI, block floating point

Prefill by tiles, without training (`sparse/prefill/`)
    attend_tiles                 exact attention over the tiles that are kept
    Tiles                        which tiles each head keeps, and which single keys besides
    tile_masses                  the softmax weight in every tile
    sale_tiles, calibrate_sale   4-bit scores against an exact denominator (SALE)
    pattern_tiles, Pattern       vertical-slash, a-shape, pooled blocks (MInference)
    search_patterns, patterns_by_head  the offline search for a pattern per head, and its use
    antidiagonal_tiles           tiles by sums along their antidiagonals (XAttention)
    flexible_tiles               a pattern and a number of tiles per head and prompt (FlexPrefill)
    top_tiles                    the tiles with the largest masses (AdaSpa)

Every mixer once, with what it costs (`mixers.py`)
    MIXERS                       name -> row; iterated over by the tests, looked up by the rest
    Mixer                        a row: functions, options, FLOPs, bytes, paper
    mixer                        look a row up, with other options if wanted
    register                     add a row of your own, which every room then knows by its name
    register_dataclass           make a class for its state, or another pytree (`_pytrees.py`)
    recurrent                    a row whose state has one size, such as one matrix per head
    Input                        what a row says of one of a mixer's inputs (`inputs.py`)
    draw_inputs                  random inputs for any row (`inputs.py`)
    bucket_length                a few lengths for many, so that few programs are compiled
    chunk_gated_delta_rule       Gated DeltaNet as MaxText calls it (`drop_in.py`)
"""

from toolkit._pytrees import register_dataclass
from toolkit.attention import latent, quantised
from toolkit.attention.buckets import bucket_length
from toolkit.attention.drop_in import chunk_gated_delta_rule
from toolkit.attention.inputs import Input, Mixer, draw_inputs, recurrent
from toolkit.attention.linear.delta.comba import comba, comba_reference, comba_step
from toolkit.attention.linear.delta.delta_net import delta_net, delta_net_reference, delta_net_step
from toolkit.attention.linear.delta.error_free_linear_attention import (
    error_free_linear_attention,
    error_free_linear_attention_reference,
    error_free_linear_attention_step,
)
from toolkit.attention.linear.delta.gated_delta_net import (
    gated_delta_net,
    gated_delta_net_reference,
    gated_delta_net_step,
)
from toolkit.attention.linear.delta.gated_delta_net_2 import (
    gated_delta_net_2,
    gated_delta_net_2_reference,
    gated_delta_net_2_step,
)
from toolkit.attention.linear.delta.gated_delta_product import (
    gated_delta_product,
    gated_delta_product_reference,
    gated_delta_product_step,
)
from toolkit.attention.linear.delta.kimi_delta_attention import (
    kimi_delta_attention,
    kimi_delta_attention_reference,
    kimi_delta_attention_step,
)
from toolkit.attention.linear.delta.log_linear_gated_delta_net import (
    log_linear_gated_delta_net,
    log_linear_gated_delta_net_reference,
    log_linear_gated_delta_net_step,
)
from toolkit.attention.linear.delta.preconditioned_kda import (
    PreconditionedState,
    preconditioned_kda,
    preconditioned_kda_reference,
    preconditioned_kda_step,
)
from toolkit.attention.linear.delta.rwkv7 import rwkv7, rwkv7_reference, rwkv7_step
from toolkit.attention.linear.engine.inverse import unit_lower_inverse
from toolkit.attention.linear.engine.levels import LevelState
from toolkit.attention.linear.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_reference,
    gated_linear_attention_step,
)
from toolkit.attention.linear.gates import log_decay, unit_length
from toolkit.attention.linear.hgrn2 import hgrn2, hgrn2_reference, hgrn2_step
from toolkit.attention.linear.linear_attention import (
    linear_attention,
    linear_attention_reference,
    linear_attention_step,
)
from toolkit.attention.linear.log_linear_mamba2 import (
    log_linear_mamba2,
    log_linear_mamba2_reference,
    log_linear_mamba2_step,
)
from toolkit.attention.linear.mamba2 import mamba2, mamba2_reference, mamba2_step
from toolkit.attention.linear.mamba3 import Mamba3State, mamba3, mamba3_reference, mamba3_step
from toolkit.attention.linear.mesa_net import MesaState, mesa_net, mesa_net_reference, mesa_net_step
from toolkit.attention.linear.retention import (
    retention,
    retention_log_decay,
    retention_reference,
    retention_step,
)
from toolkit.attention.mixers import MIXERS, mixer, register
from toolkit.attention.short_convolution import short_convolution, short_convolution_step
from toolkit.attention.softmax.cache import KVCache, softmax_attention_step
from toolkit.attention.softmax.merge import merge_attention
from toolkit.attention.softmax.online import online_softmax
from toolkit.attention.softmax.positions.forgetting_attention import (
    ForgettingCache,
    forgetting_attention,
    forgetting_attention_reference,
    forgetting_attention_step,
)
from toolkit.attention.softmax.positions.path_attention import (
    PathCache,
    path_attention,
    path_attention_reference,
    path_attention_step,
)
from toolkit.attention.softmax.quantisation import quantisation_error
from toolkit.attention.softmax.reference import softmax_attention_reference
from toolkit.attention.softmax.softmax_attention import softmax_attention
from toolkit.attention.sparse import (
    BlockCache,
    CompressedCache,
    IndexedCache,
    block_pooling,
    compressed_sparse_attention,
    compressed_sparse_attention_reference,
    compressed_sparse_attention_step,
    deepseek_sparse_attention,
    deepseek_sparse_attention_reference,
    deepseek_sparse_attention_step,
    heavily_compressed_attention,
    heavily_compressed_attention_reference,
    heavily_compressed_attention_step,
    indexer_loss,
    mixture_of_block_attention,
    mixture_of_block_attention_reference,
    mixture_of_block_attention_step,
    native_sparse_attention,
    native_sparse_attention_reference,
    native_sparse_attention_step,
    qwen_sparse_attention,
    qwen_sparse_attention_reference,
    qwen_sparse_attention_step,
)
from toolkit.attention.sparse.prefill import (
    Pattern,
    Tiles,
    antidiagonal_tiles,
    attend_tiles,
    calibrate_sale,
    flexible_tiles,
    pattern_tiles,
    patterns_by_head,
    sale_tiles,
    search_patterns,
    tile_masses,
    top_tiles,
)

__all__ = [
    "MIXERS", "BlockCache", "CompressedCache", "ForgettingCache", "IndexedCache", "Input",
    "KVCache", "LevelState", "Mamba3State", "MesaState", "Mixer", "PathCache", "Pattern",
    "PreconditionedState", "Tiles", "antidiagonal_tiles", "attend_tiles", "block_pooling",
    "bucket_length", "calibrate_sale", "chunk_gated_delta_rule", "comba", "comba_reference",
    "comba_step", "compressed_sparse_attention", "compressed_sparse_attention_reference",
    "compressed_sparse_attention_step", "deepseek_sparse_attention",
    "deepseek_sparse_attention_reference", "deepseek_sparse_attention_step", "delta_net",
    "delta_net_reference", "delta_net_step", "draw_inputs", "error_free_linear_attention",
    "error_free_linear_attention_reference", "error_free_linear_attention_step", "flexible_tiles",
    "forgetting_attention", "forgetting_attention_reference", "forgetting_attention_step",
    "gated_delta_net", "gated_delta_net_2", "gated_delta_net_2_reference",
    "gated_delta_net_2_step", "gated_delta_net_reference", "gated_delta_net_step",
    "gated_delta_product", "gated_delta_product_reference", "gated_delta_product_step",
    "gated_linear_attention", "gated_linear_attention_reference", "gated_linear_attention_step",
    "heavily_compressed_attention", "heavily_compressed_attention_reference",
    "heavily_compressed_attention_step", "hgrn2", "hgrn2_reference", "hgrn2_step", "indexer_loss",
    "kimi_delta_attention", "kimi_delta_attention_reference", "kimi_delta_attention_step",
    "latent", "linear_attention", "linear_attention_reference", "linear_attention_step",
    "log_decay", "log_linear_gated_delta_net", "log_linear_gated_delta_net_reference",
    "log_linear_gated_delta_net_step", "log_linear_mamba2", "log_linear_mamba2_reference",
    "log_linear_mamba2_step", "mamba2", "mamba2_reference", "mamba2_step", "mamba3",
    "mamba3_reference", "mamba3_step", "merge_attention", "mesa_net", "mesa_net_reference",
    "mesa_net_step", "mixer", "mixture_of_block_attention",
    "mixture_of_block_attention_reference", "mixture_of_block_attention_step",
    "native_sparse_attention", "native_sparse_attention_reference",
    "native_sparse_attention_step", "online_softmax", "path_attention",
    "path_attention_reference", "path_attention_step", "pattern_tiles", "patterns_by_head",
    "preconditioned_kda", "preconditioned_kda_reference", "preconditioned_kda_step",
    "quantisation_error", "quantised", "qwen_sparse_attention", "qwen_sparse_attention_reference",
    "qwen_sparse_attention_step", "recurrent", "register", "register_dataclass", "retention",
    "retention_log_decay", "retention_reference", "retention_step", "rwkv7", "rwkv7_reference",
    "rwkv7_step",
    "sale_tiles", "search_patterns", "short_convolution", "short_convolution_step",
    "softmax_attention", "softmax_attention_reference", "softmax_attention_step", "tile_masses",
    "top_tiles", "unit_length", "unit_lower_inverse",
]  # fmt: skip
