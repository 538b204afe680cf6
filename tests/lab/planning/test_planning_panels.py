"""The panels on planning, driven from Python."""

import itertools

import numpy as np
import pytest
from panel_moves import MAX_WARM_SECONDS
from yardstick import assert_quick

pytest.importorskip("ipywidgets")

from toolkit.lab.planning import plan
from toolkit.lab.planning.fits import SCHEMES, FitsPanel, _letters
from toolkit.lab.planning.memory import ChipMemoryPanel
from toolkit.lab.planning.plan import PlanPanel

# Together they draw for longer than the first tier has time.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("chip", ["a10g", "b200"])
def test_bars_end_at_the_total_and_no_words_leave_the_picture(chip):
    panel = ChipMemoryPanel(chip=chip)
    for change in ({}, {"model": "llama-3-70b"}, {"fsdp": 256, "recompute": "layer"}):
        panel.change(**change)
        (plot,) = panel._plots
        ends = [bar.get_x() + bar.get_width() for bar in plot.bars]
        assert ends[-2] == pytest.approx(ends[-1])
        limit = panel.view.prediction.limit / panel.view.prediction.memory.total
        assert (limit >= 1) == panel.view.prediction.fits == (not plot.bars[-1].get_hatch())
        for words in (*plot._words, plot._limit_words):
            box = words.get_window_extent()
            assert box.x0 >= 0
            assert box.x1 <= panel.picture.figure.bbox.x1


def test_a_bad_combination_is_told_and_the_picture_stays():
    panel = ChipMemoryPanel(model="llama-3-8b")
    png = panel.png
    with pytest.raises(ValueError, match="batch x sequence_length must be at most"):
        panel.change(replicas=64, fsdp=256, pipeline=8, sequences=32, context=131_072)
    assert panel.png == png
    assert "at most" in panel.error


def test_cells_of_the_map_say_and_colour_what_fits():
    panel = FitsPanel(chip="h100", scheme="ZeRO-3, recomputing")
    table, fewest = panel._plots
    for plot in (table, fewest):
        said = [cell for row in plot.rows for cell in row]
        fitting = sum(is_fit for _, is_fit in said)
        # One outline of five corners per cell that fits, and letters for every cell.
        assert len(plot._fitting.get_path().vertices) == 5 * fitting > 0
        letters = {True: 0, False: 0}
        for words, is_fit in said:
            letters[is_fit] += sum(
                len(codes) for _, codes in _letters(words, plot._fontsize, is_fit)
            )
        for is_fit, shape in plot._words.items():
            assert len(shape.get_path().vertices) == letters[is_fit] > 0
    panel.scheme = "ZeRO-3 x tensor, recomputing"
    title, cells = table._title, table.axes
    assert title.get_window_extent().x1 < cells.get_window_extent().x1
    for at, (words, is_fit) in enumerate(table.rows[3]):
        assert words.endswith("%")
        outline = np.concatenate([part for part, _ in _letters(words, table._fontsize, is_fit)])
        width = cells.get_window_extent().width / len(table.rows[3])
        assert np.ptp(outline[:, 0]) * table.axes.figure.dpi / 72 < width, at


def test_every_strategy_of_the_plan_has_its_row_and_reason():
    panel = PlanPanel(model="llama-3-70b", chips=64)
    table, grade = panel._plots
    assert len(grade.dots.get_xdata()) == len(panel.view.graded) > 16
    # None where the head is whole in some.
    heading = table._heading.get_text()
    shared = f", {heading[15:-1]}" if heading != "strategy" else ""
    for row, texts in zip(panel.view.rows, table.rows, strict=False):
        strategy, _, _, reason = (text.get_text().replace("\n", " ") for text in texts)
        # What all strategies share stands in the heading.
        assert (strategy + shared, reason) == (str(row.strategy), panel.view.remark(row))
        lefts = [text.get_window_extent() for text in texts]
        assert all(one.x1 < two.x0 for one, two in itertools.pairwise(lefts))
    seconds = [row.step_seconds for row in panel.view.rows]
    assert seconds == sorted(seconds)
    assert heading in ("strategy", "strategy (all: head in 16 chunks)")
    assert "(recorded)" in panel.view.sentence()
    assert "(modelled)" in panel.view.sentence()


def test_a_plan_that_does_not_fit_is_told():
    with pytest.raises(ValueError, match="nearest that works"):
        PlanPanel(model="llama-3-70b", chip="a10g", chips=8)


def test_a_search_is_shown_by_a_bar_and_a_setting_come_back_to_needs_none(monkeypatch):
    panel = PlanPanel(model="llama-3.2-1b", chips=8)
    seen = []
    assert panel.page
    panel._bar.observe(lambda change: seen.append(change.new), names="value")
    panel.change(model="llama-3.2-3b", sequences=1)
    assert seen == sorted(seen)
    assert seen[-1] == panel._bar.max > 16
    assert panel._bar.layout.visibility == "hidden"
    panel.model = "llama-3.2-1b"
    searches = []
    monkeypatch.setattr(plan, "searched", lambda *given, tell: searches.append(given))
    panel.model = "llama-3.2-3b"
    assert searches == []


@pytest.mark.timed
@pytest.mark.parametrize(
    ("panel", "control", "values"),
    [
        (FitsPanel, "scheme", SCHEMES),
        (PlanPanel, "model", ("llama-3.2-1b", "llama-3-8b")),
    ],
)
def test_what_was_seen_before_is_drawn_in_a_tenth_of_a_second(panel, control, values):
    shown, ahead = panel(), itertools.cycle(values)
    for _ in values:
        shown.change(**{control: next(ahead)})
    assert_quick(lambda: shown.change(**{control: next(ahead)}), MAX_WARM_SECONDS)
