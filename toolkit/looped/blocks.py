"""One physical layer: norm, mix tokens, add; norm, feed forward, add."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.looped.config import LoopedConfig
from toolkit.looped.layers import SwiGLU
from toolkit.looped.mixing import LAYERS


class Block(nnx.Module):
    """Pre-norm transformer block around any token mixer.

        h' = h + Mixer(RMSNorm(h));   F(h) = h' + SwiGLU(RMSNorm(h'))

    Attributes:
        mixer_norm, mixer, feed_forward_norm, feed_forward: the sub-modules.

    Source: LT2, architecture section.
    """

    def __init__(self, word: str, config: LoopedConfig, *, rngs: nnx.Rngs):
        width, hidden, dtype = config.width, config.feed_forward_size, config.compute_dtype
        self.mixer = LAYERS[word](config, rngs=rngs)
        # LT2 draws the down projection at hidden^-1/2 in softmax blocks, width^-1/2 elsewhere.
        down_std = (hidden if self.mixer.word in ("full", "window") else width) ** -0.5
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
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """A whole sequence; returns the cache that follows it, or None without one."""
        mixed, cache = self.mixer(
            self.mixer_norm(h), segment_ids=segment_ids, cache=cache, **_only_if_given(window)
        )
        h += mixed
        return h + self.feed_forward(self.feed_forward_norm(h)), cache

    def step(
        self, h: Float[Array, "batch width"], cache: Any, *, window: int | None = None
    ) -> tuple[Array, Any]:
        """One token; returns the cache with that token in it."""
        mixed, cache = self.mixer.step(self.mixer_norm(h), cache, **_only_if_given(window))
        h += mixed
        return h + self.feed_forward(self.feed_forward_norm(h)), cache


def _only_if_given(window):
    """Only softmax layers know windows; a configuration gives no other layer one."""
    return {} if window is None else {"window": window}
