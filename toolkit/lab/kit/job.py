"""Work too long for a slider: a button, a progress bar and a stop button.

The work is a generator that yields `(done, total, what)` between pieces of at most a second or
two. A press of the button runs the pieces as a task of the kernel's own event loop, which lets the
stop button and the sliders in between them; no thread, so nothing is timed against a competitor
and no output lands in another cell. From Python, `run()` does all of it and returns.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as widgets

from toolkit._compat import tooltip
from toolkit.lab.kit.view import Progress

# Long enough for the kernel to process pending messages.
PAUSE_SECONDS = 0.02


def button(
    label: str, icon: str, name: str, press: Callable[[], Any], width: str = "120px"
) -> widgets.Button:
    """A button; on the page, `name` is its class."""
    made = widgets.Button(description=label, icon=icon, layout=widgets.Layout(width=width))
    made.add_class(name)
    made.on_click(lambda _: press())
    return made


class Job(widgets.HBox):
    """A row with a run button, a stop button, a bar and a line of text.

    Attributes:
        is_running: whether pieces are left.
        message: the line of text beside the bar.
    """

    def __init__(
        self,
        label: str,
        pieces: Callable[[], Iterator[Progress]],
        *,
        after_piece: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._pieces, self._after_piece, self._on_error = pieces, after_piece, on_error
        self._run = button(label, "play", "job-run", self.start, "180px")
        self._stop = button("Stop", "stop", "job-stop", self.stop, "90px")
        self._bar = widgets.IntProgress(
            max=1, layout=widgets.Layout(width="200px"), **tooltip("progress")
        )
        self._text = widgets.Label()
        self._text.add_class("job-text")
        self.is_running, self._stop.disabled = False, True
        self._started = 0.0
        self._task: asyncio.Task | None = None
        parts = [self._run, self._stop, self._bar, self._text]
        super().__init__(parts, layout=widgets.Layout(flex_flow="row wrap"))

    @property
    def message(self) -> str:
        return self._text.value

    def start(self) -> None:
        """Begin in the background when the kernel has an event loop, otherwise run to the end."""
        if self.is_running:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.run()
        else:
            self._begin()
            self._task = loop.create_task(self._run_in_background())

    def stop(self) -> None:
        """Ask the work to end after the current piece."""
        self.is_running = False

    def run(self) -> None:
        """Do every piece now; errors are raised."""
        self._begin()
        try:
            for progress in self._pieces():
                self._show(*progress)
        finally:
            self._set_running(False)

    async def _run_in_background(self) -> None:
        try:
            for progress in self._pieces():
                self._show(*progress)
                await asyncio.sleep(PAUSE_SECONDS)
                if not self.is_running:
                    self._text.value = "stopped after: " + self._text.value
                    break
        except Exception as error:
            self._on_error(error)
        finally:
            self._set_running(False)

    def _begin(self) -> None:
        self._set_running(True)
        self._started = time.monotonic()
        self._bar.value, self._text.value = 0, "starting"

    def _show(self, done: int, total: int, what: str) -> None:
        self._bar.max, self._bar.value = total, done
        left = (time.monotonic() - self._started) * (total - done) / max(done, 1)
        about = f", about {left:.0f} s left" if left >= 1 else ""
        self._text.value = f"{what} ({done} of {total}{about})"
        self._after_piece()

    def _set_running(self, is_running: bool) -> None:
        self.is_running, self._run.disabled = is_running, is_running
        self._stop.disabled = not is_running
