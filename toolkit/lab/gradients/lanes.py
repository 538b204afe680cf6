"""A backward pass in lanes: what is encoded, sent and decoded when, by four searches."""

from dataclasses import dataclass
from functools import cached_property

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from toolkit.figures import ACCENT, INK, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.parallel.gradients import Exchange
from toolkit.parallel.gradients.peers import Along
from toolkit.planning import Option, Schedule, best_exchanges, cluster, greedy_exchanges
from toolkit.planning.gradients.costs import message_cost
from toolkit.planning.gradients.lanes import Cost, one_by_one
from toolkit.planning.time.seconds import constants_of

LAYERS, WIDTH, HIDDEN, VOCABULARY = 4, 2048, 8192, 32_768
TENSORS = [
    ("head", WIDTH * VOCABULARY),
    *(
        (f"{what} {layer}", size)
        for layer in range(LAYERS, 0, -1)
        for what, size in (("mlp", 3 * WIDTH * HIDDEN), ("mixer", 4 * WIDTH**2))
    ),
    ("table", WIDTH * VOCABULARY),
]
SIZES = tuple(size for _, size in TENSORS)
CHIPS = {"h100:8": "8 H100, NVLink", "h100:64": "64 H100, InfiniBand", "a10g:8": "8 A10G, Ethernet"}
COMPRESSORS = ("int8", "int4", "scaled_sign")
SEARCHES = {
    "dense": "nothing", "greedy": "greedy (Espresso)", "best": "exact", "grouped": "exact, merged",
}  # fmt: skip


@dataclass(frozen=True)
class LanesView(View):
    """A schedule, and the step's end under every search."""

    # chips, compressor, tokens, search, decisions: as chosen
    chips: str
    compressor: str
    tokens: int
    search: str
    decisions: int
    options: tuple[Option, ...]  # dense, then the compressor's patterns
    schedules: dict[str, Schedule]  # search -> its schedule

    @property
    def shown(self) -> Schedule:
        """The schedule that the lanes show."""
        return self.schedules[self.search]

    @cached_property
    def names(self) -> list[str]:
        """The tensors of each message in words."""
        return [
            TENSORS[first][0] if last == first + 1 else f"{TENSORS[first][0]} … {last - first}"
            for first, last, _ in self.shown.messages
        ]

    def data(self) -> Data:
        costs = [option.cost(first, last) for first, last, option in self.shown.messages]
        return {
            "tensors": self.names,
            "exchange": [message.option.name for message in self.shown.messages],
            "encode (seconds)": [cost.encode for cost in costs],
            "link (seconds)": [cost.send for cost in costs],
            "decode (seconds)": [cost.decode for cost in costs],
        }

    def sentence(self) -> str:
        shown, dense, best = (self.schedules[name] for name in (self.search, "dense", "best"))
        count = sum(name != "dense" for name in shown.options())
        gap = self.schedules["greedy"].seconds / best.seconds - 1
        when = "" if self.search != "greedy" else f" after {self.decisions} decisions"
        return (
            f"{CHIPS[self.chips]}, {self.tokens:,} tokens per chip: {SEARCHES[self.search]}{when} "
            f"compresses {count} of {len(TENSORS)} gradients, in "
            f"{len(shown.messages)} messages, and leaves {in_words(shown.exposed, 'seconds')} "
            f"exposed; all dense {in_words(dense.exposed, 'seconds')}. The greedy search ends "
            f"{gap:.1%} later than the exact one."
        )

    def footnote(self) -> str:
        return (
            f"Modelled: {LAYERS} layers of width {WIDTH}, published rates. The backward pass is "
            "grey, what encoding adds to it red; decoding runs beside the link."
        )


def lanes_view(
    *, chips: str, compressor: str, tokens: int, search: str, decisions: int
) -> LanesView:
    """The view of one search; the others are found too."""
    where = cluster(chips)
    constants = constants_of(where, None)
    rate = 4 * tokens / (where.chip.flops_per_second * constants.matmul)  # backward, per number
    ready, now = [], 0.0
    for name, size in TENSORS:
        now += rate * size * (name != "table")  # a look-up
        ready.append(now)
    options = _options(chips, compressor)
    schedules = {
        "dense": one_by_one(ready, options[:1] * len(ready)),
        "greedy": greedy_exchanges(ready, options, SIZES, decisions=decisions),
        "best": best_exchanges(ready, options),
        "grouped": best_exchanges(ready, options, is_grouped=True),
    }
    return LanesView(chips, compressor, tokens, search, decisions, options, schedules)


def _options(chips: str, compressor: str) -> tuple[Option, ...]:
    where = cluster(chips)
    constants = constants_of(where, None)
    near = where.chip.links[0].chips if where.chips > where.chip.links[0].chips else where.chips
    along = Along.over({"data": where.chips}, near)
    patterns = ("scatter_gather", "two_hop", "far") if near < where.chips else ("scatter_gather",)
    exchanges = [Exchange("float32", "dense"), *(Exchange(compressor, each) for each in patterns)]

    def option(exchange: Exchange) -> Option:
        def cost(first: int, last: int) -> Cost:
            return message_cost(
                exchange, along, sum(SIZES[first:last]),
                lambda peers: where.link(near if peers is along.far else 1, peers.size),
                where.chip.bytes_per_second * constants.memory, constants,
            )  # fmt: skip

        return Option("dense" if exchange.pattern == "dense" else exchange.pattern, cost)

    return tuple(map(option, exchanges))


def stretches(schedule: Schedule) -> dict[str, list[tuple[float, float, int]]]:
    """Lane -> stretches (start, end, message); the backward pass is of message -1."""
    found: dict[str, list[tuple[float, float, int]]] = {"chip": [], "link": [], "decode": []}
    now = 0.0
    for name, message, start, end in schedule.lanes:
        if name == "encode":
            found["chip"] += [(now, start, -1), (start, end, message)]
            now = end
        else:
            found[name].append((start, end, message))
    found["chip"].append((now, schedule.ready[-1] + schedule.encoding, -1))
    return found


_LANES = ("chip", "link", "decode")
_BACKWARD, _DENSE, _FEW = "#cfd6dc", "#a8cfe8", look("full").colour
_GAP = 0.0015  # of the width, between neighbours


class LanesPlot(Plot):
    """The lanes of the chosen schedule; widths are shares of the slowest step."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, grid="")
        axes.set(xlim=(0, 1), ylim=(2.6, -0.8), xticks=[])
        self.name_rows(_LANES)
        self.bars = self.segments(linewidths=26, capstyle="butt")
        self.words = [self.text(ha="center", va="center", fontsize=7.5) for _ in TENSORS]
        self.end = self.line(color=INK, linewidth=1.2)
        self.total = self.text(y=-0.55, ha="right", fontsize=9, fontweight="bold")
        shown = {"backward": _BACKWARD, "encode": ACCENT, "dense": _DENSE, "compressed": _FEW}
        axes.legend(
            handles=[Patch(color=colour, label=name) for name, colour in shown.items()],
            loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=9,
        )  # fmt: skip

    def show(self, view: LanesView) -> None:
        longest = max(schedule.seconds for schedule in view.schedules.values())
        lines, colours, places = [], [], {}
        for row, lane in enumerate(_LANES):
            for start, end, message in stretches(view.shown)[lane]:
                left, right = start / longest, end / longest
                lines.append([(left, row), (max(left + _GAP, right - _GAP), row)])
                is_few = message >= 0 and view.shown.messages[message].option.name != "dense"
                colours.append(
                    (_BACKWARD if message < 0 else ACCENT) if lane == "chip"
                    else _FEW if is_few else _DENSE
                )  # fmt: skip
                if lane == "link":
                    places[message] = left, right, is_few
        self.bars.set_segments(lines)
        self.bars.set_color(colours)
        for at, words in enumerate(self.words):
            left, right, is_few = places.get(at, (0.0, 0.0, False))
            name = view.names[at] if at < len(view.names) else ""
            is_wide = right - left > 0.012 * len(name)
            words.set(
                x=(left + right) / 2, y=1, text=name if is_wide else "",
                color="white" if is_few else INK,
            )  # fmt: skip
        end = view.shown.seconds / longest
        self.end.set_data([end, end], [-0.4, 2.5])
        self.total.set_text(in_words(view.shown.seconds, "seconds"))
        self.total.set_x(end)


class EndsPlot(Plot):
    """What each search leaves exposed."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Exposed, of all dense", grid="x")
        axes.set(xlim=(0, 1.4), ylim=(len(SEARCHES) - 0.4, -0.6), xticks=(0, 0.5, 1))
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        self.name_rows([*SEARCHES.values()], fontsize=9)
        self.bars = self.bars_at(range(len(SEARCHES)), 0.6, is_flat=True)
        self.words = [self.text(y=at, va="center", fontsize=9) for at in range(len(SEARCHES))]

    def show(self, view: LanesView) -> None:
        dense = view.schedules["dense"].exposed
        for bar, words, name in zip(self.bars, self.words, SEARCHES, strict=True):
            share = view.schedules[name].exposed / dense
            bar.set(width=share, color=_FEW if name == view.search else _DENSE)
            words.set(x=share + 0.02, text=in_words(view.schedules[name].exposed, "seconds"))


class LanesPanel(Panel):
    """Gradients compressed or not, on the timeline of a backward pass.

    Example:
        >>> panel = LanesPanel(chips="h100:64", search="best")
        >>> panel.view.shown.seconds <= panel.view.schedules["greedy"].seconds
        True
    """

    title = "Gradients: which of them are worth compressing?"
    figure_size = (10.4, 4.0)
    has_palette = True

    chips = Choice("Chips", "h100:64", {words: name for name, words in CHIPS.items()})
    compressor = Choice("Compressor", "int4", {name: name for name in COMPRESSORS})
    tokens = Number("Tokens per chip", 4096, low=512, high=65_536, powers_of_two=True)
    search = Choice("Shown", "best", {words: name for name, words in SEARCHES.items()})
    decisions = Number(
        "Decisions", len(TENSORS), low=0, high=len(TENSORS),
        explanation="Of the greedy search: tensors looked at so far, the largest first",
    )  # fmt: skip

    compute = staticmethod(lanes_view)
    places = (
        (LanesPlot, (0.06, 0.12, 0.58, 0.7)),
        (EndsPlot, (0.79, 0.16, 0.2, 0.66)),
    )
