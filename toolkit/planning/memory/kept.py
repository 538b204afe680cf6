"""What a layer's forward pass keeps for its backward pass, as its traced derivative says.

Softmax layers have a formula in `categories`. A recurrent layer keeps what the chunked form of its
method needs: states at the ends of chunks, [C, C] products of decays and keys and their inverses,
queries, keys and values cut into chunks. Which of these it keeps differs from method to method, and
a layer registered elsewhere has its own. All are leaves of the function that `jax.vjp` returns.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from toolkit.looped import LoopedConfig
from toolkit.looped.blocks import Block
from toolkit.looped.mixing import LAYERS
from toolkit.parallel.pipeline.partition import partition
from toolkit.planning.memory.sizes import LANES, alone

TRACED = 2048  # tokens of a recurrent layer that is traced: many chunks of any method


def _is_cheap_to_keep(primitive, *_, **__):
    """Keep all but gathered arrays and copies in another type: weights among them."""
    return primitive.name not in ("all_gather", "convert_element_type", "optimization_barrier")


# What `jax.checkpoint` keeps, by what is recomputed.
POLICIES = {
    "none": _is_cheap_to_keep,
    "elementwise": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layer": None,
}


def kept_per_token(config: LoopedConfig, word: str, fed: str, recompute: str, length: int) -> float:
    """Bytes that one layer of one chip keeps per token of sequences of that length, padded as a TPU
    pads them; without the half of a mixture of experts. Of a recurrent layer they do not depend on
    the length, so one trace serves for all.
    """
    layer = alone(config, word, **({"feed_forward": 1} if fed == "moe" else {}))
    return _traced(layer, recompute, TRACED if LAYERS[word].is_recurrent else length)


@functools.lru_cache(maxsize=256)
def waiting_per_token(config: LoopedConfig, word: str, length: int) -> tuple[float, float]:
    """The same in a pipeline, which computes cheap operations anew, and bytes kept between the
    gradient of the layer's input and those of its weights."""
    run, h, state = _layer(alone(config, word), TRACED if LAYERS[word].is_recurrent else length)
    leaves, tree = jax.tree.flatten(state)

    def stage(weights, x, _):
        return [run(x[0], tree.unflatten(weights))]

    cut = partition(stage, leaves, [h], [], recompute=False)
    kept, split = (
        sum(_padded_bytes(a, h.shape[1]) for a in each) for each in (cut.kept, cut.split)
    )
    return kept / h.shape[1], split / h.shape[1]


def _layer(config: LoopedConfig, length: int) -> tuple[Callable[..., Any], Any, Any]:
    dtype = config.compute_dtype
    block = nnx.eval_shape(lambda: Block(config.pattern, config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(block)

    def layer(h, weights):
        used = jax.tree.map(lambda x: x.astype(dtype) if x.ndim >= 2 else x, weights)
        return nnx.merge(graph, used)(h)[0]

    return layer, jax.ShapeDtypeStruct((1, length, config.width), dtype), state


@functools.lru_cache(maxsize=256)
def _traced(config: LoopedConfig, recompute: str, length: int) -> float:
    layer, h, state = _layer(config, length)
    weights = {leaf.shape for leaf in jax.tree.leaves(state)}
    # Of another length than any weight, which would not be told from what tokens leave.
    while any(length in shape for shape in weights):
        length += 2 * LANES
        h = jax.ShapeDtypeStruct((1, length, config.width), h.dtype)
    run = jax.checkpoint(layer, policy=POLICIES[recompute])
    backward = jax.eval_shape(lambda *given: jax.vjp(run, *given)[1], h, state)
    found = [leaf for leaf in jax.tree.leaves(backward) if leaf.shape not in weights]
    return sum(_padded_bytes(leaf, length) for leaf in found) / length


def _padded_bytes(array, length: int) -> int:
    """Bytes on a TPU, which lays an array's time along the lanes where that is not cut, and else
    its last dimension."""
    shape = list(array.shape)
    while shape and shape[-1] == 1:
        shape.pop()
    if shape and length not in shape:
        shape[-1] = -(-shape[-1] // LANES) * LANES
    return math.prod(shape) * array.dtype.itemsize
