"""The picture of `toolkit bench mixers`: ratios with the lines wanted, and shares of the machine.

Drawn from records, of this run (*measured here*) or of a file (*recorded*). Where a mixer was run
on several shapes, a bar is the least favourable of them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from toolkit.bench.harness import FRACTION
from toolkit.bench.mixers.gpu import LEAST_RATIO
from toolkit.bench.mixers.gpu import PEER as FLA
from toolkit.bench.mixers.suite import MATMUL, OURS, SIZES, WANTED
from toolkit.bench.peers import AFTER
from toolkit.figures import INK, look, new_figure, style
from toolkit.measure import Record

# What divides, and what is wanted of the quotient; all are forward+backward.
LINES = {**WANTED, FLA: LEAST_RATIO}
FRACTION_SIZE = 128  # head size whose share of the machine is drawn
DIRECTIONS: tuple[str, ...] = ("forward", "forward+backward")
ABOVE, BELOW = 0.5, 1.5  # inches for titles, and for labels, legends and provenance
_NAME = re.compile(r"(\w+) (forward(?:\+backward)?) B=\d+ T=\d+ H=\d+ D=(\d+) \w+")


@dataclass(frozen=True)
class MixerFigureData:
    """What the picture shows."""

    mixers: tuple[str, ...]  # their names, in the order they were run
    # contender -> mixer -> its seconds over ours, forward+backward
    ratios: Mapping[str, Mapping[str, float]]
    # direction -> mixer -> our share of the machine's rate, heads of 128
    fractions: Mapping[str, Mapping[str, float]]
    yardstick: str  # what the share is of


def mixer_figure_data(records: Iterable[Record]) -> MixerFigureData:
    """Reads ratios and shares out of the records of the suite."""
    seconds: dict[str, dict[str, float]] = {}
    for record in records:
        case, _, contender = (
            record.name.split(" | ") if record.name.count(" | ") == 2 else ("",) * 3
        )
        if _NAME.fullmatch(case):
            seconds.setdefault(case, {})[contender] = record.value
    ratios: dict[str, dict[str, float]] = {}
    fractions: dict[str, dict[str, float]] = {}
    yardstick = MATMUL
    for case, values in seconds.items():
        mixer, direction, size = _NAME.findall(case)[0]
        ours = values.get(OURS + AFTER, values.get(OURS, values.get("toolkit", 0.0)))
        for contender in LINES.keys() & values.keys():
            if direction == "forward+backward":
                _keep_least(ratios.setdefault(contender, {}), mixer, values[contender] / ours)
        for name in values:
            if name.startswith(FRACTION) and int(size) == FRACTION_SIZE:
                yardstick = name.removeprefix(FRACTION)
                _keep_least(fractions.setdefault(direction, {}), mixer, values[name])
    if not seconds:
        raise ValueError("the records hold no sequence of a mixer: want those of suite mixers")
    mixers = tuple(dict.fromkeys(case.partition(" ")[0] for case in seconds))
    return MixerFigureData(mixers, ratios, fractions, yardstick)


def draw_mixers(records: Iterable[Record], path: Path, *, is_recorded: bool) -> Path:
    """Draws the picture and writes it."""
    records = list(records)
    data = mixer_figure_data(records)
    with style():
        inches = 0.3 + 0.5 * len(data.mixers)  # of the axes, so that bars are alike in any number
        height = ABOVE + inches + BELOW
        figure = new_figure(11.0, height)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        figure.subplots_adjust(
            left=0.11, right=0.99, wspace=0.06, bottom=BELOW / height, top=1 - ABOVE / height
        )
        ratios = {name: data.ratios[name] for name in LINES if name in data.ratios}
        # On a logarithmic axis bars grow from 1, "as fast as ours", to either side.
        _bars(left, data.mixers, ratios, LINES, looks=("full", "gdn"), start=1.0, form="{:.3g}")
        highest = max([10.0, *(max(table.values()) for table in ratios.values())])
        left.set_xscale("log")
        left.set_xlim(0.5, 2.0 * highest)
        ticks = [tick for tick in (1, 3, 10, 30, 100, 300) if tick < 2.0 * highest]
        left.set_xticks(ticks, [str(tick) for tick in ticks])
        left.minorticks_off()
        left.set_title("Time of others over time of ours, forward+backward")
        left.set_xlabel("their seconds / our seconds (logarithmic)")

        fractions = {name: data.fractions[name] for name in DIRECTIONS if name in data.fractions}
        least = SIZES[FRACTION_SIZE] if data.yardstick == MATMUL else None
        lines = {} if least is None else dict.fromkeys(DIRECTIONS, least)
        _bars(
            right,
            data.mixers,
            fractions,
            lines,
            looks=("window", "fourth"),
            start=0.0,
            form="{:.0%}",
        )
        right.set_xlim(0, 1.15)
        right.xaxis.set_major_formatter(PercentFormatter(1.0))
        right.set_title(f"Share of the {data.yardstick}")
        right.set_xlabel(f"our work / our seconds, heads of {FRACTION_SIZE}")
        left.set_yticks(range(len(data.mixers)), data.mixers)
        left.invert_yaxis()
        kind = "recorded" if is_recorded else "measured here"
        about = records[0]
        figure.text(
            0.01, 0.12 / height,
            f"{kind}: {about.device}, jax {about.versions.get('jax', '?')}, {about.date[:10]}, "
            f"commit {about.commit}",
            color=INK, fontsize=9,
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def _keep_least(table: dict[str, float], mixer: str, value: float) -> None:
    table[mixer] = min(value, table.get(mixer, value))


def _bars(
    axes: Axes, mixers: Sequence[str], tables: Mapping[str, Mapping[str, float]],
    wanted: Mapping[str, float], *,
    looks: Sequence[str], start: float,
    form: str,
) -> None:  # fmt: skip
    """Horizontal bars, one per mixer and table, with numbers and the wanted line."""
    height = 0.8 / max(1, len(tables))
    for number, (name, table) in enumerate(tables.items()):
        appearance = look(looks[number % len(looks)])
        places = {
            mixer: index - 0.4 + height * (number + 0.5)
            for index, mixer in enumerate(mixers)
            if mixer in table
        }
        least = wanted.get(name)
        axes.barh(
            list(places.values()), [table[mixer] - start for mixer in places], 0.92 * height,
            left=start, color=appearance.colour, hatch=appearance.hatch, edgecolor="white",
            linewidth=0, label=name if least is None else f"{name} (wanted: {form.format(least)})",
        )  # fmt: skip
        for mixer, place in places.items():
            axes.annotate(
                form.format(table[mixer]), (max(table[mixer], least or 0, start), place), (5, 0),
                textcoords="offset points", va="center", fontsize=9,
            )  # fmt: skip
        if least is not None:
            low, high = (
                [place + side * 0.46 * height for place in places.values()] for side in (-1, 1)
            )
            for colour, width in (("white", 4.0), (INK, 2.0)):
                axes.vlines([least] * len(low), low, high, color=colour, linewidth=width)
    axes.grid(axis="y", visible=False)
    below = -0.6 / (0.3 + 0.5 * len(mixers))  # 0.6 inches under the axes, below their label
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, below))
