"""The token-wise layers, one for every word of `feed_forwards`.

    y = layer(x)                        x [..., width]
    y, routing = layer.routed(x)        routing: a `toolkit.experts.Routing`, or None
    Layer.Options, Layer.check(config)  reached as config.<word>

FEED_FORWARDS   word -> class
layer.py        FeedForwardLayer, the base of all
swiglu.py       one gated layer, one without a gate, and none at all
mixture.py      a mixture of experts: router, experts, shared expert
hashed.py       a mixture whose experts a table of tokens names
"""

from typing import Any

from toolkit.looped.feed_forward.hashed import HashedMixtureLayer
from toolkit.looped.feed_forward.layer import FeedForwardLayer
from toolkit.looped.feed_forward.mixture import ChoiceBias, MixtureLayer, RouterState
from toolkit.looped.feed_forward.swiglu import MLPLayer, NoFeedForward, SwiGLULayer

FEED_FORWARDS: dict[str, Any] = {
    layer.word: layer
    for layer in (SwiGLULayer, MLPLayer, MixtureLayer, HashedMixtureLayer, NoFeedForward)
}
"""Every layer by its word in `feed_forwards`."""

MIXTURES = frozenset((MixtureLayer.word, HashedMixtureLayer.word))
"""The words of layers with a router; their options are those of "moe"."""

__all__ = ["FEED_FORWARDS", "MIXTURES", "ChoiceBias", "FeedForwardLayer", "RouterState"]
