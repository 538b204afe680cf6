"""The forms of softmax attention with their derivatives: one function for whoever attends to keys.

Dense is one tile of all queries and keys, for all heads at once; blockwise goes in tiles.
Derivatives of both beyond the first gradient are those of rows in chunks, so memory is linear in
time there too. With biases by distance all is done in such chunks.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit.attention._shapes import known
from toolkit.attention.execution.cores import refuse_explicit_axes
from toolkit.attention.execution.derivatives import differentiable
from toolkit.attention.softmax.blockwise import attend_tiles, attend_tiles_backward
from toolkit.attention.softmax.rows import attend_chunks, attend_rows
from toolkit.attention.softmax.scores import Context, Inputs, Options
from toolkit.attention.softmax.tiles import Tiling, even_tile, tiling

# Measured on two CPU cores, 8 heads of 64, forward and backward: dense takes 0.85 of the time of
# blockwise at 128 keys and 1.2 times as long at 256, in twice the memory.
DENSE_UP_TO = 128


def attend_to_keys(
    inputs: Inputs,
    context: Context,
    options: Options,
    implementation: str | None = None,
    largest_tile: int | None = None,
) -> tuple[Float[Array, "batch query_time heads value"], Float[Array, "batch query_time heads"]]:
    """Output and log-sum-exp of softmax attention to keys and values that have time last."""
    if inputs.relative_bias is not None:
        return attend_chunks(options, _vary_alike(inputs), context)
    time, heads = inputs.q.shape[1:3]
    key_heads, keys = inputs.k.shape[1], inputs.k.shape[3]
    if implementation == "dense" or (implementation is None and known(keys) <= DENSE_UP_TO):
        whole = even_tile(time, time), even_tile(keys, keys)
        cut = Tiling(*whole, heads // key_heads, key_heads, at_once=True)
        forward = partial(attend_tiles, options, cut)
        if options.dropout_rate:  # with explicit axes too, which rows carry and tiles do not
            forward = partial(attend_rows, options)
    else:
        refuse_explicit_axes(inputs[:3], "dropout in tiles")
        cut = tiling(time, keys, heads, key_heads, context.mask.window, largest_tile)
        forward = partial(attend_tiles, options, cut)
    backward = partial(attend_tiles_backward, options, cut)
    function = differentiable(forward, backward, partial(attend_chunks, options))
    return function(_vary_alike(inputs), context)


def _vary_alike(inputs: Inputs) -> Inputs:
    """Inputs that vary over the same axes inside `shard_map`.

    Adding zeros that vary like all of them does it; differentiation then sums the gradient of a
    replicated one over the axes it is shared by.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return inputs
    zeros = [jnp.zeros_like(x, shape=()) for x in jax.tree.leaves(inputs)]
    return jax.tree.map(lambda x: x + sum(zero.astype(x.dtype) for zero in zeros), inputs)
