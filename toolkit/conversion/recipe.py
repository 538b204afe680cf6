"""From a trained looped softmax model to a hybrid: align, choose, distil, extend."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from toolkit._checks import check_choice, checked
from toolkit.conversion.alignment import alignment_losses
from toolkit.conversion.plan import ConversionPlan
from toolkit.conversion.selection import kl_guided, restoration_benefits, uniform
from toolkit.conversion.stage import Batch, Course, align, distil, extend
from toolkit.conversion.student import STARTABLE, restore, student_from
from toolkit.looped.model import LoopedLM

SELECTIONS = ("kl", "uniform")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        model: the hybrid.
        layers: indices of the restored attention layers; None before they are chosen.
        alignment: mean square distances [loops, layers] from the teacher's attention after stage 1,
            see `alignment_losses`; None before its end.
        benefits: nats per position gained by restoring each layer alone [layers], see
            `restoration_benefits`; None unless layers were chosen by them.
        history: metrics rows by stage: "align", "distil", "extend-2048", ...
        stopped_by: None if the conversion is complete, otherwise the cause of the stop.

    Example:
        >>> left = Conversion(None, (1,), None, None, history={}, stopped_by="SIGTERM")
        >>> left.layers, left.stopped_by
        ((1,), 'SIGTERM')
    """

    model: LoopedLM
    layers: tuple[int, ...] | None
    alignment: Float[np.ndarray, "loops layers"] | None
    benefits: Float[np.ndarray, "layers"] | None
    history: dict[str, list[dict[str, Any]]]
    stopped_by: str | None


@checked
def convert(
    teacher: LoopedLM, data: Any, sample: Callable[..., Batch], *,
    word: str = "gdn", restored: int | Sequence[int] = 0, selection: str = "kl",
    plan: ConversionPlan | None = None, seed: int = 0, directory: str | os.PathLike | None = None,
    is_progress_shown: bool = True, stop: Callable[[], bool] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
) -> Conversion:  # fmt: skip
    """Convert a trained looped softmax model into a hybrid of linear-time layers and some
    attention.

        0  replace every attention layer (`student_from`)
        1  align each new mixer with the attention it replaces, on the teacher's stream (`align`)
        -  restore attention where it helps most (`restoration_benefits`) or evenly spread
        2  distil the teacher's predictions, after every loop (`distil`)
        3  go on with longer and longer sequences (`extend`)

    A conversion that is killed and called again with the same arguments ends with the same bits as
    an uninterrupted one.

    Args:
        teacher: its layers are softmax attention, "full" or "window".
        data: passed to `sample`; a pytree of arrays on the device, or None.
        sample: (data, step, time=tokens per sequence) -> (inputs, targets), both whole numbers
            [batch, time], traceable; targets below 0 do not count. For text
            `partial(training.sample_batch, seed=0, batch=16)`.
        word: the layer that replaces attention, one of `STARTABLE`.
        restored: number of attention layers to restore, or their indices.
        selection: "kl" restores the layers with the largest benefits, "uniform" the last of each
            equal share of the stack.
        plan: steps, rates and lengths of the stages; None for the defaults of `ConversionPlan`.
        seed: of the new layers' initial values.
        directory: for checkpoints and metrics, a folder per stage; None keeps all in memory.
        is_progress_shown: whether to draw a progress bar per stage.
        stop: called every few steps; True saves and returns.
        callback: called with every metrics row, which has the name of its "stage".

    Returns:
        The hybrid, with measurements.

    Raises:
        CheckpointError: if the directory holds another conversion, or cannot be written.
        DivergedError: if a loss stops being finite.

    Cost: a step of stage 1, a forward pass of the teacher and a training step of the mixers; of
        stages 2 and 3, a forward pass of the teacher and a training step of the student; the
        choice, one forward pass of the student per layer and batch.

    Source: LT2, "Linear-Time Looped Transformers", distillation section.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> teacher = LoopedLM(LoopedConfig.tiny("full full", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> sample = lambda data, step, time: 2 * (jnp.zeros((1, time), int),)
        >>> convert(teacher, None, sample, plan=ConversionPlan(0, 1e-3, 8, 0)).model.config.pattern
        'gdn gdn'
    """
    plan = plan or ConversionPlan()
    _check(teacher, word, restored, selection, plan)
    course = Course(
        teacher,
        data,
        sample,
        plan,
        directory=directory,
        is_progress_shown=is_progress_shown,
        stop=stop,
        callback=callback,
    )
    pattern = " ".join([word] * len(teacher.config.layers))
    student = student_from(teacher, pattern, rngs=nnx.Rngs(seed))
    aligned = align(course, student)
    history = {"align": aligned.history}
    if aligned.stopped_by:
        return Conversion(aligned.model, None, None, None, history, aligned.stopped_by)
    alignment = _mean_over_batches(course, aligned.model, plan.align_time, _alignment)
    layers, benefits = _choose(course, aligned.model, restored, selection)
    result = distil(course, restore(aligned.model, teacher, layers))
    history["distil"] = result.history
    for time in plan.extend_times:
        if not result.stopped_by:
            result = extend(course, result.model, time)
            history[f"extend-{time}"] = result.history
    return Conversion(result.model, layers, alignment, benefits, history, result.stopped_by)


def _choose(course, student, restored, selection):
    """The layers to restore, and their benefits."""
    if not isinstance(restored, int):
        return tuple(sorted(set(restored))), None
    if selection == "uniform" or restored == 0:
        return uniform(len(student.config.layers), restored), None

    def benefits_of(student, teacher, inputs, targets):
        return restoration_benefits(
            student,
            teacher,
            inputs,
            targets,
            top_k=course.plan.top_k,
            temperature=course.plan.temperature,
        )

    benefits = _mean_over_batches(course, student, course.plan.distil_time, benefits_of)
    return kl_guided(benefits, restored), benefits


@jax.jit
def _alignment(student, teacher, inputs, targets):
    return alignment_losses(student, teacher, inputs)


def _mean_over_batches(course, student, time, measure) -> np.ndarray:
    """The mean of a measure over batches after those of the last stage."""
    first = course.plan.total_steps
    batches = (
        course.sample(course.data, jnp.int32(first + batch), time=time)
        for batch in range(course.plan.choice_batches)
    )
    return np.mean([measure(student, course.teacher, *batch) for batch in batches], axis=0)


def _check(teacher, word, restored, selection, plan):
    config = teacher.config
    layers = len(config.layers)
    if config.coda:
        raise ValueError(
            f"the teacher has the coda {config.coda!r}; its predictions after the loops before "
            "the last, which distillation compares, are not defined."
        )
    if word in config.layers:
        raise ValueError(
            f"word is {word!r}, which the teacher's pattern {config.pattern!r} has already; "
            f"convert to another of {', '.join(STARTABLE)}."
        )
    check_choice("selection", selection, SELECTIONS)
    layer_numbers = range(layers)
    is_number = isinstance(restored, int)
    fits = restored in layer_numbers if is_number else set(restored) < set(layer_numbers)
    if not fits:
        raise ValueError(
            f"restored is {restored}; wanted a number below the teacher's {layers} layers, or the "
            f"numbers of some of them, 0 to {layers - 1}."
        )
    if plan.top_k > config.vocabulary:
        raise ValueError(
            f"plan.top_k is {plan.top_k}; it must be at most the vocabulary of {config.vocabulary}."
        )
