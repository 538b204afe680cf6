"""A part of a figure: its artists are made once, when it is, and moved afterwards."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.text import Text


class Plot:
    """Axes and what moves in them; artists made first are drawn lowest."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._artists: list[Artist] = []

    def artists(self) -> list[Artist]:
        """What `show` moves, lowest first."""
        return self._artists

    def show(self, view: Any) -> None:
        """Move the artists to the view; limits, ticks and words may change where they must."""
        raise NotImplementedError

    def moving(self, artist: Any) -> Any:
        """An artist that `show` moves."""
        self._artists.append(artist)
        return artist

    def line(self, **look: Any) -> Line2D:
        """A line, or markers, that moves."""
        return self.moving(self.axes.plot([], [], **look)[0])

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


class Note(Plot):
    """A line of words below the plots that follows the view."""

    def __init__(self, figure: Figure, x: float, y: float, words: Callable[[Any], str]) -> None:
        self.words, self._of = figure.text(x, y, "", fontsize=9), words
        self._artists = [self.words]

    def show(self, view: Any) -> None:
        self.words.set_text(self._of(view))
