"""The base of every instrument: a pure function, a thin view, a still picture.

    state --compute--> view --show--> plots of one figure --PNG--> one image on the page

`compute` is pure and tested without widgets, which are made when the panel is first shown (see
`Page`). Artists are made once and moved afterwards, and the page receives one new value (the PNG
bytes) per update, so that nothing flickers. A reader without a kernel sees the same PNG.
"""

import base64
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from IPython.display import display
from matplotlib.figure import Figure

from toolkit.figures import Picture, new_figure, save_figure, style
from toolkit.figures.style import magnification
from toolkit.lab.kit.controls import Control
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, Progress, View
from toolkit.lab.notebooks.waiting import show_working

PIXELS_PER_INCH_ON_PAGE = 100
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Panel:
    """A figure with controls; a subclass declares them and provides `compute` and `plots`.

    Its docstring lists the controls by itself.

    Set a control as an attribute (`panel.heads = 4`), several at once with `change(...)`. A bad
    value raises in Python; one typed into a box shows its message under the panel, the picture
    stays as it was, and the next good value clears the message.

    Attributes:
        title: heading of the panel.
        figure_size: inches, (width, height).
        has_palette: whether 256 colours suffice for the picture; see `Picture`.
        button: label of the button that starts the long work, `pieces`; empty if there is none.
        places: the plots, each (its class, its box in the figure, further arguments ...).
        controls: by name.
        state: the controls' values, read-only.
        view: the view now shown.
        picture: the figure and what moves in it.
        png: the current picture.
        pixels: width and height of the picture on the page.
        extra_rows: rows of what stands between the caption and the button, or of a high control.
        pixels_above: height of what stands between the controls and the picture.
        opening_seconds: about how long the first picture takes, which its cell shows meanwhile.
        error: the message shown under the panel, or empty.
        page: the panel as a widget, to be placed beside others.

    Example:
        >>> panel = MemoryPanel(layers=16)
        >>> panel.change(sequences=2, context_length=8192)
        >>> panel.view.table().columns[0]
        'tokens'
    """

    title: str = ""
    figure_size: tuple[float, float] = (9.6, 4.4)
    has_palette = False
    extra_rows = pixels_above = 0
    button = ""
    opening_seconds = 1.0
    places: tuple[tuple[Any, ...], ...] = ()
    _is_built = False
    controls: dict[str, Control]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.controls = {
            name: control
            for base in reversed(cls.__mro__)
            for name, control in vars(base).items()
            if isinstance(control, Control)
        }
        listed = "".join(
            f"    {name}: {control.described()}\n" for name, control in cls.controls.items()
        )
        head, mark, example = inspect.cleandoc(cls.__doc__ or "").partition("\nExample:")
        purpose, _, others = head.partition("\nAttributes:\n")
        cls.__doc__ = f"{purpose}\nAttributes:\n{listed}{others}{mark}{example}"

    def __init__(self, **values: Any) -> None:
        show_working(self.opening_seconds)
        self._followers: list[Panel] = []
        self._page: Any = None
        self.error = ""
        self._state = {name: control.default for name, control in self.controls.items()}
        self._state.update(self._checked(values))
        scale = PIXELS_PER_INCH_ON_PAGE * magnification()
        self.pixels = [round(inches * scale) for inches in self.figure_size]
        with style():
            figure = new_figure(*self.figure_size)
            self._plots = self.plots(figure)
            left, bottom = min(a.get_position().x0 for a in figure.axes), 0.07 / self.figure_size[1]
            self._footnote = figure.text(left, bottom, "", fontsize=9, va="bottom")
            moving = [artist for plot in self._plots for artist in plot.artists()]
            self.picture = Picture(figure, moving, has_palette=self.has_palette)
        self.refresh()
        self._is_built = True

    @property
    def page(self) -> Any:
        if self._page is None:
            from toolkit.lab.kit.page import Page

            self._page = Page(self)
            self._page.show()
        return self._page

    def __setattr__(self, name: str, value: Any) -> None:
        # A typo such as `panel.headz = 3` would otherwise pass in silence.
        if self._is_built and not name.startswith("_") and not hasattr(self, name):
            raise AttributeError(
                f"{type(self).__name__} has no control {name!r}; "
                f"wanted one of {', '.join(self.controls)}"
            )
        super().__setattr__(name, value)

    # Provided by a subclass.

    compute: Callable[..., View]
    """The view for the controls' values, which it is given by name: a pure function."""

    def plots(self, figure: Figure) -> list[Plot]:
        """Make axes and artists once; plots are drawn in this order, the first one lowest."""
        if not self.places:
            raise NotImplementedError(f"{type(self).__name__} has neither places nor plots")
        return [plot(figure.add_axes(box), *how) for plot, box, *how in self.places]

    def widgets_above(self) -> list[Any]:
        """Widgets between the controls and the picture, made once."""
        return []

    def extra_widgets(self) -> list[Any]:
        """Widgets between the caption and the button of the long work, made once."""
        return []

    def pieces(self) -> Iterator[Progress]:
        """The long work that the button starts, in pieces of at most a second or two."""
        raise NotImplementedError

    def after_piece(self) -> None:
        """Show what a piece of the long work has found."""
        self.refresh()

    def finish(self) -> None:
        """Do all the long work that is left, and show it at the end only."""
        for _ in self.pieces():
            pass
        self.after_piece()

    def adjust(self, view: Any) -> None:
        """Adapt the page's widgets to the view, such as a button that has nothing left to do."""

    # Called by a user.

    @property
    def state(self) -> MappingProxyType[str, Any]:
        return MappingProxyType(self._state)

    def data(self) -> Data:
        """The current numbers in columns, as under "Show the numbers"."""
        return self.view.data()

    def change(self, **values: Any) -> None:
        """Set several controls with one redraw.

        Raises:
            ValueError: for an unknown control or a value outside its bounds; nothing changes then.
        """
        state = self._state | self._checked(values)
        try:
            self._accept(state)
        except Exception as error:
            self.show_error(error)
            raise
        if self._page is not None:
            for name in values:
                self._page.controls[name].show(self._state[name])

    def refresh(self) -> None:
        """Compute and draw again with the values as they are."""
        self._accept(dict(self._state))

    def follow(self, panel: "Panel") -> Self:
        """Follow another panel in all shared controls."""
        panel._followers.append(self)
        self._take_over(panel)
        return self

    def save(self, path: str | os.PathLike, columns: int = 2) -> Path:
        """Write the picture as a paper takes it, PDF or SVG, one or two columns wide; see
        `toolkit.figures.save_figure`."""
        moving = self.picture.moving
        for artist in moving:  # which only `Picture` draws otherwise
            artist.set_animated(False)
        try:
            return save_figure(self.picture.figure, path, columns)
        finally:
            for artist in moving:
                artist.set_animated(True)

    def draw(self, view: View) -> None:
        """Draw a view without changing anything else of the panel."""
        with style():
            for plot in self._plots:
                plot.show(view)
        before, words = self._footnote.get_text(), view.footnote()
        if words != before:
            self._footnote.set_text(words)
            # Unchanged artists are skipped; moving them would redraw the whole figure.
            if before:
                self.picture.move(self._footnote)

    def show_error(self, error: Exception) -> None:
        """Show an error under the panel; the next successful update clears it."""
        self.error = f"{type(error).__name__}: {error}"
        if self._page is not None:
            self._page.show_error()

    def attempt(self, action: Callable[..., Any], **values: Any) -> None:
        """Run a user's action on the page: an error is shown, not raised."""
        try:
            action(**values)
        except Exception as error:
            self.show_error(error)

    # The machinery.

    def _checked(self, values: dict[str, Any]) -> dict[str, Any]:
        for name in values:
            if name not in self.controls:
                known = ", ".join(self.controls)
                raise ValueError(f"{name}: no such control, wanted one of {known}")
        return {name: self.controls[name].check(value) for name, value in values.items()}

    def _accept(self, state: dict[str, Any]) -> None:
        """Compute, draw, and only then adopt the new state, so that a failure changes nothing."""
        view = self.compute(**state)
        self.draw(view)
        png = self.picture.png()
        self.view, self.png, self._state = view, png, state
        self.error = ""
        if self._page is not None:
            self._page.show()
        for follower in self._followers:
            follower._take_over(self)

    def _take_over(self, panel: "Panel") -> None:
        wanted = {name: panel.state[name] for name in self.controls.keys() & panel.state.keys()}
        if any(self._state[name] != value for name, value in wanted.items()):
            self.change(**wanted)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        words = self.view.sentence()
        data = {
            WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.page.model_id},
            "image/png": base64.b64encode(self.png).decode(),
            "text/plain": f"{self.title}\n{words}",
        }
        size = {"width": self.pixels[0], "alt": words}
        return data, {"image/png": size}

    def _ipython_display_(self) -> None:
        """Show the bundle by a message of its own, not as a cell's result.

        Colab needs this message to find the code of widgets like the curve editor, and its
        ipywidgets 7 would show its own bundle without the still picture.
        """
        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True)
