"""Drawings of lessons: a guess with the truth, a result with the wanted one."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from toolkit.figures import (
    ACCENT,
    INK,
    LOOKS,
    SIGNED,
    Picture,
    in_words,
    log_axes,
    new_figure,
    style,
)
from toolkit.lab.lessons.outline import Draw

WIDTH, HEIGHT = 9.6, 3.4
GUESS = {"color": ACCENT, "marker": "D", "markersize": 9, "linestyle": "none", "zorder": 6}
RIGHT = "#00805e"
_RIGHT_LINE: dict[str, Any] = {"color": RIGHT, "marker": "o"}
_WRONG_LINE: dict[str, Any] = {"color": ACCENT, "linestyle": (0, (4, 2)), "marker": "D"}
TRUTH = {"color": LOOKS["full"].colour, "marker": "o", "markersize": 10, "linestyle": "none"}


def png_of(draw: Draw, height: float = HEIGHT) -> bytes:
    """A drawing as the bytes of a PNG file, 10 to 40 kB."""
    with style():
        figure = new_figure(WIDTH, height)
        draw(figure)
        return Picture(figure, has_palette=True).png()


@dataclass(frozen=True)  # of a tuple IPython would write the bytes
class Drawing:
    """A picture in a notebook, with its words; it is saved with the notebook."""

    png: bytes
    words: str

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data = {"image/png": as_base64(self.png), "text/plain": self.words}
        return data, {"image/png": {"width": 960, "alt": self.words}}


def as_base64(png: bytes) -> str:
    """A picture's bytes in base64, for embedding."""
    return base64.b64encode(png).decode()


def draw_on_a_line(figure: Figure, guess: float, truth: float, unit: str) -> None:
    """A guess and the truth on one axis, logarithmic if they are far apart."""
    axes = figure.add_axes((0.04, 0.34, 0.92, 0.3))
    low, high = sorted((guess, truth))
    if low > 0 and high > 8 * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 3, high * 3)
    else:
        margin = 0.35 * (high - low) or 0.5 * abs(high) or 1.0
        axes.set_xlim(low - margin, high + margin)
    axes.axhline(0, color=INK, linewidth=1)
    axes.plot([truth], [0], **TRUTH)
    axes.plot([guess], [0], **GUESS)
    for x, name, y, side in ((truth, "it is", 0.6, "bottom"), (guess, "you guessed", -0.7, "top")):
        words = f"{name} {in_words(x, unit)}"
        axes.annotate(words, (x, y), ha="center", va=side, annotation_clip=False)
    axes.set(ylim=(-1, 1), yticks=[])
    axes.xaxis.set_visible(False)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(False)


def mark_guess(axes: Axes, x: float, guess: float, truth: float) -> None:
    """A guess on a rising curve that goes through the truth, its words where the curve is not."""
    axes.plot([x], [guess], **GUESS)
    side = -1 if guess > truth else 1
    axes.annotate(
        "your guess", (x, guess), xytext=(9 * side, 0), textcoords="offset points",
        ha="right" if side < 0 else "left", va="center", color=ACCENT,
    )  # fmt: skip


def draw_lines(
    x: Any,
    yours: Any,
    wanted: Any,
    *,
    xlabel: str,
    ylabel: str,
    units: tuple[str, str] | None = None,
) -> Draw:
    """Two curves over one axis, yours above what was wanted; logarithmic if with units."""

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.12, 0.17, 0.84, 0.7))
        known = LOOKS["full"]
        axes.plot(x, wanted, **known.line, linewidth=5, alpha=0.35, label="wanted")
        if yours is not None:
            agrees = bool(agreeing(yours, wanted).all())
            own = _RIGHT_LINE if agrees else _WRONG_LINE
            axes.plot(x, yours, **own, label=_yours(agrees))
        if units is not None:
            log_axes(axes, x_unit=units[0], y_unit=units[1])
        axes.set(xlabel=xlabel, ylabel=ylabel)
        _legend(axes)

    return draw


def draw_matrices(
    yours: Any, wanted: Any, *, xlabel: str, ylabel: str, title: str = "wanted"
) -> Draw:
    """Two matrices beside each other, in one scale of colours."""

    def draw(figure: Figure) -> None:
        own, right = (None if m is None else np.asarray(m) for m in (yours, wanted))
        agrees = own is not None and bool(agreeing(own, right).all())
        pairs = [(_yours(agrees), own), (title, right)]
        finite = [np.abs(m[np.isfinite(m)]) for _, m in pairs if m is not None]
        top = max((float(part.max()) for part in finite if part.size), default=1.0) or 1.0
        for place, (name, matrix) in zip((0.1, 0.5), pairs, strict=True):
            axes = figure.add_axes((place, 0.18, 0.34, 0.7))
            axes.set(xlabel=xlabel, ylabel=ylabel if matrix is own else "")
            axes.set_title(name, color=INK if matrix is right else RIGHT if agrees else ACCENT)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(False)
            if matrix is not None:
                image = axes.imshow(matrix, cmap=SIGNED, vmin=-top, vmax=top, aspect="auto")
        bar = figure.add_axes((0.87, 0.18, 0.015, 0.7))
        figure.colorbar(image, cax=bar)

    return draw


def draw_bars(
    names: Sequence[str], yours: Sequence[float] | None, wanted: Sequence[float], *, xlabel: str
) -> Draw:
    """A pair of bars per name; those of yours that agree look like no other."""

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.24, 0.17, 0.72, 0.7))
        places = np.arange(len(names))
        known = LOOKS["full"]
        axes.barh(places - 0.2, wanted, 0.36, color=known.colour, label="wanted")
        if yours is not None:
            agree = agreeing(yours, wanted)
            look: dict[str, Any]
            for those, look in (
                (agree, {"color": RIGHT}),
                (~agree, {"color": ACCENT, "hatch": "//"}),
            ):
                if those.any():
                    own = np.asarray(yours, float)[those]
                    label = _yours(bool(those is agree))
                    axes.barh(places[those] + 0.2, own, 0.36, label=label, **look)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel(xlabel)
        if max(map(abs, axes.get_xlim())) >= 10_000:
            axes.xaxis.set_major_formatter("{x:,.0f}")
        _legend(axes)

    return draw


def agreeing(yours: Any, wanted: Any) -> np.ndarray:
    """Where two arrays agree to a thousandth of themselves and a millionth of the largest."""
    yours, wanted = np.asarray(yours, float), np.asarray(wanted, float)
    if yours.shape != wanted.shape:
        return np.zeros(yours.shape, bool)
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    return np.isclose(yours, wanted, rtol=1e-3, atol=1e-6 * largest, equal_nan=True)


def _yours(agrees: bool) -> str:
    return "yours \N{CHECK MARK}" if agrees else "yours \N{BALLOT X}"


def _legend(axes: Axes) -> None:
    """A legend above the axes, clear of lines and bars."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
