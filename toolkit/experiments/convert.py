"""Is a converted model as good as its teacher, and does the choice of its attention layers matter?

A looped softmax model learns to recall; its attention becomes Gated DeltaNet. All settings of a
seed share the teacher and stage 1, whose checkpoints are beside the runs' folders.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.conversion import ConversionPlan, restoration_benefits
from toolkit.conversion import student_from as new_student
from toolkit.conversion.distillation import divergence_by_loop
from toolkit.conversion.selection import kl_guided, uniform
from toolkit.conversion.stage import Course, align, distil
from toolkit.conversion.student import restore
from toolkit.experiments.kit.chart import LOOKS, caption_below, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Stopped, Workspace
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.synthetic import Recipe, train
from toolkit.experiments.kit.verdicts import Claim, above, in_words
from toolkit.experiments.tasks import MultiQueryRecall
from toolkit.looped import LoopedConfig, LoopedLM

LAYERS = 3
TASK = MultiQueryRecall(pairs=4, length=16, vocabulary=32)
MODEL = LoopedConfig.tiny(
    " ".join(["full"] * LAYERS), loops=2, width=64, vocabulary=TASK.vocabulary
)
WORD = "gdn"
TEACHER_STEPS, TEACHER_BATCH, BATCH = 320, 64, 32
TOP_K = 16
RETAINED = 0.95
_FINAL = "after stage 2"
SUPERVISION = {"scheduled": (0.1, 0.7), "every loop": (0.0, 1.0), "last loop": (0.0, 0.0)}
# Batches that no training step draws.
HELD_OUT, HELD_OUT_BATCH = 1_000_003, 1024


@dataclasses.dataclass(frozen=True)
class ConversionSetting:
    """The choice and training of the hybrid.

    Attributes:
        restored: number of restored attention layers.
        selection: "kl" or "uniform".
        supervision: a key of `SUPERVISION`.
        align_steps, distil_steps: steps of stages 1 and 2.
    """

    restored: int
    selection: str = "kl"
    supervision: str = "scheduled"
    align_steps: int = 200
    distil_steps: int = 100

    @property
    def plan(self) -> ConversionPlan:
        """The plan of the conversion."""
        return ConversionPlan(
            align_steps=self.align_steps,
            align_rate=1e-2,
            align_time=TASK.length,
            distil_steps=self.distil_steps,
            distil_time=TASK.length,
            top_k=TOP_K,
            supervision=SUPERVISION[self.supervision],
        )


def _sample(seed, step, *, time, batch=BATCH):
    drawn = TASK.draw(jax.random.fold_in(jax.random.key(seed), step), batch)
    return drawn.tokens, jnp.where(drawn.mask, drawn.targets, -1)


def _execute(setting: ConversionSetting, seed: int, workspace: Workspace) -> dict[str, Any]:
    shared = workspace.directory.parent / f"shared-seed-{seed}"
    teacher = _teacher(seed, shared / "teacher")
    workspace.progress(0.3)
    course = Course(teacher, jnp.int32(seed), _sample, setting.plan, is_progress_shown=False)
    student = new_student(teacher, " ".join([WORD] * LAYERS), rngs=nnx.Rngs(seed))
    # Stage 1 is the same for all settings: the plan of its folder must be, too.
    plan = dataclasses.replace(setting.plan, supervision=SUPERVISION["scheduled"])
    aligned = align(dataclasses.replace(course, directory=shared, plan=plan), student)
    if aligned.stopped_by:
        raise Stopped
    workspace.progress(0.6)
    held_out = _sample(seed, HELD_OUT, time=TASK.length, batch=HELD_OUT_BATCH)
    benefits = restoration_benefits(aligned.model, teacher, *held_out, top_k=TOP_K)
    layers = uniform(LAYERS, setting.restored)
    if setting.selection == "kl":
        layers = kl_guided(benefits, setting.restored)
    hybrid = restore(aligned.model, teacher, layers)
    result = distil(dataclasses.replace(course, directory=workspace.directory), hybrid)
    if result.stopped_by:
        raise Stopped
    divergences = _divergences(result.model, teacher, *held_out)
    return {
        "teacher": float(_accuracy(teacher, seed)),
        "after stage 1": float(_accuracy(aligned.model, seed)),
        "layers restored": float(_accuracy(hybrid, seed)),
        _FINAL: float(_accuracy(result.model, seed)),
        "KL after stage 2": float(divergences[-1]),
        "benefits": benefits,
        "layers": list(layers),
        "align loss": [row["loss"] for row in aligned.history],
        "distil loss": [row["loss"] for row in result.history],
    }


def _teacher(seed: int, directory: Path) -> LoopedLM:
    """A softmax model that recalls.

    Its embeddings start at unit size: at LT2's width^-1/2 the outputs of the first mixers dominate,
    and tokens cannot be identified for thousands of steps.
    """
    model = LoopedLM(MODEL, rngs=nnx.Rngs(seed))
    model.embedding.embedding[...] *= MODEL.width**0.5
    recipe = Recipe(MODEL, TASK, steps=TEACHER_STEPS, batch=TEACHER_BATCH)
    place = Workspace(directory, lambda share: None)
    trained = train(recipe, seed, place, start=nnx.split(model)[1])
    return nnx.merge(trained.graph, trained.params)


@jax.jit
def _accuracy(model, seed):
    inputs, targets = _sample(seed, HELD_OUT + 1, time=TASK.length, batch=HELD_OUT_BATCH)
    right = (model(inputs).argmax(-1) == targets).sum()
    return right / (targets >= 0).sum()


@jax.jit
def _divergences(student, teacher, inputs, targets):
    return divergence_by_loop(student, teacher, inputs, targets, top_k=TOP_K)


def _losses_fall(results: Results) -> tuple[np.ndarray, str]:
    label = results.labels[0]
    rows = {name: results.curves(label, f"{name} loss") for name in ("align", "distil")}
    words = (f"{name} {r[:, 0].mean():.3f} to {r[:, -1].mean():.3f}" for name, r in rows.items())
    return np.min([r[:, 0] - r[:, -1] for r in rows.values()], 0), f"means: {', '.join(words)}"


def _retained(results: Results) -> tuple[np.ndarray, str]:
    label = "2 restored, KL"
    shares = results.paired(_FINAL, [label]) / results.paired("teacher", [label])
    return shares[0] - RETAINED, f"{_FINAL}, of the teacher's accuracy: {in_words([label], shares)}"


def _distilled(results: Results) -> tuple[np.ndarray, str]:
    """A control: a student that is not distilled is worse, or no difference can be seen."""
    after, before = (results.paired(name, ["0 restored"])[0] for name in (_FINAL, "after stage 1"))
    return after - before, f"gain of stage 2: {after.mean() - before.mean():.3f}"


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels()
    figure.subplots_adjust(left=0.19, wspace=0.22)
    places = np.arange(len(results.labels))
    stages = ("after stage 1", "layers restored", _FINAL)
    for row, (name, look) in enumerate(zip(stages, LOOKS, strict=False)):
        for place, label in zip(places, results.labels, strict=True):
            samples = np.array(results.samples(label, name))
            heights = np.full(len(samples), place + 0.22 * (row - 1))
            left.plot(samples, heights, look.marker, color=look.colour, alpha=0.45, markersize=5)
            left.plot(
                samples.mean(), heights[0], look.marker, color=look.colour, markersize=9,
                label=name if place == 0 else None,
            )  # fmt: skip
    teacher = float(np.mean([results.mean(label, "teacher") for label in results.labels]))
    left.axvline(teacher, color="#8a949e", linewidth=1)
    left.annotate("teacher", (teacher, -0.62), xytext=(-4, 0), textcoords="offset points",
                  ha="right", va="center", color="#66707a")  # fmt: skip
    left.set_yticks(places, results.labels)
    left.set(ylim=(len(places) - 0.4, -0.9), xlabel="accuracy", title="Recall after each stage")
    figure.legend(loc="lower right", ncols=3, bbox_to_anchor=(0.62, 0.035))
    benefits = results.curves(results.labels[0], "benefits")
    for seed, (row, look) in enumerate(zip(benefits, LOOKS, strict=False)):
        right.plot(np.arange(LAYERS), row, color=look.colour, linestyle=look.dashes,
                   marker=look.marker, label=f"seed {seed}")  # fmt: skip
    right.axhline(0, color="#8a949e", linewidth=1)
    right.set_xticks(range(LAYERS))
    right.set(xlabel="layer restored alone", ylabel="benefit (nats)",
              title="What each layer is worth")  # fmt: skip
    right.legend()
    caption_below(figure, f"Large: mean of the seeds. {caption}")
    return figure


_COMPARED = (
    ("one restored layer is better than none", "1 restored, KL", "0 restored"),
    ("two are better than one", "2 restored, KL", "1 restored, KL"),
    ("one layer chosen by KL is better than the last", "1 restored, KL", "1 restored, uniform"),
    ("two layers chosen by KL are better than evenly spread ones",
     "2 restored, KL", "2 restored, uniform"),
    ("supervision of every loop is better than of the last alone",
     "0 restored, every loop", "0 restored, last loop"),
)  # fmt: skip
"""A claim, the setting that ought to be better, and the other."""

EXPERIMENT = Experiment(
    name="convert",
    title="A looped softmax model becomes a hybrid: what is retained, and which layers to keep?",
    settings={
        "0 restored": ConversionSetting(0),
        "1 restored, KL": ConversionSetting(1),
        "1 restored, uniform": ConversionSetting(1, "uniform"),
        "2 restored, KL": ConversionSetting(2),
        "2 restored, uniform": ConversionSetting(2, "uniform"),
        "0 restored, every loop": ConversionSetting(0, supervision="every loop"),
        "0 restored, last loop": ConversionSetting(0, supervision="last loop"),
    },
    execute=_execute,
    columns=(
        Column("teacher"),
        Column("after stage 1"),
        Column("layers restored"),
        Column(_FINAL),
        Column("KL after stage 2", "nats", 4),
    ),
    claims=(
        Claim("the losses of stages 1 and 2 fall", _losses_fall),
        *(
            Claim(text, judge, control=_distilled)
            for text, judge in (
                ("with 2 of 3 layers restored, 95% of the teacher's accuracy is kept", _retained),
                *((text, above(_FINAL, [better], [worse], 3)) for text, better, worse in _COMPARED),
            )
        ),
    ),
    draw=_draw,
    beyond="a teacher of language, of 24 layers, and a billion tokens to distil it; "
    "`toolkit.conversion.convert` is the same recipe at any size.",
    minutes=20,
)
