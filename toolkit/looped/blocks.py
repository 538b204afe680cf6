"""One physical layer: norm, mix tokens, add; norm, feed forward, add."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.looped.config import LoopedConfig
from toolkit.looped.layers import SwiGLU
from toolkit.looped.mixing import AttentionLayer, GatedDeltaNetLayer


class Block(nnx.Module):
    """Pre-norm transformer block around any token mixer.

        h' = h + Mixer(RMSNorm(h));   F(h) = h' + SwiGLU(RMSNorm(h'))

    Attributes:
        mixer_norm, mixer, feed_forward_norm, feed_forward: the sub-modules.

    Source: LT2, architecture section.
    """

    def __init__(self, word: str, config: LoopedConfig, *, rngs: nnx.Rngs):
        width, hidden, dtype = config.width, config.feed_forward_size, config.compute_dtype
        if word == "gdn":
            self.mixer = GatedDeltaNetLayer(config, rngs=rngs)
        else:
            self.mixer = AttentionLayer(config, sliding_window=_window(word, config), rngs=rngs)
        # LT2 draws the down projection at width^-1/2 in linear-time blocks, hidden^-1/2 elsewhere.
        down_std = (width if word == "gdn" else hidden) ** -0.5
        self.feed_forward = SwiGLU(width, hidden, down_std=down_std, dtype=dtype, rngs=rngs)
        self.mixer_norm = nnx.RMSNorm(width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.feed_forward_norm = nnx.RMSNorm(
            width, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs
        )

    def __call__(
        self,
        h: Float[Array, "batch time width"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
        cache: Any = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """A whole sequence; returns the cache that follows it, or None without one."""
        mixed, cache = self.mixer(self.mixer_norm(h), segment_ids=segment_ids, cache=cache)
        h += mixed
        return h + self.feed_forward(self.feed_forward_norm(h)), cache

    def step(self, h: Float[Array, "batch width"], cache: Any) -> tuple[Array, Any]:
        """One token; returns the cache with that token in it."""
        mixed, cache = self.mixer.step(self.mixer_norm(h), cache)
        h += mixed
        return h + self.feed_forward(self.feed_forward_norm(h)), cache


def empty_layer_cache(word: str, config: LoopedConfig, batch: int, capacity: int) -> Any:
    """The cache of one layer in one loop before the first token.

    Args:
        word: the layer's word in the pattern.
        config: the model.
        batch: sequences.
        capacity: tokens a full-attention cache can hold.

    Returns:
        A `KVCache` or a `GatedDeltaNetCache`.
    """
    if word == "gdn":
        return GatedDeltaNetLayer.empty_cache(config, batch)
    return AttentionLayer.empty_cache(config, batch, capacity, sliding_window=_window(word, config))


def _window(word: str, config: LoopedConfig) -> int | None:
    return config.sliding_window if word == "window" else None
