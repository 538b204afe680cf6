"""The search as one call: trains, tries candidates from a snapshot, returns what was found.

A snapshot is a reference to immutable arrays, so taking and restoring it is free and exact.
Candidates start from it and see the very batches that the training after them will see.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from toolkit.lr.autolrs import Controller, Ledger, Request, ask, init, tell
from toolkit.lr.constants import AutoLRS
from toolkit.lr.schedules import tabulated_schedule

STEPS_PER_CALL = 256
EVALUATIONS = ("loop", "vmap")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "optimizer_state", "cursor"),
    meta_fields=(),
)
@dataclass(frozen=True)
class SearchState:
    """All that training changes.

    Attributes:
        params: any pytree of arrays.
        optimizer_state: what the optax transformation keeps.
        cursor: the next batch, and so the updates kept so far.
    """

    params: Any
    optimizer_state: Any
    cursor: int


@partial(jax.tree_util.register_dataclass, data_fields=("controller", "state"), meta_fields=())
@dataclass(frozen=True)
class SearchProgress:
    """A search at some point, ready for a checkpoint: a pytree of arrays and numbers.

    Attributes:
        controller: what the search knows.
        state: what the training has reached.
    """

    controller: Controller
    state: SearchState


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        schedule: step -> rate, as trained; its last rate stays. The lowest rate of the interval if
            no step of training was kept.
        ledger: what it cost.
        table: columns "stage", "rate", "forecast", "variance", one row a candidate.
        params: trained by the search itself along that schedule.
        progress: to go on from, if the search was stopped.
    """

    schedule: optax.Schedule
    ledger: Ledger
    table: dict[str, np.ndarray]
    params: Any
    progress: SearchProgress


def search(
    loss_fn: Callable[[Any, Any], Float[Array, ""]],
    params: Any,
    batches: Any,
    *,
    interval: tuple[float, float] = (1e-4, 1e-1),
    budget: int = 4000,
    method: Callable[..., AutoLRS] = AutoLRS.scaled,
    optimizer: optax.GradientTransformation | None = None,
    validation: Callable[[Any], Float[Array, ""]] | None = None,
    evaluation: str = "loop",
    start: SearchProgress | None = None,
    callback: Callable[[SearchProgress], Any] | None = None,
) -> SearchResult:
    """Trains by AutoLRS: finds the schedule while following it.

        params <- params + rate * optimizer(grad loss(params, batches(step)))

    The optimiser is built with learning rate 1 and its updates are multiplied by the searched
    rate, so that different rates of groups of parameters keep their ratio, and no rate is stored
    in a state from which a candidate could take a stale one.

        result = search(loss_fn, params, batches, interval=(1e-4, 1e-1), budget=4000)
        optimizer = optax.adamw(result.schedule)

    Args:
        loss_fn: (params, batch) -> scalar loss, traceable.
        params: any pytree of arrays; not consumed.
        batches: (step int32) -> batch, traceable and always the same for the same step; or a
            pytree of arrays [batches, ...], gone through again and again.
        interval: lowest and highest rate.
        budget: gradient evaluations in all, those of candidates included; kept to exactly.
        method: (interval, budget) -> constants, for instance `AutoLRS.paper` or
            `functools.partial(AutoLRS.code, warmup_steps=100, warmup_rate=0.01)`.
        optimizer: an optax transformation with learning rate 1; None for `optax.adamw(1.0)`.
        validation: params -> scalar loss on a few fixed batches, traceable; None for training
            losses throughout. Never give it test data: the schedule is chosen by it.
        evaluation: of candidates proposed together, "loop" (one after another) or "vmap" (in one
            program; faster for dense networks, slower for convolutions on CPU).
        start: from the `progress` of a stopped search, or from a checkpoint of it; all other
            arguments as they were.
        callback: given a `SearchProgress` after every request; True stops the search.

    Returns:
        A `SearchResult`.

    Raises:
        ValueError: evaluation is unknown, a warm-up diverged, or the constants contradict one
            another.

    Cost:
        `budget` gradient evaluations; memory of one candidate ("loop") or of all ("vmap") besides
        the snapshot. Two compilations.

    Source: Jin et al., AutoLRS (arXiv:2105.10762).
    """
    if evaluation not in EVALUATIONS:
        raise ValueError(f"evaluation must be one of {', '.join(EVALUATIONS)}, got {evaluation!r}")
    constants = replace(method(interval, budget), has_validation=validation is not None)
    optimizer = optax.adamw(1.0) if optimizer is None else optimizer
    trainer = Trainer(loss_fn, optimizer, batches, validation)
    if start is None:
        params = jax.tree.map(jnp.asarray, params)
        start = SearchProgress(init(constants), SearchState(params, optimizer.init(params), 0))
    controller, state = start.controller, start.state
    while (request := ask(constants, controller)) is not None:
        began = time.perf_counter()
        if len(request.rates) > 1 and evaluation == "vmap":
            reached, losses = trainer.run_together(state, request)
        else:
            # Only training has one candidate and is kept, so the last state is the one meant.
            runs = [trainer.run(state, replace(request, rates=row[None])) for row in request.rates]
            reached, losses = runs[-1][0], np.concatenate([losses for _, losses in runs])
        seconds = time.perf_counter() - began
        controller, is_kept = tell(constants, controller, request, losses, seconds=seconds)
        state = reached if is_kept else state
        if callback is not None and callback(SearchProgress(controller, state)) is True:
            break
    rates = controller.rates if len(controller.rates) else np.array(interval[:1])
    progress = SearchProgress(controller, state)
    return SearchResult(
        tabulated_schedule(rates), controller.ledger, controller.table, state.params, progress
    )


class Trainer:
    """Runs requests: one compiled program for one candidate, another for several.

    The number of steps is a traced bound and a request is cut into equal calls, so no length
    compiles anew, and however training is cut, each update is the same machine code.
    """

    def __init__(
        self,
        loss_fn: Callable,
        optimizer: optax.GradientTransformation,
        batches: Any,
        validation: Callable | None = None,
    ):
        # Arrays are passed to the program, not baked into it.
        self._data = None if callable(batches) else jax.tree.map(jnp.asarray, batches)
        sample = (lambda data, step: batches(step)) if callable(batches) else _row_of
        steps = partial(_steps, loss_fn, optimizer, sample)
        evaluate = validation if validation is not None else lambda params: jnp.nan
        # Nothing is donated: the snapshot must survive its candidates.
        self._one = jax.jit(steps)
        self._several = jax.jit(jax.vmap(steps, in_axes=(0, 0, None, None, 0, None)))
        self._evaluate_one = jax.jit(evaluate)
        self._evaluate_several = jax.jit(jax.vmap(evaluate))

    def run(self, state: SearchState, request: Request) -> tuple[SearchState, np.ndarray]:
        """One candidate: the state reached, and its losses [1, points]."""
        return self._run(self._one, self._evaluate_one, state, request, request.rates[0])

    def run_together(self, state: SearchState, request: Request) -> tuple[SearchState, np.ndarray]:
        """All candidates: states with a leading axis, and losses [candidates, points]."""
        count = len(request.rates)
        params, optimizer_state = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))),
            (state.params, state.optimizer_state),
        )
        state = SearchState(params, optimizer_state, state.cursor)
        return self._run(self._several, self._evaluate_several, state, request, request.rates)

    def _run(
        self,
        program: Callable,
        evaluate: Callable,
        state: SearchState,
        request: Request,
        rates: np.ndarray,
    ) -> tuple[SearchState, np.ndarray]:
        params, optimizer_state, cursor = state.params, state.optimizer_state, int(state.cursor)
        total, done, curves = rates.shape[-1], 0, []
        every = request.validate_every
        while done < total:
            count = min(total - done, STEPS_PER_CALL, every - done % every if every else total)
            padded = np.zeros((*rates.shape[:-1], STEPS_PER_CALL), np.float32)
            padded[..., :count] = rates[..., done : done + count]
            params, optimizer_state, losses = program(
                params, optimizer_state, self._data, jnp.int32(cursor), padded, jnp.int32(count)
            )
            cursor, done = cursor + count, done + count
            if not every:
                curves.append(losses[..., :count])
            elif done % every == 0:
                curves.append(evaluate(params)[..., None])
        losses = np.concatenate([np.atleast_2d(curve) for curve in curves], axis=-1)
        return SearchState(params, optimizer_state, cursor), losses


def _steps(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    sample: Callable,
    params: Any,
    optimizer_state: Any,
    data: Any,
    cursor: Array,
    rates: Array,
    steps: Array,
) -> tuple[Any, Any, Array]:
    def body(index: Array, carry: tuple) -> tuple[Any, Any, Array]:
        params, optimizer_state, losses = carry
        loss, gradients = jax.value_and_grad(loss_fn)(params, sample(data, cursor + index))
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        updates = jax.tree.map(lambda update: (rates[index] * update).astype(update.dtype), updates)
        params = optax.apply_updates(params, updates)
        return params, optimizer_state, losses.at[index].set(loss.astype(losses.dtype))

    losses = jnp.zeros(rates.shape, jnp.float32)
    params, optimizer_state, losses = jax.lax.fori_loop(
        0, steps, body, (params, optimizer_state, losses)
    )
    # The last update comes after the last loss, which knows nothing of its outcome.
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    is_finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))
    return params, optimizer_state, jnp.where(is_finite, losses, jnp.nan)


def _row_of(data: Any, step: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[step % len(leaf)], data)
