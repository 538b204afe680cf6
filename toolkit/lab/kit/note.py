"""A line of words below the plots that follows the view."""

from collections.abc import Callable
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure


class Note:
    """A plot of words only: where the numbers come from."""

    def __init__(self, figure: Figure, x: float, y: float, words: Callable[[Any], str]) -> None:
        self.text, self._words = figure.text(x, y, "", fontsize=9), words

    def artists(self) -> list[Artist]:
        return [self.text]

    def show(self, view: Any) -> None:
        self.text.set_text(self._words(view))
