"""One compiled step in time: compute and collectives in lanes, on slower links.

The steps are stored, because compiling takes minutes. `python -m toolkit.lab.planning.timeline`
compiles them anew, by libtpu; with names of layouts, those only.
"""

import functools
import json
import sys
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.measure.stored import stored_folder
from toolkit.planning import Strategy, Timeline, cluster, timeline, train_program
from toolkit.planning.models import model_of
from toolkit.planning.time.compiled_work import (
    CompiledWork,
    Compute,
    Loop,
    Send,
    Wait,
    compiled_work,
)
from toolkit.planning.time.timeline import COMPUTE, LINK, STRAGGLER

FILE = "timelines.json"
MODEL, TOPOLOGY, BATCH, LENGTH = "llama-3.2-1b", "v5e:4x4", 32, 2048
STRATEGIES = {
    "FSDP 16": Strategy(fsdp=16, recompute="layer", head_chunks=8),
    "FSDP 4 x tensor 4": Strategy(fsdp=4, tensor=4, recompute="layer", head_chunks=8),
}
_ITEMS = (Compute, Send, Wait, Loop)


@functools.cache
def stored_work(layout: str) -> CompiledWork:
    """What the compiled step does under a layout of `STRATEGIES`."""
    found = _stored()["layouts"][layout]
    return CompiledWork(_items(found["items"]), found["unknown_loops"])


def compiled_with() -> str:
    """What compiled them."""
    return _stored()["compiled_with"]


def _items(rows: list[Any]) -> tuple[Any, ...]:
    """Rows [number of the kind, fields ...] as items."""
    found = []
    for kind, *fields in rows:
        if _ITEMS[kind] is Loop:
            fields[1] = _items(fields[1])
        found.append(_ITEMS[kind](*fields))
    return tuple(found)


def _rows(items: tuple[Any, ...]) -> list[Any]:
    def plain(field: Any) -> Any:
        return _rows(field) if isinstance(field, tuple) else field

    return [[_ITEMS.index(type(item)), *map(plain, item)] for item in items]


@functools.cache
def _stored() -> dict[str, Any]:
    return json.loads((stored_folder("planning") / FILE).read_text())


def main(names: list[str]) -> None:
    """Writes the file anew, one layout after the other: minutes each."""
    path = stored_folder("planning") / FILE
    layouts = _stored()["layouts"] if path.exists() else {}
    for name in names or STRATEGIES:
        program = train_program(
            model_of(MODEL), STRATEGIES[name], batch=BATCH, sequence_length=LENGTH,
            devices=cluster(TOPOLOGY).devices(),
        )  # fmt: skip
        work = compiled_work(program.compile())
        layouts[name] = {"unknown_loops": work.unknown_loops, "items": _rows(work.items)}
        import libtpu

        made_by = f"jax {jax.__version__}, libtpu {libtpu.__version__}, {TOPOLOGY}"
        text = json.dumps({"compiled_with": made_by, "layouts": layouts})
        path.write_text(text + "\n")


SPEEDS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
SHOWN = 16  # the part of the step that the close view shows: one in so many


def speed_in_words(speed: float) -> str:
    """A share of the published speed."""
    return f"1/{1 / speed:g}" if speed < 1 else f"{speed:g} x" if speed > 1 else "as published"


@dataclass(frozen=True)
class TimelineView(View):
    """The step as set, the same on other links, and the part that is shown close."""

    layout: str
    straggler: float
    now: Timeline
    speed: float
    by_speed: dict[float, Timeline]
    usual_seconds: float  # on links as published, without a straggler
    start: float  # of what is shown close, in seconds

    @property
    def window(self) -> tuple[float, float]:
        """Seconds from and to which the step is shown close."""
        return self.start, self.start + self.now.step_seconds / SHOWN

    def data(self) -> Data:
        rows = self.by_speed.items()
        return {
            "links, modelled": [speed_in_words(speed) for speed, _ in rows],
            "computing (seconds)": [timeline.computing for _, timeline in rows],
            "communicating (seconds)": [timeline.communicating for _, timeline in rows],
            "of that hidden (seconds)": [timeline.hidden for _, timeline in rows],
            "step (seconds)": [timeline.step_seconds for _, timeline in rows],
        }

    def sentence(self) -> str:
        now = self.now
        slow = f", one chip {self.straggler:g} times as slow" if self.straggler > 1 else ""
        took, usual = (in_words(s, "seconds") for s in (now.step_seconds, self.usual_seconds))
        is_usual = now.step_seconds == self.usual_seconds
        instead = "" if is_usual else f" instead of {usual}"
        parts = in_words(now.computing, "seconds"), in_words(now.communicating, "seconds")
        start, end = (in_words(s, "seconds") for s in self.window)
        return (
            f"{MODEL} on {TOPOLOGY}, {self.layout}, links {speed_in_words(self.speed)}{slow}: a "
            f"step takes {took}{instead}: computing {parts[0]}, communicating {parts[1]}, of which "
            f"{in_words(now.hidden, 'seconds')} are hidden. Shown close: {start} to {end}. "
            "Durations modelled."
        )

    def footnote(self) -> str:
        return (
            f"{BATCH} x {LENGTH:,} tokens. FLOPs, bytes and order as compiled: {compiled_with()}; "
            "durations modelled, none measured."
        )


def timeline_of(*, layout: str, speed: float, straggler: float, part: float) -> TimelineView:
    """The step under a layout; `part` is where the close view begins, in percent of the step."""
    by_speed = {each: _timeline(layout, each, straggler) for each in SPEEDS}
    now, usual = by_speed[speed], _timeline(layout, 1.0, 1.0)
    start = part / 100 * now.step_seconds * (1 - 1 / SHOWN)
    return TimelineView(layout, straggler, now, speed, by_speed, usual.step_seconds, start)


@functools.lru_cache(maxsize=256)
def _timeline(layout: str, speed: float, straggler: float) -> Timeline:
    return timeline(stored_work(layout), TOPOLOGY, link_speed=speed, straggler=straggler)


LANES = {COMPUTE: "chip", STRAGGLER: "slow chip", LINK: "link"}
COLOURS = {"nothing": "white", "forward": "#a8cfe8", "backward": "#2f7fb8", "update": "#e8c46a",
           "other": "#cfd6dc", "collectives": "#f0b9cd"}  # fmt: skip
_NAMES = tuple(COLOURS)
_CELLS = 1200  # about one per pixel
_ROWS = 8  # of the picture per lane; the first and the last stay white
_MOST_WORDS = 24


class LanesPlot(Plot):
    """Lanes from above: a chip's computing, the slow chip's if there is one, the link."""

    def __init__(self, axes: Axes, is_close: bool) -> None:
        super().__init__(axes, grid="")
        self._is_close = is_close
        # One picture: a step has thousands of spans, which would take half a second to draw.
        colours = ListedColormap([*COLOURS.values()])
        self.lanes = self.image((_ROWS * len(LANES), _CELLS), colours, 0, len(COLOURS) - 1)
        self.lanes.set_extent((0, 1, len(LANES) - 0.5, -0.5))
        axes.set_yticks(range(len(LANES)), list(LANES.values()))
        axes.tick_params(axis="y", length=0)
        # Shares of what is shown: limits that stay make a redraw cheap.
        axes.set(xticks=[], xlim=(0, 1), ylim=(len(LANES) - 0.5, -0.5))
        self._title = self.text(0, -0.62, va="bottom", fontweight="bold", fontsize=10)
        self._words = [
            self.text(fontsize=7.5, ha="center", va="center", clip_on=True)
            for _ in range(_MOST_WORDS if is_close else 0)
        ]
        if not is_close:
            self._window = self.line(color=ACCENT, linewidth=1.4)
            handles = [Patch(color=COLOURS[name], label=name) for name in _NAMES[1:]]
            axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=5)

    def show(self, view: TimelineView) -> None:
        total = view.now.step_seconds
        begin, end = view.window if self._is_close else (0.0, total)
        length = end - begin
        cells, labels = np.zeros((len(LANES), _ROWS, _CELLS)), []
        for lane, name, start, seconds in view.now.spans:
            left, right = max(0.0, (start - begin) / length), (start + seconds - begin) / length
            right = min(right, 1.0)
            if right <= left:
                continue
            row = list(LANES).index(lane)
            kind = "collectives" if lane == LINK else name
            first, last = (round(edge * _CELLS) for edge in (left, right))
            cells[row, 1:-1, first : max(last, first + 1)] = _NAMES.index(kind)
            if right - left > 0.015 + 0.0095 * len(name):  # what the word takes of the width
                labels.append(((left + right) / 2, row, name))
        self.lanes.set_data(cells.reshape(-1, _CELLS))
        for words in self._words:
            words.set_visible(False)
        for words, (x, row, name) in zip(self._words, labels, strict=False):
            words.set(
                visible=True, x=x, y=row, text=name, color="white" if name == "backward" else INK
            )
        what = "Close" if self._is_close else "The step"
        span = in_words(length, "seconds")
        at = f" from {in_words(begin, 'seconds')}" if self._is_close else ""
        self._title.set_text(f"{what}{at}: {span} (modelled)")
        if not self._is_close:
            left, right = (edge / total for edge in view.window)
            self._window.set_data(
                [left, left, right, right, left], [-0.45, 2.45, 2.45, -0.45, -0.45]
            )


class SpeedsPlot(Plot):
    """The step on slower and faster links: what computes, and what of the link shows."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("The step by speed of the links", fontsize=10)
        axes.grid(False)
        axes.set_yticks(range(len(SPEEDS)), [speed_in_words(speed) for speed in SPEEDS])
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.set(xticks=[], xlim=(0, 2), ylim=(len(SPEEDS) - 0.5, -0.5))
        axes.spines["bottom"].set_visible(False)
        self.bars = self.bars_at(range(len(SPEEDS)), 0.6, is_flat=True, linewidth=0)
        self._words = [self.text(0, row, fontsize=8.5, va="center") for row in range(len(SPEEDS))]
        self._parts = self.text(1.45, -0.5, fontsize=9, va="top", linespacing=1.5)

    def show(self, view: TimelineView) -> None:
        now = view.now
        parts = {
            "computing": now.computing, "communicating": now.communicating,
            "hidden behind computing": now.hidden, "step": now.step_seconds,
        }  # fmt: skip
        self._parts.set_text(
            "\n".join(f"{name}: {in_words(value, 'seconds')}" for name, value in parts.items())
        )
        steps = [timeline.step_seconds for timeline in view.by_speed.values()]
        longest = max(steps)
        for speed, seconds, bar, words in zip(SPEEDS, steps, self.bars, self._words, strict=True):
            is_chosen = speed == view.speed
            bar.set(width=seconds / longest, color=look("full").colour if is_chosen else FAINT)
            words.set(
                x=seconds / longest + 0.02, text=in_words(seconds, "seconds"),
                fontweight="bold" if is_chosen else "normal",
            )  # fmt: skip


class TimelinePanel(Panel):
    """A step compiled for TPUs, laid out in time: what would slower links or a slow chip cost?

    Example:
        >>> panel = TimelinePanel(layout="FSDP 16", speed=0.5)
        >>> panel.view.now.step_seconds > panel.view.usual_seconds
        True
    """

    title = "What does the link cost?"
    figure_size = (9.6, 5.0)

    layout = Choice("Layout", "FSDP 16", {name: name for name in STRATEGIES})
    speed = Choice(
        "Links", 1.0, {speed_in_words(speed): speed for speed in SPEEDS},
        explanation="Speed of the links, as a share of the published one",
    )  # fmt: skip
    straggler = Number(
        "Straggler", 1.0, low=1.0, high=3.0, step=0.1, is_continuous=False,
        explanation="How many times as long one chip computes",
    )  # fmt: skip
    part = Number(
        "Close view", 20.0, low=0.0, high=100.0, step=1.0,
        explanation="Where it begins, in percent of the step",
    )  # fmt: skip

    compute = staticmethod(timeline_of)

    places = (
        (LanesPlot, (0.085, 0.66, 0.9, 0.24), False),
        (LanesPlot, (0.085, 0.33, 0.9, 0.24), True),
        (SpeedsPlot, (0.115, 0.065, 0.87, 0.175)),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
