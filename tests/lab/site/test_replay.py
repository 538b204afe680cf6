"""Panels recorded for a page without a kernel: what is replayed is what the panel shows."""

import base64
import gzip
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.textpath import TextPath

pytest.importorskip("ipywidgets")

import toolkit.lab
from toolkit.lab import MixerCostPanel, MixerPanel, ReadingPanel
from toolkit.lab.kit.panel import PIXELS_PER_INCH_ON_PAGE
from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.site import replay
from toolkit.lab.site.drawing import ElementRenderer
from toolkit.lab.site.panels import ELSEWHERE, REPLAYED, shown_in
from toolkit.lab.site.questions import record_questions
from toolkit.lab.site.replay import as_script, axis_of, record_panel

ROOT = Path(__file__).resolve().parents[3]


def read(recorded):
    """Header and rows of a recording, as the page reads them."""
    length = int(np.frombuffer(recorded, "<u4", 1)[0])
    header = json.loads(recorded[4 : 4 + length])
    numbers = np.frombuffer(recorded, "<i4", offset=4 + length)
    return header, np.split(numbers, np.cumsum(header["lengths"])[:-1])


def table(header, row):
    return dict(header["columns"][at] for at in row[4 + row[3] :])


def test_a_point_of_the_grid_is_the_view():
    panel = MixerCostPanel(context_length=4096, heads=4)
    grid = {"context_length": (256, 4096, 1 << 20), "left": ("linear", "retention"), "heads": (4,)}
    header, rows = read(record_panel(panel, grid))
    assert [control["start"] for control in header["controls"]] == [1, 1, 0]
    assert header["controls"][0]["words"] == ["256", "4,096", "1,048,576"]
    assert panel.state["context_length"] == 4096
    assert "Head size: 128" in header["held"]
    assert "computed in advance on" in header["origin"]
    at = 0
    for context_length in grid["context_length"]:
        for left in grid["left"]:
            view = panel.compute(**{**panel.state, "context_length": context_length, "left": left})
            row, at = rows[at], at + 1
            assert table(header, row) == view.cells()
            assert header["words"][row[1]] == view.sentence()
            drawn = header["backgrounds"][row[0]]
            drawn += "".join(header["elements"][one] for one in row[4 : 4 + row[3]])
            for words in (
                f"{context_length:,} tokens",
                view.cell_of("moved", "left"),
                view.footnote(),
            ):
                assert f">{words}</text>" in drawn
    # What stands still is kept once (the names of two mixers do), as is what two points share.
    assert len(header["backgrounds"]) == 2
    assert len(header["elements"]) < sum(row[3] for row in rows)


def test_a_map_has_one_pixel_per_cell():
    panel = ReadingPanel(token=3)
    header, rows = read(record_panel(panel, {"token": (3,)}))
    words = len(panel.view.words)
    drawn = "".join(header["elements"][one] for one in rows[0][4 : 4 + rows[0][3]])
    sizes = re.findall(r'<image width="(\d+)" height="(\d+)"', drawn)
    assert sizes == [(str(words), str(words)), ("16", "16")]


def test_letters_keep_thin_strokes_and_hatches_their_inch():
    figure = Figure(figsize=(2, 1))
    FigureCanvasAgg(figure)
    line = TextPath((0, 0), "\N{EN DASH}", size=9)
    letters = figure.add_artist(PathPatch(line, linewidth=0, snap=False))
    bar = figure.add_artist(Rectangle((0.1, 0.1), 0.5, 0.5, linewidth=0, hatch="/"))
    renderer = ElementRenderer(figure)
    drawn = renderer.draw([letters, bar])
    assert ["crispEdges" in element for element in drawn] == [False, True]
    (pattern,) = renderer.patterns.values()
    assert f'width="{PIXELS_PER_INCH_ON_PAGE}"' in pattern
    assert "M0 100L100 0" in pattern


def test_a_point_that_the_panel_refuses_has_its_words():
    class Picky(MixerCostPanel):
        def compute(self, **state):
            if state["heads"] == 2:
                raise ValueError("heads: got 2, wanted another")
            return super().compute(**state)

    header, rows = read(record_panel(Picky(), {"heads": (2, 16)}))
    assert [*rows[0]][:2] == [-1, -1]
    assert header["words"][rows[0][2]] == "heads: got 2, wanted another"
    assert rows[1][2] == -1


def test_a_grid_is_checked():
    panel = MixerCostPanel()
    assert axis_of(panel, "context_length", None).values == [2**n for n in range(7, 21)]
    assert axis_of(panel, "bytes_per_number", None).words == ["float32", "bfloat16", "8 bit"]
    for grid, words in (
        ({"nothing": None}, "nothing: no such control"),
        ({"heads": (1, 65)}, "heads: got 65, wanted 1 to 64"),
        ({"heads": (1, 2)}, "heads: the panel has 16"),
        ({"heads": None, "context_length": None, "left": None}, "grid: .* points, wanted 1 to"),
        ({"heads": ()}, "grid: 0 points"),
    ):
        with pytest.raises(ValueError, match=words):
            record_panel(panel, grid)
    with pytest.raises(ValueError, match="text: got None, wanted values by name"):
        axis_of(ReadingPanel(), "text", None)


def test_a_script_is_small_and_holds_the_recording(monkeypatch):
    text = as_script("one", b"recorded")
    (packed,) = re.findall(r'\["one"\] = "(.*)";', text)
    assert gzip.decompress(base64.b64decode(packed)) == b"recorded"
    monkeypatch.setattr(replay, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match=r"one: .* wanted at most 10; make its grid coarser"):
        as_script("one", b"recorded")


@pytest.mark.parametrize("name", REPLAYED)
def test_a_panel_stands_in_one_cell_and_its_grid_is_its_own(name):
    replayed = REPLAYED[name]
    page, start = replayed.page, replayed.cell
    cells = json.loads((ROOT / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["\n" + "".join(cell["source"]) for cell in cells]
    assert sum(f"\n{start}" in source for source in sources) == 1
    kind = getattr(toolkit.lab, replayed.panel)
    axes = [axis_of(kind, control, values) for control, values in replayed.grid.items()]
    assert math.prod(len(axis.values) for axis in axes) <= replay.MOST_POINTS
    for axis in axes:
        if replayed.prepare is None:
            axis.header(replayed.start.get(axis.name, axis.control.default))


def test_what_was_measured_is_told_as_recorded():
    header, rows = read(record_panel(MixerPanel(token=5), {"token": (5,)}))
    drawn = header["backgrounds"][rows[0][0]]
    drawn += "".join(header["elements"][one] for one in rows[0][4:])
    for words in (*header["words"], drawn):
        assert "measured here" not in words.lower()
    assert "Recorded; nothing is trained." in drawn
    assert re.search(r"on .+ with jax \d.+, \d{4}-\d\d-\d\d, commit", header["origin"])


def test_questions_are_asked_as_in_the_lesson():
    header, _ = read(record_questions("pipeline"))
    (first, second) = load_outline("pipeline").questions
    assert [*header][:2] == [first.name, second.name]
    asked = header[second.name]
    assert asked["text"] == second.text
    assert tuple(asked["options"]) == second.options
    assert asked["words"] == second.answer().words
    assert "Computed in advance on" in asked["origin"]


@pytest.mark.parametrize("place", ELSEWHERE)
def test_another_place_of_a_panel_is_a_cell_and_starts_within_its_grid(place):
    page, cell = place
    name, start = ELSEWHERE[place]
    cells = json.loads((ROOT / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    (source,) = (one for one in sources if f"\n{cell}" in f"\n{one}")
    assert shown_in(page, source) == (name, start)
    assert shown_in(page, sources[0]) == ("", {})
    kind = getattr(toolkit.lab, REPLAYED[name].panel)
    for control, words in start.items():
        values = REPLAYED[name].grid[control]
        assert words in axis_of(kind, control, values).words
