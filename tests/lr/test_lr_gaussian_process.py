"""The Gaussian process against scikit-learn's, and where its confidence bound looks next."""

import numpy as np
import pytest

from toolkit.lr.fits.gaussian_process import (
    GaussianProcess,
    finite_values,
    fit_gaussian_process,
    lowest_confidence_bound,
)

EXACT = 1e-6  # relative; ours adds a jitter of 1e-10


def points(count=10, seed=0):
    generator = np.random.default_rng(seed)
    inputs = np.sort(generator.uniform(size=count))
    values = 2.0 + 3 * (inputs - 0.6) ** 2 + 0.05 * generator.normal(size=count)
    return inputs, values, 0.01 * generator.uniform(size=count)


def scikit_learn(inputs, values, variances, kernel, optimizer=None, restarts=0):
    process = pytest.importorskip("sklearn.gaussian_process")
    return process.GaussianProcessRegressor(
        kernel,
        alpha=variances / values.std() ** 2,
        normalize_y=True,
        optimizer=optimizer,
        n_restarts_optimizer=restarts,
        random_state=0,
    ).fit(inputs[:, None], values)


@pytest.mark.oracle
@pytest.mark.parametrize("seed", [0, 1])
def test_posterior_and_likelihood_are_scikit_learns(seed):
    kernels = pytest.importorskip("sklearn.gaussian_process.kernels")
    inputs, values, variances = points(seed=seed)
    kernel = kernels.ConstantKernel(1.7) * kernels.Matern(0.4, nu=2.5) + kernels.WhiteKernel(0.02)
    peer = scikit_learn(inputs, values, variances, kernel)
    ours = GaussianProcess(inputs, values, variances, 1.7, 0.4, 0.02)
    queries = np.linspace(-0.2, 1.2, 57)
    mean, deviation = ours.predict(queries)
    peer_mean, peer_deviation = peer.predict(queries[:, None], return_std=True)
    np.testing.assert_allclose(mean, peer_mean, rtol=EXACT)
    # Theirs is the next observation's: the function's plus the common noise.
    peer_variance = peer_deviation**2 - 0.02 * values.std() ** 2
    np.testing.assert_allclose(deviation**2, peer_variance, rtol=EXACT, atol=1e-9)
    assert ours.log_marginal_likelihood()[0] == pytest.approx(
        peer.log_marginal_likelihood_value_, rel=EXACT
    )


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:The optimal value found")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_fit_is_as_likely_as_scikit_learns(seed):
    kernels = pytest.importorskip("sklearn.gaussian_process.kernels")
    inputs, values, variances = points(seed=seed)
    kernel = kernels.ConstantKernel(1.0, (1e-2, 1e3)) * kernels.Matern(
        1.0, (1e-2, 1e2), nu=2.5
    ) + kernels.WhiteKernel(0.1, (1e-5, 1e1))
    peer = scikit_learn(inputs, values, variances, kernel, "fmin_l_bfgs_b", 4)
    ours = fit_gaussian_process(inputs, values, variances)
    assert ours.log_marginal_likelihood()[0] > peer.log_marginal_likelihood_value_ - 1e-3


def test_the_likelihoods_gradient_is_its_differences():
    inputs, values, variances = points()
    kernel, step = np.log([1.7, 0.4, 0.02]), 1e-5

    def likelihood(kernel):
        process = GaussianProcess(inputs, values, variances, *np.exp(kernel))
        return process.log_marginal_likelihood()

    differences = [
        (likelihood(kernel + move)[0] - likelihood(kernel - move)[0]) / (2 * step)
        for move in step * np.eye(3)
    ]
    np.testing.assert_allclose(likelihood(kernel)[1], differences, rtol=1e-5)


def test_known_variance_is_noise():
    inputs, values, _ = points()
    wild = values.copy()
    wild[4] += 10.0
    variances = np.zeros_like(values)
    variances[4] = 1e6
    believed = fit_gaussian_process(inputs, wild).predict(inputs)[0]
    doubted = fit_gaussian_process(inputs, wild, variances).predict(inputs)[0]
    assert abs(doubted[4] - values[4]) < 0.5 < abs(believed[4] - values[4])


def test_large_kappa_fills_the_space():
    tried = [0.37]
    for _ in range(9):
        process = GaussianProcess(
            np.array(tried), np.sin(tried), np.zeros(len(tried)), 1.0, 0.5, 1e-6
        )
        tried.append(lowest_confidence_bound(process, 1e3))
    gaps = np.diff(np.sort(tried))
    assert {0.0, 1.0} < set(tried)
    assert gaps.max() < 0.2
    assert gaps.min() > 0.02


def test_small_kappa_goes_to_the_minimum_and_never_repeats():
    inputs = np.linspace(0, 1, 11)
    process = fit_gaussian_process(inputs, (inputs - 0.6) ** 2)
    proposal = lowest_confidence_bound(process, 0.0)
    assert 0 < abs(proposal - 0.6) < 0.01


def test_one_point_and_equal_values():
    assert lowest_confidence_bound(fit_gaussian_process([0.2], [5.0]), 1e3) == 1.0
    process = fit_gaussian_process([0.2, 0.8], [5.0, 5.0])
    assert np.isfinite(process.predict([0.5])[1]).all()


def test_diverged_runs_stay_just_above_the_others():
    values = finite_values([1.0, np.nan, 2.0, np.inf, -np.inf])
    np.testing.assert_array_equal(values, [1.0, 3.0, 2.0, 3.0, 3.0])
    np.testing.assert_array_equal(finite_values([np.nan, 4.0]), [5.0, 4.0])
    np.testing.assert_array_equal(finite_values([np.nan, np.inf]), [0.0, 0.0])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="points"):
        fit_gaussian_process([0.1, 0.2], [1.0])
    with pytest.raises(ValueError, match="finite"):
        fit_gaussian_process([0.1], [np.nan])
    with pytest.raises(ValueError, match="variances"):
        fit_gaussian_process([0.1], [1.0], [-1.0])
    process = fit_gaussian_process([0.1], [1.0])
    with pytest.raises(ValueError, match="kappa"):
        lowest_confidence_bound(process, -1.0)
