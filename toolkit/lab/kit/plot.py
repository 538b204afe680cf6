"""A part of a figure, whose artists are made once and moved afterwards."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from toolkit.figures import ACCENT


class Drag(NamedTuple):
    """Which control a plot drags, along which axis.

        class ReachPlot(Plot):
            drag = Drag("token", "x", offset=-1)     # the first token is drawn at 0

    Attributes:
        control: name of a `Number`.
        axis: "x" or "y".
        offset: added to the control's value gives where it is drawn.
    """

    control: str
    axis: str
    offset: float = 0.0


class Plot:
    """Axes with their moving artists; artists made first are drawn lowest.

    `settings` are those of `Axes.set`; `grid` names the axes whose ticks have lines. One that
    `is_timed` has the time of its panel's scene along x, from the left end to the right; in one
    with a `drag` a control's number is dragged where it is drawn.
    """

    is_timed = False
    drag: Drag | None = None

    def __init__(self, axes: Axes, *, grid: str = "xy", **settings: Any) -> None:
        self.axes = axes
        for axis in ("x", "y"):
            if axis not in grid:
                axes.grid(False, axis=axis)
        axes.set(**settings)
        self._artists: list[Artist] = []
        self._names: dict[str, Sequence[str]] = {}

    def artists(self) -> list[Artist]:
        """The moving artists, lowest first."""
        return self._artists

    def show(self, view: Any) -> None:
        """Move the artists to the view; limits, ticks and words change only if necessary."""
        raise NotImplementedError

    def moving(self, artist: Any) -> Any:
        """An artist that `show` moves."""
        self._artists.append(artist)
        return artist

    def line(self, **look: Any) -> Line2D:
        """A line, or markers, that moves."""
        return self.moving(self.axes.plot([], [], **look)[0])

    def marks(self, colour: str, marker: str, **look: Any) -> Line2D:
        """Markers that move."""
        return self.line(color=colour, marker=marker, linestyle="none", **look)

    def segments(self, **look: Any) -> LineCollection:
        """Straight lines that move, and may be more or fewer."""
        return self.moving(self.axes.add_collection(LineCollection([], **look)))

    def bars_at(
        self, places: Iterable[float], size: float, *, is_flat: bool = False, **look: Any
    ) -> list[Rectangle]:
        """Bars that move, upright at places of x or flat at places of y."""
        draw = self.axes.barh if is_flat else self.axes.bar
        return [self.moving(bar) for bar in draw(list(places), 0, size, **look)]

    def frame(self, x: float, y: float, width: float, height: float, **look: Any) -> Rectangle:
        """A frame around what is chosen."""
        look = {"fill": False, "edgecolor": ACCENT} | look
        return self.moving(self.axes.add_patch(Rectangle((x, y), width, height, **look)))

    def text(self, x: float = 0, y: float = 0, **look: Any) -> Text:
        """Words that move."""
        return self.moving(self.axes.text(x, y, "", **look))

    def image(
        self, shape: tuple[int, int], colours: Colormap, low: float, high: float, **look: Any
    ) -> AxesImage:
        """A matrix that changes."""
        look = {"aspect": "auto", "interpolation": "nearest"} | look
        image = self.axes.imshow(np.zeros(shape), cmap=colours, vmin=low, vmax=high, **look)
        return self.moving(image)

    def scale_beside(self, image: AxesImage, gap: float, width: float, **look: Any) -> Colorbar:
        """The scale of an image's colours, as high as the axes; `gap` and `width` of the figure."""
        box, figure = self.axes.get_position(), self.axes.figure
        bar = figure.add_axes((box.x1 + gap, box.y0, width, box.height))
        return figure.colorbar(image, cax=bar, **look)

    def name_rows(self, names: Sequence[str], **look: Any) -> None:
        """Name the whole numbers of y once and for all, without ticks."""
        self.axes.set_yticks(range(len(names)), names, **look)
        self.axes.tick_params(axis="y", length=0)

    def name_places(self, axis: str, names: Sequence[str], **look: Any) -> None:
        """Name the whole numbers of an axis, `"x"` or `"y"`, and end it half a step beyond them.

        Names are cut to nine letters. Unchanged names are skipped, because new ticks redraw the
        whole figure.
        """
        if names != self._names.get(axis):
            self._names[axis] = names
            limits = (-0.5, len(names) - 0.5)
            self.axes.set(**{f"{axis}lim": limits if axis == "x" else limits[::-1]})
            place = self.axes.set_xticks if axis == "x" else self.axes.set_yticks
            shown = [name if len(name) <= 9 else name[:8] + "…" for name in names]
            place(range(len(names)), shown, **look)
