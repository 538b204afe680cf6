"""A compiled step in lanes, and its time on slower links. Pure; durations are modelled."""

import functools
from dataclasses import dataclass

from toolkit.lab.kit.view import Data, View
from toolkit.lab.planning.stored_timelines import (
    BATCH,
    LENGTH,
    MODEL,
    TOPOLOGY,
    compiled_with,
    stored_work,
)
from toolkit.measure import in_words
from toolkit.planning import Timeline, timeline

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
