"""The short convolution of `toolkit.attention` with its weights."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import short_convolution
from toolkit.parallel.context.along import sequence_look_back


class ShortConvolution(nnx.Module):
    """Depthwise causal convolution over a few tokens: y_t = b + sum_i w_i x_{t - taps + 1 + i}.

    Attributes:
        kernel: weights [taps, channels]; the last row multiplies the current token.
        bias: [channels], or None.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        use_bias: bool = False,
    ):
        bound = taps**-0.5

        def draw(*shape):
            return jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)

        self.kernel = nnx.Param(draw(taps, channels))
        self.bias = nnx.Param(draw(channels)) if use_bias else nnx.data(None)
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "batch time channels"],
        *,
        tail: Float[Array, "batch past channels"] | None = None,
        segment_ids: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time channels"], Float[Array, "batch past channels"]]:
        """Convolve a sequence that continues after `tail` (the past taps - 1 inputs, or zeros).

        Returns the outputs and the tail with which the next piece continues.
        """
        kernel = self.kernel[...].astype(self.dtype)
        bias = None if self.bias is None else self.bias[...].astype(self.dtype)
        past: Any = {"segment_ids": segment_ids, "initial_state": tail}
        return sequence_look_back(short_convolution, x, kernel, bias, reach=len(kernel) - 1, **past)
