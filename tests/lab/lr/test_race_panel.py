"""A schedule drawn by hand: the control that draws it, and the race it runs."""

import asyncio
import itertools

import numpy as np
import pytest
from panel_moves import MAX_WARM_SECONDS
from whole_search import whole_search
from yardstick import assert_quick

pytest.importorskip("anywidget")

from toolkit.lab.kit.curve_control import KNOTS, Curve, at_knots
from toolkit.lab.lr.race import RACERS, SEARCHED, RacePanel, drawn_rates, plotted, settings_of
from toolkit.lab.lr.small_problems import SHAPES, best_known, problem

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.slow

EXACT = 1e-12
ONE = {"problem": "quadratic 1d", "budget": 500}


@pytest.fixture
def panel() -> RacePanel:
    return RacePanel(**ONE)


def test_every_racer_ends_where_its_schedule_does(panel: RacePanel) -> None:
    quadratic = problem("quadratic 1d").quadratic
    runs = panel.view.runs
    assert set(runs) == set(RACERS)
    best = best_known("quadratic 1d", 500).loss
    for name, run in runs.items():
        assert run.loss == pytest.approx(quadratic.final_loss(run.rates), rel=EXACT)
        assert panel.view.ratio(name) == pytest.approx(run.loss / best, rel=EXACT)
        assert panel.view.ratio(name) >= 1 - EXACT
    for name in ("yours", "best", *SHAPES):
        assert len(runs[name].rates) == 500
    for name in SEARCHED:  # candidates are paid from the same budget
        assert len(runs[name].rates) + runs[name].searched == 500
        whole = whole_search(settings_of(name, "quadratic 1d", 500))
        assert runs[name].loss == whole.rounds[-1].loss


def test_the_schedule_is_the_points_joined_by_lines() -> None:
    points = ((0.0, 0.2), (0.5, 1.0), (1.0, 0.0))
    rates = drawn_rates("quadratic 10", 1000, points)
    top = problem("quadratic 10").lr_range[1]
    np.testing.assert_allclose(rates[[0, 250, 500, 750]], top * np.array([0.2, 0.6, 1.0, 0.5]))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([(0, 0.5), (1, 0)], ((0, 0.5), (1, 0))),
        ([(1, 0), (0, 0.5)], ((0, 0.5), (1, 0))),
        ([(0.3, 0.7)], ((0, 0.7), (0.3, 0.7), (1, 0.7))),
        (np.array([[0.0, 1.0], [0.9, 0.1]]), ((0, 1), (0.9, 0.1), (1, 0.1))),
    ],
    ids=str,
)
def test_points_are_sorted_and_level_at_the_ends(given, kept, panel: RacePanel) -> None:
    panel.points = given
    assert panel.points == kept
    assert panel.page.controls["points"].editor.points == [list(point) for point in kept]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(0, 1.5), (1, 0)], "wanted x and y from 0 to 1"),
        ([(0, float("nan"))], "wanted x and y from 0 to 1"),
        ([(0.5, 1), (0.5, 0)], "wanted no x twice"),
        ([0.1, 0.2], "wanted up to 64 pairs"),
        ([], "wanted up to 64 pairs"),
        ("linear", "wanted up to 64 pairs"),
        ([(0, 1), (1, 0, 1)], "wanted up to 64 pairs"),
    ],
)
def test_what_is_no_curve_is_refused(points, message: str, panel: RacePanel) -> None:
    png = panel.png
    with pytest.raises(ValueError, match=f"points: got .*{message}"):
        panel.points = points
    assert panel.png == png


def test_editor_sliders_and_python_move_the_same_curve(panel: RacePanel) -> None:
    curve = panel.page.controls["points"]
    curve.editor.points = [[0, 0.9], [0.4, 0.9], [1, 0]]  # as the page sends it
    assert panel.points == ((0, 0.9), (0.4, 0.9), (1, 0))
    sliders = [knot.inputs[0] for knot in curve._knots]
    np.testing.assert_allclose([s.value for s in sliders], at_knots(panel.points), atol=0.0051)
    assert all(round(slider.value, 2) == slider.value for slider in sliders)
    sliders[-1].value = 0.25
    assert panel.points[-1] == (1.0, 0.25)
    assert len(panel.points) == KNOTS
    assert curve.editor.points[-1] == [1.0, 0.25]
    boxes = [knot.inputs[1] for knot in curve._knots]
    boxes[0].value = 0.1
    assert panel.points[0] == (0.0, 0.1)
    assert panel.view.rates[0] == pytest.approx(0.1 * problem("quadratic 1d").lr_range[1])


def test_the_editor_knows_the_largest_rate(panel: RacePanel) -> None:
    editor = panel.page.controls["points"].editor
    assert editor.top == pytest.approx(problem("quadratic 1d").lr_range[1])
    panel.problem = "quadratic 10"
    assert editor.top == pytest.approx(1.99)


def test_a_drawing_out_of_bounds_shows_its_error(panel: RacePanel) -> None:
    editor = panel.page.controls["points"].editor
    editor.points = [[0, 2.0], [1, 0]]
    assert "wanted x and y from 0 to 1" in panel.error
    panel.points = [(0, 1), (1, 0)]
    assert panel.error == ""


@pytest.mark.timed
def test_the_race_follows_the_hand() -> None:
    panel = RacePanel()
    heights = itertools.cycle(np.linspace(0.3, 0.9, 8))
    assert_quick(lambda: panel.change(points=[(0, next(heights)), (1, 0)]), MAX_WARM_SECONDS)


def test_a_hand_that_diverges_says_so_and_spoils_no_axis(panel: RacePanel) -> None:
    panel.change(problem="quadratic 10", points=[(0, 0.5), (1, 0)])
    _, losses, ends = panel._plots
    runs = {**panel.view.runs}
    best = runs.pop("best")
    for run in runs.values():  # above all others on the way, and below them in the end
        assert best.losses[len(best.losses) // 4] > run.losses[len(run.losses) // 4]
        assert best.loss < run.loss
    limits = losses.axes.get_ylim(), ends.axes.get_xlim()
    panel.points = [(0, 1), (1, 1)]  # stays at the edge of stability
    assert panel.view.ratio("yours") > 50
    assert (losses.axes.get_ylim(), ends.axes.get_xlim()) == limits


def test_on_the_network_a_race_waits_stops_and_goes_on() -> None:
    panel = RacePanel(problem="network", budget=500)
    assert panel.view.missing == tuple(name for name in RACERS if name != "best")
    assert "has not run yet" in panel.view.sentence()
    assert panel._plots[1].waiting.get_text()

    async def race_and_stop_at(rest: int) -> None:
        panel.page.job._run.click()
        while len(panel.view.missing) > rest:
            await asyncio.sleep(0.01)
        panel.page.job._stop.click()
        await panel.page.job._task

    asyncio.run(race_and_stop_at(4))
    done = panel.view.runs
    assert "yours" in done
    assert panel.view.missing
    panel.race()
    assert not panel.view.missing
    assert all(panel.view.runs[name] is run for name, run in done.items() if name != "yours")
    assert panel.view.reference == "linear"
    assert panel.view.ratio("linear") == 1
    straight = RacePanel(problem="network", budget=500)
    straight.race()
    assert straight.data() == panel.data()
    panel.points = [(0, 0.3), (1, 0)]  # another drawing has not run
    assert panel.view.missing == ("yours",)
    assert "not run yet" in str(panel.view.table().rows)


def test_curves_are_broken_where_a_search_was_paid() -> None:
    run = RacePanel(problem="quadratic 10", budget=4000).view.runs["robust"]
    spent, rates, losses = plotted(run, True)
    gaps = (np.diff(run.spent) > 1).sum()
    assert np.isnan(spent).sum() == np.isnan(rates).sum() == np.isnan(losses).sum() == gaps > 0
    assert (spent[0], losses[0]) == (run.spent[0], run.losses[0])
    assert (spent[-1], losses[-1]) == (run.spent[-1], run.losses[-1])


def test_a_curve_without_a_panel_checks_itself() -> None:
    curve = Curve("Rate", ((0.0, 1.0), (1.0, 0.0)))
    curve.name = "rate"
    assert curve.check([[0, 1], [1, 0]]) == ((0.0, 1.0), (1.0, 0.0))
