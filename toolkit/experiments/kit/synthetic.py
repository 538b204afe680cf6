"""Training a small looped model on a synthetic task, as in most experiments."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from toolkit.experiments.kit.experiment import Stopped, Workspace
from toolkit.experiments.kit.side_by_side import SeedTrainer
from toolkit.experiments.tasks import Batch, Task
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.training import (
    FitOptions,
    TrainState,
    adamw,
    fit,
    make_train_step,
)

LOG_EVERY = 50
EVALUATION_BATCH = 256
_EVALUATION_SEED = 1_000_003  # training draws from keys folded with the step, from 0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model, a task and how long to train: a setting of a synthetic experiment.

    Attributes:
        model: the model; its vocabulary is the task's.
        task: what is trained on.
        steps: updates.
        batch: sequences per step.
        learning_rate: peak of the warm-up (a twentieth of the steps) and cosine schedule.
        weight_decay: of matrices.
        growing: share of the steps during which the task grows to its full length, for tasks with
            `draw_easier`. 0 trains on the whole task from the start.
    """

    model: LoopedConfig
    task: Task
    steps: int
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    growing: float = 0.0

    def __post_init__(self):
        if self.model.vocabulary != self.task.vocabulary:
            raise ValueError(
                f"model: its vocabulary is {self.model.vocabulary}, the task's "
                f"{self.task.vocabulary}"
            )
        if self.growing and not hasattr(self.task, "draw_easier"):
            raise ValueError(f"growing: {type(self.task).__name__} has no easier sequences")

    @property
    def work(self) -> float:
        """Layer executions times tokens, roughly proportional to the time."""
        return self.steps * self.batch * self.task.length * self.model.loops * len(
            self.model.layers
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model after its recipe.

    Attributes:
        graph: structure of the model.
        params: its parameters.
        numbers: the curves "step" and "accuracy by step"; of `train` also "loss" (of the last
            updates) and "seconds" (of training).
    """

    graph: nnx.GraphDef
    params: nnx.State
    numbers: dict[str, Any]

    def accuracy(self, task: Task, seed: int, *, batches: int = 4) -> float:
        """Share of right answers on fresh sequences of a task; see `accuracy_by_position`."""
        right, scored = _counts(self.graph, self.params, task, seed, batches)
        return float(right.sum() / scored.sum())

    def accuracy_by_position(self, task: Task, seed: int) -> list[float]:
        """Share of right answers at each position that is scored at least once."""
        right, scored = jax.device_get(_counts(self.graph, self.params, task, seed, 4))
        return [float(r / s) for r, s in zip(right, scored, strict=True) if s]


def train(
    recipe: Recipe,
    seed: int,
    workspace: Workspace,
    *,
    start: nnx.State | None = None,
) -> Trained:
    """Train a recipe, from the last checkpoint in the workspace if there is one."""
    graph, optimizer, step = _programs(recipe)
    params = nnx.split(LoopedLM(recipe.model, rngs=nnx.Rngs(seed)))[1] if start is None else start
    directory = workspace.directory / "training"

    def tell(row: dict[str, Any]) -> None:
        workspace.progress(row["step"] / recipe.steps)

    def held_out_errors(params: nnx.State) -> float:
        right, scored = _counts(graph, params, recipe.task, seed, 1)
        return 1 - float(right.sum() / scored.sum())

    interval = max(LOG_EVERY, recipe.steps // 20 // LOG_EVERY * LOG_EVERY)
    result = fit(
        TrainState.create(params, optimizer),
        step,
        jnp.int32(seed),
        FitOptions(
            total_steps=recipe.steps,
            log_every=LOG_EVERY,
            eval_every=interval,
            checkpoint_every=interval,
            keep=1,
            is_progress_shown=False,
        ),
        directory=directory,
        evaluate=held_out_errors,
        callback=tell,
    )
    if result.stopped_by is not None:
        raise Stopped
    evaluated = [row for row in result.history if "evaluation_loss" in row]
    numbers = {
        "loss": result.history[-1]["loss"],
        "seconds": sum(row["seconds"] for row in result.history),
        "step": [row["step"] for row in evaluated],
        "accuracy by step": [1 - row["evaluation_loss"] for row in evaluated],
    }
    return Trained(graph, result.state.params, numbers)


def train_side_by_side(recipe: Recipe, seeds: Sequence[int]) -> list[Trained]:
    """Train a recipe with several seeds in one program, see `SeedTrainer`; no checkpoints."""
    graph, trainer = _side_by_side(recipe)
    found, steps, curves = trainer.train(seeds, recipe.steps)
    return [
        Trained(graph, params, {"step": steps, "accuracy by step": curve})
        for params, curve in zip(found, curves, strict=True)
    ]


def answer_loss(graph: nnx.GraphDef, params: nnx.State, batch: Batch) -> Float[Array, ""]:
    """Mean cross-entropy of the answers at the scored positions."""
    logits = nnx.merge(graph, params)(batch.tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(losses * batch.mask) / jnp.sum(batch.mask)


@functools.lru_cache(maxsize=1)
def _programs(recipe: Recipe):
    """Structure, optimiser and compiled step, shared by all seeds."""
    graph, optimizer, sample = _parts(recipe)
    loss = functools.partial(answer_loss, graph)
    return graph, optimizer, make_train_step(loss, optimizer, sample=sample, most_steps=LOG_EVERY)


@functools.lru_cache(maxsize=1)
def _side_by_side(recipe: Recipe) -> tuple[nnx.GraphDef, SeedTrainer]:
    graph, optimizer, sample = _parts(recipe)

    def accuracy(params: nnx.State, seed: Array) -> Array:
        right, scored = _counts(graph, params, recipe.task, seed, 1)
        return right.sum() / scored.sum()

    return graph, SeedTrainer(
        init=lambda key: nnx.split(LoopedLM(recipe.model, rngs=nnx.Rngs(key)))[1],
        loss=functools.partial(answer_loss, graph),
        sample=sample,
        optimizer=optimizer,
        evaluate=accuracy,
        every=max(1, recipe.steps // 20),
    )


def _parts(recipe: Recipe):
    graph = nnx.split(nnx.eval_shape(lambda: LoopedLM(recipe.model, rngs=nnx.Rngs(0))))[0]
    warmup = max(1, recipe.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, warmup, recipe.steps)
    optimizer = adamw(schedule, weight_decay=recipe.weight_decay)

    def sample(seed: Array, step: Array) -> Batch:
        key = jax.random.fold_in(jax.random.key(seed), step)
        if recipe.growing:
            share = jnp.minimum(1.0, step / (recipe.growing * recipe.steps))
            return recipe.task.draw_easier(key, recipe.batch, share)  # pyright: ignore
        return recipe.task.draw(key, recipe.batch)

    return graph, optimizer, sample


@functools.partial(jax.jit, static_argnames=("graph", "task", "batches"))
def _counts(graph, params, task, seed, batches):
    """Right and scored answers at each position, over `batches` times EVALUATION_BATCH draws."""
    model = nnx.merge(graph, params)
    keys = jax.random.split(jax.random.key(seed + _EVALUATION_SEED), batches)

    def count(key):
        batch = task.draw(key, EVALUATION_BATCH)
        right = (model(batch.tokens).argmax(-1) == batch.targets) & batch.mask
        return right.sum(0), batch.mask.sum(0)

    with jax.default_matmul_precision("float32"):  # why: `SeedTrainer`
        return jax.tree.map(lambda counts: counts.sum(0), jax.lax.map(count, keys))
