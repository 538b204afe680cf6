"""Figures that belong to nobody but their caller, and turn into PNG bytes quickly."""

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from toolkit._checks import checked
from toolkit.figures.style import magnification, style


@checked
def new_figure(width: float = 9.6, height: float = 4.4, *, dots_per_inch: int = 130) -> Figure:
    """An empty figure in the house style, owned by nobody but the caller.

    It never enters pyplot's registry, so it needs no closing and no notebook shows it twice.

    Args:
        width: inches; 9.6 fills a notebook's output at 100 pixels an inch.
        height: inches.
        dots_per_inch: 130 stays crisp on dense screens and under 200 kB in a saved notebook; what
            `use_size` chose multiplies it.

    Returns:
        A `Figure` with an Agg canvas attached.

    Cost: About a millisecond; axes cost tens of milliseconds, so keep and reuse them.

    Example:
        >>> figure = new_figure(4.0, 3.0, dots_per_inch=100)
        >>> figure.canvas.get_width_height()
        (400, 300)
    """
    sizes = {"width": width, "height": height, "dots_per_inch": dots_per_inch}
    for name, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{name} must be positive; got {size}.")
    figure = Figure(figsize=(width, height), dpi=dots_per_inch * magnification())
    FigureCanvasAgg(figure)
    return figure


class Picture:
    """A figure that turns into PNG bytes quickly, again and again.

    Axes, ticks and words are drawn once and remembered as a background; only the artists said to
    move are drawn at each update. That makes an update three times cheaper. When limits, ticks or
    words of the rest have changed, which matplotlib knows, all is drawn again.

    Attributes:
        figure: the figure; its canvas must be Agg, as `new_figure` makes it.
        moving: artists drawn at every update, first ones lowest.
        has_palette: whether 256 colours suffice, as they do where no image has a colour map: the
            file is half as large then.

    Example:
        >>> figure = new_figure(4.0, 3.0)
        >>> (line,) = figure.add_subplot().plot([0, 1], [0, 1])
        >>> picture = Picture(figure, moving=[line])
        >>> picture.png()[:8]
        b'\\x89PNG\\r\\n\\x1a\\n'
    """

    @checked
    def __init__(
        self, figure: Figure, moving: Iterable[Artist] = (), *, has_palette: bool = False
    ) -> None:
        self.figure, self.has_palette = figure, has_palette
        self.moving: list[Artist] = []
        self._background: Any = None
        for artist in moving:
            self.move(artist)

    def move(self, artist: Artist) -> None:
        """From now on, an artist is drawn at every update, above those that already are."""
        if artist not in self.moving:
            artist.set_animated(True)
            self.moving.append(artist)
            self._background = None

    def png(self) -> bytes:
        """The figure as it now is.

        Returns:
            The bytes of a PNG file.

        Cost: 50 to 120 ms the first time and after a change of what stands still, else 15 to 40 ms.
        """
        canvas = self.figure.canvas
        assert isinstance(canvas, FigureCanvasAgg)
        with style():
            if self._background is None or self.figure.stale:
                canvas.draw()
                self._background = canvas.copy_from_bbox(self.figure.bbox)
            else:
                canvas.restore_region(self._background)
            for artist in self.moving:
                self.figure.draw_artist(artist)
        self.figure.stale = False  # an axis that moves has told it that its ticks do
        pixels = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        if self.has_palette:
            pixels = pixels.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        pixels.save(buffer, format="png", compress_level=2)
        return buffer.getvalue()
