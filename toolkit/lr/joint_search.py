"""A search over several hyper-parameters at once: rate, momentum, weight decay, batch size.

The first points are spread evenly over the logarithms, later ones follow the expected improvement
of a Gaussian process with a length scale per dimension. Coordinates should be coupled as little as
possible: with momentum, search the effective rate, rate / (1 - momentum).
"""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit._checks import checked
from toolkit.lr.fits.gaussian_process import finite_values


@dataclass(frozen=True)
class JointResult:
    """The result of a joint search.

    Attributes:
        best: name -> value at the lowest loss of all points tried.
        loss: that loss.
        points: name -> [points], in the order tried.
        losses: [points], infinity where a run diverged.

    Example:
        >>> losses = lambda point: (point["rate"] - 0.1) ** 2 + (point["decay"] - 0.01) ** 2
        >>> space = {"rate": (1e-3, 1.0), "decay": (1e-4, 1.0)}
        >>> found = joint_search(losses, space, points=32, rounds=0)
        >>> sorted(found.best), found.points["rate"].shape
        (['decay', 'rate'], (32,))
    """

    best: dict[str, float]
    loss: float
    points: dict[str, np.ndarray]
    losses: np.ndarray


@checked
def joint_search(
    evaluate: Callable[[dict[str, np.ndarray]], Any],
    space: dict[str, tuple[float, float]],
    *,
    points: int = 16,
    rounds: int = 3,
    points_per_round: int = 4,
    seed: int = 0,
) -> JointResult:
    """Find the values of lowest loss, all on logarithmic scales.

    A round fits an ARD Matern-5/2 process to all losses and picks its points one by one by expected
    improvement, assuming the process's mean at the points already picked.

    Args:
        evaluate: {name: values [n]} -> losses [n]; the n runs may run in parallel.
        space: name -> (lowest, highest), positive; for momentum give 1 - momentum, and for the
            rate the effective one (see `effective_rate`).
        points: number of points in the first round, from a Sobol sequence.
        rounds: number of further rounds.
        points_per_round: points evaluated together.
        seed: seed of the sequence.

    Raises:
        ModuleNotFoundError: when there are rounds and scikit-learn is not installed.

    Cost: points + rounds * points_per_round evaluations; a fit of the process per point, some 50
        ms.

    Source: Snoek et al. (arXiv:1206.2944) for the process and the improvement; Ginsbourger et al.
        (2010) for the believing.

    Example:
        >>> losses = lambda point: (point["rate"] - 0.1) ** 2 + (point["decay"] - 0.01) ** 2
        >>> space = {"rate": (1e-3, 1.0), "decay": (1e-4, 1.0)}
        >>> found = joint_search(losses, space, points=32, rounds=0)
        >>> found.loss < 0.01, len(found.losses)
        (True, 32)
    """
    for name, (low, high) in space.items():
        if not 0 < low < high < np.inf:
            raise ValueError(f"space[{name!r}] must be 0 < lowest < highest, got {(low, high)}")
    if min(points, points_per_round) < 1 or rounds < 0:
        raise ValueError(
            f"need points >= 1, points_per_round >= 1 and rounds >= 0, got {points}, "
            f"{points_per_round} and {rounds}"
        )
    if rounds and importlib.util.find_spec("sklearn") is None:  # before any run is paid for
        raise ModuleNotFoundError(
            "joint_search needs scikit-learn: python -m pip install scikit-learn"
        )
    from scipy.stats import qmc

    lows, highs = np.log(np.array(list(space.values()))).T

    def losses_at(places: np.ndarray) -> np.ndarray:
        values = np.exp(lows + places * (highs - lows)).T
        losses = np.asarray(evaluate(dict(zip(space, values, strict=True))), np.float64)
        if losses.shape != (len(places),):
            raise ValueError(f"evaluate must return [{len(places)}] losses, got {losses.shape}")
        return np.where(np.isfinite(losses), losses, np.inf)

    sequence = qmc.Sobol(len(space), rng=np.random.default_rng(seed))
    places = sequence.random(2 ** int(np.ceil(np.log2(points))))[:points]
    losses = losses_at(places)
    for round_number in range(rounds):
        generator = np.random.default_rng([seed, round_number])
        new = _proposals(places, losses, points_per_round, generator)
        places, losses = np.concatenate([places, new]), np.append(losses, losses_at(new))
    if not np.isfinite(losses.min()):
        raise ValueError("every run diverged: lower the space's highest rate")
    values = np.exp(lows + places * (highs - lows)).T
    best = int(np.argmin(losses))
    return JointResult(
        {name: float(row[best]) for name, row in zip(space, values, strict=True)},
        float(losses[best]),
        dict(zip(space, values, strict=True)),
        losses,
    )


@checked
def effective_rate(rate: Any, momentum: Any) -> Any:
    """The long-term step size with momentum.

        rate / (1 - momentum)

    Args:
        rate: a number or an array of any shape [...].
        momentum: likewise.

    Returns:
        [...].

    Example:
        >>> round(effective_rate(0.01, 0.9), 6)
        0.1
    """
    return rate / (1 - momentum)


def _proposals(
    places: np.ndarray, losses: np.ndarray, count: int, generator: np.random.Generator
) -> np.ndarray:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
    from threadpoolctl import threadpool_limits

    dimensions = places.shape[1]
    lengths: Any = np.ones(dimensions)
    matern = Matern(lengths, [(5e-2, 2e1)] * dimensions, nu=2.5)
    kernel = ConstantKernel(1.0, (1e-2, 1e3)) * matern + WhiteKernel(1e-3, (1e-6, 1.0))
    values = _comparable(losses)
    chosen = []
    # Threads do not pay for matrices this small.
    with threadpool_limits(1), warnings.catch_warnings():
        # A length at its bound says that a direction does not matter.
        warnings.simplefilter("ignore", ConvergenceWarning)
        process = GaussianProcessRegressor(kernel, normalize_y=True).fit(places, values)
        believer: Any = {"kernel": process.kernel_, "optimizer": None, "normalize_y": True}
        for _ in range(count):
            process = GaussianProcessRegressor(**believer).fit(places, values)
            near = places[np.argmin(values)] + 0.1 * generator.normal(size=(500, dimensions))
            anywhere = generator.uniform(size=(500, dimensions))
            options = np.clip(np.concatenate([anywhere, near]), 0, 1)
            mean, deviation = np.asarray(process.predict(options, return_std=True))
            best = int(np.argmax(_improvement(values.min() - mean, deviation)))
            chosen.append(options[best])
            places, values = np.vstack([places, options[best]]), np.append(values, mean[best])
    return np.array(chosen)


def _comparable(losses: np.ndarray) -> np.ndarray:
    """Losses transformed for the process: logarithms, clipped far above the median."""
    values = finite_values(np.where(losses > 0, np.log(np.maximum(losses, 1e-300)), losses))
    middle, least = np.median(values), values.min()
    return np.minimum(values, middle + max(middle - least, 1e-12))


def _improvement(gain: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    from scipy.stats import norm

    deviation = np.maximum(deviation, 1e-9)
    return gain * norm.cdf(gain / deviation) + deviation * norm.pdf(gain / deviation)
