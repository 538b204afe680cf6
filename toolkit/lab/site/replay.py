"""A panel recorded over a grid of its settings: one file, from which a page replays it.

    settings --compute--> view --plots--> SVG elements,  caption, table

The panel's own view and plots are asked once per point of the grid. Points share what they have in
common: every element, caption and column is kept once, and a point is a row of whole numbers.
"""

import base64
import gzip
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.figures import style
from toolkit.lab.kit.controls import Choice, Control, Number
from toolkit.lab.kit.panel import PIXELS_PER_INCH_ON_PAGE, Panel
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.site.drawing import ElementRenderer
from toolkit.measure.provenance import environment

MOST_POINTS = 4000
MOST_BYTES = 1_000_000
Values = Sequence[Any] | Mapping[str, Any] | None
"""The values of a control: some values, named values, or None for all."""


@dataclass(frozen=True)
class Axis:
    """A control on the page: its values in words and, for a slider, in numbers."""

    name: str
    control: Control
    words: list[str]
    values: list[Any]

    def header(self, now: Any) -> dict[str, Any]:
        """What the page needs to make it; `now` is where it starts."""
        if now not in self.values:
            wanted = ", ".join(self.words)
            raise ValueError(f"{self.name}: the panel has {now!r}, wanted one of {wanted}")
        slides = isinstance(self.control, Number)
        return {
            "name": self.name,
            "label": self.control.label.partition(":")[0],
            "explanation": self.control.explanation,
            "words": self.words,
            "numbers": [float(value) for value in self.values] if slides else None,
            "start": self.values.index(now),
        }


def axis_of(panel: Panel | type[Panel], name: str, values: Values) -> Axis:
    """The values of a control, checked by it."""
    control = panel.controls.get(name)
    if control is None:
        raise ValueError(f"{name}: no such control, wanted one of {', '.join(panel.controls)}")
    named = values if isinstance(values, Mapping) else None
    if named is None and isinstance(control, Choice):
        wanted = [*control.options.values()] if values is None else [*values]
        named = {text: value for text, value in control.options.items() if value in wanted}
    if named is None and isinstance(control, Number):
        given = _all_of(control) if values is None else values
        named = {f"{value:,}" if control.is_integer else f"{value:g}": value for value in given}
    if named is None:
        raise ValueError(f"{name}: got {values!r}, wanted values by name")
    return Axis(name, control, [*named], [control.check(value) for value in named.values()])


def _all_of(number: Number) -> list[float]:
    """Where the slider of a number stops."""
    if number.powers_of_two:
        low, high = (math.log2(bound) for bound in (number.low, number.high))
        return [2**power for power in range(math.ceil(low), math.floor(high) + 1)]
    count = round((number.high - number.low) / number.step) + 1
    return [number.low + step * number.step for step in range(count)]


class _Pool:
    """Distinct objects, identified by index."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, label: str) -> int:
        return self.places.setdefault(label, len(self.places))


def record_panel(panel: Panel, grid: Mapping[str, Values]) -> bytes:
    """The panel at every point of a grid: a JSON header, then rows of whole numbers.

    A row is the background, the caption, the error (or -1), how many elements, the elements, and
    the columns of the table, and the scene of a panel that plays one. Controls that are not in the
    grid stay as they are.
    """
    axes = [axis_of(panel, name, values) for name, values in grid.items()]
    count = math.prod(len(axis.values) for axis in axes)
    if not 0 < count <= MOST_POINTS:
        raise ValueError(f"grid: {count:,} points, wanted 1 to {MOST_POINTS:,}")
    backgrounds, elements, words, columns, scenes = (_Pool() for _ in range(5))
    state, figure = dict(panel.state), panel.picture.figure
    renderer, rows, background = ElementRenderer(figure), [], -1
    for values in itertools.product(*(axis.values for axis in axes)):
        point = state | {axis.name: value for axis, value in zip(axes, values, strict=True)}
        try:
            view = panel.compute(**point)
        except ValueError as error:  # the panel shows it below the picture, which stays
            rows.append([-1, -1, words.place(str(error)), 0])
            continue
        panel.draw(view)
        with style():
            if background < 0 or figure.stale:
                renderer.elements = []
                figure.draw(renderer)
                background = backgrounds.place(as_recorded("".join(renderer.elements)))
            drawn = renderer.draw(panel.picture.moving)
            seen = [elements.place(as_recorded(element)) for element in drawn]
        figure.stale = False
        cells = view.cells().items()
        table = [columns.place(as_recorded(json.dumps(column))) for column in cells]
        caption = words.place(as_recorded(view.sentence()))
        played = []
        if isinstance(panel, PlayedPanel):
            played = [scenes.place(as_recorded(json.dumps(panel.scene(view).as_json())))]
        rows.append([background, caption, -1, len(seen), *seen, *table, *played])
    panel.refresh()
    width, height = (inches * PIXELS_PER_INCH_ON_PAGE for inches in panel.figure_size)
    header = {
        "title": panel.title,
        "size": [round(width), round(height)],
        "controls": [axis.header(state[axis.name]) for axis in axes],
        "held": _held(panel, grid),
        "origin": f"{count:,} settings, computed in advance on {origin()}",
        "patterns": "".join(renderer.patterns.values()),
        "backgrounds": [*backgrounds.places],
        "elements": [*elements.places],
        "words": [*words.places],
        "columns": [json.loads(column) for column in columns.places],
        "scenes": [json.loads(scene) for scene in scenes.places],
    }
    if isinstance(panel, PlayedPanel):
        names = {name: getattr(panel, name) for name in ("bar_control", "time_control")}
        header |= {"timed": panel.timed(), **names}
    return as_recording(header, rows)


def as_recording(header: Mapping[str, Any], rows: Sequence[Sequence[int]] = ()) -> bytes:
    """The length of the header, the header, and the numbers of all rows."""
    whole = {**header, "lengths": [len(row) for row in rows]}
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)  # the numbers start at a multiple of their size
    numbers = np.fromiter(itertools.chain.from_iterable(rows), "<i4")
    return np.array([len(text)], "<u4").tobytes() + text + numbers.tobytes()


def _held(panel: Panel, grid: Mapping[str, Values]) -> str:
    """The controls missing on the page, and their values."""
    parts = []
    for name, control in panel.controls.items():
        if name not in grid:
            value = panel.state[name]
            if isinstance(control, Choice):
                options = control.options.items()
                value = next(text for text, option in options if option == value)
            parts.append(f"{control.label}: {value:,}" if isinstance(value, int) else
                         f"{control.label}: {value}")  # fmt: skip
    return "; ".join(parts)


def as_recorded(words: str) -> str:
    """Replace "measured here" by "recorded", as the reader's machine did not measure it."""
    return words.replace("Measured here", "Recorded").replace("measured here", "recorded")


def origin() -> str:
    """Where and when something was computed, in words."""
    here = environment()
    return (
        f"{here['device']} with jax {here['versions']['jax']}, {here['date'][:10]}, "
        f"commit {here['commit']}"
    )


def as_script(name: str, recorded: bytes) -> str:
    """A recording as a script, which a page may read without a server too."""
    packed = base64.b64encode(gzip.compress(recorded, mtime=0)).decode()
    text = f'(globalThis.toolkitReplays ??= {{}})["{name}"] = "{packed}";\n'
    if len(text) > MOST_BYTES:
        raise ValueError(
            f"{name}: {len(text):,} bytes, wanted at most {MOST_BYTES:,}; make its grid coarser"
        )
    return text
