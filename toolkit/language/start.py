"""What training starts from: a drawn model or a trained one, and its text."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from toolkit.language.documents import write_tokens
from toolkit.language.load import model_to_start_from, parts_of
from toolkit.language.run import TrainingRun
from toolkit.looped import LoopedLM
from toolkit.parallel import Layout
from toolkit.training import (
    Corpus,
    HostBatches,
    ProgramForm,
    TokenWindows,
    load_corpus,
    load_tokens,
    mix_sources,
    record_batches,
)
from toolkit.training.data.corpora import BYTE_VOCABULARY

TOKENS = "tokens.npy"


def first_model(run: TrainingRun) -> LoopedLM:
    """The model before the first step: that of the run's `init_from`, or a drawn one."""
    if run.init_from is None:
        return LoopedLM(run.config, rngs=nnx.Rngs(run.seed))
    free = {name: getattr(run.config, name) for name in ("dtype", "remat")}
    model = model_to_start_from(run.init_from, **free)
    if model.config != run.config:
        raise ValueError(
            f"config: got one that differs from that of init_from {run.init_from!r} in more than "
            "dtype and remat; wanted `load_language_model(init_from).config`"
        )
    return model


def planned_parameters(run: TrainingRun, form: ProgramForm) -> tuple[Any, Any, None, Layout]:
    """The first parameters as the program of a plan has them, and its layout."""
    wanted: dict[str, Any] = {
        "layout": "single", "loss_chunks": 1, "block_chunks": 1, "accumulate": 1,
        "device_batch": None, "bias_rate": 0.0, "router_z": 0.0,
        "exchange": None if form.exchange is None else str(form.exchange.exchange),
    }  # fmt: skip
    if "moe" in run.config.feed_forward_words:
        wanted["balance"] = 0.0
    for name, value in wanted.items():
        if getattr(run, name) != value:
            raise ValueError(
                f"{name}: got {getattr(run, name)!r} with a plan, which says how the model is run; "
                f"wanted {value!r}"
            )
    if run.learning_rate == "search":
        raise ValueError("learning_rate: got 'search' with a plan; wanted a number")
    graph, params, bias = parts_of(first_model(run))
    if bias is not None:
        raise ValueError("config: got moe.choice_bias with a plan, which has no step for it")
    return graph, form.layout.apply(jax.jit(form.pack)(params)), None, form.layout


def text_corpus(text: str | tuple[str, ...]) -> Corpus:
    """Text, or the token array whose name ends in .npy."""
    paths: list[str] = [text] if isinstance(text, str) else list(text)
    if any(path.endswith(".npy") for path in paths):
        if len(paths) > 1:
            raise ValueError(
                f"text: got {len(paths)} paths, wanted one token array by itself, or weights"
            )
        return load_tokens(paths[0])
    return load_corpus(text if isinstance(text, str) else paths)


def corpora_of(run: TrainingRun, directory: Path, tokenizer: Any) -> list[Corpus]:
    """The texts of a run: all in one, or each that has a weight.

    With a tokenizer, files become token arrays in the run's folder; token arrays are read as they
    are.
    """
    texts = [run.text] if isinstance(run.text, str) else [*run.text]
    if run.weights is not None and len(run.weights) != len(texts):
        raise ValueError(f"weights: got {len(run.weights)} for {len(texts)} texts, wanted as many")
    parts = [run.text] if run.weights is None else texts
    return [_corpus(run, directory, tokenizer, part, i) for i, part in enumerate(parts)]


def _corpus(
    run: TrainingRun, directory: Path, tokenizer: Any, text: str | tuple[str, ...], number: int
) -> Corpus:
    paths = [text] if isinstance(text, str) else text
    if any(path.endswith(".npy") for path in paths):
        return text_corpus(text)
    if tokenizer is None:
        if run.init_from is not None and run.config.vocabulary > BYTE_VOCABULARY:
            raise ValueError(
                f"init_from: {run.init_from!r} has no tokenizer.json for its "
                f"{run.config.vocabulary:,} tokens; wanted one, or a token array as text"
            )
        return text_corpus(text)
    if jax.process_count() > 1:
        raise ValueError("text: got files in a job of several processes; wanted a token array")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / (f"{number}-{TOKENS}" if number else TOKENS)
    write_tokens(tokenizer, text, file)
    # Without the folder in its name, so that a run may be moved.
    return dataclasses.replace(load_tokens(file), name=file.name)


def mixed_batches(
    run: TrainingRun, parts: Sequence[np.ndarray], sharding: NamedSharding | None
) -> HostBatches:
    """Batches of several texts in the proportions of the run's weights."""
    assert run.weights is not None
    vocabulary = run.config.vocabulary
    windows = [TokenWindows(part, run.sequence_length, vocabulary) for part in parts]
    mixed = mix_sources(windows, run.weights, seed=run.seed, block=max(1024, run.batch))
    return record_batches(
        mixed, seed=run.seed, batch=run.batch, sharding=sharding, is_shuffled=False
    )
