"""The figure: what each method loses against oracle-tuned linear decay, and the profile."""

import statistics
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.experiments.kit.chart import LOOKS, caption_below
from toolkit.experiments.lr.evaluation import EVALUATION
from toolkit.experiments.lr.methods import METHODS
from toolkit.experiments.lr.report import (
    DEFAULT,
    LARGEST_FACTOR,
    REFERENCE,
    Cell,
    factors_of,
    paired_difference,
    profile,
    profile_area,
)
from toolkit.figures import ACCENT, FAINT, INK, new_figure

PROFILED = (
    "Prodigy + cosine",
    "random probes",
    "successive halving",
    "AutoLRS",
    "linear, fixed rate",
)
SHOWN = 0.75  # of the points of a panel lie within its axis, the others at its edge
SPREAD = 0.22  # between the budgets of a row


def draw(found: Sequence[Cell], caption: str) -> Figure:
    """One panel per workload with a row per method, and the performance profile."""
    found = [cell for cell in found if cell.losses]
    workloads = [name for name in EVALUATION if any(cell.workload == name for cell in found)]
    budgets = sorted({cell.budget for cell in found})
    figure = new_figure(14.0, 10.5)
    if not workloads:
        caption_below(figure, f"No cell has been run yet. {caption}")
        return figure
    below = 0.21 + 0.045 * len(budgets)  # a line of text for each
    grid = figure.add_gridspec(2, len(workloads), height_ratios=(2.2, 1), hspace=below, wspace=0.1)
    figure.subplots_adjust(left=0.135, right=0.985, top=0.955, bottom=0.1)
    methods = [method for method in METHODS if method != REFERENCE]
    for column, name in enumerate(workloads):
        axes = figure.add_subplot(grid[0, column])
        rows = [cell for cell in found if cell.workload == name]
        _draw_losses(axes, rows, methods, budgets)
        axes.set_title(name)
        axes.set_yticks(range(len(methods)), methods if not column else [""] * len(methods))
    fullest = max(figure.axes, key=lambda axes: len(axes.get_legend_handles_labels()[0]))
    if (named := fullest.get_legend_handles_labels())[0]:
        # In a panel it would cover points of the last methods.
        beside_profile = (figure.subplotpars.right, figure.subplotpars.bottom)
        figure.legend(*named, loc="lower right", bbox_to_anchor=beside_profile, title="budget")
    _draw_profile(figure.add_subplot(grid[1, : max(3 * len(workloads) // 4, 1)]), found)
    note = "Above: paired difference of test losses to linear decay tuned by an oracle, 95 % "
    note += (
        "bootstrap interval; arrows: beyond the axis.\nBelow: factor, times the evaluations that "
    )
    note += f"oracle-tuned linear decay needs for the same loss. {caption}"
    caption_below(figure, note)
    return figure


def _draw_losses(
    axes: Axes, rows: Sequence[Cell], methods: Sequence[str], budgets: Sequence[int]
) -> None:
    gaps = {
        (row.budget, method): paired_difference(row.losses[method], row.losses[REFERENCE])
        for row in rows
        for method in methods
        if len(row.losses.get(method, ())) == len(row.losses.get(REFERENCE, (None,)))
    }
    sizes = [abs(gap.mean) for gap in gaps.values()]
    limit = 1.4 * float(np.quantile(sizes, SHOWN)) if sizes else 1.0
    axes.axvline(0, color=INK, linewidth=1)
    for index, (budget, look) in enumerate(zip(budgets, LOOKS, strict=False)):
        label = f"{budget:,}"
        for (of, method), gap in gaps.items():
            if of != budget:
                continue
            y = methods.index(method) + SPREAD * (index - (len(budgets) - 1) / 2)
            if abs(gap.mean) > limit:
                marker, x = (">", limit) if gap.mean > 0 else ("<", -limit / 2)
                axes.plot(x, y, marker, color=look.colour, markersize=5, clip_on=False)
                continue
            ends = np.clip([gap.low, gap.high], -limit / 2, limit)
            axes.plot(ends, [y, y], color=look.colour, linewidth=1.4)
            axes.plot(gap.mean, y, look.marker, color=look.colour, markersize=5, label=label)
            label = None
    axes.set(ylim=(len(methods) - 0.4, -0.6), xlim=(-limit / 2, limit))
    axes.axhspan(-0.5, 0.5, color=ACCENT, alpha=0.06, linewidth=0)
    losses = [
        f"{row.budget:,}: {statistics.fmean(row.losses[REFERENCE]):.3f}"
        for row in rows
        if REFERENCE in row.losses
    ]
    axes.set_xlabel("above linear\n(oracle)\n" + "\n".join(losses), fontsize=9)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.locator_params(axis="x", nbins=3)


def _draw_profile(axes: Axes, found: Sequence[Cell]) -> None:
    ratios = np.linspace(1, LARGEST_FACTOR, 400)
    for index, method in enumerate((DEFAULT, *PROFILED)):
        factors = factors_of(method, found)
        if not factors:
            continue
        look, area = LOOKS[index % len(LOOKS)], profile_area(factors.values())
        colour, width = (ACCENT, 3.0) if method == DEFAULT else (look.colour, 1.8)
        axes.plot(ratios, profile(factors.values(), ratios), color=colour, linewidth=width,
                  linestyle="-" if method == DEFAULT else look.dashes, marker=look.marker,
                  markevery=(12 * index, 80), drawstyle="steps-post",
                  label=f"{method}: {area:.2f} ({len(factors)})")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
    axes.minorticks_off()
    axes.set(xlim=(1, LARGEST_FACTOR), ylim=(-0.03, 1.03), xlabel="factor r",
             ylabel="share of cells within r", title="performance profile")  # fmt: skip
    axes.axhline(1, color=FAINT, linewidth=1)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.05), title="area, 1 is best (cells)")
