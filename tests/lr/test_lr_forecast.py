"""Forecasts of curves whose future is known."""

import numpy as np
import pytest
from scipy.interpolate import UnivariateSpline
from scipy.optimize import fmin

from toolkit.lr import forecast_loss, published_forecast

EXACT = 1e-6  # relative, without noise
ROUNDING = 1e-9  # between two programs of one rule
# What the authors' published code forecasts for `wavy` curves, (points, constant, noise).
PUBLISHED = {
    (100, 10, 0.05): 0.9924777626255036,
    (100, 60, 0.1): 1.073454769443557,
    (100, 300, 0.3): 1.8172725470531104,
    (200, 30, 0.2): 1.056702739640738,
    (400, 150, 0.5): 1.20919286236825,
}
PUBLISHED_VALIDATION = {(16, 5, 0.05): 0.91859584037576, (16, 9, 0.2): 0.6361144298177057}


def exponential(constant, points=100, amplitude=1.0, asymptote=1.0):
    return amplitude * np.exp(-np.arange(points) / constant) + asymptote


@pytest.mark.parametrize("constant", [0.2, 1.0, 3.3, 10.0, 47.0, 100.0, 300.0, 900.0])
@pytest.mark.parametrize("amplitude", [1.0, -0.3])
def test_exact_on_clean_exponentials(constant, amplitude):
    forecast = forecast_loss(exponential(constant, amplitude=amplitude), 1000.0)
    expected = amplitude * np.exp(-1000 / constant) + 1
    assert abs(forecast.mean / expected - 1) < EXACT
    assert forecast.variance < EXACT**2
    if constant >= 1:  # faster, and the second point alone tells it
        assert abs(forecast.time_constant / constant - 1) < 1e-4


@pytest.mark.parametrize("rate", [0.03, 0.4, 1.2, 1.4, 2.0, 2.7])
def test_exact_on_the_noisy_quadratic(rate):
    curvature, noise, second_moment, losses = 0.7, 0.3, 2.0, []
    for _ in range(1001):
        losses.append(curvature * second_moment / 2)
        second_moment = (1 - rate * curvature) ** 2 * second_moment + rate**2 * noise
    assert abs(forecast_loss(losses[:100], 1000.0).mean / losses[1000] - 1) < EXACT


def test_outliers_do_not_matter():
    curve = exponential(20.0)
    curve[[3, 30, 31, 77, 99]] += [5.0, 20.0, -4.0, 100.0, 3.0]
    assert abs(forecast_loss(curve, 1000.0).mean - 1) < 1e-3


@pytest.mark.parametrize("constant", [10.0, 33.0, 100.0])
def test_variance_covers_the_error(constant):
    generator = np.random.default_rng(0)
    noisy = exponential(constant) + 0.02 * generator.normal(size=(40, 100))
    truth = np.exp(-1000 / constant) + 1
    forecasts = [forecast_loss(curve, 1000.0) for curve in noisy]
    scores = np.array([(f.mean - truth) / np.sqrt(f.variance) for f in forecasts])
    assert np.mean(np.abs(scores) < 2.5) >= 0.85
    errors = np.abs([f.mean - truth for f in forecasts])
    assert np.median(errors) < {10.0: 0.01, 33.0: 0.015, 100.0: 0.15}[constant]


def test_a_longer_constant_is_less_certain():
    generator = np.random.default_rng(1)
    noise = 0.02 * generator.normal(size=100)
    sure, unsure = (forecast_loss(exponential(c) + noise, 1000.0) for c in (5.0, 200.0))
    assert sure.variance < 1e-2 * unsure.variance


def test_beats_the_published_one_where_the_curve_bends():
    generator = np.random.default_rng(2)
    noisy = exponential(33.0) + 0.02 * generator.normal(size=(10, 100))
    ours, theirs = (
        np.median([abs(forecast(curve, 1000.0).mean - 1) for curve in noisy])
        for forecast in (forecast_loss, published_forecast)
    )
    assert ours < theirs < 0.5


def test_a_line_is_not_extrapolated():
    curve = 3 - 0.01 * np.arange(100)
    forecast = forecast_loss(curve, 1000.0)
    assert forecast.time_constant is None
    assert forecast.mean == pytest.approx(curve[-10:].mean())
    assert np.sqrt(forecast.variance) > 1  # it knows that it knows nothing


@pytest.mark.parametrize("forecast", [forecast_loss, published_forecast])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_a_diverged_curve(forecast, bad):
    curve = exponential(10.0)
    curve[40] = bad
    assert forecast(curve, 1000.0).mean == np.inf


@pytest.mark.parametrize("forecast", [forecast_loss, published_forecast])
@pytest.mark.parametrize("points", [1, 2, 3, 4, 5, 10, 16, 17])
def test_short_windows_and_constant_losses(forecast, points):
    assert np.isfinite(forecast(exponential(4.0, points), 100.0).mean)
    assert forecast(np.full(points, 2.5), 100.0).mean == pytest.approx(2.5)


def wavy(points, constant, noise):
    times = np.arange(points)
    curve = np.exp(-times / constant) + 1 + noise * np.sin(1.7 * times**2)
    curve[3::29] += 10 * noise
    return curve


@pytest.mark.parametrize("is_validation", [False, True])
def test_the_published_code_forecasts_the_same(is_validation):
    for (points, *shape), expected in (
        PUBLISHED_VALIDATION if is_validation else PUBLISHED
    ).items():
        curve = wavy(points, *shape)
        found = published_forecast(curve, 10 * points, is_validation=is_validation).mean
        assert abs(found / expected - 1) < EXACT


def rule_of_the_paper(curve, horizon, dropped=lambda left: round(0.03 * left)):
    """The published rule point by point: one list of points, from which the farthest are taken."""
    points = list(enumerate(curve))
    last_early = int((len(curve) - 1) * 0.5)

    def spline(points):
        return UnivariateSpline(*zip(*points, strict=True), k=2)

    for _ in range(10):
        times, losses = np.array(points).T
        distances = np.abs(losses - spline(points)(times))
        order = sorted(range(len(points)), key=distances.__getitem__)
        outliers = {place for place in order[-dropped(len(points)) :] if place < last_early}
        points = [point for place, point in enumerate(points) if place not in outliers]
    times = np.arange(len(curve))
    smooth = spline(points)(times)

    def basis(log_rate, at):
        return np.vstack([np.exp(-np.exp(log_rate) * at), np.ones(len(at))]).T

    def misfit(log_rate):
        found = np.linalg.lstsq(basis(log_rate, times), smooth, rcond=None)[1]
        return found[0] if len(found) else np.inf

    log_rate = fmin(misfit, 0.0, xtol=1e-5, ftol=1e-5, disp=False)
    weights = np.linalg.lstsq(basis(log_rate, times), smooth, rcond=None)[0]
    return float((basis(log_rate, np.array([horizon])) @ weights)[0])


def noisy_curve(number):
    generator = np.random.default_rng([33, number])
    points = int(generator.choice([50, 100, 200, 400]))
    constant = points * 10 ** generator.uniform(-1.5, 1.0)
    curve = generator.uniform(0.3, 3) * np.exp(-np.arange(points) / constant) + 1
    curve += 10 ** generator.uniform(-3, -0.5) * generator.normal(size=points)
    curve[generator.random(points) < 0.02] += generator.uniform(0, 2)
    return curve


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_published_rule_on_noisy_curves(count):
    near = {"the rule": 0, "of the first length": 0}
    for number in range(count):
        curve = noisy_curve(number)
        horizon = 10 * len(curve)
        found = published_forecast(curve, horizon).mean
        first = round(0.03 * len(curve))
        rules = {
            "the rule": rule_of_the_paper(curve, horizon),
            "of the first length": rule_of_the_paper(curve, horizon, lambda left, n=first: n),
        }
        for name, expected in rules.items():
            near[name] += abs(found - expected) < ROUNDING * max(1, abs(expected))
    assert near["the rule"] == count
    assert near["of the first length"] < 0.9 * count  # another rule would not pass


def test_published_validation_guard():
    rising = np.linspace(1.0, 2.0, 16)
    assert published_forecast(rising, 160.0, is_validation=True, ceiling=1.5).mean == 2.0


@pytest.mark.parametrize("forecast", [forecast_loss, published_forecast])
def test_wrong_arguments_are_named(forecast):
    with pytest.raises(ValueError, match="losses"):
        forecast([], 10.0)
    with pytest.raises(ValueError, match="losses"):
        forecast(np.ones((2, 2)), 10.0)
    with pytest.raises(ValueError, match="horizon"):
        forecast([1.0], np.nan)
