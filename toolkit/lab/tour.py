"""`toolkit tour`: train, compare, measure, shard, and write it all down on one page.

Each stage leaves its result in the tour's folder, so a tour that was interrupted, even in the
middle of a training run, goes on where it stopped.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.lab import report, tour_figures
from toolkit.lab.figures import in_words
from toolkit.lab.language_model import (
    LOG_EVERY,
    TrainedModel,
    TrainingRun,
    stream_text,
    train_language_model,
)
from toolkit.lab.tour_costs import measure_costs
from toolkit.looped import LoopedConfig, match_parameters, parameter_count
from toolkit.measure import environment
from toolkit.training import Corpus, load_corpus

PROMPT = "The statement "
SAMPLE_LENGTH = 400
BATCH, WINDOW = 8, 128

LABELS = {
    "plain": "plain softmax",
    "looped": "looped softmax",
    "hybrid": "looped Gated DeltaNet hybrid",
}


def contenders() -> dict[str, LoopedConfig]:
    """The three models of the tour, at matched parameters.

    Returns:
        Name -> configuration: four layers once, the same four layers twice, and a hybrid of three
        Gated DeltaNet layers and one softmax layer twice.

    Cost:
        Arithmetic.
    """
    plain = LoopedConfig.tiny("full full full full", loops=1)
    looped = LoopedConfig.tiny("full full full full", loops=2)
    hybrid = LoopedConfig.tiny("gdn gdn gdn full", loops=2)
    return {
        "plain": plain,
        "looped": match_parameters(looped, plain),
        "hybrid": match_parameters(hybrid, plain),
    }


def run_tour(
    directory: Path, *, steps: int = 160, text: Sequence[Path] = (), fresh: bool = False
) -> Path:
    """The whole story on this machine.

    Args:
        directory: where everything goes; a tour found there is resumed.
        steps: training steps of each model.
        text: files and folders to train on; none means the language manual's prose.
        fresh: throw away what an earlier tour left in `directory`.

    Returns:
        The path of `index.html`.

    Raises:
        ValueError: for `steps` out of range, or a folder that holds a tour of other settings.
        CorpusError: when the text cannot be used.
        KeyboardInterrupt: when stopped; run again to go on.

    Cost:
        Two to three minutes on two cores, about 1 GB of memory at its peak.
    """
    if steps < 10:
        raise ValueError(f"steps: got {steps}, wanted at least 10")
    directory = Path(directory)
    source = tuple(str(path) for path in text) or "prose"
    corpus = load_corpus(source)
    runs = {
        name: TrainingRun(config, source, steps=steps, batch=BATCH, window=WINDOW)
        for name, config in contenders().items()
    }
    _open_folder(directory, runs, corpus, fresh)
    started = time.perf_counter()

    trained: dict[str, TrainedModel] = {}
    samples = {}
    for number, (name, run) in enumerate(runs.items(), 1):
        print(
            f"\n[{number}/5] {LABELS[name]}: {parameter_count(run.config):,} parameters, "
            f"loops {run.config.loops}, {steps} steps on {corpus.name} ({corpus.size:,} bytes)",
            flush=True,
        )
        trained[name] = train_language_model(run, directory / name, corpus=corpus)
        if trained[name].stopped_by is not None:
            raise KeyboardInterrupt
        samples[name] = _once(
            directory / name / "sample.json",
            lambda name=name: "".join(stream_text(trained[name].model, PROMPT, SAMPLE_LENGTH)),
        )
        print(f"      held-out loss {trained[name].evaluation_loss:.3f} nats a byte")

    print("\n[4/5] cost against context: softmax and Gated DeltaNet, one layer", flush=True)
    costs = _once(directory / "costs.json", measure_costs)

    print("\n[5/5] one train step on 8 simulated devices, as the compiler made it", flush=True)
    sharded = _once(directory / "sharded.json", _sharded_step)

    page = _write_page(directory, runs, trained, samples, costs, sharded, corpus)
    print(f"\n{time.perf_counter() - started:.0f} seconds")
    return page


def _open_folder(
    directory: Path, runs: dict[str, TrainingRun], corpus: Corpus, fresh: bool
) -> None:
    """Make the folder, or refuse one that holds a different tour."""
    facts = {name: dataclasses.asdict(run) for name, run in runs.items()}
    text = json.dumps({"runs": facts, "corpus": corpus.sha256}, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    marker = directory / "tour.json"
    if fresh and marker.exists():
        shutil.rmtree(directory)
    if directory.exists() and any(directory.iterdir()) and not marker.exists():
        raise ValueError(
            f"directory: {str(directory)!r} holds files that are no tour; choose another"
        )
    if marker.exists() and json.loads(marker.read_text())["fingerprint"] != fingerprint:
        raise ValueError(
            f"directory: {str(directory)!r} holds a tour of other settings or text; "
            "start over with --fresh, or choose another --directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({"fingerprint": fingerprint}))


def _once(path: Path, work: Callable[[], Any]) -> Any:
    """The stored result of a finished stage, or that of doing it now."""
    if path.exists():
        print(f"      already done: {path.name}")
        return json.loads(path.read_text())
    result = work()
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(path)
    return result


def _sharded_step() -> dict[str, Any]:
    """Run in a process of its own: devices must be simulated before jax starts."""
    command = [sys.executable, "-m", "toolkit.lab.sharded_step"]
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the sharded step failed with status {done.returncode}; see above")
    return json.loads(done.stdout)


def _write_page(
    directory: Path,
    runs: dict[str, TrainingRun],
    trained: dict[str, TrainedModel],
    samples: dict[str, str],
    costs: dict[str, Any],
    sharded: dict[str, Any],
    corpus: Corpus,
) -> Path:
    sections = [
        ("Three models, the same text", _training_section(runs, trained)),
        ("What they write", _sample_section(samples)),
        ("What a longer context costs", _cost_section(costs)),
        ("One train step on eight devices", _sharded_section(sharded)),
        ("Where these numbers come from", _environment_section(corpus)),
        ("Go on", _next_section(directory)),
    ]
    return report.write_page(
        directory / "index.html",
        "A tour of efficient language models",
        _lead(trained, costs),
        sections,
    )


def _lead(trained: dict[str, TrainedModel], costs: dict[str, Any]) -> str:
    losses = {name: model.evaluation_loss for name, model in trained.items()}
    best = min(losses, key=losses.__getitem__)
    longest = max(row["context"] for row in costs["decode"])
    softmax, delta = (
        next(r for r in costs["decode"] if r["mixer"] == name and r["context"] == longest)
        for name in ("full", "gdn")
    )
    ranking = ", ".join(
        f"{LABELS[name]} {losses[name]:.3f}" for name in sorted(losses, key=losses.__getitem__)
    )
    return (
        f"After the same number of steps at matched parameters the {LABELS[best]} predicts the "
        f"held-out text best (nats a byte: {ranking}). To write on after {longest:,} tokens, one "
        f"softmax layer reads {in_words(softmax['bytes'], 'bytes')} a token, one Gated DeltaNet "
        f"layer {in_words(delta['bytes'], 'bytes')}, whatever the context."
    )


def _training_section(runs: dict[str, TrainingRun], trained: dict[str, TrainedModel]) -> str:
    figure = tour_figures.loss_figure(
        {name: model.history for name, model in trained.items()}, LABELS
    )
    rows = []
    for name, model in trained.items():
        config = runs[name].config
        usual = statistics.median(row["seconds"] for row in model.history) / LOG_EVERY
        rows.append(
            (
                LABELS[name],
                config.pattern,
                str(config.loops),
                f"{model.parameters:,}",
                f"{model.evaluation_loss:.3f}",
                f"{math.exp(model.evaluation_loss):.2f}",
                in_words(usual, "seconds"),
                f"{BATCH * WINDOW / usual:,.0f}",
            )
        )
    header = (
        "model", "layers", "loops", "parameters", "held-out loss", "perplexity", "step", "bytes/s",
    )  # fmt: skip
    steps = runs["plain"].steps
    return (
        report.paragraph(
            "A looped model applies the same layers again: more computation and more memory for "
            "activations, not one parameter more. The hybrid replaces three of four softmax layers "
            "by Gated DeltaNet, whose cost does not grow with the square of the context. One seed "
            f"and {steps} steps are a demonstration, not a ranking: differences of a few "
            "hundredths change with the seed."
        )
        + report.picture(
            figure,
            "Loss in nats a byte, measured here: training (lines) and held-out text (marks).",
            "Loss curves of the three models against steps and against seconds",
        )
        + report.table(
            header, rows, f"After {steps} steps of {BATCH * WINDOW} bytes", "measured here"
        )
    )


def _sample_section(samples: dict[str, str]) -> str:
    parts = [
        report.paragraph(
            "The same prompt, temperature 0.8, one byte at a time. Minutes of training teach "
            "spelling and markup, not meaning."
        )
    ]
    for name, text in samples.items():
        parts += [report.paragraph(LABELS[name], "written here"), report.sample(PROMPT, text)]
    return "".join(parts)


def _cost_section(costs: dict[str, Any]) -> str:
    header = ("context", "softmax prefill", "GDN prefill", "softmax decode", "GDN decode")
    contexts = sorted({row["context"] for rows in costs.values() for row in rows})

    def cell(table: str, name: str, context: int) -> str:
        for row in costs[table]:
            if row["mixer"] == name and row["context"] == context:
                return in_words(row["seconds"], "seconds")
        return ""

    rows = [
        (
            f"{context:,}",
            *(cell(t, n, context) for t in ("prefill", "decode") for n in ("full", "gdn")),
        )
        for context in contexts
    ]
    return (
        report.paragraph(
            "One layer, 8 heads of size 64, float32, one sequence. Softmax attention compares "
            "every token with all before it: reading costs the square of the context, writing "
            "reads a cache that grows with it. Gated DeltaNet keeps one matrix a head: reading is "
            "linear, writing constant. Both were compared with their token-by-token references "
            "before timing."
        )
        + report.picture(
            tour_figures.cost_figure(costs),
            "Cost against context. Lines with slope 2 quadruple when the context doubles.",
            "Seconds to read a prompt, seconds to write a token and bytes of decode state",
        )
        + report.table(header, rows, "Median of interleaved rounds", "measured here")
    )


def _sharded_section(sharded: dict[str, Any]) -> str:
    header = ("layout", "collective", "runs", "result bytes", "sent by a device")
    rows = [
        (
            layout,
            item["kind"],
            f"{item['count']}",
            f"{item['bytes']:,}",
            f"{item['bytes_sent']:,.0f}",
        )
        for layout, facts in sharded["layouts"].items()
        for item in facts["collectives"]
    ]
    error = max(facts["difference"] for facts in sharded["layouts"].values())
    return (
        report.paragraph(
            f"The same train step ({sharded['model']}) compiled for eight simulated devices. "
            "Data parallel: every device holds everything and the gradients are summed. Fully "
            "sharded (ZeRO-3): every device holds an eighth, gathers parameters before use and "
            "scatters gradients after; as published it gathers again for the backward pass, which this "
            "compiler merges with the first gather where it sees room. Simulated devices share this machine's cores, so what is "
            "shown is what they would send and hold, never a speed. After one step both agree "
            f"with a single device to {error:.0e}."
        )
        + report.picture(
            tour_figures.layout_figure(sharded["layouts"]),
            "Read from the compiled programs, measured here.",
            "Bytes held and bytes sent by one device under each layout",
        )
        + report.table(header, rows, "Collectives of one step", "read from the compiled program")
    )


def _environment_section(corpus: Corpus) -> str:
    facts = environment()
    rows = [
        (
            name,
            ", ".join(f"{k} {v}" for k, v in value.items())
            if isinstance(value, dict)
            else str(value),
        )
        for name, value in facts.items()
    ]
    rows.append(("text", f"{corpus.name}: {corpus.size:,} bytes, sha256 {corpus.sha256[:16]}…"))
    return report.table(("", ""), rows, "Environment of this run")


def _next_section(directory: Path) -> str:
    return report.paragraph(
        "Move the sliders yourself: toolkit lab. Continue a text with a model trained here: "
        f'toolkit generate {directory}/hybrid --prompt "The ". Train a larger one on your own files: '
        "toolkit train runs/mine --text PATH. Compare with PyTorch: toolkit bench."
    )
