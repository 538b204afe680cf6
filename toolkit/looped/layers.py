"""The small parts flax has no module for: SwiGLU, rotary embedding, short causal convolution.

RMSNorm, Linear and Embed are flax's own (`nnx.RMSNorm` takes its mean square in float32).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def linear(
    inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs, *, std: float
) -> nnx.Linear:
    """A projection without bias, drawn from a normal distribution cut at three deviations.

    Args:
        inputs: size of the last axis of the argument.
        outputs: size of the last axis of the result.
        dtype: compute type; the kernel itself is float32.
        rngs: where the initial values come from.
        std: standard deviation before the cut; 0 starts the projection at zero.

    Returns:
        The flax module.

    Source: LT2, initialisation.
    """
    initializer = (
        nnx.initializers.truncated_normal(std, lower=-3.0, upper=3.0)
        if std
        else nnx.initializers.zeros
    )
    return nnx.Linear(
        inputs, outputs, use_bias=False, kernel_init=initializer, dtype=dtype, rngs=rngs
    )


class SwiGLU(nnx.Module):
    """Gated feed-forward layer: y = W_down( silu(W_gate x) * (W_up x) ).

    Attributes:
        gate, up: projections to the hidden size.
        down: projection back.

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


def rotary_embedding(
    x: Float[Array, "... heads size"], positions: Int[Array, "..."], *, theta: float
) -> Float[Array, "... heads size"]:
    """Rotate channel pairs by an angle proportional to the position.

    Channels i and i + size/2 form the pair (x_i, x_{i + size/2}), turned by the angle
    position * theta^(-2i/size). This is the half-split order of Hugging Face's Llama checkpoints;
    the original code pairs neighbours (2i, 2i + 1), a fixed permutation of the channels.

    Scores depend on differences of positions only, so packed documents need no restart at 0.

    Args:
        x: queries or keys, size even.
        positions: position of each token, one axis fewer than heads and size.
        theta: base of the wavelengths.

    Returns:
        The rotated array, in the type of `x`; angles are float32.

    Cost: 3 FLOPs a number.

    Source: Su et al., "RoFormer", 2021, section 3.2.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def unit_length(x: Float[Array, "... size"]) -> Float[Array, "... size"]:
    """Scale the last axis to Euclidean length one: x / sqrt(sum x^2 + 1e-6), summed in float32.

    Args:
        x: any array.

    Returns:
        An array of the same shape and type.

    Source: Yang et al., "Gated Delta Networks", 2024: keys must not be longer than 1, or the
        delta rule expands the state.
    """
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


@jax.custom_vjp
def _shifted_products(
    padded: Float[Array, "batch past_and_time channels"], kernel: Float[Array, "taps channels"]
) -> Float[Array, "batch time channels"]:
    """y_t = sum_i w_i x_{t + i}. Its gradient is the same sum with the taps reversed.

    Derived from the forward pass, that gradient would be one padded array a tap.
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


class ShortConvolution(nnx.Module):
    """Depthwise causal convolution over a few tokens: y_t = sum_i w_i x_{t - taps + 1 + i}.

    Written as `taps` shifted products, which every backend fuses into one pass (XLA's grouped
    convolution is far slower on CPU) and which can respect document borders.

    Attributes:
        kernel: weights [taps, channels]; the last row multiplies the current token.

    Source: Yang et al., "Gated Delta Networks", 2024, section 3.4.
    """

    def __init__(self, channels: int, taps: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        bound = taps**-0.5
        self.kernel = nnx.Param(
            jax.random.uniform(rngs.params(), (taps, channels), minval=-bound, maxval=bound)
        )
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
        if tail is None:
            tail = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype)
        padded = jnp.concatenate([tail, x], axis=1)
        if segment_ids is None:
            # Zeros that vary like both: a hand-written gradient needs one set of `shard_map` axes.
            zero = jnp.zeros_like(padded, shape=()) + jnp.zeros_like(kernel, shape=())
            return _shifted_products(padded + zero, kernel + zero), padded[:, time:]
        y = x * kernel[-1]
        for lag in range(1, taps):
            past = padded[:, taps - 1 - lag :][:, :time]
            same = jnp.pad(segment_ids, ((0, 0), (lag, 0)), mode="edge")[:, :time] == segment_ids
            y += jnp.where(same[..., None], past, 0) * kernel[-1 - lag]
        return y, padded[:, time:]

    def step(
        self, x_t: Float[Array, "batch channels"], tail: Float[Array, "batch past channels"]
    ) -> tuple[Float[Array, "batch channels"], Float[Array, "batch past channels"]]:
        """One token: the same sum over the tail and the new input."""
        window = jnp.concatenate([tail, x_t[:, None]], axis=1)
        y_t = jnp.sum(window * self.kernel[...].astype(self.dtype), axis=1)
        return y_t, window[:, 1:]
