"""A small run for the chaos suite, on any mesh, with exact marks of the data's order.

    python chaos_job.py DIRECTORY MESH STEPS        MESH such as data=4,model=2

Says "step N" at every metrics row and "order N loss X sha256 HEX" at the end, the first process
only. Its model state is a number made of every token in its place of row and step: rows in another
order, left out or taken twice would change it, and no rounding does. A device computes a row at a
time, so that fewer devices take more passes over the same batch, four devices two. Checkpoints come
every second update, so that a run is inside a save most of the time.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from training_hosts_run import TEXT, say, whole_digest
from training_small_run import bigram_loss, bigram_params

from toolkit import parallel, training

BATCH, TIME, WIDTH, ROWS_AT_ONCE = 8, 16, 16, 1


def loss(params, order, batch):
    tokens, targets, places = batch
    marks = tokens.astype(jnp.uint32) * jnp.arange(1, TIME + 1, dtype=jnp.uint32)
    marks = (marks.sum(axis=1, dtype=jnp.uint32) * places).sum(dtype=jnp.uint32)
    return bigram_loss(params, (tokens, targets)), order + marks


def sample(block, step):
    places = step.astype(jnp.uint32) * BATCH + jnp.arange(1, BATCH + 1, dtype=jnp.uint32)
    return (*training.HostBatches.sample(block, step), places * places)


def run(directory, axes, steps):
    mesh = parallel.make_mesh(axes)
    params = bigram_params(WIDTH)
    layout = parallel.fully_sharded(params, mesh, axis="data", min_elements=0)
    if "model" in axes:
        layout = layout.replace("head", PartitionSpec("data", "model"), "cut twice")
    everywhere = NamedSharding(mesh, PartitionSpec())
    passes = max(1, BATCH // (ROWS_AT_ONCE * axes["data"]))
    recipe = training.Recipe(steps=steps, learning_rate=1e-2, ema=0.9, accumulate=passes)
    data = training.token_batches(
        TEXT, seed=0, batch=BATCH, time=TIME, sharding=layout.batch_sharding
    )
    state, step = training.prepare(
        loss, layout.apply(params), recipe, sample=sample, most_steps=2,
        model_state=jax.device_put(jnp.uint32(0), everywhere), batch_sharding=layout.batch_sharding,
    )  # fmt: skip
    held_out = training.evaluation_batches(TEXT, batch=BATCH, time=TIME, count=1)
    evaluate = training.make_evaluation(
        lambda params, order, batch: bigram_loss(params, batch),
        jax.device_put(held_out, everywhere),
    )
    options = training.FitOptions(
        steps, log_every=2, eval_every=8, checkpoint_every=2, is_progress_shown=False
    )
    result = training.fit(
        state, step, data, options, directory=directory, evaluate=evaluate,
        callback=lambda row: say("step", row["step"]),
    )  # fmt: skip
    if result.stopped_by is not None:
        sys.exit(130)
    order = int(np.asarray(result.state.model_state.addressable_data(0)))
    say("order", order, "loss", result.history[-1]["loss"], "sha256", whole_digest(result.state))


if __name__ == "__main__":
    try:
        parallel.join_processes()
        sizes = (axis.split("=") for axis in sys.argv[2].split(","))
        axes = {name: int(size) for name, size in sizes}
        if axes.keys() == {"data"}:
            axes["data"] = jax.device_count()  # fewer if the job goes on with fewer processes
        run(sys.argv[1], axes, int(sys.argv[3]))
    except training.CheckpointError as error:
        print(f"job: {error}", file=sys.stderr, flush=True)
        parallel.hosts.processes.leave(2)
