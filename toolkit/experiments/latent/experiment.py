"""A model with sliced latents: the cost of each choice, and of alignment.

A small model is trained on text; then its latents are sliced as over devices (TPLA): two or four
slices, three bases, the norm of a slice or of the whole latent. All numbers are for the second half
of held-out windows, whose first half is read either in slices too or exactly, as with separate
prefill. Some settings are then aligned: their attention is distilled for a few steps towards the
original model.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention.latent import slicing_report
from toolkit.attention.latent.tpla import Norm
from toolkit.experiments.kit.chart import LOOKS, caption_below, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Stopped, Workspace
from toolkit.experiments.kit.results import Outcome, Results
from toolkit.experiments.kit.verdicts import Claim, above, below, in_words
from toolkit.experiments.latent.sliced import BASES, Slices, align, cut, judged, streams
from toolkit.language import TrainingRun, train_language_model
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.training import Corpus, evaluation_batches, load_corpus, sample_batch

MODEL = LoopedConfig.tiny(
    "mla mla",
    width=48,
    residual_gate=False,
    options={"mla": {"latent_size": 64, "key_size": 32, "rope_size": 16, "value_size": 32}},
)
STEPS, BATCH, TIME, RATE = 300, 8, 128, 4e-3
ALIGN_STEPS, ALIGN_RATE, ALIGN_BATCH = 40, 1e-3, 8
WINDOWS, CALIBRATION = (2, 16), 16
SLICES = (2, 4)
# Batches no training step draws.
CALIBRATED, ALIGNED = 1_000_003, 2_000_003

_ALL, _APART = "perplexity", "perplexity, prompt exact"
_SAME, _SAME_APART = "same token", "same token, prompt exact"
_KL, _KL_APART = "KL", "KL, prompt exact"
_ERROR = "output error"


@dataclasses.dataclass(frozen=True)
class Setting:
    """The slicing of the latents.

    Attributes:
        slices: number of slices; 1 is the model itself.
        basis: one of `BASES`.
        norm: "sliced" or "exact".
        align_steps: steps of alignment; 0 for none.
        steps: steps of the training before.
        model: the model.
    """

    slices: int = 1
    basis: str = "none"
    norm: Norm = "exact"
    align_steps: int = 0
    steps: int = STEPS
    model: LoopedConfig = MODEL


def _label(slices: int, basis: str, norm: str, is_aligned: bool = False) -> str:
    name = {"none": "no basis"}.get(basis, basis)
    return f"g={slices}, {name}, {norm} norm{', aligned' * is_aligned}"


def _execute(setting: Setting, seed: int, workspace: Workspace) -> Outcome:
    model = _parent(setting.model, setting.steps, seed, workspace.directory.parent)
    workspace.progress(0.6)
    text, held_out = _corpus().split()
    inputs, _ = sample_batch(jnp.asarray(text), CALIBRATED, seed, CALIBRATION, TIME)
    read = streams(model, inputs)
    layers, losses = cut(model, read, setting.slices, setting.basis, jax.random.key(seed)), []
    if setting.align_steps:
        layers, losses = align(
            model, layers, text, norm=setting.norm, steps=setting.align_steps,
            rate=ALIGN_RATE, seed=ALIGNED + seed, batch=ALIGN_BATCH, time=TIME,
        )  # fmt: skip
    workspace.progress(0.8)
    batches, windows = WINDOWS
    fresh = evaluation_batches(held_out, windows, TIME, batches)
    outcome = {}
    for prompt, perplexity, same, kl in (
        (0, _ALL, _SAME, _KL),
        (TIME // 2, _APART, _SAME_APART, _KL_APART),
    ):
        found = judged(model, layers, *fresh, norm=setting.norm, prompt=prompt)
        loss, is_same, divergence = (np.asarray(x)[..., TIME // 2 :] for x in found)
        outcome |= {perplexity: np.exp(loss.mean()), same: is_same.mean(), kl: divergence.mean()}
    reports = _reports(model, layers, streams(model, fresh[0][0]), setting.norm)
    return outcome | reports | ({"align loss": losses} if losses else {})


def _reports(model: LoopedLM, layers: Slices, read: list, norm: Norm) -> dict[str, list | float]:
    """Of every layer its output's error, and means over slices of what its softmaxes are off by."""
    found = [
        slicing_report(x, sliced, block.mixer.sizes, norm=norm)
        for block, x, sliced in zip(model.blocks, read, layers, strict=True)
    ]
    curves = {
        _ERROR: [one.output_error for one in found],
        "attention KL": [float(one.divergence.mean()) for one in found],
        "score R2": [float(one.score_r2.mean()) for one in found],
        "top key agreement": [float(one.top_agreement.mean()) for one in found],
    }
    means = {name: float(np.mean(values)) for name, values in curves.items()}
    return means | {f"{name} by layer": values for name, values in curves.items()}


@functools.cache
def _corpus() -> Corpus:
    return load_corpus("prose")


@functools.cache
def _parent(config: LoopedConfig, steps: int, seed: int, folder: Path) -> LoopedLM:
    """The model of a seed, shared by all settings; its checkpoints are beside the runs' folders."""
    run = TrainingRun(
        config, "prose", steps=steps, batch=BATCH, sequence_length=TIME, learning_rate=RATE,
        seed=seed,
    )  # fmt: skip
    trained = train_language_model(
        run, folder / f"model-of-seed-{seed}", corpus=_corpus(), is_progress_shown=False
    )
    if trained.stopped_by is not None:
        raise Stopped
    return trained.model


def _nearer(text: str, ours: str, theirs: str, most: float) -> Claim:
    """Whether one setting's divergence from the model is below a multiple of another's."""

    def judge(results: Results):
        rows = results.paired(_KL, [ours, theirs])
        shares = rows[0] / rows[1]
        return (
            most - shares,
            f"KL from MLA, over that of {theirs}: {in_words([ours], shares[None])}",
        )

    return Claim(text, judge)


def _further(results: Results):
    two, four = ([_label(g, basis, "exact") for basis in BASES] for g in SLICES)
    ratios = results.paired(_KL, four) / results.paired(_KL, two)
    return ratios.min(0) - 1, f"KL from MLA, over that with g=2: {in_words(four, ratios)}"


def _apart_helps(results: Results):
    labels = [_label(g, "none", "sliced") for g in SLICES]
    shares = results.paired(_KL_APART, labels) / results.paired(_KL, labels)
    words = f"KL from MLA, over that in slices throughout: {in_words(labels, shares)}"
    return 1 - shares.max(0), words


_KINDS = tuple(itertools.product(SLICES, BASES, ("sliced", "exact")))
_PLAIN = [_label(*kind) for kind in _KINDS]


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels(6.2)
    figure.subplots_adjust(left=0.245, wspace=0.06, top=0.93, bottom=0.16)
    labels = results.labels
    places = np.arange(len(labels))
    columns = (
        (left, _ALL, "prompt in slices", LOOKS[0]),
        (left, _APART, "prompt exact", LOOKS[1]),
        (right, f"{_ERROR} by layer", "", LOOKS[2]),
    )
    for axes, name, legend, look in columns:
        for place, label in zip(places, labels, strict=True):
            samples = results.curves(label, name).reshape(len(results.samples(label, name)), -1)
            for column, marker in zip(samples.T, "os^vDP", strict=False):
                axes.plot(column, [place] * len(column), marker, color=look.colour, alpha=0.35,
                          markersize=4)  # fmt: skip
                marker = look.marker if legend else marker
                axes.plot(column.mean(), place, marker, color=look.colour, markersize=8)
        if legend:
            axes.plot([], [], look.marker, color=look.colour, markersize=8, label=legend)
    if "MLA" in labels:
        left.axvline(results.mean("MLA", _ALL), color="#8a949e", linewidth=1)
    left.set_yticks(places, labels)
    right.set_yticks(places, [""] * len(labels))
    for axes in (left, right):
        axes.set_ylim(len(places) - 0.4, -0.6)
    left.set(xlabel="perplexity of a held-out byte", title="A model in slices")
    left.legend(loc="upper right")
    right.set(xlabel="relative error of a layer's output", title="Layers: circle 1, square 2")
    caption_below(figure, f"Large: means of the seeds; the line: MLA. {caption}")
    return figure


EXPERIMENT = Experiment(
    name="latent",
    title="Latents in slices, a softmax each: what does it cost, and what wins it back?",
    settings={"MLA": Setting()}
    | {_label(*kind): Setting(*kind) for kind in _KINDS}
    | {
        _label(g, basis, "sliced", True): Setting(g, basis, "sliced", ALIGN_STEPS)
        for g, basis in ((2, "PCA"), (4, "PCA"), (4, "none"))
    },
    execute=_execute,
    columns=(
        Column(_ALL),
        Column(_APART),
        Column(_KL, "nats", 4),
        Column(_KL_APART, "nats", 4),
        Column(_SAME),
        Column(_SAME_APART),
        Column(_ERROR),
        Column("attention KL", "nats"),
        Column("score R2"),
        Column("top key agreement"),
    ),
    claims=(
        Claim("slices cost perplexity, whatever the basis", above(_ALL, _PLAIN, ["MLA"], 3)),
        Claim("four slices are further from the model than two, whatever the basis", _further),
        *(
            Claim(
                f"with g={g}, principal components are nearer than Hadamard's basis or none",
                below(
                    _KL,
                    [_label(g, "PCA", "exact")],
                    [_label(g, basis, "exact") for basis in ("none", "Hadamard")],
                    4,
                ),
            )
            for g in SLICES
        ),
        Claim(
            "given exact norms, Hadamard's basis is nearer than none",
            below(_KL, [_label(2, "Hadamard", "exact")], [_label(2, "none", "exact")], 4),
        ),
        _nearer(
            "an exact norm takes away less than half: the softmaxes are the larger part",
            _label(2, "none", "sliced"),
            _label(2, "none", "exact"),
            2.0,
        ),
        Claim("an exact prompt leaves less than one in slices", _apart_helps),
        *(
            _nearer(
                f"{ALIGN_STEPS} steps of alignment take away half and more: {name}",
                f"{name}, aligned",
                name,
                0.5,
            )
            for name in (_label(4, "none", "sliced"), _label(4, "PCA", "sliced"))
        ),
        Claim(
            "aligned, no basis does as well as principal components",
            below(_KL, [_label(4, "none", "sliced", True)], [_label(4, "PCA", "sliced", True)], 4),
        ),
    ),
    draw=_draw,
    beyond="published models: `toolkit.looped.with_slices` cuts one of yours, and "
    "`toolkit.attention.latent.slicing_report` tells what that costs, layer by layer.",
    minutes=8,
)
