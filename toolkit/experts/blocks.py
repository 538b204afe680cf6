"""The form for CPUs: a loop over blocks of pairs, each multiplied by its expert's own weights.

The loop runs over the blocks that hold pairs and reads every chosen expert in place. The gradient
is a second loop, which adds to the weights' gradients in place; JAX's own would make a gradient of
all experts for every block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from toolkit._compat import vary_alike
from toolkit.attention.execution.derivatives import differentiable
from toolkit.attention.execution.precision import accumulator
from toolkit.experts.products import (
    Activation,
    Layout,
    Weights,
    by_pair,
    expert,
    in_blocks,
    layout,
    rows_of,
)

BLOCK = 16


def blocks(activation: Activation, x: Array, experts: Array, weights: Weights) -> Array:
    """A loop over blocks of 16; forward mode and second derivatives by copies of the weights."""
    places = layout(experts, weights.up.shape[0], BLOCK)
    return _looped(activation)((x, weights), places)[0]


@functools.cache
def _looped(activation: Activation) -> Callable:
    of_rows = functools.partial(expert, activation)

    def at(array: Array, index: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)

    def forward(inputs: Any, places: Layout) -> tuple[Array]:
        x, weights = inputs

        def body(block: Array, out: Array) -> Array:
            rows = rows_of(x, at(places.pairs, block), places.slots.shape[1])
            own = jax.tree.map(lambda array: at(array, at(places.owners, block)), weights)
            return jax.lax.dynamic_update_index_in_dim(out, of_rows(rows, own), block, 0)

        out = jnp.zeros((*places.pairs.shape, x.shape[1]), accumulator(x.dtype))
        out, _ = vary_alike((out, x))
        return (by_pair(jax.lax.fori_loop(0, places.live, body, out), places),)

    def backward(
        outputs: Any, inputs: Any, places: Layout, d_outputs: Any, is_wanted: Any
    ) -> tuple[Array, Weights]:
        x, weights = inputs
        wide, chosen = accumulator(x.dtype), places.slots.shape[1]
        d_pairs = d_outputs[0].reshape(-1, x.shape[1])

        def body(block: Array, sums: Any) -> Any:
            d_x, d_weights = sums
            pairs, owner = at(places.pairs, block), at(places.owners, block)
            own = jax.tree.map(lambda array: at(array, owner), weights)
            d_out = d_pairs.at[pairs].get(mode="fill", fill_value=0)
            d_rows, d_own = jax.vjp(of_rows, rows_of(x, pairs, chosen), own)[1](d_out)
            d_x = jax.lax.dynamic_update_index_in_dim(d_x, d_rows.astype(wide), block, 0)
            add = jax.tree.map(lambda total, d: total.at[owner].add(d), d_weights, d_own)
            return d_x, add

        d_x = jnp.zeros((*places.pairs.shape, x.shape[1]), wide)
        d_weights = jax.tree.map(lambda array: jnp.zeros(array.shape, wide), weights)
        sums, _ = vary_alike(((d_x, d_weights), x))
        d_x, d_weights = jax.lax.fori_loop(0, places.live, body, sums)
        d_weights = jax.tree.map(lambda d, array: d.astype(array.dtype), d_weights, weights)
        return by_pair(d_x, places).sum(1).astype(x.dtype), d_weights

    def equation(inputs: Any, places: Layout) -> tuple[Array]:
        x, weights = inputs
        return (in_blocks(activation, x, places, weights),)

    return differentiable(forward, backward, equation)
