"""The one style of every figure: light, readable, and told apart without colour.

A line is never told from its neighbours by colour alone: each `Look` also fixes a dash pattern, a
marker and (for bars) a hatch. The colours are those of Okabe and Ito, darkened where the original
is too pale on white to carry a thin line.
"""

import io
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

INK = "#1f2933"
FAINT = "#8a949e"
GRID = "#e3e7eb"
ACCENT = "#b3245b"

# White to dark blue for weights; blue through white to vermillion for signed numbers. Both keep
# their order in grey-scale print and under the common forms of colour-blindness.
WEIGHTS = LinearSegmentedColormap.from_list("weights", ["#ffffff", "#a8cfe8", "#2f7fb8", "#08306b"])
SIGNED = LinearSegmentedColormap.from_list(
    "signed", ["#08519c", "#9cc7e3", "#ffffff", "#f4b183", "#b23c00"]
)

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelsize": 10.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "lines.linewidth": 2.2,
    "lines.markersize": 6.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}


@dataclass(frozen=True)
class Look:
    """How one contender is drawn everywhere.

    Attributes:
        colour: line and marker colour.
        dashes: matplotlib line style.
        marker: matplotlib marker of measured points.
        hatch: fill pattern of bars.
    """

    colour: str
    dashes: Any
    marker: str
    hatch: str


LOOKS: dict[str, Look] = {
    "full": Look("#0072b2", "-", "o", ""),
    "window": Look("#00805e", (0, (5, 2)), "s", "//"),
    "gdn": Look("#c44e00", (0, (1.2, 1.4)), "^", ".."),
    "fourth": Look("#8a5a93", (0, (6, 2, 1, 2)), "D", "xx"),
    "fifth": Look("#6b5b00", (0, (3, 1, 1, 1, 1, 1)), "v", "++"),
}


def look(name: str) -> Look:
    """How to draw the contender `name`; unknown names get one of the spare looks.

    Args:
        name: a mixer's name (`"full"`, `"window"`, `"gdn"`) or any other label.

    Returns:
        The same `Look` for the same name, always.

    Cost:
        A dictionary look-up.
    """
    if name in LOOKS:
        return LOOKS[name]
    return LOOKS[("fourth", "fifth")[sum(map(ord, name)) % 2]]


def style() -> AbstractContextManager[None]:
    """A context in which matplotlib follows the house style, leaving the user's settings alone.

    Returns:
        A context manager; make and draw figures inside it.

    Cost:
        About a millisecond.
    """
    return matplotlib.rc_context(STYLE)  # pyright: ignore[reportArgumentType]


def new_figure(width: float = 9.6, height: float = 4.4, *, dots_per_inch: int = 130) -> Figure:
    """An empty figure in the house style, owned by nobody but the caller.

    It never enters pyplot's registry, so it needs no closing and no notebook shows it twice.

    Args:
        width: inches; 9.6 fills a notebook's output at 100 pixels an inch.
        height: inches.
        dots_per_inch: 130 stays crisp on dense screens and under 200 kB in a saved notebook.

    Returns:
        A `Figure` with an Agg canvas attached.

    Cost:
        About a millisecond; axes cost tens of milliseconds, so keep and reuse them.
    """
    figure = Figure(figsize=(width, height), dpi=dots_per_inch)
    FigureCanvasAgg(figure)
    return figure


class Picture:
    """A figure that turns into PNG bytes quickly, again and again.

    Axes, ticks and words are drawn once and remembered as a background; only the artists said to
    move are drawn at each update. That makes an update three times cheaper.

    Attributes:
        figure: the figure; its canvas must be Agg, as `new_figure` makes it.
        moving: artists drawn at every update, first ones lowest.
        has_palette: whether 256 colours suffice, as they do where no image has a colour map: the
            file is half as large then.
    """

    def __init__(
        self, figure: Figure, moving: Iterable[Artist] = (), *, has_palette: bool = False
    ) -> None:
        self.figure, self.moving, self.has_palette = figure, list(moving), has_palette
        self._background: Any = None
        for artist in self.moving:
            artist.set_animated(True)

    def forget_background(self) -> None:
        """Draw everything again at the next update: limits, ticks or words have changed."""
        self._background = None

    def png(self) -> bytes:
        """The figure as it now is.

        Returns:
            The bytes of a PNG file.

        Cost:
            50 to 120 ms the first time and after `forget_background`, then 15 to 40 ms.
        """
        canvas = self.figure.canvas
        assert isinstance(canvas, FigureCanvasAgg)
        with style():
            if self._background is None:
                canvas.draw()
                self._background = canvas.copy_from_bbox(self.figure.bbox)
            else:
                canvas.restore_region(self._background)
            for artist in self.moving:
                self.figure.draw_artist(artist)
        pixels = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        if self.has_palette:
            pixels = pixels.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        pixels.save(buffer, format="png", compress_level=2)
        return buffer.getvalue()


_UNITS: dict[str, tuple[float, tuple[str, ...]]] = {
    "bytes": (1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")),
    "FLOP": (1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")),
}
_TIMES = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (3600.0, "h"), (86400.0, "days"))


def in_words(value: float, unit: str) -> str:
    """A number with its unit, in three significant digits and the prefix a reader expects.

    Args:
        value: the number, in the base unit.
        unit: `"seconds"`, `"bytes"` (binary prefixes), `"FLOP"`, or any other word.

    Returns:
        For example `"3.50 ms"`, `"64.0 MiB"` or `"12,000 tokens"`.

    Cost:
        None worth naming.
    """
    if unit == "seconds":
        scale, name = next(((s, n) for s, n in reversed(_TIMES) if abs(value) >= s), _TIMES[0])
        return f"{_three_digits(value / scale)} {name}"
    if unit in _UNITS:
        base, names = _UNITS[unit]
        power = 0
        while abs(value) >= base * (1 - 1e-9) and power < len(names) - 1:
            value, power = value / base, power + 1
        return f"{_three_digits(value)} {names[power]}"
    return f"{value:,.4g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def short(value: float, unit: str) -> str:
    """`in_words` for axis ticks: no trailing zeros.

    Args:
        value: the number, in the base unit.
        unit: as in `in_words`.

    Returns:
        For example `"1 ms"` or `"32k"` for a number of tokens.

    Cost:
        None worth naming.
    """
    if unit == "tokens":
        for scale, suffix in ((1 << 20, "M"), (1 << 10, "k")):
            if value >= scale:
                return f"{value / scale:g}{suffix}"
        return f"{value:g}"
    if unit == "seconds" and value >= 1:
        return f"{value:,.0f} s"
    number, _, name = in_words(value, unit).partition(" ")
    return f"{float(number.replace(',', '')):g} {name}"


def log_axes(axes: Axes, *, x_unit: str, y_unit: str) -> None:
    """Logarithmic axes whose ticks speak the unit: 1k, 32k, 1M tokens; 1 ms, 1 s; 64 KiB, 1 GiB.

    Args:
        axes: changed in place.
        x_unit: as in `in_words`; `"tokens"` ticks at powers of two.
        y_unit: as in `in_words`; `"bytes"` ticks at powers of two.

    Returns:
        None.

    Cost:
        None worth naming; ticks are placed at each draw.
    """
    for axis, scale, unit in (
        (axes.xaxis, axes.set_xscale, x_unit),
        (axes.yaxis, axes.set_yscale, y_unit),
    ):
        base = 2 if unit in ("tokens", "bytes") else 10
        scale("log", base=base)
        axis.set_major_locator(LogLocator(base=base, numticks=7))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: short(value, unit)))
