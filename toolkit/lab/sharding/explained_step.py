"""One train step of a language model under a layout, compiled and explained; nothing runs."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.parallel import Explanation, explain, layout, make_mesh, partitioned_train_step


def explain_step(
    config: LoopedConfig,
    axes: Mapping[str, int],
    scheme: str,
    *,
    batch: int = 16,
    sequence_length: int = 64,
) -> Explanation:
    """Compiles a step (Adam) under the layout of a scheme, from shapes alone, and explains it."""
    mesh = make_mesh(axes)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    found = layout(model, mesh, scheme)
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((batch, sequence_length), jnp.int32)
    step = partitioned_train_step(partial(next_byte_loss, graph), optimizer, found)
    placed = (
        jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            tree,
            found.shardings(tree),
        )
        for tree in (params, state)
    )
    text = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=found.batch_sharding)
    return explain(step.lower(*placed, (text, text)).compile())
