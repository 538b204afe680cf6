"""What lets a layer see a few tokens back: a short causal convolution, and the token before.

Both respect the borders of packed documents, and both continue a sequence from its *tail*, the
last inputs before the next one.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


class ShortConvolution(nnx.Module):
    """Depthwise causal convolution over a few tokens: y_t = b + sum_i w_i x_{t - taps + 1 + i}.

    Written as `taps` shifted products, which every backend fuses into one pass (XLA's grouped
    convolution is far slower on CPU) and which can respect document borders.

    Attributes:
        kernel: weights [taps, channels]; the last row multiplies the current token.
        bias: [channels], or None.

    Source: Yang et al., "Gated Delta Networks", 2024, section 3.4.
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
        taps, time = kernel.shape[0], x.shape[1]
        padded = _after_tail(x, tail, taps - 1)
        if segment_ids is None:
            # Zeros that vary like both: a hand-written gradient needs one set of `shard_map` axes.
            zero = jnp.zeros_like(padded, shape=()) + jnp.zeros_like(kernel, shape=())
            y = _shifted_products(padded + zero, kernel + zero)
        else:
            y = x * kernel[-1]
            for lag in range(1, taps):
                past = padded[:, taps - 1 - lag :][:, :time]
                y += _same_document(past, segment_ids, lag) * kernel[-1 - lag]
        if self.bias is not None:
            y += self.bias[...].astype(self.dtype)
        return y, _tail(padded, taps - 1, segment_ids)


def token_before(
    x: Float[Array, "batch time channels"],
    *,
    tail: Float[Array, "batch 1 channels"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time channels"], Float[Array, "batch 1 channels"]]:
    """RWKV's token shift, x_{t-1} at every t or zero before a document, and the new tail."""
    padded = _after_tail(x, tail, 1)
    past = padded[:, :-1]
    if segment_ids is not None:
        past = _same_document(past, segment_ids, 1)
    return past, _tail(padded, 1, segment_ids)


def _after_tail(x, tail, past):
    if tail is None:
        tail = jnp.zeros((x.shape[0], past, x.shape[2]), x.dtype)
    return jnp.concatenate([tail, x], axis=1)


def _same_document(past, segment_ids, lag):
    """`past`, the inputs of `lag` tokens ago, where they belong to the same document.

    What came before the sequence belongs to its first document.
    """
    time = segment_ids.shape[1]
    theirs = jnp.pad(segment_ids, ((0, 0), (lag, 0)), mode="edge")[:, :time]
    return jnp.where((theirs == segment_ids)[..., None], past, 0)


def _tail(padded, past, segment_ids):
    """The last `past` inputs, those of another document than the last one cleared."""
    tail = padded[:, padded.shape[1] - past :]
    if segment_ids is None or past == 0:
        return tail
    theirs = jnp.pad(segment_ids, ((0, 0), (past, 0)), mode="edge")[:, -past:]
    return jnp.where((theirs == segment_ids[:, -1:])[..., None], tail, 0)


@jax.custom_vjp
def _shifted_products(
    padded: Float[Array, "batch past_and_time channels"], kernel: Float[Array, "taps channels"]
) -> Float[Array, "batch time channels"]:
    """y_t = sum_i w_i x_{t + i}. Its gradient is the same sum with the taps reversed.

    Derived from the forward pass, that gradient would be one padded array per tap.
    """
    shifts = _shifts(padded, kernel)
    y = shifts[0] * kernel[0]
    for weight, past in zip(kernel[1:], shifts[1:], strict=True):
        y += past * weight
    return y


def _shifts(padded, kernel):
    """The window of `padded` that each tap of the kernel meets."""
    taps = kernel.shape[0]
    time = padded.shape[1] - taps + 1
    return [padded[:, i : i + time] for i in range(taps)]


def _shifted_products_forward(padded, kernel):
    return _shifted_products(padded, kernel), (padded, kernel)


def _shifted_products_backward(saved, d_y):
    padded, kernel = saved
    reach = kernel.shape[0] - 1
    d_padded = _shifted_products(jnp.pad(d_y, ((0, 0), (reach, reach), (0, 0))), kernel[::-1])
    d_kernel = [jnp.sum(d_y * past, axis=(0, 1)) for past in _shifts(padded, kernel)]
    # Without the barrier XLA sums the taps inside the transposition its next product asks for.
    return jax.lax.optimization_barrier(d_padded), jnp.stack(d_kernel)


_shifted_products.defvjp(_shifted_products_forward, _shifted_products_backward)
