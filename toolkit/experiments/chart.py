"""What the figures of experiments have in common, in the house style."""

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import FAINT, Look, new_figure
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


def curve_with_band(
    axes: Axes,
    x: Float[np.ndarray, "points"],
    curves: Float[np.ndarray, "seeds points"],
    look: Look,
    label: str,
    *,
    markers: int | tuple[int, int] = 3,
) -> None:
    """The mean of the seeds as a line with a marker now and then, all seeds as a band."""
    axes.plot(x, curves.mean(0), color=look.colour, linestyle=look.dashes, marker=look.marker,
              markevery=markers, label=label)  # fmt: skip
    axes.fill_between(x, curves.min(0), curves.max(0), color=look.colour, alpha=0.15)


def caption_below(figure: Figure, text: str) -> None:
    """One line under the axes: what the marks are and where the numbers come from."""
    figure.text(0.01, 0.02, text, color=FAINT, fontsize=9)
