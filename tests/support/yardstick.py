"""Durations judged so that neither a slower machine nor a busy one fails a test.

A bare limit, of processor time too, is a claim on the machine. What is judged here takes turns with
a yardstick, a figure that matplotlib draws anew and that is encoded as a panel's picture is, and
limits are seconds of a machine on which the yardstick takes `QUIET_SECONDS`.
"""

import functools
import io
import statistics
import time
from collections.abc import Callable

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

QUIET_SECONDS = 0.03
"""What the yardstick takes of a processor where nothing else runs, on two cores of an AMD EPYC."""


def assert_quick(
    action: Callable[[], object], most_seconds: float, *, what: str = "", rounds: int = 20
) -> None:
    """Whether an action takes less, on the quiet machine, than it may.

    Its quickest is held against the yardstick's quickest, over rounds that go on until three of
    them agree or one leaves no doubt: what is quick is soon done, and a busy moment may pass.
    """
    ours, yardstick = [], []
    for _ in range(rounds):
        yardstick.append(_processor_seconds(_draw))
        ours.append(_processor_seconds(action))
        seconds = min(ours) / min(yardstick) * QUIET_SECONDS
        if seconds < most_seconds * (1 if len(ours) >= 3 else 0.4):
            return
    raise AssertionError(f"{what} takes {seconds:.3f} s (quiet); it may take {most_seconds:g}")


def slowness() -> float:
    """How many times as long as on the quiet machine a program takes now."""
    return statistics.median(_processor_seconds(_draw) for _ in range(5)) / QUIET_SECONDS


def _processor_seconds(action: Callable[[], object]) -> float:
    """Of all threads: no less than an idle machine's clock would show."""
    start = time.process_time()
    action()
    return time.process_time() - start


def _draw() -> None:
    canvas = _canvas()
    canvas.draw()
    pixels = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    pixels.save(io.BytesIO(), format="png", compress_level=2)


@functools.cache
def _canvas() -> FigureCanvasAgg:
    figure = Figure(figsize=(6, 3), dpi=100)
    axes = figure.add_subplot(title="Words, ticks, a line and an image: what panels consist of")
    axes.imshow([[0, 1, 2], [3, 4, 5]], aspect="auto")
    axes.plot([0, 1, 2], [1, 0, 1])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # the first one fills caches
    return canvas
