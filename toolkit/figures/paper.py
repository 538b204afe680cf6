"""Figures as a paper takes them: PDF or SVG, as wide as its columns, with fonts embedded."""

import os
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from toolkit._checks import checked
from toolkit.figures.style import STYLE, style

COLUMNS = {1: 3.35, 2: 7.0}
"""Width in inches of one and of two columns, which the templates of ACM, IEEE and PMLR have within
a tenth of an inch."""

_PAPER = {
    "pdf.fonttype": 42,  # TrueType, whole: reviewers' systems refuse Type 3
    "svg.fonttype": "path",  # glyphs as outlines, which need no font where they are read
    "svg.hashsalt": "toolkit",
}


@checked
def save_figure(figure: Figure, path: str | os.PathLike, columns: int = 2) -> Path:
    """Write a figure for a paper.

    Words and lines shrink as the figure does when its width becomes that of two columns, 10.5 point
    on 9.6 inches to 7.7. In one column they keep that size and the height of two, so that only
    figures with few axes side by side look well there. The file has no date: equal figures are
    equal files.

    Args:
        figure: any figure of matplotlib.
        path: ends in .pdf or .svg.
        columns: 1 or 2: as wide as a column, or as the page.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, or another number of columns.

    Source: matplotlib, "Fonts in Matplotlib" (types 3 and 42).

    Example:
        >>> from toolkit.figures import new_figure
        >>> save_figure(new_figure(), "figure.png")
        Traceback (most recent call last):
        ValueError: path: got 'figure.png', wanted a name that ends in .pdf or .svg
    """
    path = Path(path)
    if path.suffix not in (".pdf", ".svg"):
        raise ValueError(f"path: got {str(path)!r}, wanted a name that ends in .pdf or .svg")
    if columns not in COLUMNS:
        raise ValueError(f"columns: got {columns}, wanted 1 or 2")
    width, height = figure.get_size_inches()
    factor = COLUMNS[2] / width
    with matplotlib.rc_context(STYLE | _PAPER | _scaled_style(factor)):  # pyright: ignore
        undo = _scale(figure, factor)
        figure.set_size_inches(COLUMNS[columns], height * factor)
        try:
            date = "CreationDate" if path.suffix == ".pdf" else "Date"
            figure.savefig(path, metadata={date: None})
        finally:
            figure.set_size_inches(width, height)
            undo()
    with style():
        _renew_ticks(figure)
    return path


def _scaled_style(factor: float) -> dict[str, float]:
    """Sizes of what ticks read when they are made."""
    names = ("xtick.labelsize", "ytick.labelsize")
    ticks = (f"{axis}tick.major.{name}" for axis in "xy" for name in ("size", "width", "pad"))
    values = matplotlib.rcParams | STYLE
    return {name: factor * values[name] for name in (*names, *ticks)}


def _scale(figure: Figure, factor: float) -> Callable[[], None]:
    """Scale words, lines and markers; returns what restores them."""
    restored = []
    for artist in figure.findobj():
        for name in ("fontsize", "linewidth", "markersize", "sizes"):
            before = getattr(artist, f"get_{name}", lambda: None)()
            if before is not None and not isinstance(before, str):
                change = getattr(artist, f"set_{name}", None)
                if change is not None:
                    restored.append((change, before))
                    change(np.asarray(before) * (factor**2 if name == "sizes" else factor))
    _renew_ticks(figure)

    def undo() -> None:
        for change, before in restored:
            change(before)

    return undo


def _renew_ticks(figure: Figure) -> None:
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.reset_ticks()
