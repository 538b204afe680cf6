"""The widgets of a panel, which are made when it is first shown."""

import functools
import html
from typing import Any

import ipywidgets as widgets

from toolkit.figures.style import magnification
from toolkit.lab.kit.controls import Number, Words
from toolkit.lab.kit.drags import Drags
from toolkit.lab.kit.job import Job
from toolkit.lab.kit.view import as_html

SCREEN_PIXELS = 900  # a panel with its controls is seen at once on a laptop
ROW_PIXELS, WORDS_PIXELS = 32, 163  # a row of two controls; heading, caption, button
LEAST_SHARE = 0.85  # words in a smaller picture are hard to read


def rows_of(panel: Any) -> int:
    """Rows of two controls, or of one line of words; the button of the long work is one more."""
    rows, has_room = int(bool(panel.button)) + panel.extra_rows, False
    for control in panel.controls.values():
        rows += not has_room or isinstance(control, Words)
        has_room = not has_room and not isinstance(control, Words)
    return rows


def height_of(panel: Any) -> int:
    """Pixels of the picture: less than it has where the whole panel would not fit a screen."""
    whole, rows = panel.pixels[1], ROW_PIXELS * rows_of(panel)
    free = SCREEN_PIXELS * magnification() - WORDS_PIXELS - rows - panel.pixels_above
    return round(min(whole, max(free, LEAST_SHARE * whole)))


class Page(widgets.VBox):
    """A panel on the page: its controls, its picture, and what is said of both.

    Attributes:
        controls: the widgets of each control.
        above: what the panel has between its controls and its picture.
        drags: handles over the picture, or None.
        job: the button and the bar of its long work, or None.
        image, caption, error, table: what they are named.
        show_numbers: the button that shows the table.
    """

    def __init__(self, panel: Any) -> None:
        self._panel = panel
        self.controls = {
            name: control.widgets(functools.partial(self._user_moved, name))
            for name, control in panel.controls.items()
        }
        for name, value in panel.state.items():
            self.controls[name].show(value)
        width, height = f"{panel.pixels[0]}px", f"{height_of(panel)}px"
        # A fixed height: the page does not move while one picture replaces another.
        most = f"{100 * panel.pixels[1] / panel.pixels[0]:.2f}vw"  # no empty room on a telephone
        fixed = widgets.Layout(
            width="calc(100% - 4px)",
            max_width=width,
            height=height,
            max_height=most,
            object_fit="contain",
        )
        self.image = widgets.Image(format="png", layout=fixed)
        # An Image has no alternative text (and fails on a tooltip), so the words stand below it.
        self.caption, self.error, self.table = (
            widgets.HTML(layout=widgets.Layout(max_width=width)) for _ in range(3)
        )
        for widget, name in (
            (self.image, "picture"), (self.caption, "caption"), (self.error, "error"),
        ):  # fmt: skip
            widget.add_class(f"panel-{name}")
        self.show_numbers = widgets.ToggleButton(
            description="Show the numbers", icon="table", layout=widgets.Layout(width="170px")
        )
        self.show_numbers.observe(lambda _: self._write_table(), names="value")
        self.job = panel.button and Job(
            panel.button, panel.pieces, after_piece=panel.after_piece, on_error=panel.show_error
        )
        self.above = panel.widgets_above()
        dragged = [plot for plot in panel._plots if plot.drag]
        self.drags = Drags(panel, dragged, height_of(panel)) if dragged else None
        grid = widgets.Box(
            [parts.box for parts in self.controls.values()],
            layout=widgets.Layout(display="flex", flex_flow="row wrap", max_width=width),
        )
        heading = widgets.HTML(f"<h3 style='margin:4px 0'>{html.escape(panel.title)}</h3>")
        handles = [self.drags] if self.drags else []
        shown = heading, grid, *self.above, *handles, self.image, self.caption, self.error
        jobs = [self.job] if self.job else []
        below = *panel.extra_widgets(), *jobs, self.show_numbers, self.table
        super().__init__([*shown, *below])
        self.add_class("toolkit-panel")

    def show(self) -> None:
        """Show the panel's view."""
        panel = self._panel
        for name, control in panel.controls.items():
            if isinstance(control, Number) and control.maximum is not None:
                self.controls[name].set_maximum(control.maximum(panel.view))
        panel.adjust(panel.view)
        if self.drags:
            self.drags.follow()
        self.image.value = panel.png
        words = html.escape(panel.view.sentence())
        self.caption.value = f"<p style='margin:2px 0;line-height:1.35'>{words}</p>"
        self._write_table()
        self.show_error()

    def show_error(self) -> None:
        """Show the panel's message, or that there is none."""
        # role=alert has screen readers speak it at once.
        self.error.value = self._panel.error and (
            "<div role='alert' style='border-left:4px solid #b3245b;padding:4px 10px;"
            f"background:#fdf0f4'>&#9888; {html.escape(self._panel.error)}</div>"
        )

    def _user_moved(self, name: str, value: Any) -> None:
        self._panel.attempt(self._panel.change, **{name: value})

    def _write_table(self) -> None:
        words = as_html(self._panel.view.table()) if self.show_numbers.value else ""
        self.table.value = words
