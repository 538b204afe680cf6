"""The picture of `toolkit bench mixers`: ratios with the lines wanted, and shares of the machine.

Drawn from records, of this run (*measured here*) or of a file (*recorded*). Where a mixer was run
on several shapes, a bar is the least favourable of them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from toolkit.bench.harness import FRACTION
from toolkit.bench.mixers import MATMUL, OURS, SIZES, WANTED
from toolkit.bench.mixers_gpu import LEAST_RATIO
from toolkit.bench.mixers_gpu import PEER as FLA
from toolkit.lab.figures import ACCENT, INK, look, new_figure, style
from toolkit.measure import Record

# What divides, and what is wanted of the quotient; all are forward+backward.
LINES = {**WANTED, FLA: LEAST_RATIO}
FRACTION_SIZE = 128  # head size whose share of the machine is drawn
DIRECTIONS = ("forward", "forward+backward")
_NAME = re.compile(r"(\w+) (forward(?:\+backward)?) B=\d+ T=\d+ H=\d+ D=(\d+) \w+")


@dataclass(frozen=True)
class MixerFigureData:
    """What the picture shows.

    Attributes:
        ratios: contender -> mixer -> its seconds over ours, forward+backward.
        fractions: direction -> mixer -> our share of the machine's rate, heads of 128.
        yardstick: what the share is of.
    """

    ratios: Mapping[str, Mapping[str, float]]
    fractions: Mapping[str, Mapping[str, float]]
    yardstick: str


def mixer_figure_data(records: Iterable[Record]) -> MixerFigureData:
    """Reads ratios and shares out of the records of the suite.

    Args:
        records: what `toolkit bench mixers` wrote.

    Returns:
        The data; a mixer or contender that was not run is absent.

    Raises:
        ValueError: no record of a mixer's sequences among them.

    Cost:
        One pass.
    """
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
        mixer, direction, size = _NAME.fullmatch(case).groups()  # pyright: ignore
        ours = values.get(OURS, values.get("toolkit", 0.0))
        for contender in LINES.keys() & values.keys():
            if direction == "forward+backward":
                _keep_least(ratios.setdefault(contender, {}), mixer, values[contender] / ours)
        for name in values:
            if name.startswith(FRACTION) and int(size) == FRACTION_SIZE:
                yardstick = name.removeprefix(FRACTION)
                _keep_least(fractions.setdefault(direction, {}), mixer, values[name])
    if not seconds:
        raise ValueError("the records hold no sequence of a mixer: want those of suite mixers")
    return MixerFigureData(ratios, fractions, yardstick)


def draw_mixers(records: Iterable[Record], path: Path, *, is_recorded: bool) -> Path:
    """Draws the picture and writes it.

    Args:
        records: of one run of the suite.
        path: the PNG file.
        is_recorded: whether they come from a file rather than from this run.

    Returns:
        `path`.

    Raises:
        ValueError: no record of a mixer's sequences among them.

    Cost:
        About a second.
    """
    records = list(records)
    data = mixer_figure_data(records)
    mixers = list(dict.fromkeys(
        mixer for table in (*data.ratios.values(), *data.fractions.values()) for mixer in table
    ))  # fmt: skip
    with style():
        figure = new_figure(11.0, 1.8 + 0.5 * len(mixers))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        ratios = {name: data.ratios[name] for name in LINES if name in data.ratios}
        _bars(left, mixers, ratios, "{:.3g}")
        left.set_xscale("log")
        left.set_xlim(0.5, 2.5 * max([10.0, *(max(t.values()) for t in ratios.values())]))
        left.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        left.minorticks_off()
        for name in ratios:
            _wanted(left, LINES[name], f"wanted of {name.split(', ')[-1]}: {LINES[name]:g}")
        left.set_title("Times as long as ours, forward+backward")
        left.set_xlabel("their seconds / our seconds (logarithmic)")

        fractions = {name: data.fractions[name] for name in DIRECTIONS if name in data.fractions}
        _bars(right, mixers, fractions, "{:.0%}")
        right.set_xlim(0, 1.15)
        right.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        if data.yardstick == MATMUL and (least := SIZES[FRACTION_SIZE]) is not None:
            _wanted(right, least, f"wanted: {least:.0%}")
        right.set_title(f"Share of the {data.yardstick}")
        right.set_xlabel(f"heads of {FRACTION_SIZE}")
        left.set_yticks(range(len(mixers)), mixers)
        left.invert_yaxis()
        kind = "recorded" if is_recorded else "measured here"
        about = records[0]
        figure.text(
            0.01, 0.012,
            f"{kind}: {about.device}, jax {about.versions.get('jax', '?')}, {about.date[:10]}, "
            f"commit {about.commit}",
            color=INK, fontsize=9,
        )  # fmt: skip
        figure.tight_layout(rect=(0, 0.035, 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def _keep_least(table: dict[str, float], mixer: str, value: float) -> None:
    table[mixer] = min(value, table.get(mixer, value))


def _bars(
    axes: Axes, mixers: list[str], tables: Mapping[str, Mapping[str, float]], form: str
) -> None:
    """Horizontal bars, one a mixer and table, each with its number beside it."""
    height = 0.8 / max(1, len(tables))
    for number, (name, table) in enumerate(tables.items()):
        appearance = look(("full", "gdn", "window")[number % 3])
        places = [
            index - 0.4 + height * (number + 0.5)
            for index, mixer in enumerate(mixers)
            if mixer in table
        ]
        values = [table[mixer] for mixer in mixers if mixer in table]
        axes.barh(
            places, values, 0.92 * height, label=name,
            color=appearance.colour, hatch=appearance.hatch, edgecolor="white", linewidth=0,
        )  # fmt: skip
        for place, value in zip(places, values, strict=True):
            axes.annotate(
                form.format(value), (value, place), (4, 0),
                textcoords="offset points", va="center", fontsize=9,
            )  # fmt: skip
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(tables))


def _wanted(axes: Axes, value: float, text: str) -> None:
    axes.axvline(value, color=ACCENT, linewidth=1.4, linestyle=(0, (4, 2)))
    axes.text(
        value, 1.0, f"{text} ", color=ACCENT, fontsize=8.5, ha="center", va="bottom",
        transform=blended_transform_factory(axes.transData, axes.transAxes),
    )  # fmt: skip
