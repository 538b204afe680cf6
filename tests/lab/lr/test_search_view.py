"""What the panels on learning-rate search show, against closed forms and the searches' own word."""

import numpy as np
import pytest
from whole_search import whole_search

pytest.importorskip("anywidget")

from toolkit.lab.kit.view import in_cell
from toolkit.lab.lr.search_rounds import Search, Settings, begin, from_arrays, next_round
from toolkit.lab.lr.search_view import columns, parabola, view_round
from toolkit.lab.lr.small_problems import (
    BUDGETS,
    PROBLEMS,
    SHAPES,
    STABLE,
    STORED,
    best_known,
    find_schedules,
    peaks,
    problem,
    run_peak,
    tuned,
)
from toolkit.lr import Request

EXACT = 1e-9
FORECAST = 1e-3  # of an exponential without noise, from five points of it
FIVE_DIGITS = 1e-5  # to which the best rates are stored

ONE_DIMENSION = Settings("quadratic 1d", 500, "robust", 6, 1000.0, "sequential")
TOGETHER = Settings("quadratic 10", 1000, "robust", 6, 1000.0, "together")
PUBLISHED = Settings("quadratic 100", 500, "autolrs", 5, 2.0, "sequential")
PROBES = Settings("quadratic 10", 2000, "probe", 7, 1000.0, "sequential")
NOISY = Settings("network", 500, "robust", 4, 1000.0, "sequential")
EVERY = [ONE_DIMENSION, TOGETHER, PUBLISHED, PROBES, NOISY]
every_search = pytest.mark.parametrize(
    "settings", EVERY, ids=lambda s: f"{s.problem}-{s.method}-{s.proposals}"
)


def after(settings: Settings, rounds: int) -> Search:
    search = begin(settings)
    for _ in range(rounds):
        search = next_round(search)
    return search


@pytest.mark.parametrize("name", PROBLEMS.values())
def test_a_problem_leaves_its_states_alone_and_cuts_nothing(name: str) -> None:
    task = problem(name)
    rates = np.geomspace(task.lr_range[1] / 2, task.lr_range[0], 40).astype(np.float32)
    whole, losses = task.run(task.start(), Request("train", rates[None]))
    first, before = task.run(task.start(), Request("train", rates[None, :15]))
    loss = task.loss(first)
    second, then = task.run(first, Request("train", rates[None, 15:]))
    assert task.loss(first) == loss
    assert task.loss(second) == task.loss(whole)
    np.testing.assert_array_equal(np.concatenate([before, then], axis=1), losses)


def test_in_one_dimension_the_forecast_is_the_closed_form() -> None:
    view = view_round(after(ONE_DIMENSION, 5), 5)
    quadratic = problem("quadratic 1d").quadratic
    for one in view.candidates:
        exact = quadratic.loss(quadratic.constant_rate_moment(one.rate, view.horizon))
        assert one.expected == pytest.approx(exact, rel=FORECAST)
    newest = view.candidates[-1]
    assert view.is_new(newest)
    assert view.outlook.mean[-1] == newest.expected
    assert view.outlook.steps[[0, -1]].tolist() == [len(newest.losses), view.horizon]


def test_the_next_rate_is_where_the_bound_is_lowest() -> None:
    search = after(PUBLISHED, 3)
    land = view_round(search, 3).landscape
    np.testing.assert_allclose(land.bound, land.mean - 2.0 * land.deviation)
    spacing = land.rates[1] / land.rates[0]
    lowest = land.rates[np.argmin(land.bound)]
    assert land.next_rates[0] == pytest.approx(lowest, rel=1.01 * (spacing - 1))
    taken = next_round(search)
    assert taken.rounds[-1].request.rates[0, 0] == pytest.approx(land.next_rates[0])
    # Seen again later, the round says what it said then.
    again = view_round(whole_search(PUBLISHED), 3).landscape
    np.testing.assert_array_equal(again.next_rates, land.next_rates)


def test_pins_are_the_table_and_the_lowest_is_trained() -> None:
    search = after(PUBLISHED, 6)
    view = view_round(search, 5)
    (pins,) = view.landscape.pins
    rates, expected, _ = columns(pins)
    np.testing.assert_array_equal(rates, search.controller.table["rate"])
    np.testing.assert_array_equal(expected, search.controller.table["forecast"])
    assert [view.is_new(one) for one in pins] == [False] * 4 + [True]
    assert view.landscape.chosen_rate == rates[np.argmin(expected)]
    trained = view_round(search, 6)
    assert trained.run.rates[-1] == pytest.approx(view.landscape.chosen_rate)
    np.testing.assert_array_equal(trained.trained, search.rounds[5].losses[0])
    np.testing.assert_allclose(view.planned[1], search.rounds[5].request.rates[0])


def test_pins_of_annealed_probes_are_scores_by_length_and_the_plan_is_drawn() -> None:
    search = whole_search(PROBES)
    probes = sum(one.request.kind == "probe" for one in search.rounds)
    view = view_round(search, probes)
    lengths = sorted({one.request.rates.shape[1] for one in search.rounds[:probes]})
    assert [{len(one.losses) for one in pins} for pins in view.landscape.pins] == [
        {steps} for steps in lengths
    ]
    spent, rates = view.planned
    assert len(rates) == PROBES.budget - view.run.searched
    assert (spent[0], spent[-1]) == (view.run.searched, PROBES.budget - 1)
    assert view.landscape.chosen_rate == rates.max()
    last = view_round(search, len(search.rounds))
    np.testing.assert_allclose(last.run.rates, rates)
    assert (last.is_over, last.taken[-1].request.kind, last.candidates) == (True, "train", ())


@pytest.mark.parametrize(
    ("values", "is_drawn"),
    [((3, 1, 2, 4), True), ((4, 3, 2, 1), False), ((1, 2, 3, 4), False), ((3, 2, 2e3, 3e3), False)],
)
def test_a_parabola_goes_through_the_best_three_but_over_no_cliff(values, is_drawn: bool) -> None:
    rates = np.array([0.1, 0.2, 0.5, 1.0])
    x, y = parabola(rates, np.array(values, float))
    assert bool(len(x)) == is_drawn
    if is_drawn:
        np.testing.assert_allclose(
            np.interp(np.log(rates[:3]), np.log(x), y), values[:3], atol=0.01
        )


@every_search
def test_the_ledger_adds_up_and_the_loss_is_that_of_the_rates_shown(settings: Settings) -> None:
    search = whole_search(settings)
    for number in (1, len(search.rounds) // 2, len(search.rounds)):
        view = view_round(search, number)
        assert len(view.run.rates) == len(view.run.spent) == view.ledger["training"]
        tried = [len(one.losses) for taken in view.taken for one in taken.candidates]
        assert sum(tried) == view.ledger["search"]
        assert sum(view.ledger.values()) == settings.budget
        task = problem(settings.problem)
        state = task.start()
        if len(view.run.rates):
            state, _ = task.run(state, Request("train", view.run.rates[None].astype(np.float32)))
        assert view.run.loss == pytest.approx(task.loss(state), rel=FIVE_DIGITS)
    assert view.is_over
    assert view.ledger["unspent"] == 0
    assert in_cell(view.run.loss) in view.sentence()
    assert ("closed form" in view.sentence()) == (settings.problem != "network")


@every_search
def test_a_search_put_away_and_taken_up_ends_the_same(settings: Settings) -> None:
    whole = whole_search(settings)
    search = after(settings, len(whole.rounds) // 2)
    search = from_arrays(search.arrays())
    while (further := next_round(search)) is not search:
        search = further
    np.testing.assert_array_equal(search.controller.rates, whole.controller.rates)
    assert search.controller.ledger == whole.controller.ledger
    assert [one.loss for one in search.rounds] == [one.loss for one in whole.rounds]


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="method must be one of 'autolrs', 'robust'"):
        begin(Settings("quadratic 10", 500, "grid", 5, 1.0, "sequential"))
    with pytest.raises(ValueError, match="problem must be one of 'quadratic 10"):
        problem("cubic")
    with pytest.raises(ValueError, match="round: got 0, wanted 1 to 1"):
        view_round(after(PUBLISHED, 1), 0)
    with pytest.raises(ValueError, match="steps must be one of 500, 1000"):
        best_known("quadratic 10", 700)


@pytest.mark.parametrize("steps", BUDGETS)
@pytest.mark.parametrize("name", STORED)
def test_stored_schedules_are_the_best_of_their_kind(name: str, steps: int) -> None:
    task, best = problem(name), best_known(name, steps)
    assert best.rates.max() <= STABLE * (1 + FIVE_DIGITS)
    times = np.arange(steps) / steps
    for centre in (0.2, 0.5, 0.8, 0.98):
        bump = np.exp(-(((times - centre) / 0.05) ** 2) / 2)
        for factor in (0.97, 1.03):
            rates = np.minimum(best.rates * factor**bump, best.rates.max())
            moved, _ = task.run(task.start(), Request("train", rates[None]))
            assert task.loss(moved) >= best.loss * (1 - FIVE_DIGITS)
    for shape in SHAPES:
        known = tuned(name, shape, steps)
        assert best.loss < known.loss
        for factor in (0.97, 1.03):
            peak = min(known.rates.max() * factor, STABLE)
            assert run_peak(name, shape, steps, peak).loss >= known.loss * (1 - FIVE_DIGITS)


def test_the_best_known_are_those_of_other_tests_and_of_theory() -> None:
    # As in tests/lr, where no rate may exceed 1.95.
    for name, loss in (("quadratic 10", 0.0785), ("quadratic 100", 0.01436)):
        assert 0.95 * loss < best_known(name, 1000).loss < loss
    edge = best_known("quadratic 10", 1000).rates > 0.99 * STABLE
    assert edge.mean() == pytest.approx(1 / 3, abs=0.01)
    assert edge[: edge.sum()].all()
    assert len(problem("quadratic 10").quadratic.curvatures) == 1000
    quadratic = problem("quadratic 1d").quadratic
    h, v, start = (
        float(part[0]) for part in (quadratic.curvatures, quadratic.noise, quadratic.start)
    )
    exact = h / 2 * start / (1 + 500 * h**2 * start / v)
    assert best_known("quadratic 1d", 500).loss == pytest.approx(exact, rel=EXACT)
    assert best_known("network", 500) is None


def test_a_shape_is_tuned_on_the_network_by_its_held_out_loss() -> None:
    found = tuned("network", "linear", 500)
    losses = [run_peak("network", "linear", 500, p).loss for p in peaks("network")]
    assert found.loss == np.nanmin(losses)


@pytest.mark.slow
def test_stored_schedules_can_be_found_again() -> None:
    for one in find_schedules("quadratic 100", 500):
        which = one.name.split(" | ")[-1]
        known = (
            best_known("quadratic 100", 500)
            if which == "best"
            else tuned("quadratic 100", which, 500)
        )
        assert one.value == pytest.approx(known.loss, rel=1e-3)
