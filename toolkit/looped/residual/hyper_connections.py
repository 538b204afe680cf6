"""Hyper-connections: n residual streams, from which a sub-layer reads a mean and to which it adds.

The weights depend on the streams themselves. The matrix that mixes the streams is doubly stochastic
(manifold-constrained, mHC), so no product of such matrices makes a stream grow.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.looped.layers import normalised

EPSILON = 1e-6
"""Added to the weights, and to the sums that Sinkhorn's steps divide by."""

START_SCALE = 0.01
"""By how much the weights depend on the streams at the start of training."""

START_STAY = 4.0
"""At the start, the logit of a stream's share in itself above that in the others."""


def opened_streams(h: Float[Array, "... width"], streams: int) -> Float[Array, "... streams width"]:
    """Copies of one stream."""
    return jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], streams, h.shape[-1]))


def doubly_stochastic(
    logits: Float[Array, "... rows columns"], steps: int
) -> Float[Array, "... rows columns"]:
    """Sinkhorn and Knopp: columns and rows of softmax(logits) divided by their sums, in turn."""
    matrix = jax.nn.softmax(logits, axis=-1) + EPSILON
    matrix /= matrix.sum(-2, keepdims=True) + EPSILON

    def step(matrix: Array, _: None) -> tuple[Array, None]:
        matrix /= matrix.sum(-1, keepdims=True) + EPSILON
        return matrix / (matrix.sum(-2, keepdims=True) + EPSILON), None

    return jax.lax.scan(step, matrix, length=steps - 1)[0]


class _Weights(nnx.Module):
    """Weights of streams that depend on all of them: x W of their common RMSNorm, scaled."""

    def __init__(self, config: Any, sizes: tuple[int, ...], start: Array, rngs: nnx.Rngs):
        inputs, self.sizes = config.streams * config.width, sizes
        draw = nnx.initializers.normal(inputs**-0.5)
        self.kernel = nnx.Param(draw(rngs.params(), (inputs, sum(sizes))))
        self.bias = nnx.Param(start)
        self.scale = nnx.Param(jnp.full(len(sizes), START_SCALE))
        self.epsilon = config.norm_epsilon

    def __call__(self, streams: Float[Array, "... streams width"]) -> list[Array]:
        """Scaled and shifted weights in at least float32, one array per size."""
        flat = normalised(streams.reshape(*streams.shape[:-2], -1), self.epsilon)
        wide = flat.dtype
        out = flat @ self.kernel[...].astype(wide)
        ends = [sum(self.sizes[:n]) for n in range(1, len(self.sizes))]
        bias, scale = self.bias[...].astype(wide), self.scale[...].astype(wide)
        parts = zip(jnp.split(out, ends, -1), jnp.split(bias, ends), scale, strict=True)
        return [x * factor + start for x, start, factor in parts]


def _mean(weights: Array, streams: Float[Array, "... streams width"]) -> Array:
    return jnp.einsum("...n,...nd->...d", weights.astype(streams.dtype), streams)


def _even(streams: int) -> Array:
    """Logits whose sigmoids are 1 / streams."""
    return jnp.full(streams, -math.log(streams - 1))


class HyperConnection(nnx.Module):
    """What a sub-layer reads of n streams x, and how its output y is added to them.

        a, b, C = scale * (RMSNorm(x) W) + bias          x [n, width] as one vector
        read   = sum_i (sigmoid(a_i) + e) x_i
        x'_k   = 2 sigmoid(b_k) y + sum_j S(C)_jk x_j    S: Sinkhorn's steps, doubly stochastic

    At the start of training the streams stay nearly equal, and the block is nearly one with a plain
    residual.

    Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025, arXiv:2512.24880; Zhu
        et al., "Hyper-Connections", 2024, arXiv:2409.19606; as in DeepSeek-V4.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        n = config.streams
        start = [_even(n), jnp.zeros(n), START_STAY * jnp.eye(n).ravel()]
        self.weights = _Weights(config, (n, n, n * n), jnp.concatenate(start), rngs)
        self.steps = config.stream_mixing_steps

    def __call__(
        self, streams: Float[Array, "... streams width"]
    ) -> tuple[Float[Array, "... width"], Callable[[Array], Array]]:
        """What the sub-layer reads, and the function from its output to the next streams."""
        read, write, mix = self.weights(streams)
        mix = mix.reshape(*mix.shape[:-1], *2 * (streams.shape[-2],))
        mix = doubly_stochastic(mix, self.steps).astype(streams.dtype)
        write = 2 * jax.nn.sigmoid(write).astype(streams.dtype)

        def added(out: Array) -> Array:
            stayed = jnp.einsum("...jk,...jd->...kd", mix, streams)
            return write[..., None] * out[..., None, :].astype(streams.dtype) + stayed

        return _mean(jax.nn.sigmoid(read) + EPSILON, streams), added


class StreamHead(nnx.Module):
    """One stream of n: sum_i (sigmoid(a_i) + e) x_i, a as in `HyperConnection`."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.weights = _Weights(config, (config.streams,), _even(config.streams), rngs)

    def __call__(self, streams: Float[Array, "... streams width"]) -> Float[Array, "... width"]:
        return _mean(jax.nn.sigmoid(self.weights(streams)[0]) + EPSILON, streams)
