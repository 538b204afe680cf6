"""Trains several runs of a workload in one program: seeds by rates, many steps per call.

A lane is one run. The rates of its steps are data, so that all schedules and lengths share one
compiled program.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from toolkit.experiments.lr.workloads import Workload
from toolkit.parallel.updates import TrainState, make_update, run_along

STEPS_PER_CALL = 500
EVALUATED_TOGETHER = 512
# Lanes have separate parameters and optimiser states, but share the step.
_AXES: Any = TrainState(None, 0, 0)  # pyright: ignore


class LaneTrainer:
    """One workload and one optimiser, compiled once per number of lanes.

    Attributes:
        workload: the problem.
        optimizer: takes `value=loss`; its updates are multiplied by the rates.
        sample: (arrays and seed, step) -> batch.
        evaluations: gradient evaluations of all lanes so far, to check ledgers.
    """

    def __init__(
        self,
        workload: Workload,
        optimizer: optax.GradientTransformation,
        evaluation_params: Callable[[Any, Any], Any] = lambda optimizer_state, params: params,
    ):
        self.workload = workload
        self.optimizer = optimizer
        self.sample = lambda data, step: workload.sample(data[0], step, data[1])
        self.evaluations = 0
        steps = functools.partial(run_along, make_update(workload.loss, optimizer, self.sample))
        along_rates = jax.vmap(steps, in_axes=(_AXES, None, None, 0), out_axes=(_AXES, 0))
        along_seeds = jax.vmap(
            along_rates, in_axes=(_AXES, (None, 0), None, 0), out_axes=(_AXES, 0)
        )
        self._program = jax.jit(along_seeds)
        self._init = jax.jit(self._initial, static_argnames="lanes")
        self._losses = jax.jit(functools.partial(_losses, workload.loss, evaluation_params))

    def init(self, seeds: Any, lanes: int = 1) -> TrainState:
        """Runs [seeds, lanes] before their first step; all lanes of a seed start alike."""
        params, optimizer_state = self._init(jnp.asarray(seeds, jnp.uint32), lanes=lanes)
        return TrainState(jnp.int32(0), params, optimizer_state)

    def train(
        self,
        lanes: TrainState,
        seeds: Any,
        rates: np.ndarray,
        progress: Callable[[int], Any] | None = None,
    ) -> tuple[TrainState, np.ndarray]:
        """Makes the steps of `rates` [seeds, lanes, steps]; the losses before each, same shape.

        Losses of a call that ends in a diverged update are not finite; `progress` is told the
        steps.
        """
        data, total = (self.workload.data, jnp.asarray(seeds, jnp.uint32)), rates.shape[-1]
        curves = np.zeros(rates.shape, np.float32)
        for begin in range(0, total, STEPS_PER_CALL):
            count = min(total - begin, STEPS_PER_CALL)
            padded = np.zeros((*rates.shape[:-1], STEPS_PER_CALL), np.float32)
            padded[..., :count] = rates[..., begin : begin + count]
            lanes, losses = self._program(lanes, data, np.int32(count), padded)
            curves[..., begin : begin + count] = np.asarray(losses)[..., :count]
            self.evaluations += count * rates.shape[0] * rates.shape[1]
            if progress is not None:
                progress(begin + count)
        return lanes, curves

    def evaluate(self, lanes: TrainState, split: Any) -> np.ndarray:
        """Mean loss over a whole split [seeds, rates]; not finite where a run diverged."""
        return np.asarray(self._losses(lanes.params, lanes.optimizer_state, split), np.float64)

    def _initial(self, seeds: Array, lanes: int) -> tuple[Any, Any]:
        def initial(seed: Array) -> tuple[Any, Any]:
            params = self.workload.init(jax.random.key(seed))
            return params, self.optimizer.init(params)

        def repeated(leaf: Array) -> Array:
            shape = leaf.shape
            return jnp.broadcast_to(leaf[:, None], (shape[0], lanes, *shape[1:]))

        return jax.tree.map(repeated, jax.vmap(initial)(seeds))


def _losses(
    loss: Callable, evaluation_params: Callable, params: Any, optimizer_state: Any, split: Any
) -> Array:
    count = len(jax.tree.leaves(split)[0])

    def evaluate(lane: tuple) -> Array:
        evaluated = evaluation_params(lane[1], lane[0])
        total = jnp.zeros(())
        for begin in range(0, count, EVALUATED_TOGETHER):
            end = min(begin + EVALUATED_TOGETHER, count)
            part = jax.tree.map(lambda leaf, at=slice(begin, end): leaf[at], split)
            # The last part is smaller; a mean of means would weigh its examples wrongly.
            total += (end - begin) * loss(evaluated, part)
        return total / count

    return jax.lax.map(lambda seed: jax.lax.map(evaluate, seed), (params, optimizer_state))


def gathered(lanes: TrainState, rows: np.ndarray, columns: np.ndarray) -> TrainState:
    """The lanes at these rows and columns."""
    params, state = jax.tree.map(
        lambda leaf: leaf[rows, columns], (lanes.params, lanes.optimizer_state)
    )
    return replace(lanes, params=params, optimizer_state=state)
