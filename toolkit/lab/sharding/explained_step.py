"""One train step of a language model under a layout, compiled and explained; nothing runs."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from toolkit import parallel
from toolkit.lab.sharding.stored_steps import placed, results_of
from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM


def explain_step(
    config: LoopedConfig, mesh_axes: str, scheme: str, *, batch: int = 16,
    sequence_length: int = 64, is_blamed: bool = False,
) -> parallel.Explanation | parallel.Blame:  # fmt: skip
    """Compiles a step (Adam) under the layout of a scheme, from shapes alone, and explains it.

    `mesh_axes` is such as "data=4,model=2"; on a CPU the devices are simulated. `is_blamed` adds
    the blame, which compiles once more for each change tried.
    """
    pairs = [part.partition("=") for part in mesh_axes.split(",")]
    if any(not name or not size.isdecimal() for name, _, size in pairs):
        raise ValueError(f"mesh={mesh_axes!r}: want axes and sizes, such as data=4,model=2")
    axes = {name: int(size) for name, _, size in pairs}
    parallel.simulate_devices(math.prod(axes.values()))
    mesh = parallel.make_mesh(axes)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    found = parallel.layout(model, mesh, scheme)
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, params)
    size = batch, sequence_length
    text = jax.ShapeDtypeStruct(size, jnp.int32, sharding=found.batch_sharding)
    step = parallel.partitioned_train_step(partial(next_byte_loss, graph), optimizer, found)
    arguments = *placed(found, params, state), (text, text)
    if is_blamed:
        return parallel.blame(step.__wrapped__, arguments, results=results_of(found, arguments))
    return parallel.explain(step.lower(*arguments))
