"""The curves of a comparison, its paired differences and the rates that were tried."""

import textwrap

import numpy as np
from matplotlib.figure import Figure

from toolkit.experiments.compare.comparison import CURVE, LOSS, Comparison
from toolkit.experiments.kit.chart import LOOKS, draw_curves
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import interval
from toolkit.figures import new_figure
from toolkit.figures.axes import log_ticks


def draw(
    comparison: Comparison, tried: Results, results: Results, rates: dict[str, float], origin: str
) -> Figure:
    """Loss by step, paired differences of all seeds, and loss by learning rate."""
    figure = new_figure(11.0, 4.2)
    curves, paired, tuned = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    draw_curves(curves, results, CURVE, every=1)
    curves.set(xlabel="step", ylabel=f"held-out loss, {comparison.unit}", title="Training")
    curves.legend()
    first, *others = comparison.contenders
    paired.axhline(0, color=LOOKS[0].colour)
    for band in (-comparison.smallest, comparison.smallest):
        paired.axhline(band, color="grey", linestyle=":", linewidth=1)
    for place, label in enumerate(others):
        theirs, ours = results.paired(LOSS, [first, label])
        differences, look = ours - theirs, LOOKS[(place + 1) % len(LOOKS)]
        paired.plot([place] * len(differences), differences, ".", color="grey", markersize=4)
        if len(differences) > 1 and np.isfinite(differences).all():
            low, high = interval(differences, len(others))
            mean = differences.mean()
            paired.errorbar(place, mean, [[mean - low], [high - mean]], color=look.colour,
                            marker=look.marker, capsize=5)  # fmt: skip
    paired.set_xticks(range(len(others)), others)
    paired.set_xlim(-0.6, len(others) - 0.4)
    paired.set(title="Difference and 95 % interval", ylabel=f"loss less that of {first}")
    for place, label in enumerate(comparison.contenders):
        grid, look = comparison.grid(label), LOOKS[place % len(LOOKS)]
        losses = [tried.mean(f"{label}, rate {rate:g}", LOSS) for rate in grid]
        tuned.plot(grid, losses, color=look.colour, linestyle=look.dashes, marker=look.marker)
        chosen = grid.index(rates[label])
        tuned.plot(grid[chosen], losses[chosen], marker="o", markersize=13, color=look.colour,
                   fillstyle="none", linestyle="")  # fmt: skip
    tuned.set_xscale("log")
    log_ticks(tuned.xaxis, 1, 2, 5)
    tuned.set(title="Rates tried", xlabel="learning rate")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.text(0.01, 0.01, f"Bands and dots: seeds. {origin}", color="grey", fontsize=9)
    return figure


def write_below(figure: Figure, text: str) -> None:
    """Words below the axes, for which the figure grows."""
    lines = "\n".join(textwrap.fill(line, 120) if "  " not in line else line
                      for line in text.splitlines())  # fmt: skip
    width, height = figure.get_size_inches()
    more = 0.2 * (lines.count("\n") + 2)
    share = more / (height + more)
    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position(
            (box.x0, share + box.y0 * (1 - share), box.width, box.height * (1 - share))
        )
    figure.set_size_inches(width, height + more)
    figure.texts[0].set_y(0.01)
    figure.text(0.02, share * 0.97, lines, family="DejaVu Sans Mono", fontsize=9, va="top")
