"""Trains several runs of a workload in one program: seeds by rates, many steps a call.

A lane is one run. The rates of its steps are data, so every schedule, every candidate of a search
and every length of run is the same compiled program.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from toolkit.experiments.lr.workloads import Workload

STEPS_PER_CALL = 500
EVALUATED_TOGETHER = 512


@dataclass(frozen=True)
class Lanes:
    """Runs side by side, [seeds, rates, ...] in every leaf.

    Attributes:
        params: parameters.
        optimizer_state: what the optax transformation keeps.
        step: of all: the next batch.
    """

    params: Any
    optimizer_state: Any
    step: int = 0


class Trainer:
    """One workload and one optimiser, compiled once a number of lanes.

    Attributes:
        workload: the problem.
        optimizer: takes `value=loss`; its updates are multiplied by the rates.
        evaluations: gradient evaluations made so far, of all lanes: the truth for every ledger.
    """

    def __init__(
        self,
        workload: Workload,
        optimizer: optax.GradientTransformation,
        evaluation_params: Callable[[Any, Any], Any] = lambda optimizer_state, params: params,
    ):
        self.workload = workload
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.evaluations = 0
        along_rates = jax.vmap(self._steps, in_axes=(0, 0, None, None, None, 0, None))
        along_seeds = jax.vmap(along_rates, in_axes=(0, 0, None, 0, None, 0, None))
        self._program = jax.jit(along_seeds)
        self._init = jax.jit(self._initial, static_argnames="lanes")
        self._losses = jax.jit(functools.partial(_losses, workload.loss, evaluation_params))

    def init(self, seeds: Any, lanes: int = 1) -> Lanes:
        """Runs before their first step: parameters by seed, the same in all lanes of a seed."""
        return Lanes(*self._init(jnp.asarray(seeds, jnp.uint32), lanes=lanes))

    def train(
        self,
        lanes: Lanes,
        seeds: Any,
        rates: np.ndarray,
        progress: Callable[[int], Any] | None = None,
    ) -> tuple[Lanes, np.ndarray]:
        """Makes the steps of `rates` [seeds, rates, steps]; the losses before each, same shape.

        Losses of a call that ends in a diverged update are not finite; `progress` hears the steps.
        """
        params, optimizer_state = lanes.params, lanes.optimizer_state
        seeds, total = jnp.asarray(seeds, jnp.uint32), rates.shape[-1]
        curves = np.zeros(rates.shape, np.float32)
        for begin in range(0, total, STEPS_PER_CALL):
            count = min(total - begin, STEPS_PER_CALL)
            padded = np.zeros((*rates.shape[:-1], STEPS_PER_CALL), np.float32)
            padded[..., :count] = rates[..., begin : begin + count]
            params, optimizer_state, losses = self._program(
                params, optimizer_state, self.workload.data, seeds, np.int32(lanes.step + begin),
                padded, np.int32(count),
            )  # fmt: skip
            curves[..., begin : begin + count] = np.asarray(losses)[..., :count]
            self.evaluations += count * rates.shape[0] * rates.shape[1]
            if progress is not None:
                progress(begin + count)
        return Lanes(params, optimizer_state, lanes.step + total), curves

    def evaluate(self, lanes: Lanes, split: Any) -> np.ndarray:
        """Mean loss over a whole split [seeds, rates]; not finite where a run diverged."""
        return np.asarray(self._losses(lanes.params, lanes.optimizer_state, split), np.float64)

    def _initial(self, seeds: Array, lanes: int) -> tuple[Any, Any]:
        def one(seed: Array) -> tuple[Any, Any]:
            params = self.workload.init(jax.random.key(seed))
            return params, self.optimizer.init(params)

        def repeated(leaf: Array) -> Array:
            shape = leaf.shape
            return jnp.broadcast_to(leaf[:, None], (shape[0], lanes, *shape[1:]))

        return jax.tree.map(repeated, jax.vmap(one)(seeds))

    def _steps(
        self,
        params: Any,
        optimizer_state: Any,
        data: Any,
        seed: Array,
        begin: Array,
        rates: Array,
        count: Array,
    ) -> tuple[Any, Any, Array]:
        def body(index: Array, carry: tuple) -> tuple:
            params, optimizer_state, losses = carry
            batch = self.workload.sample(data, begin + index, seed)
            loss, gradients = jax.value_and_grad(self.workload.loss)(params, batch)
            updates, optimizer_state = self.optimizer.update(
                gradients, optimizer_state, params, value=loss
            )
            updates = jax.tree.map(lambda update: rates[index] * update, updates)
            params = optax.apply_updates(params, updates)
            return params, optimizer_state, losses.at[index].set(loss)

        carry = params, optimizer_state, jnp.zeros_like(rates)
        params, optimizer_state, losses = jax.lax.fori_loop(0, count, body, carry)
        # The last update comes after the last loss, which knows nothing of its outcome.
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]
        return params, optimizer_state, jnp.where(jnp.stack(finite).all(), losses, jnp.nan)


def _losses(
    loss: Callable, evaluation_params: Callable, params: Any, optimizer_state: Any, split: Any
) -> Array:
    count = len(jax.tree.leaves(split)[0])

    def one(lane: tuple) -> Array:
        evaluated = evaluation_params(lane[1], lane[0])
        total = jnp.zeros(())
        for begin in range(0, count, EVALUATED_TOGETHER):
            end = min(begin + EVALUATED_TOGETHER, count)
            part = jax.tree.map(lambda leaf, at=slice(begin, end): leaf[at], split)
            # The last part is smaller; a mean of means would weigh its examples wrongly.
            total += (end - begin) * loss(evaluated, part)
        return total / count

    return jax.lax.map(lambda seed: jax.lax.map(one, seed), (params, optimizer_state))
