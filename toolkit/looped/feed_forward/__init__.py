"""The token-wise layers, one for every word of `feed_forwards`.

    y = layer(x)                        x [..., width]
    y, routing = layer.routed(x)        routing: a `toolkit.experts.Routing`, or None
    Layer.Options, Layer.check(config)  reached as config.<word>

FEED_FORWARDS   word -> class
layer.py        FeedForwardLayer, the base of all
swiglu.py       one gated layer, one without a gate, and none at all
mixture.py      a mixture of experts: router, experts, shared expert
"""

from typing import Any

from toolkit.looped.feed_forward.layer import FeedForwardLayer
from toolkit.looped.feed_forward.mixture import ChoiceBias, MixtureLayer
from toolkit.looped.feed_forward.swiglu import MLPLayer, NoFeedForward, SwiGLULayer

FEED_FORWARDS: dict[str, Any] = {
    layer.word: layer for layer in (SwiGLULayer, MLPLayer, MixtureLayer, NoFeedForward)
}
"""Every layer by its word in `feed_forwards`."""

__all__ = ["FEED_FORWARDS", "ChoiceBias", "FeedForwardLayer"]
