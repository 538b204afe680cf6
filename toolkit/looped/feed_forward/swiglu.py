"""The gated feed-forward layer."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.looped.feed_forward.layer import FeedForwardLayer
from toolkit.looped.layers import linear


class SwiGLU(nnx.Module):
    """Gated feed-forward layer: y = W_down( silu(W_gate x) * (W_up x) ).

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(
        self, width: int, hidden: int, *, down_std: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        std = width**-0.5
        self.gate = linear(width, hidden, dtype, rngs, std=std)
        self.up = linear(width, hidden, dtype, rngs, std=std)
        self.down = linear(hidden, width, dtype, rngs, std=down_std)

    def __call__(self, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class SwiGLULayer(SwiGLU, FeedForwardLayer):
    """`SwiGLU` of the model's `feed_forward_size`."""

    word: ClassVar[str] = "swiglu"
    can_cut_time: ClassVar[bool] = True

    def __init__(self, config: Any, *, down_std: Callable[[int, int], float], rngs: nnx.Rngs):
        width, hidden = config.width, config.feed_forward_size
        std = down_std(hidden, width)
        super().__init__(width, hidden, down_std=std, dtype=config.compute_dtype, rngs=rngs)

    def routed(self, x: Float[Array, "... width"]) -> tuple[Array, None]:
        return self(x), None

    @classmethod
    def parameters(cls, config: Any) -> tuple[int, int]:
        count = 3 * config.width * config.feed_forward_size
        return count, count
