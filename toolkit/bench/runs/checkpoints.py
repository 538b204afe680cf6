"""Checkpoints of a gigabyte: reading one to resume, and the cost of a save during training."""

import atexit
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.bench.agreement import agree
from toolkit.bench.harness import Case, PlannedCase
from toolkit.training import TrainState, adamw, make_train_step
from toolkit.training.checkpoints.checkpoint import Checkpoints

WIDTH = 2048
UPDATES = 20  # between two saves, long enough to write one
RESUME_SECONDS, MOST_BLOCKED = 10.0, 0.05
BEGINS, WRITES = "a save begun", "updates while it is written"
SAVES, TRAINS = "updates, a save begun", "updates"


def cases(cores: int) -> Iterator[PlannedCase]:
    """21 matrices of 2048 x 2048 with two moments each: 1.06 GB."""
    yield PlannedCase("resume 1 GB", partial(resume_case, 21, WIDTH))
    every = f"1 GB every {UPDATES} updates"
    yield PlannedCase(f"begin to save {every}", partial(begin_case, 21, WIDTH, UPDATES))
    yield PlannedCase(f"save {every}", partial(save_case, 21, WIDTH, UPDATES))


def resume_case(layers: int, width: int, name: str) -> Case:
    """`restore_latest`, with which `toolkit train` resumes, against NumPy reading the same
    bytes."""
    folder = _folder()
    state, step = _run(layers, width)
    state, _ = step(state, jnp.ones((64, width)))  # zeros of unused moments are quick to read
    with Checkpoints(folder / "run") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
    arrays = folder / "arrays.npz"
    np.savez(arrays, *(np.asarray(leaf) for leaf in jax.tree.leaves(state)))

    def resume() -> Any:
        with Checkpoints(folder / "run", is_read_only=True) as checkpoints:
            found = checkpoints.restore_latest(state)
        assert found is not None
        return jax.tree.leaves(found[0])

    def read() -> Any:
        with np.load(arrays) as file:
            return [jnp.asarray(file[key]) for key in file.files]

    return Case(
        name=name,
        contenders={"toolkit": resume, "numpy.load": read},
        check=agree(0.0),
        ours="toolkit",
        limit=RESUME_SECONDS,
    )


def begin_case(layers: int, width: int, updates: int, name: str) -> Case:
    """How long a save delays the next update: until the arrays are copied."""
    checkpoints, (state, _) = _writer(), _run(layers, width)
    steps = itertools.count()

    def begin() -> TrainState:
        checkpoints.save(next(steps), state)
        return state

    def check(results: Mapping[str, Any]) -> None:
        checkpoints.wait()
        found = checkpoints.restore_latest(state)
        assert found is not None
        agree(0.0)({"saved": jax.tree.leaves(found[0]), "held": jax.tree.leaves(results[BEGINS])})

    return Case(
        name=name,
        contenders={BEGINS: begin, WRITES: _interval(layers, width, updates)},
        check=check,
        ours=BEGINS,
        targets={WRITES: 1 / MOST_BLOCKED},
    )


def save_case(layers: int, width: int, updates: int, name: str) -> Case:
    """Updates during a save, and without one: the writer shares the cores."""
    return Case(
        name=name,
        contenders={
            SAVES: _interval(layers, width, updates, _writer()),
            TRAINS: _interval(layers, width, updates),
        },
        check=agree(0.0),
        ours=SAVES,
    )


def _interval(
    layers: int, width: int, updates: int, checkpoints: Checkpoints | None = None
) -> Callable[[], jax.Array]:
    """The updates between two saves; without checkpoints nothing is saved."""
    state, step = _run(layers, width)
    donated = [state]

    def call() -> jax.Array:
        if checkpoints is not None:
            checkpoints.save(int(donated[0].step), donated[0])
        loss = jnp.float32(0)
        for _ in range(updates):
            donated[0], metrics = step(donated[0], jnp.ones((64, width)))
            loss = metrics["loss"][0]
        return loss

    return call


def _writer() -> Checkpoints:
    """Keeps one checkpoint, in a folder of its own."""
    checkpoints = Checkpoints(_folder() / "run", keep=1)
    atexit.register(checkpoints.close)
    return checkpoints


def _folder() -> Path:
    """One that lasts as long as the process: a case is called after it is made."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _run(layers: int, width: int) -> tuple[TrainState, Any]:
    """A chain of matrices under AdamW, and its step."""
    keys = jax.random.split(jax.random.key(0), layers)
    params = [jax.random.normal(key, (width, width)) * width**-0.5 for key in keys]

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for matrix in params:
            x = jnp.tanh(x @ matrix)
        return jnp.mean(x**2)

    optimizer = adamw(1e-4)
    return TrainState.create(params, optimizer), make_train_step(loss, optimizer)
