"""The noisy quadratic against its closed forms and the known ranking of schedules."""

import numpy as np
import pytest

from toolkit.lr import NoisyQuadratic, forecast_loss

CLOSED_FORM = 1e-12  # relative
FORECAST = 1e-6  # relative
TABLE = 6e-3  # three digits, of which the last is rounded
STEPS = 1000

ONE = NoisyQuadratic([0.7], [0.3], [2.0])
LEFT = 1 - np.arange(STEPS) / STEPS
SHAPES = {
    "linear": LEFT,
    "cosine": (1 + np.cos(np.pi * np.arange(STEPS) / STEPS)) / 2,
    "wsd linear": np.minimum(1, LEFT / 0.2),
    "wsd sqrt": 1 - np.sqrt(np.maximum(0, 1 - LEFT / 0.2)),
    "constant": np.ones(STEPS),
}
KNOWN = {
    ("linear", 10): 0.0830,
    ("cosine", 10): 0.0847,
    ("wsd linear", 10): 0.1040,
    ("wsd sqrt", 10): 0.0994,
    ("constant", 10): 0.1985,
    ("linear", 100): 0.0305,
    ("wsd sqrt", 100): 0.01455,
    ("constant", 100): 0.0425,
}


def test_greedy_is_optimal_in_one_dimension():
    rates = ONE.greedy_rates(50)
    offset = 0.3 / (0.7**2 * 2.0)
    expected = 1 / (0.7 * (np.arange(50) + 1 + offset))
    np.testing.assert_allclose(rates, expected, rtol=CLOSED_FORM)
    moment, _ = ONE.advance(ONE.start, rates)
    np.testing.assert_allclose(moment, 0.012170385395537525, rtol=CLOSED_FORM)
    np.testing.assert_allclose(moment, 2.0 / (1 + 50 / offset), rtol=CLOSED_FORM)
    for step in (0, 10, 49):
        for factor in (0.97, 1.03):
            other = rates.copy()
            other[step] *= factor
            assert ONE.final_loss(other) > ONE.final_loss(rates)


@pytest.mark.parametrize("rate", [1e-3, 0.1, 1.0, 1.4, 2.5])
def test_constant_rate_closed_form(rate):
    steps = np.arange(201)
    _, losses = ONE.advance(ONE.start, np.full(201, rate))
    np.testing.assert_allclose(
        0.7 * ONE.constant_rate_moment(rate, steps)[:, 0] / 2, losses, rtol=CLOSED_FORM
    )


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 1.0, 1.4, 1.45, 2.0, 2.6])
def test_the_forecast_of_a_stage_is_exact(rate):
    _, losses = ONE.advance(ONE.start, np.full(100, rate))
    known = ONE.loss(ONE.constant_rate_moment(rate, 1000))
    assert abs(forecast_loss(losses, 1000).mean / known - 1) < FORECAST


@pytest.mark.parametrize(("shape", "batch"), KNOWN)
def test_tuned_schedules_reach_their_known_losses(shape, batch):
    from scipy.optimize import minimize_scalar

    problem = NoisyQuadratic.harmonic(batch)
    assert problem.loss(problem.start) == pytest.approx(3.7427, abs=1e-4)
    found = minimize_scalar(
        lambda peak: problem.final_loss(peak * SHAPES[shape]),
        bounds=(0.05, 1.99),
        method="bounded",
        options={"xatol": 1e-3},
    )
    assert found.fun == pytest.approx(KNOWN[shape, batch], rel=TABLE)


@pytest.mark.parametrize(("batch", "known"), [(10, 0.6128), (100, 0.2548)])
def test_greed_is_far_from_optimal_in_many_dimensions(batch, known):
    problem = NoisyQuadratic.harmonic(batch)
    assert problem.final_loss(problem.greedy_rates(STEPS)) == pytest.approx(known, rel=TABLE)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="curvatures"):
        NoisyQuadratic([0.0], [1.0], [1.0])
    with pytest.raises(ValueError, match="noise"):
        NoisyQuadratic([1.0], [np.nan], [1.0])
    with pytest.raises(ValueError, match="length"):
        NoisyQuadratic([1.0], [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="batch"):
        NoisyQuadratic.harmonic(0)
    with pytest.raises(ValueError, match="rate"):
        ONE.constant_rate_moment(3.0, 5)
