"""The law as the scorer of probe-then-decay: its own best run, or the tails."""

from dataclasses import astuple, replace

import jax
import numpy as np
import pytest
from lr_driver import drive

from toolkit.lr import MultiPowerLaw, ProbeThenDecay, shape_rates

LAW = MultiPowerLaw(2.0, 1.5, 0.5, 40.0, 2.0, 0.6, 0.65)
LR_RANGE = (1e-4, 1.0)
BUDGET = 2000
SHAPES = ("linear", "wsd", "wsd_sqrt", "cosine", "trapezoid")
LOG_RATE = 0.05  # a few per cent, of a peak found against the law's own
NOISE = 1e-4  # relative, of a batch, the same for all candidates


def along_the_law(request, law=LAW):
    """The law's losses, each before its update; far from the law at first, as any model is."""
    noise = 1 + NOISE * np.random.default_rng(request.points).normal(size=request.points)
    rows = [law.predict(rates, np.arange(len(rates) - 1)) for rates in request.rates]
    return np.array([np.append(row[0] + 1, row) for row in rows]) * noise


def search(scorer, losses_of=along_the_law, **options):
    searcher = ProbeThenDecay(LR_RANGE, BUDGET, scorer=scorer, **options)
    return drive(searcher, losses_of)[0]


def final_loss(controller):
    return LAW.predict(controller.rates)[0]


def best_of(shape, steps):
    unit = shape_rates(shape, steps, round(0.05 * steps))
    peaks = np.geomspace(*LR_RANGE, 500)
    losses = [LAW.predict(peak * unit)[0] for peak in peaks]
    return peaks[np.argmin(losses)], min(losses)


def test_the_best_peak_of_the_whole_run_is_found():
    by_law, by_tail = search("multi_power_law"), search("tail")
    peak, loss = best_of("trapezoid", len(by_law.rates))
    assert abs(np.log(by_law.rates.max() / peak)) < LOG_RATE
    assert final_loss(by_law) == pytest.approx(loss, rel=1e-4)
    assert final_loss(by_law) < final_loss(by_tail) - 5e-3
    assert len(by_law.law) == len(astuple(LAW))
    assert by_law.curves.size == by_tail.curves.size == by_tail.law.size == 0
    assert by_law.ledger.gradient_evaluations == BUDGET


def test_the_best_shape_is_found():
    controller = search("multi_power_law", shapes=SHAPES)
    losses = {shape: best_of(shape, len(controller.rates))[1] for shape in SHAPES}
    best = min(losses, key=losses.__getitem__)
    assert best != SHAPES[0]
    assert final_loss(controller) == pytest.approx(losses[best], rel=1e-4)


def only_nan(request):
    return np.full((len(request.rates), request.points), np.nan)


def two_sound_probes(request):
    """No more survive, of the longer ones and of the first."""
    losses = along_the_law(request)
    losses[request.rates.max(1) > 2e-4, -1] = np.nan
    return losses


def negative(request):
    return along_the_law(request) - 10


def the_higher_the_better(request):
    """Where a high rate costs nothing, the best lies beyond all that were tried."""
    return along_the_law(request, replace(LAW, drop=1e-9))


@pytest.mark.parametrize("losses_of", [only_nan, two_sound_probes, negative, the_higher_the_better])
def test_where_the_law_says_nothing_the_tails_decide(losses_of):
    by_law, by_tail = (search(s, losses_of, extensions=0) for s in ("multi_power_law", "tail"))
    assert by_law.law.size == 0
    np.testing.assert_array_equal(by_law.rates, by_tail.rates)


def test_probes_that_broke_down_are_not_fitted():
    def broken(request):
        losses = along_the_law(request)
        if request.kind == "probe":
            losses[request.rates.max(1) > 0.2] = 30.0
        return losses

    controller = search("multi_power_law", broken)
    peak, _ = best_of("trapezoid", len(controller.rates))
    assert abs(np.log(controller.rates.max() / peak)) < LOG_RATE


def test_probes_go_by_curves_even_where_validation_is_cheap():
    for scorer, is_by_validation in (("tail", True), ("multi_power_law", False)):
        searcher = ProbeThenDecay(LR_RANGE, BUDGET, validation_batches=1, scorer=scorer)
        assert searcher.is_by_validation == is_by_validation


def test_a_search_resumes_from_its_arrays():
    searcher = ProbeThenDecay(LR_RANGE, BUDGET, shapes=SHAPES[:2], scorer="multi_power_law")
    whole, _ = drive(searcher, along_the_law)
    part, _ = drive(searcher, along_the_law, most=2)
    assert part.curves.size
    assert not part.plan.size
    resumed, _ = drive(searcher, along_the_law, jax.tree.map(np.array, part))
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)


def test_an_unknown_scorer_is_named():
    with pytest.raises(ValueError, match=r"scorer must be one of tail, multi_power_law, got 'mpl'"):
        ProbeThenDecay(LR_RANGE, BUDGET, scorer="mpl")
