"""A looped language model trained on text: `looped` and `training` put together.

A run is a folder: `run.json` (what was asked for, the corpus with its files and hash, the
environment), `metrics.jsonl`, and `checkpoints/`.
"""

import codecs
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from toolkit.looped import LoopedConfig, LoopedLM, load_model, parameter_count, stream
from toolkit.measure import environment
from toolkit.parallel import Layout, data_parallel, fully_sharded, make_mesh
from toolkit.training import (
    Checkpoints,
    Corpus,
    FitOptions,
    TrainState,
    adamw,
    evaluation_batches,
    fit,
    load_corpus,
    make_evaluation,
    make_train_step,
    sample_batch,
    warmup_cosine,
)

LAYOUTS = ("single", "data_parallel", "fully_sharded")
LOG_EVERY = 10
EVALUATION_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """All that decides the outcome of a run.

    Attributes:
        config: the model.
        text: "prose", "code", or paths of files and folders.
        steps: optimiser steps.
        batch: sequences a step.
        window: bytes a sequence.
        learning_rate: peak of the warm-up and cosine schedule.
        weight_decay: of matrices.
        seed: of initialisation and of the order of the data.
        layout: "single" (one device), "data_parallel" or "fully_sharded" (ZeRO-3) over all
            devices; the batch must be a multiple of their number.
    """

    config: LoopedConfig
    text: str | tuple[str, ...] = "prose"
    steps: int = 1000
    batch: int = 16
    window: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    seed: int = 0
    layout: str = "single"

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: got {self.layout!r}, wanted one of {', '.join(LAYOUTS)}")
        for name in ("steps", "batch", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted at least 1")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate: got {self.learning_rate}, wanted more than 0")


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What training left.

    Attributes:
        model: the model with its last parameters.
        step: steps done.
        parameters: number of parameters.
        history: metrics rows; those with "evaluation_loss" were evaluated (nats a byte).
        stopped_by: None when the run is complete.
    """

    model: LoopedLM
    step: int
    parameters: int
    history: list[dict[str, Any]]
    stopped_by: str | None

    @property
    def evaluation_loss(self) -> float:
        """Last held-out loss in nats a byte; NaN before the first evaluation."""
        losses = [row["evaluation_loss"] for row in self.history if "evaluation_loss" in row]
        return losses[-1] if losses else float("nan")


def next_byte_loss(
    graph: nnx.GraphDef, params: nnx.State, batch: tuple[Int[Array, "batch time"], ...]
) -> Float[Array, ""]:
    """Mean cross-entropy of the next byte.

        loss = -mean_{b,t} log softmax(logits[b, t])[target[b, t]]

    Args:
        graph: structure of the model, from `nnx.split`.
        params: its parameters.
        batch: inputs and targets, each `[batch, time]`.

    Returns:
        Nats a byte.

    Cost:
        One forward pass.
    """
    inputs, targets = batch
    logits = nnx.merge(graph, params)(inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train_language_model(
    run: TrainingRun,
    directory: Path,
    *,
    corpus: Corpus | None = None,
    stop: Callable[[], bool] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
    is_progress_shown: bool = True,
) -> TrainedModel:
    """Train, or go on training, the run in a folder.

    Args:
        run: what to train.
        directory: the run's folder; made if missing, resumed if it holds this run.
        corpus: the text, when it is loaded already; None loads `run.text`.
        stop: asked now and then; True saves and returns.
        callback: given every metrics row.
        is_progress_shown: whether to draw the progress bar.

    Returns:
        The trained model and its history.

    Raises:
        ValueError: when the devices do not divide the batch.
        CorpusError: when the text cannot be used.
        CheckpointError: when the folder holds another run, or the disk is too full.
        OSError: when the folder cannot be made or written.
        DivergedError: when the loss stops being finite.

    Cost:
        6 FLOPs a parameter, loop and byte, plus the mixers' own. Under a layout, the collectives
        that `toolkit.parallel` lists for it.
    """
    corpus = corpus or load_corpus(run.text if isinstance(run.text, str) else list(run.text))
    train, held_out = corpus.split()
    evaluation = evaluation_batches(held_out, run.batch, run.window, EVALUATION_BATCHES)
    graph, params, layout = _placed_parameters(run)
    optimizer = _optimizer(run)
    state = TrainState.create(params, optimizer)
    loss = partial(next_byte_loss, graph)
    step = make_train_step(
        loss,
        optimizer,
        sample=partial(sample_batch, seed=run.seed, batch=run.batch, time=run.window),
        most_steps=LOG_EVERY,
        batch_sharding=layout.batch_sharding if layout else None,
    )
    everywhere = NamedSharding(layout.mesh, PartitionSpec()) if layout else None
    _describe(run, corpus, Path(directory))
    # Eight evaluations a run, each at the end of a whole logging interval.
    interval = max(1, run.steps // (8 * LOG_EVERY)) * LOG_EVERY
    result = fit(
        state,
        step,
        jax.device_put(train, everywhere),
        FitOptions(
            total_steps=run.steps,
            log_every=LOG_EVERY,
            eval_every=interval,
            checkpoint_every=interval,
            tokens_per_step=run.batch * run.window,
            is_progress_shown=is_progress_shown,
        ),
        directory=directory,
        configuration=_configuration(run, corpus),
        evaluate=make_evaluation(loss, jax.device_put(evaluation, everywhere)),
        stop=stop,
        callback=callback,
    )
    return TrainedModel(
        model=nnx.merge(graph, result.state.params),
        step=int(result.state.step),
        parameters=parameter_count(run.config),
        history=result.history,
        stopped_by=result.stopped_by,
    )


def load_language_model(directory: Path) -> LoopedLM:
    """The model with the newest parameters of a run's folder, or of an exported file.

    Args:
        directory: a folder written by `train_language_model`, or a file written by
            `toolkit.looped.save_model`.

    Returns:
        The model.

    Raises:
        FileNotFoundError: when the folder holds no run, or no checkpoint yet.
        ValueError: when its run.json, or the file, cannot be understood.
        CheckpointError: when no checkpoint can be read.

    Cost:
        One read of parameters and optimiser state.
    """
    if Path(directory).is_file():
        return load_model(directory)
    described = Path(directory) / "run.json"
    if not described.is_file():
        raise FileNotFoundError(
            f"directory: {str(directory)!r} holds no run.json; "
            "wanted a folder written by `toolkit train` or `toolkit tour`, or an exported file"
        )
    try:
        stored = json.loads(described.read_text())
        config = LoopedConfig(**stored["configuration"]["model"])
        run = TrainingRun(config, **stored["configuration"]["training"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"directory: {str(described)!r} is damaged or of another version ({error})"
        ) from error
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(run.seed)))
    state = TrainState.create(params, _optimizer(run))
    with Checkpoints(Path(directory) / "checkpoints") as checkpoints:
        restored = checkpoints.restore_latest(state, {"configuration": stored["configuration"]})
    if restored is None:
        raise FileNotFoundError(
            f"directory: {str(directory)!r} has no checkpoint yet; let training reach its first one"
        )
    return nnx.merge(graph, restored[0].params)


def stream_text(
    model: LoopedLM,
    prompt: str,
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Continue a prompt, piece by piece, as text.

    Args:
        model: a model of bytes.
        prompt: the text to continue.
        length: bytes to write.
        temperature: 0 for the likeliest byte every time.
        top_k: sample among the k likeliest bytes only.
        top_p: sample among the likeliest bytes with this share of the probability.
        seed: of the sampling.

    Returns:
        Pieces of text; bytes that are not UTF-8 show as the replacement character.

    Raises:
        ValueError: for an empty prompt or a sampling argument out of range.

    Cost:
        One prefill and `length` decode steps.
    """
    if not prompt:
        raise ValueError("prompt: got an empty text, wanted at least one character")
    tokens = jnp.asarray(np.frombuffer(prompt.encode(), np.uint8)[None].astype(np.int32))
    pieces = stream(
        model,
        tokens,
        length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        key=jax.random.key(seed),
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return (decoder.decode(bytes(token.astype(np.uint8))) for token in pieces)


def _placed_parameters(run: TrainingRun) -> tuple[nnx.GraphDef, Any, Layout | None]:
    """A fresh model's parameters, laid out on the devices as the run says."""
    graph, params = nnx.split(LoopedLM(run.config, rngs=nnx.Rngs(run.seed)))
    if run.layout == "single":
        return graph, params, None
    devices = len(jax.devices())
    if run.batch % devices:
        raise ValueError(f"batch: got {run.batch}, wanted a multiple of the {devices} devices")
    strategy = data_parallel if run.layout == "data_parallel" else fully_sharded
    layout = strategy(params, make_mesh({"data": devices}))
    return graph, layout.apply(params), layout


def _optimizer(run: TrainingRun) -> optax.GradientTransformation:
    schedule = warmup_cosine(
        peak=run.learning_rate, total_steps=run.steps, warmup_steps=max(1, run.steps // 20)
    )
    return adamw(schedule, weight_decay=run.weight_decay)


def _configuration(run: TrainingRun, corpus: Corpus) -> dict[str, Any]:
    """What must be equal for a checkpoint to be of this run; survives a trip through JSON."""
    training = {
        field.name: getattr(run, field.name)
        for field in dataclasses.fields(run)
        if field.name not in ("config", "layout")  # a run may go on under another layout
    }
    corpus_facts = {"name": corpus.name, "size": corpus.size, "sha256": corpus.sha256}
    facts = {
        "model": dataclasses.asdict(run.config),
        "training": training,
        "corpus": corpus_facts,
    }
    return json.loads(json.dumps(facts))


def _describe(run: TrainingRun, corpus: Corpus, directory: Path) -> None:
    path = directory / "run.json"
    if path.exists() and any(entry.name.isdigit() for entry in directory.glob("checkpoints/*")):
        return  # the first start of the run is the one on record; no checkpoint, no run yet
    facts = {
        "configuration": _configuration(run, corpus),
        "corpus": corpus.record(),
        "environment": environment(),
    }
    unfinished = path.with_name(path.name + ".tmp")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(facts, indent=1) + "\n")
        os.replace(unfinished, path)
    except OSError as error:
        raise OSError(
            f"directory: cannot write in {str(directory)!r} ({error.strerror}); "
            "wanted a folder with room, or the name of a new one"
        ) from error
