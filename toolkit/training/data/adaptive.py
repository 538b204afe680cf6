"""Data that training chooses as it goes: samples, proportions of sources, weights of losses.

Three hooks, as in DataFlex: `AdaptiveBatches` chooses the next records or proportions every so many
steps, by a rule of one's own or one of those here; `reweighted_loss` weighs the rows of each batch.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit._checks import check_fields, checked
from toolkit.parallel.updates import TrainState
from toolkit.training.data.host_batches import HostBatches
from toolkit.training.metrics import MetricsLog, read_metrics

CHOICES = "choices.jsonl"


@dataclass(frozen=True)
class AdaptiveBatches:
    """Batches that depend on the state of training: data for `fit`.

    Every `every` steps, `choose` makes a choice, which is kept in `choices.jsonl` of the run's
    folder, so that a resumed run reads the same batches as an unbroken one.

    Attributes:
        every: steps between two choices; the first is made before the first step.
        choose: (state, earlier choices) -> what JSON can hold, such as weights of sources or the
            numbers of records, or arrays, which become lists; the same in every process.
        batches: (all choices so far) -> `HostBatches` for the steps until the next choice.

    Example:
        >>> records, farthest = [jnp.float32(0), jnp.float32(4)], lambda state, choices: 1
        >>> chosen = lambda choices: record_batches([records[choices[-1]]], seed=0, batch=1)
        >>> data = AdaptiveBatches(every=5, choose=farthest, batches=chosen)
        >>> data.every, data.choose(None, [])
        (5, 1)
    """

    every: int
    choose: Callable[[TrainState, list[Any]], Any]
    batches: Callable[[list[Any]], HostBatches]

    def __post_init__(self):
        check_fields(self)
        if self.every < 1:
            raise ValueError(f"every: got {self.every}, wanted at least 1")


class Choices:
    """The choices of a run, kept in its folder by the first process; made by `fit`."""

    def __init__(self, data: AdaptiveBatches, directory: str | os.PathLike | None, step: int):
        self.data = data
        self.current: tuple[int, Any] = (-1, None)
        path = None if directory is None else Path(directory) / CHOICES
        # The choice of this step is made again: of another run it would be another.
        self.log = MetricsLog(None if jax.process_index() else path, step - 1)
        if path is not None and jax.process_index():
            self.log.rows = [row for row in read_metrics(path) if row["step"] < step]

    def at(self, state: TrainState, step: int) -> HostBatches:
        """The batches of a step; the next choice is made where it is due."""
        number, rest = divmod(step, self.data.every)
        if number != self.current[0]:
            rows = self.log.rows
            steps, earlier = [row["step"] for row in rows], number + (rest > 0)
            if steps != [self.data.every * i for i in range(earlier)]:
                raise ValueError(
                    f"every: got {self.data.every}, and at step {step} {CHOICES} holds choices of "
                    f"steps {steps}; wanted the file of this run"
                )
            if not rest:
                choice = self.data.choose(state, [row["choice"] for row in rows])
                kept = json.loads(json.dumps(choice, default=np.ndarray.tolist))
                self.log.append({"step": step, "choice": kept})
            self.current = number, self.data.batches([row["choice"] for row in rows])
        return self.current[1]

    def close(self) -> None:
        """Close the file."""
        self.log.close()


@checked
def doremi_weights(
    weights: Float[np.ndarray, "sources"], excess: Float[np.ndarray, "sources"], *,
    rate: float = 1.0, smoothing: float = 1e-3,
) -> Float[np.ndarray, "sources"]:  # fmt: skip
    """The next weights of sources by DoReMi: more where a model lags behind its reference.

        z_j = w_j exp(rate max(excess_j, 0)),  w'_j = (1 - smoothing) z_j / sum z + smoothing / K

    Args:
        weights: of each of K sources, with sum 1.
        excess: mean over the source's tokens of max(loss - loss of the reference, 0), in nats; of a
            source that was not seen, its last.
        rate: of the exponent.
        smoothing: share that is spread evenly.

    Returns:
        K weights with sum 1, for the loss of the next records; the mean over training is the
        mixture that DoReMi finds.

    Source: Xie et al., "DoReMi", arXiv:2305.10429, Algorithm 1.

    Example:
        >>> import numpy as np
        >>> doremi_weights(np.full(3, 1 / 3), np.array([0.5, 0.1, -0.2])).round(4).tolist()
        [0.4391, 0.2944, 0.2665]
    """
    if not np.isfinite(excess).all():
        raise ValueError(f"excess: got {excess.tolist()}, wanted finite numbers")
    gap = np.maximum(excess, 0)
    grown = weights * np.exp(rate * (gap - gap.max()))
    return (1 - smoothing) * grown / grown.sum() + smoothing / len(weights)


@checked
def odm_weights(
    rewards: Float[np.ndarray, "sources"], weights: Float[np.ndarray, "sources"],
    losses: Float[np.ndarray, "sources"], updates: int, *,
    memory: float = 0.9,
) -> tuple[Float[np.ndarray, "sources"], Float[np.ndarray, "sources"]]:  # fmt: skip
    """The next weights of sources by online data mixing, a bandit that seeks high losses.

        R_j <- memory R_j + (1 - memory) loss_j / w_j,   eps_t = min(1 / K, sqrt(ln K / (K t)))
        w_j <- (1 - K eps_t) softmax(eps_{t-1} R)_j + eps_t

    While t <= K ln K, K eps_t is 1 and the weights are even.

    Args:
        rewards: R of each of K sources; 0 at first.
        weights: of each source when the losses were found.
        losses: of each source, in nats; NaN for one that was not seen, whose R stays.
        updates: t, 1 for the first.
        memory: share of R that stays.

    Returns:
        (R, weights with sum 1).

    Source: Albalak et al., "Efficient Online Data Mixing", arXiv:2312.02406, Algorithm 1.

    Example:
        >>> import numpy as np
        >>> losses = np.array([2.0, 1.0])
        >>> rewards, weights = odm_weights(np.zeros(2), np.full(2, 0.5), losses, 1, memory=0.5)
        >>> rewards.tolist(), weights.tolist()
        ([2.0, 1.0], [0.5, 0.5])
    """
    many = len(rewards)
    if updates < 1 or (weights <= 0).any():
        raise ValueError(
            f"weights: got {weights.tolist()} at update {updates}; wanted them above 0, and "
            "updates from 1 on"
        )

    def explored(update: int) -> float:
        return min(1 / many, math.sqrt(math.log(many) / (many * update))) if update else 1 / many

    new = np.where(np.isfinite(losses), memory * rewards + (1 - memory) * losses / weights, rewards)
    exponents = explored(updates - 1) * new
    chances = np.exp(exponents - exponents.max())
    least = explored(updates)
    chances = (1 - many * least) * chances / chances.sum() + least
    return new, chances


@checked
def select_by_loss(
    losses: Float[np.ndarray, "records"], count: int, *,
    favour: Literal["low", "medium", "high"] = "medium", factor: float = 5.0,
    quantiles: tuple[float, float] = (0.33, 0.66), seed: int = 0,
) -> list[int]:  # fmt: skip
    """Draw records without replacement, those in one range of losses more often.

    Args:
        losses: of each record; one that is not finite is never drawn.
        count: records to draw.
        favour: the range between the quantiles, or below or above.
        factor: weight of a record in that range; the others have 1.
        quantiles: ends of the middle range.
        seed: of the draw.

    Returns:
        Numbers of `count` records, in the order drawn.

    Source: the selector "loss" of DataFlex, whose defaults these are.

    Example:
        >>> import numpy as np
        >>> select_by_loss(np.array([3.0, 1.0, 2.0, np.nan]), 1, favour="high", factor=1e9)
        [0]
    """
    values = np.asarray(losses, float)
    able = np.isfinite(values)
    if not 1 <= count <= able.sum():
        raise ValueError(f"count: got {count}, wanted 1..{able.sum()}, the finite losses")
    if factor <= 0:
        raise ValueError(f"factor: got {factor}, wanted a number above 0")
    low, high = np.quantile(values[able], quantiles)
    with np.errstate(invalid="ignore"):
        ranges = {"low": values <= low, "high": values > high}
    ranges["medium"] = ~ranges["low"] & ~ranges["high"]
    weights = np.where(ranges[favour], factor, 1.0)
    # The largest of log-weight + Gumbel noise: a draw without replacement.
    keys = np.log(weights) + np.random.default_rng(seed).gumbel(size=len(values))
    return np.argsort(-np.where(able, keys, -np.inf), kind="stable")[:count].tolist()


@checked
def loss_weights(
    losses: Float[Array, "batch"],
    strategy: Literal["linupper", "quadratic", "extremes"] = "linupper",
) -> Float[Array, "batch"]:
    """Weights of the rows of a batch by their own losses, with sum 1.

        h_i = -1 .. 1 from the least to the greatest loss,  weights = softmax(s(h))
        linupper: s = min(h + 1, 1)    quadratic: s = 1 - h^2    extremes: s = |h|

    "linupper" levels off above the middle, so that outliers weigh no more than other hard rows.
    Equal losses have equal weights. No gradient flows through them.

    Args:
        losses: of each row.
        strategy: which losses weigh more.

    Returns:
        A weight per row.

    Source: Sow et al., "Dynamic Loss-Based Sample Reweighting", arXiv:2502.06733.

    Example:
        >>> weights = loss_weights(jnp.array([1.0, 2.0, 3.0]))
        >>> [round(weight, 3) for weight in weights.tolist()]
        [0.155, 0.422, 0.422]
    """
    losses = jax.lax.stop_gradient(losses)
    least, most = losses.min(), losses.max()
    h = (2 * losses - (most + least)) / jnp.maximum(most - least, 1e-6)
    scores = {"linupper": jnp.minimum(h + 1, 1), "quadratic": 1 - h**2, "extremes": jnp.abs(h)}
    return jax.nn.softmax(scores[strategy])


@checked
def reweighted_loss(
    loss_fn: Callable[..., Float[Array, ""]],
    weigh: Callable[[Float[Array, "batch"], Any], Float[Array, "batch"]],
) -> Callable[..., Float[Array, ""]]:
    """A loss in which each row of a batch has its own weight.

        loss = sum_i weights_i loss_i,  weights = weigh(losses, batch), without a gradient

    Args:
        loss_fn: (params, batch) -> mean loss over the rows.
        weigh: (losses, batch) -> a weight per row, such as
            `lambda losses, batch: loss_weights(losses)`, or the weight of the row's source.

    Returns:
        (params, batch) -> loss, for `make_train_step`.

    Cost: That of `loss_fn`, row by row under `jax.vmap`.

    Example:
        >>> square = lambda w, batch: jnp.mean((w - batch) ** 2)
        >>> loss = reweighted_loss(square, lambda losses, batch: jnp.array([0.25, 0.75]))
        >>> float(loss(jnp.float32(0), jnp.array([1.0, 2.0])))
        3.25
    """

    def loss(params: Any, batch: Any) -> Float[Array, ""]:
        def of_row(row: Any) -> Float[Array, ""]:
            return loss_fn(params, jax.tree.map(lambda leaf: leaf[None], row))

        losses = jax.vmap(of_row)(batch)
        return jnp.sum(jax.lax.stop_gradient(weigh(losses, batch)) * losses)

    return loss
