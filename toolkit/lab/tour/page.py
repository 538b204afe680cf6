"""The tour's page: pure functions from its results to HTML."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.bench.mixers.layer_costs import DECODE, PREFILL
from toolkit.figures import in_words, report
from toolkit.lab.tour import figures
from toolkit.language import TrainedModel, TrainingRun
from toolkit.language.train import LOG_EVERY
from toolkit.measure import environment_rows
from toolkit.training import Corpus


@dataclass(frozen=True)
class TourResults:
    """The content of the page; mappings are keyed by model unless noted."""

    labels: dict[str, str]  # names in words
    runs: dict[str, TrainingRun]
    trained: dict[str, TrainedModel]
    prompt: str  # the text that every model continued
    samples: dict[str, str]  # continuations
    costs: list[dict[str, Any]]  # what `measure_costs` returned
    sharded: dict[str, Any]  # what `sharded_step_facts` returned
    corpus: Corpus


def write_tour_page(tour: TourResults, directory: Path) -> Path:
    """Write `index.html`, 250 kB, in the tour's folder."""
    sections = [
        ("Three models, the same text", _training_section(tour)),
        ("What they write", _sample_section(tour)),
        ("What a longer context costs", _cost_section(tour.costs)),
        ("One train step on eight devices", _sharded_section(tour.sharded)),
        ("Where these numbers come from", _environment_section(tour.corpus)),
        ("Go on", _next_section(directory)),
    ]
    title = "A tour of efficient language models"
    return report.write_page(directory / "index.html", title, _lead(tour), sections)


def _lead(tour: TourResults) -> str:
    labels, costs = tour.labels, tour.costs
    losses = {name: model.evaluation_loss for name, model in tour.trained.items()}
    ranked = sorted(losses, key=losses.__getitem__)
    longest = max(row["tokens"] for row in costs if row["phase"] == DECODE)
    last = (row for row in costs if row["tokens"] == longest)
    kept = {row["mixer"]: in_words(row["kept"], "bytes") for row in last}
    ranking = ", ".join(f"{labels[name]} {losses[name]:.3f}" for name in ranked)
    return (
        f"After the same number of steps at matched parameters the {labels[ranked[0]]} predicts "
        f"the held-out text best (nats per byte: {ranking}). To write on after {longest:,} tokens, "
        f"one softmax layer reads {kept['full']} per token, one Gated DeltaNet layer "
        f"{kept['gdn']}, whatever the context."
    )


def _training_section(tour: TourResults) -> str:
    figure = figures.loss_figure(
        {name: model.history for name, model in tour.trained.items()}, tour.labels
    )
    rows = []
    for name, model in tour.trained.items():
        run, loss = tour.runs[name], model.evaluation_loss
        usual = statistics.median(row["seconds"] for row in model.history) / LOG_EVERY
        rows.append(
            (
                tour.labels[name], run.config.pattern, str(run.config.loops),
                f"{model.parameters:,}", f"{loss:.3f}", f"{math.exp(loss):.2f}",
                in_words(usual, "seconds"), f"{run.batch * run.sequence_length / usual:,.0f}",
            )
        )  # fmt: skip
    header = (
        "model", "layers", "loops", "parameters", "held-out loss", "perplexity", "step", "bytes/s",
    )  # fmt: skip
    run = next(iter(tour.runs.values()))
    return (
        report.paragraph(
            "A looped model applies the same layers again: more computation and more memory for "
            "activations, not one parameter more. The hybrid replaces three of four softmax layers "
            "by Gated DeltaNet, whose cost does not grow with the square of the context. One seed "
            f"and {run.steps} steps are a demonstration, not a ranking: differences of a few "
            "hundredths change with the seed."
        )
        + report.picture(
            figure,
            "Loss in nats per byte, measured here: training (lines) and held-out text (marks).",
            "Loss curves of the three models against steps and against seconds",
        )
        + report.table(
            header,
            rows,
            f"After {run.steps} steps of {run.batch * run.sequence_length} bytes",
            "measured here",
        )
    )


def _sample_section(tour: TourResults) -> str:
    parts = [
        report.paragraph(
            "The same prompt, temperature 0.8, one byte at a time. Minutes of training teach "
            "spelling and markup, not meaning."
        )
    ]
    for name, text in tour.samples.items():
        label = report.paragraph(tour.labels[name], "written here")
        parts += [label, report.sample(tour.prompt, text)]
    return "".join(parts)


def _cost_section(costs: list[dict[str, Any]]) -> str:
    header = ("context", "softmax prefill", "GDN prefill", "softmax decode", "GDN decode")
    places = [(phase, name) for phase in (PREFILL, DECODE) for name in figures.MIXER_LABELS]
    found = {
        (row["tokens"], row["phase"], row["mixer"]): in_words(row["seconds"], "seconds")
        for row in costs
    }
    rows = [
        (f"{tokens:,}", *(found.get((tokens, *place), "") for place in places))
        for tokens in sorted({row["tokens"] for row in costs})
    ]
    return (
        report.paragraph(
            "One layer, 8 heads of size 64, float32, one sequence. Softmax attention compares "
            "every token with all before it: reading costs the square of the context, writing "
            "reads a cache that grows with it. Gated DeltaNet keeps one matrix per head: reading "
            "is linear, writing constant. Both were compared with their plain references before "
            "timing."
        )
        + report.picture(
            figures.cost_figure(costs),
            "Cost against context. Lines with slope 2 quadruple when the context doubles.",
            "Seconds to read a prompt, seconds to write a token and bytes of decode state",
        )
        + report.table(header, rows, "Median of interleaved rounds", "measured here")
    )


def _sharded_section(sharded: dict[str, Any]) -> str:
    header = ("layout", "collective", "runs", "result bytes", "sent per device")
    rows = [
        (
            layout, item["kind"], f"{item['count']}", f"{item['bytes']:,}",
            f"{item['bytes_sent']:,.0f}",
        )
        for layout, facts in sharded["layouts"].items()
        for item in facts["collectives"]
    ]  # fmt: skip
    error = max(facts["difference"] for facts in sharded["layouts"].values())
    return (
        report.paragraph(
            f"One train step ({sharded['model']}; descent with momentum) compiled for eight "
            "simulated devices. Data parallel: every device holds everything and the gradients "
            "are summed. Fully sharded (ZeRO-3): every device holds an eighth, gathers "
            "parameters before use and scatters gradients after; as published it gathers again "
            "for the backward pass, which a compiler with room to spare merges with the first "
            "gather. Simulated devices share "
            "this machine's cores, so what is shown is what they would send and hold, never a "
            "speed. After one step both agree "
            f"with a single device to {error:.0e}."
        )
        + report.picture(
            figures.layout_figure(sharded["layouts"]),
            "Held: read from the arrays, measured here. Sent: modelled, the least bytes with which "
            "the collectives of the compiled program can be done.",
            "Bytes held and bytes sent by one device under each layout",
        )
        + report.table(
            header,
            rows,
            "Collectives of one step (bytes sent: modelled)",
            "read from the compiled program",
        )
    )


def _environment_section(corpus: Corpus) -> str:
    rows = environment_rows()
    rows.append(("text", f"{corpus.name}: {corpus.size:,} bytes, sha256 {corpus.sha256[:16]}…"))
    return report.table(("", ""), rows, "Environment of this run")


def _next_section(directory: Path) -> str:
    return report.paragraph(
        "Move the sliders yourself: toolkit lab. Continue a text with a model trained here: "
        f'toolkit generate {directory}/hybrid --prompt "The ". Train a larger one on your own '
        "files: toolkit train runs/mine --text PATH. Compare with PyTorch: toolkit bench."
    )
