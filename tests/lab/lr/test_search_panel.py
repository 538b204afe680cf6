"""The panel that steps a search, driven from Python and by its buttons and sliders."""

import asyncio
import io

import numpy as np
import pytest
from panel_moves import assert_quick_update
from whole_search import whole_search

pytest.importorskip("anywidget")

from toolkit.lab.lr.search_panel import SearchPanel

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.slow

PUBLISHED = {"method": "autolrs", "proposals": "sequential"}
QUICK = {"problem": "quadratic 1d", "budget": 500, "candidates": 4, **PUBLISHED}


@pytest.fixture
def panel() -> SearchPanel:
    return SearchPanel(**QUICK)


def test_the_first_picture_has_a_gaussian_process_that_does_not_swing() -> None:
    """The published one turns at nearly every candidate."""

    def turns(**settings) -> int:
        slope = np.sign(np.diff(SearchPanel(**settings).view.landscape.mean))
        return int((slope[1:] != slope[:-1]).sum())

    assert turns() <= 1
    assert turns(method="autolrs") > 6


def test_kappa_changes_where_the_search_goes() -> None:
    tried = {}
    for kappa in (1, 1000):
        panel = SearchPanel(kappa=kappa, **PUBLISHED)
        for _ in range(5):
            panel.step()
        tried[kappa] = [one.rate for one in panel.view.candidates]
    assert tried[1] != tried[1000]
    # With the paper's kappa the candidates spread as far as they can.
    assert np.ptp(np.log(tried[1000])) > np.log(50)


@pytest.mark.parametrize("settings", [PUBLISHED, {"method": "probe"}], ids=str)
@pytest.mark.timed
def test_looking_at_a_round_again_is_quick(settings: dict) -> None:
    panel = SearchPanel(**settings)
    for _ in range(4):
        panel.step()
    assert_quick_update(panel, "round", range(1, 6))


def test_steps_and_the_slider_show_the_same_rounds(panel: SearchPanel) -> None:
    seen = [panel.png]
    for _ in range(5):
        panel.step()
        seen.append(panel.png)
    assert panel.round == len(panel.search.rounds) == 6
    slider, box = panel.page.controls["round"].inputs
    assert (slider.max, box.max) == (6, 6)
    for number in (2, 6, 1):
        slider.value = number
        assert panel.png == seen[number - 1]
        assert panel.view.round == number
    panel.step()  # from wherever one looks, a step is one round more
    assert panel.round == 7


def test_running_is_stepping(panel: SearchPanel) -> None:
    panel.run()
    whole = whole_search(panel.search.settings)
    assert len(panel.search.rounds) == len(whole.rounds) == panel.round
    np.testing.assert_array_equal(panel.search.controller.rates, whole.controller.rates)
    assert panel.view.is_over
    assert panel.page.job
    assert panel._step.disabled
    rounds = panel.round
    panel.step()
    assert panel.round == rounds
    panel.round = 2
    assert not panel.view.is_over


def test_a_run_is_stopped_by_its_button_and_goes_on(panel: SearchPanel) -> None:
    async def run_and_stop_at(rounds: int) -> None:
        panel.page.job._run.click()
        while len(panel.search.rounds) < rounds:
            await asyncio.sleep(0.01)
        panel.page.job._stop.click()
        await panel.page.job._task

    asyncio.run(run_and_stop_at(4))
    stopped = len(panel.search.rounds)
    whole = whole_search(panel.search.settings)
    assert 4 <= stopped < len(whole.rounds)
    assert panel.page.job.message.startswith("stopped after: round")
    panel.page.job.run()
    np.testing.assert_array_equal(panel.search.controller.rates, whole.controller.rates)
    assert panel.view.run.loss == whole.rounds[-1].loss


def test_a_step_during_a_run_takes_no_round_twice(panel: SearchPanel) -> None:
    async def run_with_a_step() -> None:
        panel.page.job.start()
        await asyncio.sleep(0)
        panel._step.click()
        await panel.page.job._task

    asyncio.run(run_with_a_step())
    whole = whole_search(panel.search.settings)
    assert len(panel.search.rounds) == len(whole.rounds)
    np.testing.assert_array_equal(panel.search.controller.rates, whole.controller.rates)


def test_another_search_ends_the_run_of_the_first(panel: SearchPanel) -> None:
    async def run_and_change() -> None:
        panel.page.job.start()
        await asyncio.sleep(0.05)
        panel.candidates = 5
        await panel.page.job._task

    asyncio.run(run_and_change())
    assert (panel.candidates, panel.round) == (5, 1)
    panel.candidates = 4  # the first is still there
    assert panel.round == len(panel.search.rounds) > 1


def test_start_again_forgets_all_rounds_but_the_first(panel: SearchPanel) -> None:
    first = panel.png
    for _ in range(3):
        panel.step()
    assert panel.page
    panel._reset.click()
    assert (panel.round, len(panel.search.rounds)) == (1, 1)
    assert panel.png == first


def test_a_search_goes_on_in_another_panel(panel: SearchPanel) -> None:
    for _ in range(6):
        panel.step()
    np.savez(stored := io.BytesIO(), **panel.search.arrays())
    stored.seek(0)
    other = SearchPanel().resume(np.load(stored, allow_pickle=False))
    assert other.search.settings == panel.search.settings
    assert (other.round, other.candidates, other.problem) == (7, 4, "quadratic 1d")
    panel.run()
    other.run()
    np.testing.assert_array_equal(other.view.run.rates, panel.view.run.rates)
    assert other.view.run.loss == panel.view.run.loss


def test_the_picture_is_the_view(panel: SearchPanel) -> None:
    panel.run()
    view = panel.view
    candidates, _, schedule, ledger, bought = panel._plots
    x, y = schedule.done.get_data()
    np.testing.assert_allclose(y[np.isfinite(y)], view.run.rates)
    np.testing.assert_allclose(x[np.isfinite(x)], view.run.spent)
    np.testing.assert_allclose(bought.dots[1].get_xdata(), [view.run.loss])
    widths = [bar.get_width() for bar in ledger.bars]
    assert widths == [view.run.searched, len(view.run.rates), 0]
    panel.round = 3
    newest = candidates.curves.get_segments()[-1]
    np.testing.assert_allclose(newest[:, 1], panel.view.candidates[-1].losses)
    assert panel.view.candidates[-1].losses[-1] in panel.data()["value"]


def test_diverged_candidates_are_shown_at_the_edge() -> None:
    panel = SearchPanel(problem="quadratic 10", method="probe", budget=4000)
    panel.run()
    for number in range(1, 6):
        panel.round = number
        landscape = panel._plots[1]
        low, high = landscape.axes.get_ylim()
        for line in landscape.pins:
            y = np.asarray(line.get_ydata())
            assert ((low < y) & (y < high)).all()


def test_errors_stay_under_the_panel_and_the_picture_stays(panel: SearchPanel) -> None:
    png = panel.png
    with pytest.raises(ValueError, match=r"round: got 3, wanted 1 to 1; step\(\) takes another"):
        panel.round = 3
    assert panel.error
    assert panel.png == png
    panel.step()
    assert panel.error == ""
    with pytest.raises(ValueError, match="candidates: got 2, wanted 3 to 16"):
        panel.candidates = 2
    with pytest.raises(ValueError, match="budget: got 700, wanted one of 500, 1000"):
        panel.budget = 700


def test_the_table_says_where_numbers_come_from(panel: SearchPanel) -> None:
    table = panel.view.table()
    sources = {what: source for what, _, source in table.rows}
    assert sources["loss now"] == "closed form"
    assert sources["evaluations, search"] == "counted"
    noisy = SearchPanel(problem="network", budget=500, method="probe")
    sources = {what: source for what, _, source in noisy.view.table().rows}
    assert sources["loss now"] == "measured here"
    assert "loss, best schedule" not in sources
