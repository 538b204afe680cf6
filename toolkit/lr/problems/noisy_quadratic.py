"""The noisy quadratic: a problem with known best schedules, to test searches.

    parameter_i <- parameter_i - rate * (h_i parameter_i + noise_i),   Var noise_i = v_i
    A_i <- (1 - rate h_i)^2 A_i + rate^2 v_i,   A_i = E parameter_i^2,   loss = sum_i h_i A_i / 2

The expectation needs no sampling, so every schedule's final loss is exact.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class NoisyQuadratic:
    """Gradient descent on a quadratic with noisy gradients, in expectation.

    Attributes:
        curvatures: [dimensions], h, positive.
        noise: [dimensions], v, variance of the gradient's noise.
        start: [dimensions], A before the first step.

    Example:
        >>> problem = NoisyQuadratic.harmonic(batch=10, dimensions=100)
        >>> decaying, constant = shape_rates("linear", 200), [0.5] * 200
        >>> problem.final_loss(decaying) < problem.final_loss(constant)
        True
    """

    curvatures: np.ndarray
    noise: np.ndarray
    start: np.ndarray

    def __post_init__(self):
        for name in ("curvatures", "noise", "start"):
            values = np.atleast_1d(np.asarray(getattr(self, name), np.float64))
            if values.ndim != 1 or not (np.isfinite(values) & (values >= 0)).all():
                raise ValueError(f"{name} must be [dimensions], finite and not negative")
            object.__setattr__(self, name, values)
        if not len(self.curvatures) == len(self.noise) == len(self.start):
            raise ValueError("curvatures, noise and start must be of one length")
        if not (self.curvatures > 0).all():
            raise ValueError("curvatures must be positive")

    @classmethod
    def harmonic(cls, batch: float, dimensions: int = 1000) -> "NoisyQuadratic":
        """Curvatures 1, 1/2, 1/3, ... with noise that is the curvature over the batch size; A_0 =
        1.

        Source: Zhang et al. (arXiv:1907.04164), section 3.
        """
        if not batch > 0:
            raise ValueError(f"batch must be positive, got {batch}")
        curvatures = 1.0 / np.arange(1, dimensions + 1)
        return cls(curvatures, curvatures / batch, np.ones(dimensions))

    def advance(self, second_moment: Any, rates: Any) -> tuple[np.ndarray, np.ndarray]:
        """A [dimensions] after a schedule [steps] from a given one, and the losses [steps] before
        each step.

            A <- (1 - rate h)^2 A + rate^2 v

        Source: Wu et al., Short-horizon bias (arXiv:1803.02021), section 2.
        """
        second_moment = np.asarray(second_moment, np.float64)
        losses = np.empty(len(rates))
        for step, rate in enumerate(np.asarray(rates, np.float64)):
            losses[step] = self.loss(second_moment)
            second_moment = (1 - rate * self.curvatures) ** 2 * second_moment
            second_moment += rate**2 * self.noise
        return second_moment, losses

    def loss(self, second_moment: np.ndarray) -> float:
        """Expected loss at a second moment A [dimensions]: sum_i h_i A_i / 2."""
        return float(self.curvatures @ second_moment / 2)

    def final_loss(self, rates: Any) -> float:
        """Expected loss after a whole schedule [steps] from the start."""
        return self.loss(self.advance(self.start, rates)[0])

    def greedy_rates(self, steps: int) -> np.ndarray:
        """The rates [steps] that lower the loss most in each single step.

            rate_t = sum_i h_i^2 A_i / sum_i h_i (h_i^2 A_i + v_i)

        With one dimension this is the best schedule; with several it is far from it, since it
        reduces the noise of the steep ones before the flat ones have moved.

        Source: Wu et al., Short-horizon bias (arXiv:1803.02021), theorem 1.
        """
        second_moment, rates = self.start, np.empty(steps)
        for step in range(steps):
            pull = self.curvatures**2 * second_moment
            rates[step] = pull.sum() / (self.curvatures * (pull + self.noise)).sum()
            second_moment, _ = self.advance(second_moment, rates[step : step + 1])
        return rates

    def best_rates(
        self, steps: int, largest: float, *, pieces: int | None = None, iterations: int = 300
    ) -> np.ndarray:
        """The schedule [steps] of lowest final loss: the limit of what any search can reach.

            lambda_t = (1 - rate_t h)^2 lambda_{t+1},   lambda_T = h / 2
            d loss / d rate_t = sum_i lambda_{t+1} (2 rate_t v - 2 h (1 - rate_t h) A_t)

        by `iterations` of L-BFGS over the logarithms of the rates, from linear decay and from a
        plateau. `largest` bounds every rate, below 2 / max(h) to be stable; `pieces` are stretches
        of constant rate, None for one per step. Each iteration costs O(steps * dimensions).
        """
        from scipy.optimize import minimize

        pieces = steps if pieces is None else pieces
        if steps % pieces:
            raise ValueError(f"pieces must divide steps={steps}, got {pieces}")
        h, v = self.curvatures, self.noise

        def loss_and_slope(log_rates: np.ndarray) -> tuple[float, np.ndarray]:
            rates = np.repeat(np.exp(log_rates), steps // pieces)
            shrink = 1 - np.multiply.outer(rates, h)
            moments = np.empty((steps + 1, len(h)))
            moments[0] = self.start
            for t in range(steps):
                moments[t + 1] = shrink[t] ** 2 * moments[t] + rates[t] ** 2 * v
            adjoint, slope = h / 2, np.empty(steps)
            for t in reversed(range(steps)):
                slope[t] = adjoint @ (2 * rates[t] * v - 2 * h * shrink[t] * moments[t])
                adjoint = shrink[t] ** 2 * adjoint
            slope *= rates
            # In logarithms, so that small losses are resolved.
            loss = self.loss(moments[-1])
            return float(np.log(loss)), slope.reshape(pieces, -1).sum(1) / loss

        left = 1 - (np.arange(pieces) + 0.5) / pieces
        starts = [0.9 * largest * left, 0.9 * largest * np.minimum(1, left / 0.3)]
        bounds = [(np.log(largest) - 12, np.log(largest))] * pieces
        options = {"maxiter": iterations, "maxcor": 20, "ftol": 1e-12}
        how: Any = {"jac": True, "method": "L-BFGS-B", "bounds": bounds, "options": options}
        found = [minimize(loss_and_slope, np.log(start), **how) for start in starts]
        best = min(found, key=lambda result: result.fun)
        return np.repeat(np.exp(best.x), steps // pieces)

    def constant_rate_moment(self, rate: float, steps: Any) -> np.ndarray:
        """Second moments [..., dimensions] after `steps` [...] at one rate, in closed form.

            A_t = r^t A_0 + (1 - r^t) * rate v / (h (2 - rate h)),   r = (1 - rate h)^2

        Every loss curve at a constant rate is thus a sum of exponentials and a constant; with one
        dimension, a single one. The rate must lie below 2 / max(h).
        """
        if not 0 < rate < 2 / self.curvatures.max():
            raise ValueError(
                f"rate must lie in (0, {2 / self.curvatures.max():g}), beyond which the moments "
                f"grow forever, got {rate}"
            )
        decay = (1 - rate * self.curvatures) ** (2 * np.asarray(steps)[..., None])
        floor = rate * self.noise / (self.curvatures * (2 - rate * self.curvatures))
        return decay * self.start + (1 - decay) * floor
