"""The tour's pictures: pure functions from numbers to a matplotlib figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

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
            steps = [row["step"] for row in history]
            losses = [row["loss"] for row in history]
            # The first call compiles; what it cost beyond a usual one is not training time.
            seconds = [row["seconds"] for row in history]
            seconds[0] = min(seconds[0], sorted(seconds)[len(seconds) // 2])
            clock = [sum(seconds[: i + 1]) for i in range(len(seconds))]
            for axes, positions in ((by_step, steps), (by_time, clock)):
                axes.plot(
                    positions, losses, color=kind.colour, linestyle=kind.dashes, linewidth=1.6
                )
                held_out = [
                    (x, row["evaluation_loss"])
                    for x, row in zip(positions, history, strict=True)
                    if "evaluation_loss" in row
                ]
                axes.plot(
                    *zip(*held_out, strict=True),
                    color=kind.colour,
                    linestyle="none",
                    marker=kind.marker,
                    label=labels[name],
                )
        by_step.set(xlabel="training step", ylabel="loss, nats per byte", title="At equal steps")
        by_time.set(xlabel="seconds of training, measured here", title="At equal time")
        by_step.legend(title="marks: held-out text; lines: training", loc="upper right")
        lowest = min(row["loss"] for history in histories.values() for row in history)
        by_step.set_ylim(max(0.0, lowest - 0.15), 4.0)
    return figure


def cost_figure(costs: Mapping[str, Sequence[dict[str, Any]]]) -> Figure:
    """Prefill seconds, decode seconds and decode state against context, softmax beside GDN."""
    with style():
        figure = new_figure(9.6, 3.9)
        prefill, decode, memory = figure.subplots(1, 3, gridspec_kw={"wspace": 0.42})
        for axes, table, column, unit, title in (
            (prefill, "prefill", "seconds", "seconds", "Read a prompt"),
            (decode, "decode", "seconds", "seconds", "Write one token"),
            (memory, "decode", "bytes", "bytes", "Memory to write on"),
        ):
            for name, words in MIXER_LABELS.items():
                rows = [row for row in costs[table] if row["mixer"] == name]
                kind = look(name)
                axes.plot(
                    [row["context"] for row in rows],
                    [row[column] for row in rows],
                    color=kind.colour,
                    linestyle=kind.dashes,
                    marker=kind.marker,
                    label=words,
                )
            log_axes(axes, x_unit="tokens", y_unit=unit)
            kind_of_number = "modelled" if column == "bytes" else "measured here"
            axes.set(title=title, xlabel="context, tokens", ylabel=f"{unit}, {kind_of_number}")
        prefill.legend(loc="upper left")
    return figure


def layout_figure(steps: Mapping[str, dict[str, Any]]) -> Figure:
    """Bytes a device holds and sends in one train step, one pair of bars per layout."""
    with style():
        figure = new_figure(9.6, 2.4)
        panels = figure.subplots(1, 2, gridspec_kw={"wspace": 0.55})
        for axes, column, title in (
            (panels[0], "state_bytes", "Parameters and optimiser held by one device"),
            (panels[1], "bytes_sent", "Sent by one device in one step"),
        ):
            names = list(steps)
            values = [steps[name][column] for name in names]
            for position, (name, value) in enumerate(zip(names, values, strict=True)):
                kind = look(_LOOKS[name])
                axes.barh(position, value, color=kind.colour, hatch=kind.hatch, height=0.6)
                axes.text(value, position, f" {in_words(value, 'bytes')}", va="center")
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.set_xlim(0, max(values) * 1.3)
            axes.set_xticks([])
            axes.grid(False)
            axes.set_title(title)
    return figure
