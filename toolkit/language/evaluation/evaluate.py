"""Evaluation of a language model on rows of a task: likelihoods, then the harness' metrics."""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from tqdm import tqdm

from toolkit._checks import checked
from toolkit._files import append_sealed_line, read_sealed_lines
from toolkit.language.evaluation.likelihoods import Likelihood, Words, log_likelihoods
from toolkit.language.evaluation.rows import Choice, Continuation, Document, Row
from toolkit.language.tokens import SpecialTokens
from toolkit.looped import LoopedLM
from toolkit.training.checkpoints.identity import checksums
from toolkit.training.checkpoints.locks import locked

PAIRS_PER_LINE = 64


@dataclass(frozen=True)
class Scores:
    """What a model reached on a task.

    Attributes:
        rows: number of rows.
        metrics: name -> value.
        errors: name -> standard error of the value, where rows are independent.

    Example:
        >>> Scores(rows=4, metrics={"acc": 0.5}, errors={"acc": 0.29}).metrics["acc"]
        0.5
    """

    rows: int
    metrics: dict[str, float]
    errors: dict[str, float]


@checked
def evaluate(
    model: LoopedLM, rows: Sequence[Row], *,
    tokenizer: Any = None, special: SpecialTokens | None = None, batch: int = 8,
    window: int = 2048, results: Path | None = None, show_progress: bool = False,
) -> Scores:  # fmt: skip
    """Score a model on rows of one kind, with the metrics of lm-evaluation-harness.

        Choice        acc: share of rows whose likeliest answer is right;
                      acc_norm: likewise, of log-likelihoods per character of the answer
        Continuation  acc: share that greedy decoding writes; perplexity: exp(-mean log p)
        Document      bits_per_byte: -sum log2 p / bytes; byte_perplexity; word_perplexity

    Args:
        model: any looped language model.
        rows: from `read_task`, or made by hand.
        tokenizer: made by `load_tokenizer`; None for a model of bytes.
        special: the tokens that start and end a text, from `find_special_tokens`.
        batch: sequences computed together.
        window: most tokens that are predicted together; a document is cut into windows, and
            contexts of choices and continuations lose their beginning.
        results: a file that keeps what was computed, so that the same call goes on after a stop.
        show_progress: draw a bar.

    Raises:
        ValueError: rows of several kinds or none; a tokenizer that does not fit; `results` of
            another model, task or tokenizer.

    Cost: one forward pass over every text; see `log_likelihoods`.

    Source: Gao et al., "A framework for few-shot language model evaluation"
        (lm-evaluation-harness), whose definitions of metrics these are.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> model = LoopedLM(LoopedConfig.tiny("window"), rngs=nnx.Rngs(0))
        >>> found = evaluate(model, [Continuation("The sky is", " blue")])
        >>> sorted(found.metrics)
        ['acc', 'perplexity']
    """
    kinds = {type(row) for row in rows}
    if len(kinds) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
        raise ValueError(f"rows: got {names}, wanted rows of one kind")
    if window < 1:
        raise ValueError(f"window: got {window}, wanted at least 1 token")
    words = Words(tokenizer, special or SpecialTokens(), model.config.vocabulary)
    pairs, owners = [], []
    for number, row in enumerate(rows):
        for pair in _pairs(row, words, window):
            pairs.append(pair)
            owners.append(number)
    found = _found(model, pairs, batch, results, show_progress)
    of_rows: list[list[Likelihood]] = [[] for _ in rows]
    for number, likelihood in zip(owners, found, strict=True):
        of_rows[number].append(likelihood)
    return _METRICS[kinds.pop()](rows, of_rows)


def _pairs(row: Row, words: Words, window: int) -> Iterator[tuple[list[int], list[int]]]:
    if isinstance(row, Document):
        yield from windows(words.first, words.tokens(row.text), window)
        return
    if isinstance(row, Choice):
        texts = [(row.query, f" {choice}") for choice in row.choices]
    else:
        texts = [(row.context, row.continuation)]
    for context, continuation in texts:
        before, after = words.pair(context, continuation)
        if len(after) > window:
            raise ValueError(f"window: got {window}, wanted at least the {len(after)} of an answer")
        yield before[-(window + 1 - len(after)) :], after


def windows(first: int, tokens: list[int], window: int) -> Iterator[tuple[list[int], list[int]]]:
    """Contexts and what follows them, so that every token is predicted once.

    The first window has only the starting token before it; later ones have one token, and the last
    has as many as fit.

    Example:
        >>> list(windows(0, [1, 2, 3, 4, 5], 2))
        [([0], [1, 2]), ([2], [3, 4]), ([3, 4], [5])]
    """
    yield [first], tokens[:window]
    for start in range(window, len(tokens), window):
        end = min(start + window, len(tokens))
        yield tokens[end - window - 1 : start], tokens[start:end]


def _found(
    model: LoopedLM, pairs: list, batch: int, results: Path | None, show_progress: bool
) -> list[Likelihood]:
    """The likelihoods of all pairs, those of an earlier call from its file."""
    if results is None:
        return _computed(model, pairs, {}, batch, None, show_progress)
    identity = hashlib.sha256(json.dumps([pairs, checksums(nnx.state(model))]).encode()).hexdigest()
    with locked(results.with_suffix(".lock")):
        lines = read_sealed_lines(results)
        if not lines:
            append_sealed_line(results, {"identity": identity})
        elif lines.pop(0) != {"identity": identity}:
            raise ValueError(f"results: {str(results)!r} is of another model, task or tokenizer")
        known = {at: Likelihood(log, greedy) for line in lines for at, log, greedy in line["pairs"]}
        return _computed(model, pairs, known, batch, results, show_progress)


def _computed(model, pairs, known, batch, results, show_progress) -> list[Likelihood]:
    wanted = [number for number in range(len(pairs)) if number not in known]
    scored = log_likelihoods(model, [pairs[number] for number in wanted], batch=batch)
    bar = tqdm(scored, total=len(pairs), initial=len(known), unit="text", disable=not show_progress)
    unsaved = []
    for at, likelihood in bar:
        known[wanted[at]] = likelihood
        unsaved.append([wanted[at], *likelihood])
        if results is not None and (len(unsaved) == PAIRS_PER_LINE or len(known) == len(pairs)):
            append_sealed_line(results, {"pairs": unsaved})
            unsaved = []
    return [known[number] for number in range(len(pairs))]


def _scores(columns: dict[str, list[float]], **others: float) -> Scores:
    """Means of columns with their standard errors, and numbers that are no means of rows."""
    rows = len(next(iter(columns.values())))
    errors = {
        name: statistics.stdev(column) / math.sqrt(rows) if rows > 1 else math.nan
        for name, column in columns.items()
    }
    means = {name: statistics.fmean(column) for name, column in columns.items()}
    return Scores(rows, means | others, errors)


def _of_choices(rows: Sequence[Choice], found: list[list[Likelihood]]) -> Scores:
    columns: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    for row, answers in zip(rows, found, strict=True):
        logs = np.array([answer.log for answer in answers])
        lengths = np.array([len(choice) for choice in row.choices])
        columns["acc"].append(float(np.argmax(logs) == row.gold))
        columns["acc_norm"].append(float(np.argmax(logs / lengths) == row.gold))
    return _scores(columns)


def _of_continuations(rows: Sequence[Continuation], found: list[list[Likelihood]]) -> Scores:
    perplexity = _exp(-statistics.fmean(answer.log for (answer,) in found))
    return _scores({"acc": [float(answer.is_greedy) for (answer,) in found]}, perplexity=perplexity)


def _of_documents(rows: Sequence[Document], found: list[list[Likelihood]]) -> Scores:
    nats = -sum(window.log for row in found for window in row)
    size = sum(len(row.text.encode()) for row in rows)
    words = sum(len(re.split(r"\s+", row.text)) for row in rows)  # as the harness counts
    metrics = {
        "bits_per_byte": nats / size / math.log(2),
        "byte_perplexity": _exp(nats / size),
        "word_perplexity": _exp(nats / words),
    }
    return Scores(len(rows), metrics, {})


def _exp(nats: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(nats))


_METRICS: dict[type, Any] = {
    Choice: _of_choices,
    Continuation: _of_continuations,
    Document: _of_documents,
}
