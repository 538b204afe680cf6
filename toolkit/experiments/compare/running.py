"""Run a comparison in a folder: prepare it once, try rates, train seeds, write the page.

A folder holds `comparison.json` (what is compared, matched), `tokens.npy` with a tokenizer,
`rates.jsonl` and `runs.jsonl` (a line per finished run), and at the end the page.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit._checks import check_choice, checked
from toolkit._files import read_sealed_json, sealed_json, write_whole
from toolkit.experiments.compare.comparison import Comparison, Text, run_of
from toolkit.experiments.compare.matching import MATCHES, matched
from toolkit.experiments.compare.page import show_comparison
from toolkit.experiments.kit.experiment import Experiment, Run, Stopped
from toolkit.experiments.kit.records import FinishedRuns, read_runs, results_of, setting_facts
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.runner import finish_runs
from toolkit.language import TrainingRun, train_language_model, write_tokens
from toolkit.language.start import TOKENS, text_corpus
from toolkit.language.tokens import check_vocabulary, find_tokenizer
from toolkit.language.train import LOG_EVERY
from toolkit.training import load_tokens
from toolkit.training.checkpoints.locks import locked

FACTS, RATES, RUNS = "comparison.json", "rates.jsonl", "runs.jsonl"
TIMED_STEPS = 4 * LOG_EVERY


@checked
def run_comparison(
    contenders: Mapping[str, TrainingRun],
    directory: Path,
    *,
    match: str = "flops",
    tokenizer: Any = None,
    rates: int = 5,
    factor: float = 2.0,
    seeds: int = 5,
    smallest: float = 0.01,
    command: str = "run_comparison",
) -> bool:
    """Compare language models at equal cost, and write a table, curves, one page and a PDF.

    Several processes may share a folder and divide its runs. A killed call loses at most the time
    since the last checkpoint of its current run. More seeds or rates may be asked for later.

    Args:
        contenders: label -> run; the first is the one that the others are compared to, and that
            they are matched to. All have the text of the first.
        directory: the comparison's folder; made if missing.
        match: what is made equal, a key of `MATCHES`.
        tokenizer: made by `load_tokenizer`: the text is tokenised once, into the folder.
        rates: learning rates tried per contender, around its own, each for all of its steps.
        factor: between neighbouring rates.
        seeds: per contender; fewer than five give no verdict.
        smallest: the smallest difference that matters, in bits per byte (nats per token for a
            token array without a tokenizer).
        command: what to note as the command of each run.

    Returns:
        Whether all runs are finished; False after Ctrl-C.

    Raises:
        ValueError: contenders that cannot be matched, or a folder of another comparison.
        CorpusError: the text cannot be used.
        OSError: the folder cannot be written.

    Cost: (rates + seeds) trainings per contender.

    Example:
        >>> from pathlib import Path
        >>> from toolkit.language import TrainingRun
        >>> from toolkit.looped import LoopedConfig
        >>> runs = {word: TrainingRun(LoopedConfig.tiny(word)) for word in ("full", "gdn")}
        >>> run_comparison(runs, Path("comparison"))  # doctest: +SKIP
        True
    """
    _check(contenders, match, rates, factor, seeds, smallest)
    directory.mkdir(parents=True, exist_ok=True)
    print(f"{' or '.join(contenders)}, at equal {match}: {directory}", flush=True)
    with locked(directory / ".lock", wait=True):
        text = _prepared_text(next(iter(contenders.values())), directory, tokenizer)
        comparison = _prepared(contenders, match, smallest, factor, text, directory)
    comparison = dataclasses.replace(comparison, rates=rates, seeds=seeds)
    try:
        tuning = comparison.tuning(text)
        tried = _finished(tuning, tuning.runs(1), directory, RATES, command)
        found = comparison.best_rates(tried)
        print("  ".join(f"{label}: rate {rate:g}" for label, rate in found.items()), flush=True)
        final = comparison.final(found, text)
        with locked(directory / ".lock", wait=True):
            _set_aside_other_rates(final, directory)
        runs = sorted(final.runs(seeds), key=lambda run: run.seed)
        _finished(final, runs, directory, RUNS, command)
    except (KeyboardInterrupt, Stopped):
        print("\nstopped; the same command goes on", file=sys.stderr)
        return False
    show_comparison(*load_comparison(directory), directory, "measured here")
    return True


@checked
def load_comparison(
    directory: Path,
) -> tuple[Comparison, Results, list[dict[str, Any]]]:
    """The comparison in a folder.

    Args:
        directory: of `run_comparison`.

    Returns:
        (comparison, what the rates gave, the lines of the finished runs), for `show_comparison`.

    Raises:
        OSError: there is none.
        ValueError: a file was changed.

    Example:
        >>> from pathlib import Path
        >>> load_comparison(Path("no/such/folder"))
        Traceback (most recent call last):
        FileNotFoundError: directory: 'no/such/folder' holds no comparison.json
    """
    if not (directory / FACTS).is_file():
        raise FileNotFoundError(f"directory: {str(directory)!r} holds no {FACTS}")
    facts = read_sealed_json((directory / FACTS).read_bytes(), str(directory / FACTS))
    contenders = {label: run_of(run) for label, run in facts["matched"].items()}
    names = ("match", "unit", "smallest", "factor", "text")
    comparison = Comparison(contenders, **{name: facts[name] for name in names})
    lines = read_runs(directory / RATES, comparison.tuning())
    tried = len({line["label"] for line in lines}) // len(contenders)
    comparison = dataclasses.replace(comparison, rates=tried)
    runs = read_runs(directory / RUNS, comparison.final(dict.fromkeys(contenders, 1.0)))
    comparison = dataclasses.replace(comparison, seeds=len({line["seed"] for line in runs}))
    return comparison, results_of(lines, comparison.tuning()), runs


def _check(contenders, match, rates, factor, seeds, smallest):
    if len(contenders) < 2:
        raise ValueError(f"contenders: got {len(contenders)}, wanted at least 2")
    check_choice("match", match, MATCHES)
    if rates < 1 or seeds < 1 or factor <= 1 or smallest < 0:
        raise ValueError(
            f"wanted rates and seeds of at least 1, factor above 1, smallest of at least 0; got "
            f"{rates}, {seeds}, {factor} and {smallest}"
        )
    for label, run in contenders.items():
        if run.weights is not None:
            raise ValueError(f"weights: {label} has {run.weights}; wanted one text for all")
        if run.learning_rate == "search" or run.init_from is not None:
            name = "init_from" if run.init_from else "learning_rate"
            raise ValueError(
                f"{name}: {label} has {getattr(run, name)!r}; wanted a drawn model, and the number "
                "around which rates are tried"
            )


def _prepared_text(run: TrainingRun, directory: Path, tokenizer: Any) -> Text:
    texts = [run.text] if isinstance(run.text, str) else [*run.text]
    if tokenizer is None:
        is_tokens = any(text.endswith(".npy") for text in texts)
        return Text(text_corpus(run.text), find_tokenizer(Path(texts[0])) if is_tokens else None)
    if run.validation is not None:
        raise ValueError("validation: got a file with a tokenizer; wanted none, for the text's end")
    file = directory / TOKENS
    if not file.is_file():
        write_tokens(tokenizer, run.text if isinstance(run.text, str) else texts, file)
    return Text(dataclasses.replace(load_tokens(file), name=TOKENS), tokenizer)


def _prepared(
    contenders: Mapping[str, TrainingRun],
    match: str,
    smallest: float,
    factor: float,
    text: Text,
    directory: Path,
) -> Comparison:
    """The comparison as it was begun in the folder, or begun now."""
    if text.tokenizer is not None:
        for run in contenders.values():
            check_vocabulary(text.tokenizer, run.config.vocabulary)
    corpus = text.corpus
    asked = {
        "contenders": {label: dataclasses.asdict(run) for label, run in contenders.items()},
        "match": match,
        "smallest": smallest,
        "factor": factor,
        "unit": text.unit,
        "text": {"name": corpus.name, "size": corpus.size, "sha256": corpus.sha256},
    }
    asked = json.loads(json.dumps(asked))
    path = directory / FACTS
    if path.is_file():
        stored = read_sealed_json(path.read_bytes(), str(path))
        for name, value in asked.items():
            if stored[name] != value:
                raise ValueError(
                    f"directory: {str(directory)!r} holds a comparison with other {name}; wanted "
                    "the same, or the name of a new folder"
                )
    else:
        runs = matched(contenders, match, lambda runs: _seconds(runs, text, directory))
        facts = {label: dataclasses.asdict(run) for label, run in runs.items()}
        write_whole(path, sealed_json(asked | {"matched": facts}, indent=1))
    return load_comparison(directory)[0]


def _seconds(
    contenders: Mapping[str, TrainingRun], text: Text, directory: Path
) -> dict[str, float]:
    """Seconds of a step of each, measured here in turns, twice; the faster counts."""
    found: dict[str, float] = {}
    for turn in range(2):
        for label, run in contenders.items():
            folder = directory / "running" / f"timing {turn} of {label}"
            short = dataclasses.replace(run, steps=TIMED_STEPS, warmup=None)
            history = train_language_model(
                short, folder, corpus=text.corpus, tokenizer=text.tokenizer, is_progress_shown=False
            ).history
            seconds = float(np.median([row["seconds"] for row in history[1:]]))
            found[label] = min(seconds, found.get(label, seconds))
            shutil.rmtree(folder)
    return found


def _set_aside_other_rates(final: Experiment, directory: Path) -> None:
    """Where more rates were tried since and another one is best, judged runs are made anew."""
    path = directory / RUNS
    for line in read_runs(path, final):
        if line["setting"] != setting_facts(final.settings[line["label"]]):
            number = len([*directory.glob("runs-before-*.jsonl")]) + 1
            path.rename(directory / f"runs-before-{number}.jsonl")
            return


def _finished(
    experiment: Experiment, runs: Sequence[Run], directory: Path, name: str, command: str
) -> Results:
    finished = FinishedRuns(directory / name, experiment)
    finish_runs(experiment, runs, finished, directory, command)
    return results_of(finished.lines, experiment, runs)
