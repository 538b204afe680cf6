"""A run small enough to be killed a dozen times in a test.

    python training_small_run.py DIRECTORY

Says "training" at the first metrics row and "sha256 HEX" of the final state at the end. A
checkpoint every second update keeps it inside a save most of the time.
"""

import hashlib
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from toolkit import training

TOTAL_STEPS = 150
WIDTH = 64


def bigram_loss(params, batch):
    inputs, targets = batch
    hidden = jnp.tanh(params["embedding"][inputs] + params["bias"])
    logits = hidden @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def bigram_params(width=WIDTH):
    embedding = np.random.default_rng(0).normal(size=(256, width)).astype(np.float32)
    return {
        "embedding": jnp.asarray(embedding),
        "bias": jnp.zeros(width),
        "head": jnp.zeros((width, 256)),
    }


def digest(state):
    sha256 = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        sha256.update(np.asarray(leaf).tobytes())
    return sha256.hexdigest()


def run(directory, callback=None, place=lambda params: params, **changes):
    """Trains the bigram model, laid out by `place`; `changes` replace fields of the options."""
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 50, np.uint8)
    optimizer = training.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, TOTAL_STEPS))
    sample = partial(training.sample_batch, seed=0, batch=4, time=16)
    options = {
        "total_steps": TOTAL_STEPS,
        "log_every": 2,
        "eval_every": 20,
        "checkpoint_every": 2,
        "is_progress_shown": False,
    }
    return training.fit(
        training.TrainState.create(place(bigram_params()), optimizer),
        training.make_train_step(bigram_loss, optimizer, sample=sample, most_steps=10),
        jnp.asarray(text),
        training.FitOptions(**(options | changes)),
        directory=directory,
        configuration={"model": {"width": WIDTH}},
        evaluate=training.make_evaluation(
            bigram_loss, training.evaluation_batches(text, batch=4, time=16, count=2)
        ),
        callback=callback,
    )


if __name__ == "__main__":
    result = run(sys.argv[1], callback=lambda row: print("training", flush=True))
    if result.stopped_by is None:
        print("sha256", digest(result.state))
