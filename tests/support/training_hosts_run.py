"""The small run of `training_small_run`, laid out on all devices of a job of several processes.

    python training_hosts_run.py DIRECTORY MESH STEPS        MESH such as data=4,model=2

Says "restored STEP HEX" of the state it starts from, "training" at every metrics row, and
"sha256 HEX" at the end; the first process only.
"""

import sys
from functools import partial

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from training_small_run import bigram_loss, bigram_params, digest

from toolkit import parallel, training

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 50, np.uint8)


def whole_digest(state):
    return digest(multihost_utils.process_allgather(state, tiled=True))


def say(*words):
    if jax.process_index() == 0:
        print(*words, flush=True)


def run(directory, axes, steps):
    mesh = parallel.make_mesh(axes)
    params = bigram_params()
    layout = parallel.fully_sharded(params, mesh, axis="data", min_elements=0)
    head = PartitionSpec("data", "model") if "model" in axes else PartitionSpec("data")
    layout = layout.replace("head", head, "cut twice")
    optimizer = training.adamw(1e-2)
    state = training.TrainState.create(layout.apply(params), optimizer)
    everywhere = NamedSharding(mesh, PartitionSpec())
    with training.Checkpoints(f"{directory}/checkpoints") as checkpoints:
        restored = checkpoints.restore_latest(state)
    if restored is not None:
        say("restored", int(restored[0].step), whole_digest(restored[0]))
    sample = partial(training.sample_batch, seed=0, batch=8, time=16)
    evaluation = training.evaluation_batches(TEXT, batch=8, time=16, count=2)
    result = training.fit(
        state,
        training.make_train_step(
            bigram_loss,
            optimizer,
            sample=sample,
            most_steps=2,
            batch_sharding=layout.batch_sharding,
        ),
        jax.device_put(TEXT, everywhere),
        training.FitOptions(steps, log_every=2, eval_every=10, checkpoint_every=2),
        directory=directory,
        evaluate=training.make_evaluation(bigram_loss, jax.device_put(evaluation, everywhere)),
        callback=lambda row: say("training"),
    )
    if result.stopped_by is None:
        say("sha256", whole_digest(result.state))
    else:
        sys.exit(130)


if __name__ == "__main__":
    parallel.join_processes()
    sizes = (axis.split("=") for axis in sys.argv[2].split(","))
    run(sys.argv[1], {name: int(size) for name, size in sizes}, int(sys.argv[3]))
