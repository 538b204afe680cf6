"""The noisy quadratic with momentum, weight decay and changing batch sizes, in exact expectation.

    velocity_i <- momentum * velocity_i + h_i parameter_i + noise_i + decay * parameter_i
    parameter_i <- parameter_i - rate * velocity_i,      Var noise_i = v_i / batch

Each coordinate is a linear map of two numbers, so the expectations of their squares and their
product follow a recursion of three. This is ground truth for searches over several
hyper-parameters.
"""

from typing import Any

import numpy as np

from toolkit._checks import checked
from toolkit.lr.problems.noisy_quadratic import NoisyQuadratic


@checked
def momentum_losses(
    problem: NoisyQuadratic,
    rates: Any,
    *,
    momentum: Any = 0.0,
    weight_decay: Any = 0.0,
    batches: Any = 1.0,
    optimum: float = 0.0,
) -> np.ndarray:
    """Expected losses of gradient descent with momentum along a schedule.

        g = h (p - p*) + noise + decay p;   u <- momentum u + g;   p <- p - rate u
        loss = sum_i h_i E(p_i - p*)^2 / 2

    followed by the means and the second moments of (p - p*, u). The start is p - p* with the
    problem's second moments and no velocity, p drawn around p* with mean 0.

    Args:
        problem: curvatures, noise at batch size 1, and second moments at the start.
        rates: [steps].
        momentum: [steps] or one number, in [0, 1).
        weight_decay: [steps] or one number.
        batches: [steps] or one number; the cost is their sum.
        optimum: p*, the same in each coordinate; with 0, weight decay pulls towards it.

    Returns:
        Losses [steps + 1], before each step and after the last.

    Source: Zhang et al. (arXiv:1907.04164), section 3 and appendix.

    Example:
        >>> problem = NoisyQuadratic.harmonic(batch=10, dimensions=100)
        >>> losses = momentum_losses(problem, [0.1] * 50, momentum=0.9, batches=4)
        >>> losses.shape, bool(losses[-1] < losses[0])
        ((51,), True)
    """
    rates = np.asarray(rates, np.float64)
    momenta, decays, sizes = (
        np.broadcast_to(np.asarray(values, np.float64), rates.shape)
        for values in (momentum, weight_decay, batches)
    )
    if not (sizes > 0).all():
        raise ValueError("batches must be positive")
    if not ((momenta >= 0) & (momenta < 1)).all():
        raise ValueError("momentum must lie in [0, 1)")
    h = problem.curvatures
    position, cross, velocity = problem.start.copy(), np.zeros_like(h), np.zeros_like(h)
    mean_position, mean_velocity = np.zeros_like(h), np.zeros_like(h)
    losses = [problem.loss(position)]
    for rate, beta, decay, size in zip(rates, momenta, decays, sizes, strict=True):
        pull, push = h + decay, decay * optimum
        # u' = pull e + beta u + push + noise, e' = e - rate u' (e = p - p*)
        mean = pull * mean_position + beta * mean_velocity
        square = pull**2 * position + 2 * pull * beta * cross + beta**2 * velocity
        square += 2 * push * mean + push**2 + problem.noise / size
        product = pull * position + beta * cross + push * mean_position
        position = position - 2 * rate * product + rate**2 * square
        cross, velocity = product - rate * square, square
        mean_velocity = mean + push
        mean_position = mean_position - rate * mean_velocity
        losses.append(problem.loss(position))
    return np.array(losses)
