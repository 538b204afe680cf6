"""The visual language of every figure: style, axes, quantities in words.

save_figure   a figure for a paper: PDF or SVG, one or two columns wide
report        an HTML page of text, tables and pictures
style         the house style as a context
STYLE         its settings
Look          how one contender is drawn everywhere: colour, dashes, marker, hatch
LOOKS         the looks that have a name
look          the look of a contender
INK, FAINT, GRID, ACCENT   colours of words, background marks, grids and selections
WEIGHTS, SIGNED            colour maps of weights and of signed numbers
use_size      the size of pictures: for a page, or for a projector
new_figure    an empty figure that needs no closing
Picture       a figure that turns into PNG bytes quickly, again and again
log_axes      logarithmic axes with units at their ticks
in_words      a number with its unit and a fitting prefix
short         the same for ticks
"""

from toolkit.figures.axes import log_axes
from toolkit.figures.paper import save_figure
from toolkit.figures.picture import Picture, new_figure
from toolkit.figures.style import (
    ACCENT,
    FAINT,
    GRID,
    INK,
    LOOKS,
    SIGNED,
    STYLE,
    WEIGHTS,
    Look,
    look,
    style,
    use_size,
)
from toolkit.measure import in_words, short

__all__ = [
    "ACCENT", "FAINT", "GRID", "INK", "LOOKS", "SIGNED", "STYLE", "WEIGHTS", "Look", "Picture",
    "in_words", "log_axes", "look", "new_figure", "save_figure", "short", "style", "use_size",
]  # fmt: skip
