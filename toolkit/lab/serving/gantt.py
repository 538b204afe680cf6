"""Requests in time: who waits, who is read, who writes, who is evicted; and the cache's pages."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from toolkit.figures import ACCENT, FAINT, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.played import LANES_LEFT, LANES_WIDTH, PlayedPanel
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.scene import Bar, Kind, Scene
from toolkit.lab.kit.view import Data, View
from toolkit.lab.serving.knee import CHIPS, PAGE, POLICIES, served
from toolkit.measure import in_words
from toolkit.measure.words import counted
from toolkit.serving import Run, Served

COUNT, SHOWN = 120, 24  # requests that are simulated, and that have a lane
KINDS = (
    Kind("waits", "#dfe4e8"),
    Kind("is read", "#2f7fb8"),
    Kind("writes", "#9ed2b4"),
    Kind("stalls", "#e8c46a"),
    Kind("evicted, waits again", "#f0b9cd"),
)
WAITS, READ, WRITES, STALLS, EVICTED = range(len(KINDS))
_ROWS, _COLUMNS = 64, 480  # of the picture of a chip's pages
_OWNERS = ("#a8cfe8", "#2f7fb8", "#cfe3d6", "#5fae82", "#e8c46a")


class Span(NamedTuple):
    """What a request does for a while: a number of `KINDS`, and the tokens of its turns."""

    kind: int
    start: float
    end: float
    tokens: int = 0


def spans(run: Run[Served], count: int) -> list[list[Span]]:
    """The time of the first requests without gaps, from arrival to last token."""
    found: list[list[Span]] = [[] for _ in range(count)]
    state, at = [WAITS] * count, [request.arrival for request in run.requests[:count]]
    for turn in run.turns:
        for number in turn.evicted:
            if number < count:
                found[number].append(Span(STALLS, at[number], turn.start))
                at[number], state[number] = turn.start, EVICTED
        done = [(READ, *piece) for piece in turn.iteration.pieces]
        done += [(WRITES, number, 1) for number in turn.iteration.rows]
        for kind, number, tokens in done:
            if number >= count:
                continue
            own, last = found[number], found[number][-1] if found[number] else None
            if last is not None and (last.kind, last.end) == (kind, turn.start):
                own[-1] = last._replace(end=turn.end, tokens=last.tokens + tokens)
            else:
                own += [
                    Span(state[number], at[number], turn.start),
                    Span(kind, turn.start, turn.end, tokens),
                ]
            at[number], state[number] = turn.end, STALLS
    return [[span for span in own if span.end > span.start] for own in found]


def page_map(run: Run[Served], pages: int, end: float) -> Int[np.ndarray, "chips rows columns"]:
    """Whose every page of each chip is over time: 0 is free, otherwise a colour of its request."""
    cells = np.zeros((CHIPS, _ROWS, _COLUMNS), int)
    edges = (np.arange(_ROWS) + 0.5) / _ROWS * pages
    for chip in range(CHIPS):
        turns = [turn for turn in run.turns if turn.instance == chip]
        starts = np.array([turn.start for turn in turns])
        times = (np.arange(_COLUMNS) + 0.5) / _COLUMNS * end
        for column, place in enumerate(np.searchsorted(starts, times) - 1):
            if place < 0 or turns[place].end <= times[column]:
                continue  # idle
            own = np.array(turns[place].taken).reshape(-1, 2)
            filled = np.cumsum(own[:, 1]) / PAGE
            owners = np.append(1 + own[:, 0] % len(_OWNERS), 0)
            cells[chip, :, column] = owners[np.searchsorted(filled, edges)]
    return cells


@dataclass(frozen=True)
class GanttView(View):
    """A run, and what was chosen."""

    policy: str
    load: float
    pages: int
    request: int
    run: Run[Served]

    @cached_property
    def spans(self) -> list[list[Span]]:
        """What each request with a lane does, in order."""
        return spans(self.run, SHOWN)

    @cached_property
    def end(self) -> float:
        """Seconds until the last request with a lane has ended."""
        return max(own[-1].end for own in self.spans)

    @cached_property
    def evictions(self) -> int:
        """Of all requests."""
        return sum(len(turn.evicted) for turn in self.run.turns)

    @cached_property
    def fullest(self) -> float:
        """The largest share of a chip's cache that is taken at any time."""
        return max(turn.used for turn in self.run.turns) / (self.pages * PAGE)

    def data(self) -> Data:
        requests = self.run.requests[:SHOWN]
        return {
            "arrival (seconds)": [request.arrival for request in requests],
            "prompt (tokens)": [request.entry.prompt for request in requests],
            "text (tokens)": [request.entry.output for request in requests],
            "first token (seconds)": [request.first_token for request in requests],
            "mean gap (seconds)": [request.per_token for request in requests],
            "largest gap (seconds)": [request.largest_gap for request in requests],
            "end (seconds)": [request.completion for request in requests],
        }

    def nine_of_ten(self, name: str) -> str:
        """A time of requests that nine of ten keep, in words."""
        times = [getattr(request, name) for request in self.run.requests]
        return in_words(float(np.percentile(times, 90)), "seconds")

    def sentence(self) -> str:
        return (
            f"{self.load:g} requests per second on {CHIPS} H100, {POLICIES[self.policy]}: nine of "
            f"ten first tokens come within {self.nine_of_ten('first_token')}, and nine of ten "
            f"texts have no gap above {self.nine_of_ten('largest_gap')}; "
            f"{counted(self.evictions, 'eviction')}; a chip's {self.pages:,} pages are "
            f"{self.fullest:.0%} full at most. Request {self.request} has its first token after "
            f"{in_words(self.run.requests[self.request].first_token, 'seconds')}."
        )

    def footnote(self) -> str:
        return (
            f"Modelled: Llama 3 8B in bfloat16, half of the published rates; {COUNT} requests, the "
            f"first {SHOWN} with lanes; pages of {PAGE} tokens."
        )


def gantt_view(*, load: float, **how: Any) -> GanttView:
    """The run of a policy at a load."""
    request, policy = how.pop("request"), how.pop("policy")
    return GanttView(policy, load, how["pages"], request, served(policy, load, COUNT, **how))


def scene_of(view: GanttView) -> Scene:
    """A lane per request; a bar has the number of tokens first."""
    bars = [
        Bar(lane, 1e3 * span.start, 1e3 * span.end, _label(span), span.kind)
        for lane, own in enumerate(view.spans)
        for span in own
    ]
    return Scene(
        end=1e3 * view.end, words=view.sentence(), unit="ms", kinds=KINDS, bars=tuple(bars),
        lanes=tuple(f"r{number}" for number in range(SHOWN)), picks=tuple(b.lane for b in bars),
    )  # fmt: skip


def _label(span: Span) -> str:
    done = {READ: "read", WRITES: "written"}.get(span.kind)
    return f"{counted(span.tokens, 'token')} {done}" if done else ""


class PagesPlot(Plot):
    """The pages of each chip over the time of the lanes above, by request."""

    is_timed = True

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Pages of each chip's cache, by request", grid="")
        colours = ListedColormap(["white", *_OWNERS])
        self.cells = self.image((CHIPS * _ROWS, _COLUMNS), colours, 0, len(_OWNERS), origin="lower")
        self.cells.set_extent((0, 1, 0, CHIPS))
        axes.set(xlim=(0, 1), ylim=(0, CHIPS), xticks=[], yticks=[0.5, 1.5])
        axes.set_yticklabels(["chip 0", "chip 1"])
        axes.tick_params(axis="y", length=0)
        axes.axhline(1, color=FAINT, linewidth=1)

    def show(self, view: GanttView) -> None:
        cells = page_map(view.run, view.pages, view.end)
        self.cells.set_data(cells.reshape(-1, _COLUMNS))


class WaitsPlot(Plot):
    """The wait for the first token and the largest gap of every request, in order of arrival."""

    drag = Drag("request", "x")

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Milliseconds of every request, by arrival", grid="y")
        axes.set(
            xlim=(-1, COUNT), ylim=(4, 4e4), yscale="log", xlabel="request",
            xticks=range(0, COUNT, 20),
        )  # fmt: skip
        axes.yaxis.set_major_formatter("{x:,.0f}")
        self.first = self.marks(look("full").colour, "o", markersize=4, label="to the first token")
        self.gap = self.marks(look("gdn").colour, "^", markersize=4, label="largest gap")
        self._chosen = self.line(color=ACCENT, linewidth=1.4)
        axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=2)

    def show(self, view: GanttView) -> None:
        self._chosen.set_data([view.request] * 2, self.axes.get_ylim())
        for line, name in ((self.first, "first_token"), (self.gap, "largest_gap")):
            line.set_data(
                range(COUNT), [1e3 * getattr(request, name) for request in view.run.requests]
            )


class RequestsPanel(PlayedPanel):
    """Requests on two chips that play: waiting, prompts, texts, evictions and pages.

    Example:
        >>> panel = RequestsPanel(policy="chunks", load=40)
        >>> panel.view.evictions
        0
    """

    title = "Requests on two chips: who waits for whom?"
    figure_size = (9.6, 3.3)
    has_palette = True
    bar_control = "request"

    policy = Choice("Policy", "chunks", {words: name for name, words in POLICIES.items()})
    load = Number("Load", 90.0, low=2.0, high=120.0, step=1.0, explanation="Requests per second")
    order = Choice(
        "Order", "arrival", {"first come, first served": "arrival", "shortest text": "shortest"},
        explanation="Of those that wait; the length of a text is known to an oracle only",
    )  # fmt: skip
    budget = Number(
        "Chunk", 256, low=16, high=2048, powers_of_two=True,
        explanation="Tokens of a turn, prompts and texts, where prompts are read in chunks",
    )  # fmt: skip
    slots = Number("Slots", 16, low=1, high=128, powers_of_two=True, explanation="Of a chip")
    pages = Number(
        "Pages", 512, low=128, high=2048, powers_of_two=True,
        explanation=f"Of a chip's cache, {PAGE} tokens each",
    )  # fmt: skip
    evicts = Choice(
        "Room", False, {"reserved for the whole text": False, "as written; evicts": True},
        explanation="Where it runs out, the youngest request is forgotten and read again",
    )  # fmt: skip
    request = Number(
        "Request", 0, low=0, high=SHOWN - 1, explanation="Marked below; a click on its lane"
    )

    compute = staticmethod(gantt_view)
    scene = staticmethod(scene_of)

    places = (
        (PagesPlot, (LANES_LEFT, 0.67, LANES_WIDTH, 0.24)),
        (WaitsPlot, (LANES_LEFT, 0.2, LANES_WIDTH, 0.32)),
    )
