"""Execution of requests: one candidate to keep, or several to compare.

A snapshot is a reference to immutable arrays, so taking and restoring it is free and exact.
Candidates start from it and see the same batches as the training after them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from toolkit.lr.protocol import Request
from toolkit.lr.running.batches import batch_source
from toolkit.parallel.hosts.meeting import Together
from toolkit.parallel.updates import (
    TrainState,
    keep_layout,
    layout_of,
    make_update,
    nan_if_diverged,
    run_along,
)

PROGRAMS_KEPT = 4  # compiled programs of recent searches, for reuse with the same functions
# All compute the same; the fastest depends on the model and the machine.
MODES = {
    "loop": "one candidate after another, each in a compiled loop over steps",
    "steps": "one candidate after another, each step a call (best for convolutions on CPU)",
    "vmap": "all in one program, batched",
}
# Candidates share the step, and with it every batch.
_AXES: Any = TrainState(None, 0, 0, 0)  # pyright: ignore


class CandidateRunner:
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
        sample: Callable | None = None,
    ):
        self.source = batch_source(batches, sample)
        self._programs = _programs(loss_fn, optimizer, self.source.draw, validation)

    def run(
        self, state: TrainState, request: Request, mode: str = "loop"
    ) -> tuple[TrainState, np.ndarray]:
        """One candidate: the state reached, and its losses [1, points]."""
        program = self._stepwise if mode == "steps" else self._programs.single
        program = partial(program, layout=layout_of(state))
        evaluate = self._programs.evaluate_one
        return self._run(program, evaluate, state, request, request.rates[0])

    def run_together(self, state: TrainState, request: Request, mode: str = "vmap") -> np.ndarray:
        """All candidates: their losses [candidates, points]."""
        if mode in ("loop", "steps"):
            rows = [replace(request, rates=row[None]) for row in request.rates]
            return np.concatenate([self.run(state, row, mode)[1] for row in rows])
        copies = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (len(request.rates), *jnp.shape(leaf))),
            (state.params, state.optimizer_state, state.model_state),
        )
        start = TrainState(state.step, *copies)
        program, evaluate = self._programs.several, self._programs.evaluate_several
        return self._run(program, evaluate, start, request, request.rates)[1]

    def validation_loss(self, state: TrainState) -> float:
        """Of the validation's batches, in this state."""
        return float(self._programs.evaluate_one(state.params, state.model_state))

    def _stepwise(
        self, state: TrainState, data: Any, count: Array, rates: np.ndarray, *, layout: tuple
    ) -> tuple[TrainState, np.ndarray]:
        losses = []
        for index in range(int(count)):
            state, loss = self._programs.one_step(state, data, rates[index], layout=layout)
            losses.append(loss)
        return state, np.asarray(losses, np.float32)

    def _run(
        self,
        program: Callable,
        evaluate: Callable,
        state: TrainState,
        request: Request,
        rates: np.ndarray,
    ) -> tuple[TrainState, np.ndarray]:
        total, done, curves = rates.shape[-1], 0, []
        every, most, begin = request.validate_every, self.source.steps_per_call, state.step
        while done < total or not curves:
            count = min(total - done, most, every - done % every if every else total)
            padded = np.zeros((*rates.shape[:-1], most), np.float32)
            padded[..., :count] = rates[..., done : done + count]
            data = self.source.data(begin, done, count)
            state, losses = program(state, data, np.int32(count), padded)
            done += count
            if not every:
                curves.append(losses[..., :count])
            elif done % every == 0:
                curves.append(evaluate(state.params, state.model_state)[..., None])
        return state, np.concatenate([np.atleast_2d(curve) for curve in curves], axis=-1)


@lru_cache(maxsize=PROGRAMS_KEPT)
def _programs(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    draw: Callable,
    validation: Callable | None,
) -> SimpleNamespace:
    """The programs of a search, compiled at the first call."""
    update = make_update(loss_fn, optimizer, draw)
    steps = partial(run_along, update)

    def evaluate(params: Any, model_state: Any) -> Array:
        if validation is None:
            return jnp.array(jnp.nan)
        return validation(params) if model_state is None else validation(params, model_state)

    def one_step(state: TrainState, data: Any, rate: Array, *, layout: tuple) -> tuple:
        state, metrics = update(state, data, rate)
        state = keep_layout(state, layout)
        return state, nan_if_diverged(state.params, metrics["loss"].astype(jnp.float32))

    batched = jax.vmap(steps, in_axes=(_AXES, None, None, 0), out_axes=(_AXES, 0))
    together = partial(Together, what="candidates of the search")
    return SimpleNamespace(
        # Nothing is donated: the snapshot must survive its candidates.
        single=together(jax.jit(steps, static_argnames="layout")),
        one_step=together(jax.jit(one_step, static_argnames="layout")),
        several=together(jax.jit(batched)),
        evaluate_one=together(jax.jit(evaluate)),
        evaluate_several=together(jax.jit(jax.vmap(evaluate))),
    )
