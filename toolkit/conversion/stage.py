"""The three stages of a conversion, each a run of `training.fit` over its own loss.

Teacher, frozen parameters and data are passed as data of the train step, so that no program holds a
copy of them.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.conversion.alignment import alignment_losses
from toolkit.conversion.distillation import (
    divergence_by_loop,
    loop_weights,
    mean_where_asked,
    top_k_divergence,
)
from toolkit.conversion.plan import ConversionPlan
from toolkit.conversion.student import new_layers
from toolkit.looped.model import LoopedLM

LOG_EVERY = 10
CHECKPOINT_EVERY = 100

Batch = tuple[Int[Array, "batch time"], Int[Array, "batch time"]]


@dataclasses.dataclass(frozen=True)
class Course:
    """The arguments of `convert` that all stages share."""

    teacher: LoopedLM
    data: Any
    sample: Callable[..., Batch]
    plan: ConversionPlan
    directory: str | os.PathLike | None = None
    is_progress_shown: bool = True
    stop: Callable[[], bool] | None = None
    callback: Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        try:
            inspect.signature(self.sample).bind(self.data, 0, time=self.plan.align_time)
        except TypeError as error:
            raise TypeError(
                f"sample must be called as sample(data, step, time=tokens); its signature is "
                f"{inspect.signature(self.sample)} ({error})."
            ) from None


@dataclasses.dataclass(frozen=True)
class StageResult:
    """The student after a stage; its metrics, including those before a resume; None if complete."""

    model: LoopedLM
    history: list[dict[str, Any]]
    stopped_by: str | None


def align(course: Course, student: LoopedLM) -> StageResult:
    """Stage 1: the mean of `alignment_losses`, over the parameters of the new mixers alone."""

    def loss(student, teacher, inputs, targets, progress):
        return jnp.mean(alignment_losses(student, teacher, inputs))

    plan = course.plan
    return _train(
        course,
        student,
        loss,
        "align",
        steps=plan.align_steps,
        rate=plan.align_rate,
        time=plan.align_time,
        before=0,
        is_trained=_in_new_mixers(student, course.teacher),
    )


def distil(course: Course, student: LoopedLM) -> StageResult:
    """Stage 2: sum_tau w_tau(progress) KL_tau, of `loop_weights` and `divergence_by_loop`."""
    plan = course.plan

    def loss(student, teacher, inputs, targets, progress):
        weights = loop_weights(progress, student.config.loops, plan.supervision)
        by_loop = divergence_by_loop(
            student, teacher, inputs, targets, top_k=plan.top_k, temperature=plan.temperature
        )
        return weights @ by_loop

    return _train(
        course,
        student,
        loss,
        "distil",
        steps=plan.distil_steps,
        rate=plan.distil_rate,
        time=plan.distil_time,
        before=plan.align_steps,
        is_trained=_trained_after_alignment(course, student),
    )


def extend(course: Course, student: LoopedLM, time: int) -> StageResult:
    """Stage 3: share * CE(targets) + (1 - share) * KL(teacher || student), after the last loop."""
    # Lengths must grow step by step (LT2); the loss of this stage is not published.
    plan, share = course.plan, course.plan.target_share

    def loss(student, teacher, inputs, targets, progress):
        logits = student(inputs)
        log_likelihood = jnp.take_along_axis(
            jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], axis=-1
        )[..., 0]
        cross_entropy = mean_where_asked(-log_likelihood, targets)
        if share == 1:
            return cross_entropy
        each = top_k_divergence(
            teacher(inputs), logits, top_k=plan.top_k, temperature=plan.temperature
        )
        return share * cross_entropy + (1 - share) * mean_where_asked(each, targets)

    earlier = plan.extend_times.index(time) * plan.extend_steps
    return _train(
        course,
        student,
        loss,
        f"extend-{time}",
        steps=plan.extend_steps,
        rate=plan.extend_rate,
        time=time,
        before=plan.align_steps + plan.distil_steps + earlier,
        is_trained=_trained_after_alignment(course, student),
    )


def _train(
    course: Course, student: LoopedLM, loss: Callable[..., Float[Array, ""]], name: str, *,
    steps: int, rate: float, time: int, before: int, is_trained: Any,
) -> StageResult:  # fmt: skip
    """Minimise a loss over some of the student's parameters; `before`: steps of earlier stages."""
    student = nnx.clone(student)  # what is not trained is returned too
    if steps == 0:
        return StageResult(student, [], None)
    from toolkit import training  # imported only for training, with optimiser and checkpoints

    graph, trained, frozen = nnx.split(student, is_trained, ...)
    teacher_graph, teacher_state = nnx.split(course.teacher)

    def sample(data, step):
        *models, own = data
        return (*models, step, *course.sample(own, step + before, time=time))

    def loss_of(trained, batch):
        frozen, teacher_state, step, inputs, targets = batch
        student = nnx.merge(graph, trained, frozen)
        teacher = nnx.merge(teacher_graph, teacher_state)
        return loss(student, teacher, inputs, targets, step / steps)

    warmup = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps)
    optimizer = training.adamw(warmup, weight_decay=course.plan.weight_decay)
    log_every, callback = min(LOG_EVERY, steps), course.callback
    inputs, _ = jax.eval_shape(lambda data: course.sample(data, 0, time=time), course.data)
    result = training.fit(
        training.TrainState.create(trained, optimizer),
        training.make_train_step(loss_of, optimizer, sample=sample, most_steps=log_every),
        (frozen, teacher_state, course.data),
        training.FitOptions(
            total_steps=steps,
            log_every=log_every,
            eval_every=steps,
            checkpoint_every=CHECKPOINT_EVERY,
            keep=1,
            tokens_per_step=inputs.size,
            is_progress_shown=course.is_progress_shown,
        ),
        directory=None if course.directory is None else Path(course.directory) / name,
        configuration=_description(course, student, name),
        stop=course.stop,
        callback=callback and (lambda row: callback({"stage": name, **row})),
    )
    model = nnx.merge(graph, result.state.params, frozen)
    return StageResult(model, result.history, result.stopped_by)


def _in_new_mixers(student: LoopedLM, teacher: LoopedLM):
    """A filter of parameters by their path."""
    new = {("blocks", layer, "mixer") for layer in new_layers(student, teacher)}
    return lambda path, _: tuple(path[:3]) in new


def _trained_after_alignment(course, student):
    return ... if course.plan.trained == "all" else _in_new_mixers(student, course.teacher)


def _description(course: Course, student: LoopedLM, name: str) -> dict[str, Any]:
    """What must be equal for a checkpoint to be of this run: settings, and all bits it starts from.

    The student it starts from stands for the stages before, and the seed of its new layers.
    """
    from toolkit.training.checkpoints.identity import checksums

    def digest(tree):
        return sum(checksums(tree).values()) if jax.tree.leaves(tree) else None

    return {
        "stage": name,
        "plan": dataclasses.asdict(course.plan),
        "model": dataclasses.asdict(student.config),
        "bits": {
            "student": digest(nnx.state(student)),
            "teacher": digest(nnx.state(course.teacher)),
            "data": digest(course.data),
        },
    }
