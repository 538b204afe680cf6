"""Shared code for figures of experiments, in the house style."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.experiments.kit.results import Results
from toolkit.figures import FAINT, INK, Look, new_figure
from toolkit.figures import LOOKS as _NAMED

LOOKS = (
    *_NAMED.values(),
    Look("#1f2933", (0, (8, 2)), "P", "\\\\"),
    Look("#7a7a7a", (0, (2, 1)), "X", "oo"),
)
"""Looks in order, for settings that have no look of their own."""


def two_panels(height: float = 4.6) -> tuple[Figure, tuple[Axes, Axes]]:
    """A figure of two axes side by side, with room for a caption below."""
    figure = new_figure(11.0, height)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.subplots_adjust(left=0.07, right=0.985, wspace=0.2, bottom=0.2, top=0.9)
    return figure, (left, right)


def looks(results: Results) -> Iterator[tuple[str, Look]]:
    """The settings that were run, each with its look."""
    return zip(results.labels, itertools.cycle(LOOKS), strict=False)


def draw_curves(
    axes: Axes,
    results: Results,
    name: str,
    x: Sequence[float] | np.ndarray | None = None,
    *,
    has_band: bool = True,
    every: int = 3,
) -> None:
    """A curve of each setting over `x`, or the training steps: mean, band of all seeds, markers."""
    for index, (label, look) in enumerate(looks(results)):
        curves = results.curves(label, name)
        at = results.curves(label, "step")[0] if x is None else x[: curves.shape[1]]
        axes.plot(at, curves.mean(0), color=look.colour, linestyle=look.dashes, label=label,
                  marker=look.marker, markevery=(index % every, every))  # fmt: skip
        if has_band:
            axes.fill_between(at, curves.min(0), curves.max(0), color=look.colour, alpha=0.15)


def draw_bar(axes: Axes, place: float, samples: list[float], look: Look, width: float) -> None:
    """The mean of the seeds as a bar, all seeds as dots."""
    axes.bar(place, np.mean(samples), width, color=look.colour, hatch=look.hatch, edgecolor="white")
    axes.plot([place] * len(samples), samples, ".", color=INK, markersize=4)


def caption_below(figure: Figure, text: str) -> None:
    """Below the axes, as wide as the figure: what marks mean and where the numbers come from."""
    figure.text(0.01, 0.02, text, color=FAINT, fontsize=9, wrap=True)
