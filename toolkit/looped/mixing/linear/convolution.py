"""The short convolution of `toolkit.attention` with its weights, and a layer that is one."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import short_convolution
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions, MixingLayer
from toolkit.looped.mixing.linear.recurrent import RecurrentCache, RecurrentSizes
from toolkit.parallel.context.along import sequence_look_back


class ShortConvolution(nnx.Module):
    """Depthwise causal convolution over a few tokens: y_t = b + sum_i w_i x_{t - taps + 1 + i}.

    Attributes:
        kernel: weights [taps, channels]; the last row multiplies the current token.
        bias: [channels], or None.
    """

    def __init__(
        self, channels: int, taps: int, *, dtype: jnp.dtype, rngs: nnx.Rngs, use_bias: bool = False
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


@dataclasses.dataclass(frozen=True)
class ConvolutionOptions(LayerOptions):
    """Options of "conv" layers.

    Attributes:
        convolution_size: taps of the short convolution.
        biases: add biases to the projections and to the convolution.
    """

    convolution_size: int = 3
    biases: bool = False


class LookBackLayer(MixingLayer):
    """A layer whose cache is its last few inputs.

    Subclasses define `tail_shape` and `mix`.
    """

    is_recurrent: ClassVar[bool] = True
    can_cut_time: ClassVar[bool] = True

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> RecurrentSizes:
        """Channels in as many groups as the model has heads; they are independent."""
        taps, channels = cls.tail_shape(config)
        return RecurrentSizes(config.heads, config.heads, taps + 1, channels // config.heads)

    @classmethod
    def tail_shape(cls, config: LayerConfig) -> tuple[int, int]:
        """Tokens and channels of the cache."""
        raise NotImplementedError

    @classmethod
    def empty_cache(cls, config: LayerConfig, batch: int, capacity: int) -> RecurrentCache:
        """Zeros for the inputs before the first; the capacity does not matter."""
        shape = (batch, *cls.tail_shape(config))
        return RecurrentCache(None, jnp.zeros(shape, config.compute_dtype))

    def mix(
        self, x: Float[Array, "batch time width"], tail: Any, segment_ids: Any
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """The outputs and the new tail; `tail` is None before the first token."""
        raise NotImplementedError

    def __call__(
        self, x: Float[Array, "batch time width"], *,
        segment_ids: Int[Array, "batch time"] | None = None, cache: RecurrentCache | None = None,
    ) -> tuple[Float[Array, "batch time width"], RecurrentCache | None]:  # fmt: skip
        """Mix a sequence; with a cache it continues from the cache's inputs."""
        y, tail = self.mix(x, None if cache is None else cache.tail, segment_ids)
        return y, None if cache is None else RecurrentCache(None, tail)

    def step(
        self, x_t: Float[Array, "batch width"], cache: RecurrentCache
    ) -> tuple[Float[Array, "batch width"], RecurrentCache]:
        """Mix one token."""
        y, tail = self.mix(x_t[:, None], cache.tail, None)
        return y[:, 0], RecurrentCache(None, tail)


class ConvolutionLayer(LookBackLayer):
    """A short convolution between two gates, which looks back over its taps and no further.

        [b, c, v] = x W_in;   y = ( c * conv(b * v) ) W_o

    Source: Liquid AI, "LFM2 Technical Report", 2025, arXiv:2511.23404, section 2.
    """

    word: ClassVar[str] = "conv"
    Options: ClassVar[type[LayerOptions]] = ConvolutionOptions

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, options = config.width, config.compute_dtype, self.options_of(config)
        taps, biases = options.convolution_size, options.biases
        how = {"std": width**-0.5, "has_bias": biases}
        self.input = linear(width, 3 * width, dtype, rngs, **how)
        self.convolution = ShortConvolution(width, taps, dtype=dtype, rngs=rngs, use_bias=biases)
        self.output = linear(width, width, dtype, rngs, **how)
        self.sizes = self.sizes_of(config)

    @classmethod
    def tail_shape(cls, config: LayerConfig) -> tuple[int, int]:
        return cls.options_of(config).convolution_size - 1, config.width

    def mix(self, x, tail, segment_ids):
        before, after, v = jnp.split(self.input(x), 3, axis=-1)
        mixed, tail = self.convolution(before * v, tail=tail, segment_ids=segment_ids)
        return self.output(after * mixed), tail
