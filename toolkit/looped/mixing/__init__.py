"""The layers that mix tokens, one for every word of a pattern.

Each processes a whole sequence, with or without a cache to continue from, or one token at a time,
and declares its options:

    y, cache = layer(x, segment_ids=None, cache=None)       x [batch, time, width]
    y_t, cache = layer.step(x_t, cache)                     x_t [batch, width]
    cache = Layer.empty_cache(config, batch, capacity)
    Layer.Options, Layer.check(config)                      reached as config.<word>

`toolkit.attention` computes the mixing; the layers add the projections, convolutions, gates and
norms that each paper puts around it.

LAYERS                      word -> class; it collects itself from these files
register_layer              add a layer of another package
layer.py                    MixingLayer and LayerOptions, from which all are derived
attention.py                AttentionLayer, WindowLayer, UnrotatedLayer: softmax over all
                            tokens, the last ones, or all without positions
attention_options.py        their options
rotary.py                   how rotary wavelengths are stretched
forgetting.py               ForgettingLayer: softmax with forget gates in place of positions
latent.py                   MLALayer: keys and values of all heads from one latent per token
grouped_latent.py           GroupedLatentLayer, LowRankLayer (MLRA), GroupedTiedLayer (GTA)
value_embedding.py          ValueEmbeddingLayer: values with an embedding of the token
relative.py                 RelativeLayer, RelativeWindowLayer: scores with biases by distance
                            between short convolutions (Inkling-2)
hybrid.py                   HybridLayer: softmax attention and Mamba-2 side by side
streaming.py                blocks whose backward pass runs in pieces of the text
sparse/sparse_memory.py     indexed keys and values, of which a step reads a part
sparse/native_sparse.py     NSALayer: softmax over block means, selected blocks and a window
sparse/mixture_of_blocks.py MoBALayer: softmax over the query's own block and the best others
sparse/deepseek_sparse.py   DSALayer: softmax over the tokens an indexer picks
sparse/compressed.py        HCALayer, CSALayer, SharedWindowLayer: softmax over a window and
                            entries for the blocks before it (DeepSeek-V4)
sparse/compressed_options.py  their options
sparse/qwen_sparse.py       QSALayer: softmax over the blocks an indexer picks (Qwen4)
sparse/pooled.py            a pooled projection, and the cache of layers that pool
linear/recurrent.py         RecurrentLayer: what all of the following share, and their cache
linear/gates.py             decays, time steps, low-rank maps and norms that several use
linear/convolution.py       LookBackLayer: what reads a few tokens; ConvolutionLayer, a short
                            convolution between gates, as in LFM2; the one in front of several
linear/linear_attention.py  linear attention, retention, gated linear attention, HGRN2
linear/lightning.py         MiniMax's lightning attention
linear/mamba2.py            Mamba-2
linear/delta.py             the delta rule: DeltaNet, Gated DeltaNet, Gated DeltaProduct
linear/error_free.py        error-free linear attention
linear/comba.py             Comba
linear/kimi.py              Kimi Delta Attention, plain and preconditioned
linear/gated_delta_net_2.py Gated DeltaNet-2
linear/rwkv7.py             RWKV-7's time mixing and channel mixing
linear/mamba3.py            Mamba-3
linear/log_linear.py        log-linear Mamba-2 and Gated DeltaNet
linear/mesa.py              MesaNet
"""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from toolkit._checks import checked
from toolkit._registry import Registry
from toolkit.looped.mixing import linear, sparse
from toolkit.looped.mixing.layer import MixingLayer


def _layers(package: str, path: list[str]) -> Iterator[tuple[str, type[MixingLayer]]]:
    """The layer classes in a folder's files, by their word."""
    for found in pkgutil.iter_modules(path):
        if found.ispkg:
            continue
        module = importlib.import_module(f"{package}.{found.name}")
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, MixingLayer) and "word" in vars(value):
                yield value.word, value


LAYERS: Registry[Any] = Registry(
    pair
    for package, path in (
        (__name__, __path__),
        (linear.__name__, linear.__path__),
        (sparse.__name__, sparse.__path__),
    )
    for pair in _layers(package, list(path))
)
"""Every layer by the word that names it in a pattern: a key of `toolkit.attention.MIXERS`, but for
"mla", "grouped_latent", "mlra" and "grouped_tied", whose mixers take the residual stream, "nope",
which is "full" without positions, "conv" and "channel_mix", which look back a few tokens,
"lightning", "shared_window", "relative" and "relative_window", which are computed by another's
mixer, "hybrid", which has two, and
"value_embedding", which reads the tokens."""


@checked
def register_layer(layer: type) -> type:
    """Add a layer of your own, so that its word can stand in the pattern of a looped model.

    Args:
        layer: a subclass of `toolkit.looped.mixing.layer.MixingLayer`, such as one derived from
            `toolkit.looped.mixing.linear.recurrent.RecurrentLayer`; its `word` is the name of the
            mixer that `toolkit.attention.register` was given. May be used as a decorator.

    Returns:
        The layer. If its cache is of a class that `jax.tree_util.register_dataclass` registers,
        `LoopedCache.empty` refuses it; see `toolkit.attention.register_dataclass`.

    Example:
        >>> class Mine(LAYERS["gla"]):
        ...     word = "mine"
        >>> register_layer(Mine).word in LAYERS
        True
        >>> del LAYERS["mine"]
    """
    if not issubclass(layer, MixingLayer):
        raise TypeError(f"layer: got {layer.__name__}, wanted a subclass of MixingLayer")
    LAYERS.register(layer.word, layer)
    return layer


__all__ = ["LAYERS", "register_layer"]
