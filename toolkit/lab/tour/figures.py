"""The tour's pictures: pure functions from numbers to a matplotlib figure."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median_high
from typing import Any

from matplotlib.figure import Figure

from toolkit.bench.mixers.layer_costs import DECODE, PREFILL
from toolkit.figures import in_words, log_axes, look, new_figure, style

# Models and layouts borrow the looks of the mixers they are about.
_LOOKS = {
    "plain": "full",
    "looped": "window",
    "hybrid": "gdn",
    "data parallel": "full",
    "fully sharded": "gdn",
}

MIXER_LABELS = {"full": "softmax attention", "gdn": "Gated DeltaNet"}


def loss_figure(
    histories: Mapping[str, Sequence[dict[str, Any]]], labels: dict[str, str]
) -> Figure:
    """Loss against steps and against seconds, one line per model, from its metrics rows."""
    with style():
        figure = new_figure(9.6, 4.0)
        by_step, by_time = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.08})
        for name, history in histories.items():
            kind = look(_LOOKS[name])
            marks = {**kind.line, "linestyle": "none", "marker": kind.marker, "label": labels[name]}
            losses = [row["loss"] for row in history]
            # The first call compiles; what it cost beyond a usual one is not training time.
            seconds = [row["seconds"] for row in history]
            seconds[0] = min(seconds[0], median_high(seconds))
            steps = [row["step"] for row in history]
            for axes, places in ((by_step, steps), (by_time, list(accumulate(seconds)))):
                axes.plot(places, losses, **kind.line, linewidth=1.6)
                pairs = zip(places, history, strict=True)
                held_out = [(x, row.get("evaluation_loss")) for x, row in pairs]
                axes.plot(*zip(*(p for p in held_out if p[1] is not None), strict=True), **marks)
        by_step.set(xlabel="training step", ylabel="loss, nats per byte", title="At equal steps")
        by_time.set(xlabel="seconds of training, measured here", title="At equal time")
        by_step.legend(title="marks: held-out text; lines: training", loc="upper right")
        lowest = min(row["loss"] for history in histories.values() for row in history)
        by_step.set_ylim(max(0.0, lowest - 0.15), 4.0)
    return figure


def cost_figure(costs: Sequence[dict[str, Any]]) -> Figure:
    """Prefill seconds, decode seconds and decode state against context, softmax beside GDN."""
    with style():
        figure = new_figure(9.6, 3.9)
        for axes, phase, column, unit, title in zip(
            figure.subplots(1, 3, gridspec_kw={"wspace": 0.42}),
            (PREFILL, DECODE, DECODE),
            ("seconds", "seconds", "kept"),
            ("seconds", "seconds", "bytes"),
            ("Read a prompt", "Write one token", "Memory to write on"),
            strict=True,
        ):
            for name, words in MIXER_LABELS.items():
                rows = [row for row in costs if (row["mixer"], row["phase"]) == (name, phase)]
                places, values = zip(*((row["tokens"], row[column]) for row in rows), strict=True)
                kind = look(name)
                axes.plot(places, values, **kind.line, marker=kind.marker, label=words)
            log_axes(axes, x_unit="tokens", y_unit=unit)
            source = "modelled" if unit == "bytes" else "measured here"
            axes.set(title=title, xlabel="context, tokens", ylabel=f"{unit}, {source}")
        figure.axes[0].legend(loc="upper left")
    return figure


def layout_figure(steps: Mapping[str, dict[str, Any]]) -> Figure:
    """Bytes a device holds and sends in one train step, one pair of bars per layout."""
    with style():
        figure = new_figure(9.6, 2.4)
        for axes, column, title in zip(
            figure.subplots(1, 2, gridspec_kw={"wspace": 0.55}),
            ("state_bytes", "bytes_sent"),
            ("Parameters and optimiser held by one device", "Sent by one device in one step"),
            strict=True,
        ):
            for position, (name, facts) in enumerate(steps.items()):
                kind, value = look(_LOOKS[name]), facts[column]
                axes.barh(position, value, color=kind.colour, hatch=kind.hatch, height=0.6)
                axes.text(value, position, f" {in_words(value, 'bytes')}", va="center")
            axes.set_yticks(range(len(steps)), list(steps))
            axes.invert_yaxis()
            axes.set(xlim=(0, max(facts[column] for facts in steps.values()) * 1.3), xticks=[])
            axes.grid(False)
            axes.set_title(title)
    return figure
