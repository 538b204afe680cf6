"""A compiled program's communication and memory as a picture."""

from typing import TYPE_CHECKING

from toolkit.figures import ACCENT, FAINT, INK, in_words, new_figure, style
from toolkit.parallel.causes.cause import ExplainedCollective, MemoryRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 12
COLOURS = {
    "all-reduce": "#4c78a8",
    "all-gather": "#e08214",
    "reduce-scatter": "#54a24b",
    "all-to-all": "#b279a2",
    "collective-permute": "#8c6d31",
}
HATCHES = {"all-reduce": "", "all-gather": "//", "reduce-scatter": "\\\\", "all-to-all": "xx"}


def draw_explanation(
    collectives: tuple[ExplainedCollective, ...], memory: tuple[MemoryRow, ...]
) -> "Figure":
    """Draw the bytes sent by each collective, largest first, and the memory of a device."""
    with style():
        bars = min(len(collectives), _MOST_BARS)
        figure = new_figure(10.4, 1.9 + 0.42 * max(bars, 4))
        left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
        _draw_collectives(left, collectives)
        _draw_memory(right, memory)
        return figure


def _draw_collectives(axes: "Axes", collectives: tuple[ExplainedCollective, ...]) -> None:
    found = sorted(collectives, key=lambda item: -item.collective.total_bytes_sent)
    shown = found[:_MOST_BARS]
    most = max((item.collective.total_bytes_sent for item in shown), default=1.0)
    for row, item in enumerate(shown):
        collective = item.collective
        axes.barh(
            row - 0.16,
            collective.total_bytes_sent,
            color=COLOURS[collective.kind],
            hatch=HATCHES.get(collective.kind, ".."),
            edgecolor="white",
            height=0.16,
        )
        over = "+".join(item.axes) or "?"
        times = f" × {collective.count}" if collective.count > 1 else ""
        size = in_words(collective.total_bytes_sent, "bytes")
        words = f"{collective.kind} over {over}{times}: {size}, {item.source}"
        axes.text(0, row - 0.33, words, color=INK)
        cause = f"{item.origin}  →  {item.wanted_by}"
        axes.text(0, row + 0.14, _cut(cause), va="center", fontsize="x-small", color=FAINT)
    left_out = len(found) - len(shown)
    rest = f" (largest {_MOST_BARS} of {len(found)})" if left_out else ""
    axes.set_title(f"Bytes a device sends, compiled{rest}", loc="left")
    axes.set_yticks([])
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.7)
    axes.set_xlim(0, most * 1.05)
    axes.set_xticks([])
    if not shown:
        axes.text(0.5, 0.5, "no collectives", ha="center", transform=axes.transAxes)


def _draw_memory(axes: "Axes", memory: tuple[MemoryRow, ...]) -> None:
    rows = [row for row in memory if row.predicted or row.compiled]
    for position, row in enumerate(rows):
        for size, colour, shift, word in (
            (row.predicted, FAINT, -0.17, "predicted"),
            (row.compiled, ACCENT, 0.17, "compiled"),
        ):
            if size is None:
                continue
            axes.barh(position + shift, abs(size), color=colour, height=0.3)
            sign = "−" if size < 0 else ""
            text = f" {sign}{in_words(abs(size), 'bytes')} {word}"
            axes.text(abs(size), position + shift, text, va="center", fontsize="x-small")
        axes.text(0, position - 0.36, row.category, fontsize="small", color=INK)
    largest = max(abs(size) for row in rows for size in (row.predicted, row.compiled) if size)
    axes.set_xlim(0, 1.6 * largest)
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_title("Bytes a device holds", loc="left")


def _cut(text: str, most: int = 88) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
