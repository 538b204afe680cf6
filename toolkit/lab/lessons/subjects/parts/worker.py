"""One worker of lesson 09, which trains a tiny model with the others and may be killed once.

    python -m toolkit.lab.lessons.subjects.parts.worker DIRECTORY KILL_AT

KILL_AT is an update, or 0 for none. The first process prints "update STEP LOSS" after every update,
and "sha256 HEX" of the final state.
"""

import hashlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from toolkit import parallel, training

UPDATES, SAVE_EVERY, WIDTH = 20, 5, 16
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 50, np.uint8)


def loss(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Cross-entropy of the next byte, given one byte [batch, time]."""
    inputs, targets = batch
    logits = jnp.tanh(params["embedding"][inputs]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(directory: Path, kill_at: int) -> Any:
    """The final state; process 1 kills itself after an update, the first time it gets there."""

    def after_update(row: dict[str, Any]) -> None:
        if jax.process_index() == 0 and "loss" in row:
            print("update", row["step"], f"{row['loss']:.9g}", flush=True)
        marker = directory / "killed"
        if row["step"] == kill_at and jax.process_index() == 1 and not marker.exists():
            # Saves run beside training; the last one that was begun is let end.
            wanted = kill_at - 1 - (kill_at - 1) % SAVE_EVERY
            while wanted and not (directory / "checkpoints" / str(wanted)).exists():
                time.sleep(0.02)
            marker.touch()
            time.sleep(0.5)  # the first process says what it knows
            os.kill(os.getpid(), signal.SIGKILL)

    mesh = parallel.make_mesh({"data": jax.device_count()})
    random = np.random.default_rng(0)
    params = {
        "embedding": jnp.asarray(random.normal(size=(256, WIDTH)), jnp.float32),
        "head": jnp.zeros((WIDTH, 256)),
    }
    layout = parallel.fully_sharded(params, mesh, axis="data", min_elements=0)
    optimizer = training.adamw(1e-2)
    step = training.make_train_step(
        loss, optimizer, sample=partial(training.sample_batch, seed=0, batch=8, time=16),
        most_steps=1, batch_sharding=layout.batch_sharding,
    )  # fmt: skip
    return training.fit(
        training.TrainState.create(layout.apply(params), optimizer),
        step,
        jax.device_put(TEXT, NamedSharding(mesh, PartitionSpec())),
        training.FitOptions(
            UPDATES, log_every=1, eval_every=UPDATES, checkpoint_every=SAVE_EVERY,
            is_progress_shown=False,
        ),
        directory=directory,
        callback=after_update,
    ).state  # fmt: skip


if __name__ == "__main__":
    parallel.join_processes()
    state = multihost_utils.process_allgather(
        train(Path(sys.argv[1]), int(sys.argv[2])), tiled=True
    )
    sha256 = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        sha256.update(np.asarray(leaf).tobytes())
    if jax.process_index() == 0:
        print("sha256", sha256.hexdigest(), flush=True)
