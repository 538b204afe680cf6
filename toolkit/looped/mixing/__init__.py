"""The layers that mix tokens, one for every word of a pattern.

Each works on a whole sequence, with or without a cache to continue from, and one token at a time,
and says what options it has:

    y, cache = layer(x, segment_ids=None, cache=None)       x [batch, time, width]
    y_t, cache = layer.step(x_t, cache)                     x_t [batch, width]
    cache = Layer.empty_cache(config, batch, capacity)
    Layer.Options, Layer.check(config)                      reached as config.<word>

The mathematics of mixing is `toolkit.attention`'s; here are the projections, convolutions, gates
and norms that each paper puts around it.

LAYERS                      word -> class; a new layer is a file and a row
layer.py                    MixingLayer and LayerOptions, from which all are derived
attention.py                AttentionLayer, WindowLayer: softmax over all tokens or the last ones
latent.py                   MLALayer: keys and values of all heads out of one latent per token
streaming.py                what a block does whose gradient goes through the text in pieces
sparse/sparse_memory.py     keys and values indexed, so that a step reads a part of them
sparse/native_sparse.py     NSALayer: softmax over block means, selected blocks and a window
sparse/mixture_of_blocks.py MoBALayer: softmax over the query's own block and the best others
sparse/deepseek_sparse.py   DSALayer: softmax over the tokens an indexer picks
linear/recurrent.py         RecurrentLayer: what all others share, and their cache
linear/gates.py             decays, time steps, low-rank maps and norms that several use
linear/convolution.py       the short convolution in front of several
linear/linear_attention.py  linear attention, retention, gated linear attention, HGRN2
linear/mamba2.py            Mamba-2
linear/delta.py             the delta rule: DeltaNet, Gated DeltaNet, Gated DeltaProduct
linear/comba.py             Comba
linear/kimi.py              Kimi Delta Attention
linear/gated_delta_net_2.py Gated DeltaNet-2
linear/rwkv7.py             RWKV-7
"""

from toolkit.looped.mixing.attention import AttentionLayer, WindowLayer
from toolkit.looped.mixing.latent import MLALayer
from toolkit.looped.mixing.linear.comba import CombaLayer
from toolkit.looped.mixing.linear.delta import (
    DeltaNetLayer,
    DeltaProductLayer,
    GatedDeltaNetLayer,
)
from toolkit.looped.mixing.linear.gated_delta_net_2 import GatedDeltaNet2Layer
from toolkit.looped.mixing.linear.kimi import KimiDeltaLayer
from toolkit.looped.mixing.linear.linear_attention import (
    GatedLinearAttentionLayer,
    HGRN2Layer,
    LinearAttentionLayer,
    RetentionLayer,
)
from toolkit.looped.mixing.linear.mamba2 import Mamba2Layer
from toolkit.looped.mixing.linear.rwkv7 import RWKV7Layer
from toolkit.looped.mixing.sparse.deepseek_sparse import DSALayer
from toolkit.looped.mixing.sparse.mixture_of_blocks import MoBALayer
from toolkit.looped.mixing.sparse.native_sparse import NSALayer

LAYERS = {
    layer.word: layer
    for layer in (
        AttentionLayer,
        WindowLayer,
        GatedDeltaNetLayer,
        LinearAttentionLayer,
        RetentionLayer,
        Mamba2Layer,
        GatedLinearAttentionLayer,
        HGRN2Layer,
        DeltaNetLayer,
        CombaLayer,
        KimiDeltaLayer,
        GatedDeltaNet2Layer,
        RWKV7Layer,
        DeltaProductLayer,
        NSALayer,
        MoBALayer,
        DSALayer,
        MLALayer,
    )
}
"""Every layer by the word that names it in a pattern, a key of `toolkit.attention.MIXERS` but for
"mla", whose mixer takes the stream."""

__all__ = ["LAYERS"]
