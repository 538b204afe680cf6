"""The style of every figure: light, readable, and distinguishable without colour.

Each `Look` has not only a colour but also a dash pattern, a marker and (for bars) a hatch. The
colours are those of Okabe and Ito, darkened where they are too pale for thin lines.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.colors import LinearSegmentedColormap

from toolkit._checks import check_choice, checked

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

# How many times as large as on a page a picture is drawn, and with it all that is in it.
SIZES = {"page": 1.0, "projector": 1.5}
_size = "page"


@dataclass(frozen=True)
class Look:
    """The look of one contender in all figures.

    Attributes:
        colour: line and marker colour.
        dashes: matplotlib line style.
        marker: matplotlib marker of measured points.
        hatch: fill pattern of bars.

    Example:
        >>> Look("#0072b2", "-", "o", "").marker
        'o'
    """

    colour: str
    dashes: Any
    marker: str
    hatch: str

    @property
    def line(self) -> dict[str, Any]:
        """What matplotlib calls the look of a line."""
        return {"color": self.colour, "linestyle": self.dashes}


LOOKS: dict[str, Look] = {
    "full": Look("#0072b2", "-", "o", ""),
    "window": Look("#00805e", (0, (5, 2)), "s", "//"),
    "gdn": Look("#c44e00", (0, (1.2, 1.4)), "^", ".."),
    "fourth": Look("#8a5a93", (0, (6, 2, 1, 2)), "D", "xx"),
    "fifth": Look("#6b5b00", (0, (3, 1, 1, 1, 1, 1)), "v", "++"),
}


@checked
def look(name: str) -> Look:
    """The look of the contender `name`; unknown names get one of the spare looks.

    Args:
        name: a mixer's name (`"full"`, `"window"`, `"gdn"`) or any other label.

    Returns:
        A `Look`, always the same for the same name.

    Example:
        >>> look("gdn").marker, look("window").marker
        ('^', 's')
        >>> look("anything else") == look("anything else")
        True
    """
    if name in LOOKS:
        return LOOKS[name]
    return LOOKS[("fourth", "fifth")[sum(map(ord, name)) % 2]]


def style() -> AbstractContextManager[None]:
    """A context with the house style for matplotlib; the user's settings are restored afterwards.

    Returns:
        A context manager; make and draw figures inside it.

    Example:
        >>> with style():
        ...     axes = new_figure().add_subplot()
        >>> axes.spines["top"].get_visible()
        False
    """
    return matplotlib.rc_context(STYLE)  # pyright: ignore[reportArgumentType]


@checked
def use_size(size: str) -> None:
    """Set the size of all later pictures, including words, lines and markers.

    At `"projector"` a panel is 1,440 pixels wide, its words 21 pixels high instead of 14, if the
    window leaves it that room; nothing moves within the picture, since larger words in a picture of
    the same shape overlap in most panels. Hide the side bar (Ctrl+B).

    Args:
        size: `"page"`, or `"projector"` for a room: one and a half times as large.

    Example:
        >>> use_size("projector")
        >>> new_figure(4.0, 3.0, dots_per_inch=100).canvas.get_width_height()
        (600, 450)
        >>> use_size("page")
    """
    global _size
    check_choice("size", size, SIZES)
    _size = size


def magnification() -> float:
    """Times as large as on a page, as `use_size` has it."""
    return SIZES[_size]
