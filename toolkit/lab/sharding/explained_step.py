"""One train step of a language model under a layout, compiled and explained; nothing runs."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from toolkit.lab.sharding.stored_steps import results_of
from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.parallel import (
    Blame,
    Explanation,
    blame,
    explain,
    layout,
    make_mesh,
    partitioned_train_step,
    simulate_devices,
)


def explain_step(
    config: LoopedConfig, mesh_axes: str, scheme: str, *, batch: int = 16,
    sequence_length: int = 64, is_blamed: bool = False,
) -> Explanation | Blame:  # fmt: skip
    """Compiles a step (Adam) under the layout of a scheme, from shapes alone, and explains it.

    `mesh_axes` is such as "data=4,model=2"; on a CPU the devices are simulated. `is_blamed` adds
    the blame, which compiles once more for each change tried.
    """
    pairs = [part.partition("=") for part in mesh_axes.split(",")]
    if any(not name or not size.isdecimal() for name, _, size in pairs):
        raise ValueError(f"mesh={mesh_axes!r}: want axes and sizes, such as data=4,model=2")
    axes = {name: int(size) for name, _, size in pairs}
    simulate_devices(math.prod(axes.values()))
    mesh = make_mesh(axes)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    found = layout(model, mesh, scheme)
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((batch, sequence_length), jnp.int32)
    step = partitioned_train_step(partial(next_byte_loss, graph), optimizer, found)
    placed = tuple(
        jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            tree,
            found.shardings(tree),
        )
        for tree in (params, state)
    )
    text = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=found.batch_sharding)
    arguments = (*placed, (text, text))
    if is_blamed:
        return blame(step.__wrapped__, arguments, results=results_of(found, arguments))
    return explain(step.lower(*arguments))
