"""The layers that mix tokens, one for every word of a pattern.

Each works on a whole sequence, with or without a cache to continue from, and one token at a time:

    y, cache = layer(x, segment_ids=None, cache=None)       x [batch, time, width]
    y_t, cache = layer.step(x_t, cache)                     x_t [batch, width]
    cache = Layer.empty_cache(config, batch, capacity)

The mathematics of mixing is `toolkit.attention`'s; here are the projections, convolutions, gates
and norms that each paper puts around it.

LAYERS         word -> class; a new layer is a class and a row
attention.py   AttentionLayer, WindowLayer: softmax over all tokens or the last ones
sparse.py      NSALayer, DSALayer: softmax over a selection, and DSA's indexer
recurrent.py   RecurrentLayer: what all others share, and their cache
fading.py      linear attention, retention, gated linear attention, HGRN2
mamba2.py      Mamba-2
delta.py       the delta rule: DeltaNet, Gated DeltaNet, Gated DeltaProduct
kimi.py        Kimi Delta Attention
rwkv7.py       RWKV-7
gates.py       decays, time steps, low-rank maps and norms that several use
"""

from toolkit.looped.mixing.attention import AttentionLayer, WindowLayer
from toolkit.looped.mixing.delta import (
    DeltaNetLayer,
    DeltaProductLayer,
    GatedDeltaNetLayer,
)
from toolkit.looped.mixing.fading import (
    GatedLinearAttentionLayer,
    HGRN2Layer,
    LinearAttentionLayer,
    RetentionLayer,
)
from toolkit.looped.mixing.kimi import KimiDeltaLayer
from toolkit.looped.mixing.mamba2 import Mamba2Layer
from toolkit.looped.mixing.rwkv7 import RWKV7Layer
from toolkit.looped.mixing.sparse import DSALayer, NSALayer

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
        KimiDeltaLayer,
        RWKV7Layer,
        DeltaProductLayer,
        NSALayer,
        DSALayer,
    )
}
"""Every layer by the word that names it in a pattern, the keys of `toolkit.attention.MIXERS`."""

__all__ = ["LAYERS"]
