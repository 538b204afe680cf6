"""A Gaussian process over one number, here the logarithm of the learning rate scaled to [0, 1].

At most a few dozen points: exact Cholesky on the host in float64. Batches of small Cholesky
factorisations in compiled programs can deadlock jax's CPU backend.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit._checks import checked

# Bounds of the published code's kernel, on inputs scaled to [0, 1] and standardised values; it
# allows noise up to 1e5, but 10 already means pure noise.
SIGNAL_BOUNDS = (1e-2, 1e3)  # variance
LENGTH_BOUNDS = (1e-2, 1e2)
NOISE_BOUNDS = (1e-5, 1e1)  # variance
STARTS = ((1.0, 1.0, 1e-1), (1.0, 0.3, 1e-3), (1.0, 0.1, 1e-2))


@dataclass(frozen=True)
class GaussianProcess:
    """A posterior over functions of one number.

        cov(x, x') = signal * (1 + u + u^2 / 3) * exp(-u),   u = sqrt(5) |x - x'| / length
        value_i ~ normal(f(x_i), noise + variance_i)

    in standardised values (mean 0, standard deviation 1).

    Attributes:
        inputs: [points].
        values: [points], as given, not standardised.
        variances: [points], of each value, known in advance; in units of the values squared.
        signal: variance of the function, standardised.
        length: length scale of the Matern-5/2 kernel.
        noise: variance common to all points, standardised.

    Example:
        >>> process = fit_gaussian_process([0.0, 0.4, 1.0], [2.0, 1.0, 3.0])
        >>> mean, deviation = process.predict([0.2, 0.4])
        >>> mean.shape, bool((deviation >= 0).all())
        ((2,), True)
    """

    inputs: np.ndarray
    values: np.ndarray
    variances: np.ndarray
    signal: float
    length: float
    noise: float

    def predict(self, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the function at `inputs` [queries], without noise.

            mean = k^T C^-1 y,   variance = signal - k^T C^-1 k,   C = K + diag(noise + variances)

        Source: Rasmussen and Williams (2006), algorithm 2.1.
        """
        from scipy.linalg import cho_solve, solve_triangular

        factor, standard, centre, scale = self._factor()
        cross = self.signal * matern(np.asarray(inputs, np.float64), self.inputs, self.length)
        mean = cross @ cho_solve((factor, True), standard)
        explained = solve_triangular(factor, cross.T, lower=True)
        variance = np.maximum(self.signal - (explained**2).sum(0), 0.0)
        return centre + scale * mean, scale * np.sqrt(variance)

    def log_marginal_likelihood(self) -> tuple[float, np.ndarray]:
        """log p(standardised values | inputs, kernel) in nats, and its gradient [3] by the
        logarithms of signal, length and noise.

            -y^T a / 2 - log det C / 2 - points log(2 pi) / 2,   a = C^-1 y
            d/dp = tr((a a^T - C^-1) dC/dp) / 2

        Source: Rasmussen and Williams (2006), equations 2.30 and 5.9.
        """
        from scipy.linalg import cho_solve

        factor, standard, _, _ = self._factor()
        points = len(standard)
        inverse = cho_solve((factor, True), np.eye(points))
        solved = inverse @ standard
        log_determinant = 2 * np.log(np.diag(factor)).sum()
        value = -0.5 * (standard @ solved + log_determinant + points * np.log(2 * np.pi))
        scaled = np.sqrt(5.0) * np.abs(self.inputs[:, None] - self.inputs) / self.length
        slopes = (
            self.signal * matern(self.inputs, self.inputs, self.length),
            self.signal * scaled**2 / 3 * (1 + scaled) * np.exp(-scaled),
            self.noise * np.eye(points),
        )
        pull = np.outer(solved, solved) - inverse
        return float(value), np.array([0.5 * (pull * slope).sum() for slope in slopes])

    def _factor(self) -> tuple[np.ndarray, np.ndarray, float, float]:
        centre, scale = float(self.values.mean()), float(self.values.std()) or 1.0
        noise = self.noise + self.variances / scale**2
        covariance = self.signal * matern(self.inputs, self.inputs, self.length)
        # Repeated inputs with no noise would make it singular.
        covariance += np.diag(noise + 1e-10 * self.signal)
        return np.linalg.cholesky(covariance), (self.values - centre) / scale, centre, scale


def matern(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    """Matern correlation with smoothness 5/2 between all pairs [first, second], 1 where a = b."""
    distance = np.sqrt(5.0) * np.abs(a[:, None] - b) / length
    return (1 + distance + distance**2 / 3) * np.exp(-distance)


@checked
def fit_gaussian_process(inputs: Any, values: Any, variances: Any = None) -> GaussianProcess:
    """Fit the kernel by maximum marginal likelihood and return the posterior.

    Truncated Newton steps over the logarithms of signal, length and noise, from three starts,
    within the published code's bounds. With a single point there is nothing to learn a kernel
    from: the first start is taken.

    Args:
        inputs: [points].
        values: [points], finite.
        variances: [points], of each value; None for zero.

    Cost: A few hundred Cholesky factorisations of [points, points]: some 20 ms.

    Source: Rasmussen and Williams (2006), section 5.4.1.

    Example:
        >>> process = fit_gaussian_process([0.0, 0.4, 1.0], [2.0, 1.0, 3.0])
        >>> process.log_marginal_likelihood()[1].shape
        (3,)
    """
    from scipy.optimize import minimize

    inputs = np.asarray(inputs, np.float64)
    values = np.asarray(values, np.float64)
    variances = np.zeros_like(values) if variances is None else np.asarray(variances, np.float64)
    if inputs.ndim != 1 or not len(inputs) or not inputs.shape == values.shape == variances.shape:
        raise ValueError(
            f"inputs, values and variances must be [points] each, got {inputs.shape}, "
            f"{values.shape} and {variances.shape}"
        )
    if not (np.isfinite(inputs).all() and np.isfinite(values).all()):
        raise ValueError("inputs and values must be finite; replace those of diverged runs first")
    if not (np.isfinite(variances) & (variances >= 0)).all():
        raise ValueError("variances must be finite and not negative")

    def process(log_kernel: np.ndarray) -> GaussianProcess:
        signal, length, noise = (float(number) for number in np.exp(log_kernel))
        return GaussianProcess(inputs, values, variances, signal, length, noise)

    if len(inputs) == 1:
        return process(np.log(STARTS[0]))

    def loss(log_kernel: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = process(log_kernel).log_marginal_likelihood()
        return -value, -gradient

    # Not L-BFGS-B: SciPy's calls a threaded BLAS on vectors of three, 4x slower on a busy machine.
    bounds = np.log([SIGNAL_BOUNDS, LENGTH_BOUNDS, NOISE_BOUNDS])
    found = [
        minimize(loss, np.log(start), method="TNC", jac=True, bounds=bounds) for start in STARTS
    ]
    return process(min(found, key=lambda result: result.fun).x)


@checked
def lowest_confidence_bound(process: GaussianProcess, kappa: float) -> float:
    """The untried input in [0, 1] with the lowest confidence bound.

        argmin_x mean(x) - kappa * sd(x)

    With AutoLRS's kappa of 1000 the mean plays no part, and the result is the point farthest from
    all tried ones.

    Args:
        process: the posterior so far.
        kappa: standard deviations of optimism.

    Returns:
        A point of a fine grid, more than half a spacing from every input of the process.

    Source: Srinivas et al. (2010) for the bound; AutoLRS (arXiv:2105.10762) for its use.

    Example:
        >>> process = fit_gaussian_process([0.0, 0.4, 1.0], [2.0, 1.0, 3.0])
        >>> 0.4 < lowest_confidence_bound(process, kappa=1000.0) < 1.0
        True
    """
    if not kappa >= 0:
        raise ValueError(f"kappa must not be negative, got {kappa}")
    grid = np.linspace(0.0, 1.0, max(1001, 4 * len(process.inputs)))
    nearest = np.abs(grid[:, None] - process.inputs).min(1)
    grid = grid[nearest > 0.5 / (len(grid) - 1) * (1 + 1e-9)]
    mean, deviation = process.predict(grid)
    return float(grid[np.argmin(mean - kappa * deviation)])


def finite_values(values: Any) -> np.ndarray:
    """Replace the losses of diverged runs by values just above the worst finite one.

        v_i <- max(finite) + (max(finite) - min(finite)), or + 1 where all finite are equal

    A huge number instead (1e6 in the published code) would hide all differences between the others.
    """
    values = np.asarray(values, np.float64)
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.zeros_like(values)
    spread = float(finite.max() - finite.min()) or 1.0
    return np.where(np.isfinite(values), values, finite.max() + spread)
