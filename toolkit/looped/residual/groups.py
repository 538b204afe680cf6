"""A learned share of the input of a group of layers, added to its output."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array


class GroupResidual(nnx.Module):
    """Groups of consecutive layers, each with a learned share of its input added to its output.

        h_out = F_b(...F_a(h_in)) + gamma h_in          gamma a scalar per group, starts at zero

    Attributes:
        gamma: [groups]; the last group holds the remaining layers.

    Source: LT2, released model code ("block residual").
    """

    def __init__(self, layers: int, size: int):
        self.gamma = nnx.Param(jnp.zeros(-(-layers // size)))
        self.layers, self.size = layers, size

    def __call__(self, layer: int, h: Array, start: Array) -> tuple[Array, Array]:
        """After a layer, counted from 0: the stream, and the input of the next layer's group."""
        if (layer + 1) % self.size and layer + 1 < self.layers:
            return h, start
        h += self.gamma[...][layer // self.size].astype(h.dtype) * start
        return h, h
