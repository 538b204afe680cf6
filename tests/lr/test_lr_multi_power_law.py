"""The multi-power law: its own curves found again, and shapes ranked at a horizon never run."""

import numpy as np
import pytest

from toolkit.lr import MultiPowerLaw, fit_multi_power_law, shape_rates

LAW = MultiPowerLaw(2.0, 1.5, 0.5, 40.0, 2.0, 0.6, 0.65)
FITTED = 2e-3  # relative, at eight times the length of what was fitted


def curve(shape, peak, steps, noise=0.0):
    rates = peak * shape_rates(shape, steps, steps // 20)
    losses = np.append(5.0, LAW.predict(rates, np.arange(steps - 1)))
    losses *= 1 + noise * np.random.default_rng(steps).normal(size=steps)
    return rates, losses


def test_the_equation_term_by_term():
    rates = np.array([0.1, 0.2, 0.2, 0.05])

    def reach(rate, since):
        return 1 - (2.0 * rate**-0.65 * since + 1) ** -0.6

    for time, changes in (
        (0, 0.1 * reach(0.1, 0.1)),
        (2, 0.1 * reach(0.1, 0.5) + 0.1 * reach(0.2, 0.4)),
        (3, 0.1 * reach(0.1, 0.55) + 0.1 * reach(0.2, 0.45) - 0.15 * reach(0.05, 0.05)),
    ):
        expected = 2.0 + 1.5 * rates[: time + 1].sum() ** -0.5 + 40.0 * changes
        assert LAW.predict(rates, [time])[0] == pytest.approx(expected)
    assert LAW.predict(rates)[0] == LAW.predict(rates, [3])[0]


def test_it_scores_long_schedules_by_short_runs():
    shapes = ("constant", "linear", "wsd")
    curves = [curve(shape, peak, 400, 1e-4) for shape in shapes for peak in (0.01, 0.02)]
    law = fit_multi_power_law(curves)
    scores = {}
    for shape in ("linear", "cosine", "wsd", "wsd_sqrt", "constant"):
        rates = 0.015 * shape_rates(shape, 3200, 160)
        known, scores[shape] = LAW.predict(rates)[0], law.predict(rates)[0]
        assert scores[shape] == pytest.approx(known, rel=FITTED)
    truth = {s: LAW.predict(0.015 * shape_rates(s, 3200, 160))[0] for s in scores}
    assert min(scores, key=scores.__getitem__) == min(truth, key=truth.__getitem__)


def test_wrong_arguments_are_named():
    for curves in ([], [([1.0, 1.0], [1.0, 1.0, 1.0])], [(np.zeros(5), np.ones(5))]):
        with pytest.raises(ValueError, match="curves"):
            fit_multi_power_law(curves)
