"""Language modelling on local text at matched parameters and matched tokens: which order appears?

A loop adds computation but no parameters; a linear-time layer needs no memory per token; a hybrid
has a few attention layers among linear ones. The perplexity is that of held-out bytes.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.experiments.kit.chart import caption_below, draw_curves, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Stopped, Workspace
from toolkit.experiments.kit.results import Outcome, Results
from toolkit.experiments.kit.side_by_side import SeedTrainer
from toolkit.experiments.kit.verdicts import Claim, below, in_words, judging
from toolkit.figures import short
from toolkit.language import (
    TrainedModel,
    TrainingRun,
    next_byte_loss,
    train_language_model,
)
from toolkit.language.losses import loss_of_parts
from toolkit.language.train import EVALUATION_BATCHES, LOG_EVERY
from toolkit.looped import (
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    decode_step,
    match_parameters,
    parameter_count,
)
from toolkit.measure import program_cost
from toolkit.training import Corpus, evaluation_batches, load_corpus, sample_batch

CONTENDERS = {
    "plain": ("full full full full full", 1),
    "looped": ("full full full full full", 2),
    "looped gdn": ("gdn gdn gdn gdn gdn", 2),
    "looped full + gdn": ("gdn gdn gdn gdn full", 2),
    "looped gdn + dsa": ("gdn gdn gdn gdn dsa", 2),
}
"""Pattern and loops of each contender."""
CONTEXTS = (1024, 4096, 16384, 32768)
DECODED = 32  # tokens timed at each context
STEPS, BATCH, TIME = 600, 16, 128
PERPLEXITY = "perplexity"
_DECODE = "decode tokens/s by context"


def matched_model(pattern: str, loops: int) -> LoopedConfig:
    """A model of this pattern with as many parameters as the plain one, within 2 %."""
    sizes = {"width": 64, "heads": 2, "feed_forward_multiple_of": 8}
    plain = LoopedConfig.tiny(CONTENDERS["plain"][0], **sizes)
    return match_parameters(LoopedConfig.tiny(pattern, loops=loops, **sizes), plain, tolerance=0.02)


@dataclasses.dataclass(frozen=True)
class LanguageSetting:
    """A contender.

    Attributes:
        model: the model.
        steps: updates.
        batch: sequences per step.
        time: bytes per sequence.
    """

    model: LoopedConfig
    steps: int = STEPS
    batch: int = BATCH
    time: int = TIME


def _trained(setting: LanguageSetting, seed: int, workspace: Workspace) -> TrainedModel:
    """The setting's model after its steps, from the last checkpoint in the workspace."""
    result = train_language_model(
        _run(setting, seed),
        workspace.directory / "training",
        corpus=_corpus(),
        callback=lambda row: workspace.progress(0.9 * row["step"] / setting.steps),
        is_progress_shown=False,
    )
    if result.stopped_by is not None:
        raise Stopped
    return result


def _run(setting: LanguageSetting, seed: int = 0) -> TrainingRun:
    return TrainingRun(
        setting.model,
        "prose",
        steps=setting.steps,
        batch=setting.batch,
        sequence_length=setting.time,
        seed=seed,
    )


@functools.lru_cache(maxsize=1)
def seed_trainer(setting: LanguageSetting) -> SeedTrainer:
    """Trains seeds of the setting side by side, as `_trained` does one, evaluated eight times."""
    train, held_out = _corpus().split()
    evaluation = evaluation_batches(held_out, setting.batch, setting.time, EVALUATION_BATCHES)
    graph = nnx.split(nnx.eval_shape(lambda: LoopedLM(setting.model, rngs=nnx.Rngs(0))))[0]
    is_scanned = jax.default_backend() != "cpu"  # why: `looped.scanned`
    loss = functools.partial(loss_of_parts, graph, scan_layers=is_scanned)
    tokens, sizes = jnp.asarray(train), {"batch": setting.batch, "time": setting.time}
    return SeedTrainer(
        init=lambda key: nnx.split(LoopedLM(setting.model, rngs=nnx.Rngs(key)))[1],
        loss=loss,
        sample=lambda seed, step: sample_batch(tokens, step, seed=seed, **sizes),
        optimizer=_run(setting).make_optimizer(),
        evaluate=lambda params, seed: jax.lax.map(
            functools.partial(loss, params), evaluation
        ).mean(),
        every=setting.steps // 8,
    )


def _execute(setting: LanguageSetting, seed: int, workspace: Workspace) -> Outcome:
    result = _trained(setting, seed, workspace)
    evaluated = [row for row in result.history if "evaluation_loss" in row]
    # A call's median: the first one compiles.
    seconds = np.median([row["seconds"] / LOG_EVERY for row in result.history])
    return {
        PERPLEXITY: np.exp(result.evaluation_loss),
        "parameters": parameter_count(result.model.config),
        "step": [row["step"] for row in evaluated],
        "perplexity by step": [np.exp(row["evaluation_loss"]) for row in evaluated],
        "training tokens/s": setting.batch * setting.time / seconds,
        "training memory": _training_bytes(setting) / 2**20,
        "seconds": sum(row["seconds"] for row in result.history),
        _DECODE: [_decode_rate(result.model, context) for context in CONTEXTS],
    }


@functools.cache
def _corpus() -> Corpus:
    return load_corpus("prose")


@functools.cache
def _training_bytes(setting: LanguageSetting) -> int:
    """Scratch memory of one batch's gradient in the compiled program."""
    graph, params = nnx.split(nnx.eval_shape(lambda: LoopedLM(setting.model, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((setting.batch, setting.time), jnp.int32)
    gradient = jax.jit(jax.grad(functools.partial(next_byte_loss, graph)))
    return program_cost(gradient.lower(params, (tokens, tokens)).compile()).temp_bytes


def _decode_rate(model: LoopedLM, context: int) -> float:
    """Tokens per second of one sequence after a context.

    The cache holds zeros, which do not affect the time.
    """
    before = context - DECODED - 2

    def as_if_read(leaf: jax.Array) -> jax.Array:
        return jnp.full_like(leaf, before) if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf

    cache = jax.tree.map(as_if_read, LoopedCache.empty(model.config, 1, context))
    token = jnp.zeros(1, jnp.int32)
    for _ in range(2):
        logits, cache = decode_step(model, token, cache)
    jax.block_until_ready(logits)
    started = time.perf_counter()
    for _ in range(DECODED):
        logits, cache = decode_step(model, token, cache)
    jax.block_until_ready(logits)
    return DECODED / (time.perf_counter() - started)


def _stays_fast(results: Results) -> tuple[np.ndarray, str]:
    labels = ["looped", "looped full + gdn", "looped gdn"]
    rates = results.paired(_DECODE, labels)
    kept = rates[..., -1] / rates[..., 0]
    words = f"share of the decode rate at 1k left at 32k: {in_words(labels, kept)}"
    return np.diff(kept, axis=0).min(0), words


def _slows(results: Results) -> tuple[np.ndarray, str]:
    """A control: attention alone decodes more slowly after a long context."""
    rates = results.paired(_DECODE, ["looped"])[0]
    return 1 - rates[:, -1] / rates[:, 0], "looped attention slows"


@judging
def _trained_longer(results: Results, label: str) -> tuple[np.ndarray, str]:
    """A control: two evaluations earlier the model is worse, or no difference can be seen."""
    curves = results.curves(label, "perplexity by step")
    return curves[:, -3] - curves[:, -1], f"{label} falls in the last evaluations"


def _claim(text: str, winner: str, loser: str) -> Claim:
    judge = below(PERPLEXITY, [winner], [loser], 3)
    return Claim(text, judge, control=_trained_longer(loser))


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels()
    draw_curves(left, results, "perplexity by step", has_band=False, every=1)
    draw_curves(right, results, _DECODE, CONTEXTS, has_band=False, every=1)
    left.set(xlabel="training step", ylabel="perplexity of a held-out byte",
             title="At matched parameters and tokens")  # fmt: skip
    left.legend(loc="upper right")
    right.set_xscale("log", base=2)
    right.set_xticks(CONTEXTS, [short(context, "tokens") for context in CONTEXTS])
    right.set_ylim(bottom=0)
    right.set(xlabel="tokens in the cache", title="decoded tokens per second")
    caption_below(figure, f"Means over the seeds. {caption}")
    return figure


EXPERIMENT = Experiment(
    name="language",
    title="Plain, looped, linear, hybrid: which order appears on text?",
    settings={
        label: LanguageSetting(matched_model(pattern, loops))
        for label, (pattern, loops) in CONTENDERS.items()
    },
    execute=_execute,
    columns=(
        Column(PERPLEXITY),
        Column("training tokens/s", "token/s", 0),
        Column("training memory", "MiB", 1),
        Column("parameters", "1", 0),
        Column("seconds", "s", 0),
    ),
    claims=(
        _claim("looping helps: looped beats plain", "looped", "plain"),
        _claim("gated delta nets beat attention, looped", "looped gdn", "looped"),
        _claim("the hybrid beats looped attention", "looped full + gdn", "looped"),
        _claim("the hybrid beats looped gated delta nets", "looped full + gdn", "looped gdn"),
        _claim("GDN with sparse attention beats looped attention", "looped gdn + dsa", "looped"),
        Claim(
            "the more gated delta nets, the less a long context slows decoding",
            _stays_fast,
            control=_slows,
        ),
    ),
    draw=_draw,
    beyond="the paper's 100 billion tokens: differences here are those of the first million bytes.",
    minutes=75,
    work=lambda setting: setting.steps * setting.model.loops,
)
