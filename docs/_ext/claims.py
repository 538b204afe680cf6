"""Claim cards: what papers say, how it was tested here, what came out; made from the records."""

import importlib
import inspect
from collections import Counter
from pathlib import Path

from toolkit.experiments import EXPERIMENTS, Verdict, load_experiment
from toolkit.experiments.kit.records import read_runs, results_of

ROOT = Path(__file__).parents[2]
OUT_OF_REACH, NOT_RUN = "out of reach here", "not run yet"
# In words, signs and boxes of the theme: never by colour alone.
LOOKS = {
    "seen": ("\N{CHECK MARK}", "tip"),
    "contradicted": ("\N{BALLOT X}", "danger"),
    "no difference that matters": ("=", "note"),
    "not shown": ("?", "warning"),
    "void": ("!", "warning"),
    OUT_OF_REACH: ("\N{HORIZONTAL ELLIPSIS}", "note"),
    NOT_RUN: ("\N{EN DASH}", "note"),
}
RECORD = "https://github.com/mlsys-toolkit/toolkit/blob/main/data/experiments"
LEAD = """\
# Claims

One card per claim that the toolkit can test: the claim, the command that tests it, the verdict, and
the numbers that decided. The rule: a claim is *seen* where the interval of its mean margin over
paired seeds, at 95 % for all claims of the experiment together, lies beyond the smallest margin
that matters, *contradicted* where it lies below zero, of *no difference that matters* where it lies
within that margin, and *not shown* otherwise, also with fewer seeds than planned or runs of several
commits. It is *void* where a control that must fail does not. Claims recorded before this rule
stated no smallest margin: for them it is zero. The models are small; what a machine of two cores
cannot show is said.
"""


def cards():
    """(experiment, verdicts, finished runs) of every experiment; no runs without a record."""
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        path = ROOT / f"data/experiments/{name}.jsonl"
        lines = read_runs(path, experiment) if path.exists() else []
        if lines:
            yield experiment, experiment.verdicts(results_of(lines, experiment, None)), lines
        else:
            word = OUT_OF_REACH if "accelerator" in EXPERIMENTS[name] else NOT_RUN
            never = [Verdict(c.text, word, 0, 0, "never run") for c in experiment.claims]
            yield experiment, never, lines


def claims_page():
    """The whole page, in MyST."""
    found = list(cards())
    counts = Counter(verdict.word for _, verdicts, _ in found for verdict in verdicts)
    total = ", ".join(f"{counts[word]} {word}" for word in LOOKS if counts[word])
    parts = [LEAD, f"**{sum(counts.values())} claims: {total}.**", ""]
    parts += ["| verdict | seeds for it | claim | tested by |", "| --- | --- | --- | --- |"]
    for experiment, verdicts, _ in found:
        for verdict in verdicts:
            sign, _ = LOOKS[verdict.word]
            link = f"[`{experiment.name}`](#{experiment.name})"
            seeds = f"{verdict.agreeing} of {verdict.seeds}" if verdict.seeds else ""
            claim = verdict.claim.replace("|", "\\|")
            parts.append(f"| {sign} {verdict.word} | {seeds} | {claim} | {link} |")
    for experiment, verdicts, lines in found:
        parts += ["", *section(experiment, verdicts, lines)]
    return "\n".join(parts) + "\n"


def section(experiment, verdicts, lines):
    """An experiment's cards."""
    source = inspect.getdoc(importlib.import_module(f"toolkit.experiments.{experiment.name}")) or ""
    yield from (f"({experiment.name})=", f"## {experiment.title}", "", source, "")
    if lines:
        last = lines[-1]["environment"]
        record = f"[{experiment.name}.jsonl]({RECORD}/{experiment.name}.jsonl)"
        made = f"{last['device']}, jax {last['versions']['jax']}, {last['date'][:10]}"
        yield f"Record: {record}, {len(lines)} runs; the last on {made}, commit {last['commit']}."
    else:
        needs = "it takes an accelerator" if verdicts[0].word == OUT_OF_REACH else "not run yet"
        yield f"No record: {needs}."
    for verdict in verdicts:
        sign, box = LOOKS[verdict.word]
        yield from (
            "",
            f":::{{admonition}} {sign} {verdict.word}: {verdict.claim}",
            f":class: {box}",
        )
        yield ""
        numbers = str(verdict).splitlines()[1].strip() if verdict.seeds else verdict.numbers
        yield from (numbers, "", f"`toolkit experiment {experiment.name}`", ":::")
    yield from ("", f"Out of reach of two cores: {experiment.beyond}")
