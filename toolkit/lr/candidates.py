"""Runs what a search asks for: one candidate to keep, or several at once to compare.

A snapshot is a reference to immutable arrays, so taking and restoring it is free and exact.
Candidates start from it and see the very batches that the training after them will see.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from toolkit.lr.protocol import Request, register

STEPS_PER_CALL = 256
CANDIDATES_PER_MAP = 4
TIMED_STEPS = 4
# Each is the same computation; which is fastest depends on the model and on the machine.
MODES = {
    "loop": "one candidate after another, each in a compiled loop over steps",
    "steps": "one candidate after another, each step a call (convolutions on CPU want this)",
    "map": f"{CANDIDATES_PER_MAP} at a time in one program: bounded memory",
    "vmap": "all in one program, batched",
    "sharded": "all in one program, cut over the devices",
}


@register(("params", "optimizer_state", "cursor"))
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
        sample: Callable | None = None,
    ):
        # Arrays are passed to the program, not baked into it.
        self._data = None if callable(batches) else jax.tree.map(jnp.asarray, batches)
        draw = partial(_drawn, batches) if callable(batches) else sample or _row_of
        self._update = partial(_update, loss_fn, optimizer, draw)
        evaluate = validation if validation is not None else lambda params: jnp.nan
        # Nothing is donated: the snapshot must survive its candidates.
        self._one = jax.jit(partial(_steps, self._update), static_argnames="layout")
        self._one_step = jax.jit(partial(_step, self._update), static_argnames="layout")
        self._evaluate_one = jax.jit(evaluate)
        self._evaluate_several = jax.jit(jax.vmap(evaluate))

    def run(
        self, state: SearchState, request: Request, mode: str = "loop"
    ) -> tuple[SearchState, np.ndarray]:
        """One candidate: the state reached, and its losses [1, points]."""
        layout = _layout((state.params, state.optimizer_state))
        program = self._stepwise if mode == "steps" else self._one
        program = partial(program, layout=layout)
        return self._run(program, self._evaluate_one, state, request, request.rates[0])

    def run_together(self, state: SearchState, request: Request, mode: str = "vmap") -> np.ndarray:
        """All candidates: their losses [candidates, points]."""
        if mode in ("loop", "steps"):
            rows = [replace(request, rates=row[None]) for row in request.rates]
            return np.concatenate([self.run(state, row, mode)[1] for row in rows])
        count, rates = len(request.rates), request.rates
        place = jnp.asarray
        if mode == "sharded":
            mesh = self._mesh
            # Devices left over repeat the last candidate.
            padding = np.repeat(rates[-1:], -count % mesh.size, axis=0)
            rates = np.concatenate([rates, padding])
            place = partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("candidate")))
        params, optimizer_state = jax.tree.map(
            lambda leaf: place(jnp.broadcast_to(leaf, (len(rates), *jnp.shape(leaf)))),
            (state.params, state.optimizer_state),
        )
        start = SearchState(params, optimizer_state, state.cursor)
        program = self._several[mode]
        return self._run(program, self._evaluate_several, start, request, rates)[1][:count]

    def modes(self, state: SearchState) -> list[str]:
        """The modes that can run from this state here."""
        is_single = all(sharding is None for sharding in _layout(state.params))
        can_shard = is_single and jax.local_device_count() > 1
        return [mode for mode in MODES if mode != "sharded" or can_shard]

    def time_modes(self, state: SearchState, request: Request) -> tuple[dict[str, float], int]:
        """Seconds a step of all candidates by each mode, compiled; and the steps made for it."""
        few = replace(request, rates=request.rates[:, :TIMED_STEPS], validate_every=0)
        none = replace(few, rates=few.rates[:, :0])
        seconds, evaluations = {}, 0
        for mode in self.modes(state):
            # One after another takes as long for each, so one tells.
            share = 1 if mode in ("loop", "steps") else len(few.rates)
            timed = replace(few, rates=few.rates[:share])
            warm = timed if mode == "steps" else replace(none, rates=none.rates[:share])
            self.run_together(state, warm, mode)
            samples = []
            for _ in range(2):
                began = time.perf_counter()
                self.run_together(state, timed, mode)
                samples.append(time.perf_counter() - began)
            evaluations += (3 if mode == "steps" else 2) * timed.rates.size
            seconds[mode] = min(samples) * len(few.rates) / share / few.rates.shape[1]
        return seconds, evaluations

    @cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        auto = (jax.sharding.AxisType.Auto,)
        return jax.make_mesh((jax.local_device_count(),), ("candidate",), axis_types=auto)

    @cached_property
    def _several(self) -> dict[str, Callable]:
        axes = (0, 0, None, None, 0, None)
        steps = partial(_steps, self._update, layout=())
        batched = jax.vmap(steps, in_axes=axes)

        def mapped(params, optimizer_state, data, cursor, rates, count):
            def one(candidate: tuple) -> tuple:
                params, optimizer_state, rates = candidate
                return steps(params, optimizer_state, data, cursor, rates, count)

            candidates = (params, optimizer_state, rates)
            return jax.lax.map(one, candidates, batch_size=CANDIDATES_PER_MAP)

        programs = {"map": jax.jit(mapped), "vmap": jax.jit(batched)}
        if jax.local_device_count() > 1:
            along = PartitionSpec("candidate")
            specs = tuple(PartitionSpec() if axis is None else along for axis in axes)
            programs["sharded"] = jax.jit(
                jax.shard_map(batched, mesh=self._mesh, in_specs=specs, out_specs=along)
            )
        return programs

    def _stepwise(
        self,
        params: Any,
        optimizer_state: Any,
        data: Any,
        cursor: Array,
        rates: np.ndarray,
        count: Array,
        *,
        layout: tuple,
    ) -> tuple[Any, Any, np.ndarray]:
        losses = []
        for index in range(int(count)):
            params, optimizer_state, loss = self._one_step(
                params, optimizer_state, data, cursor + index, rates[index], layout=layout
            )
            losses.append(loss)
        return params, optimizer_state, np.asarray(losses, np.float32)

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
        while done < total or not curves:
            count = min(total - done, STEPS_PER_CALL, every - done % every if every else total)
            padded = np.zeros((*rates.shape[:-1], STEPS_PER_CALL), np.float32)
            padded[..., :count] = rates[..., done : done + count]
            params, optimizer_state, losses = program(
                params, optimizer_state, self._data, np.int32(cursor), padded, np.int32(count)
            )
            cursor, done = cursor + count, done + count
            if not every:
                curves.append(losses[..., :count])
            elif done % every == 0:
                curves.append(evaluate(params)[..., None])
        losses = np.concatenate([np.atleast_2d(curve) for curve in curves], axis=-1)
        return SearchState(params, optimizer_state, cursor), losses


def _update(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    sample: Callable,
    params: Any,
    optimizer_state: Any,
    data: Any,
    cursor: Array,
    rate: Array,
) -> tuple[Any, Any, Array]:
    loss, gradients = jax.value_and_grad(loss_fn)(params, sample(data, cursor))
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    updates = jax.tree.map(lambda update: (rate * update).astype(update.dtype), updates)
    return optax.apply_updates(params, updates), optimizer_state, loss.astype(jnp.float32)


def _steps(
    update: Callable,
    params: Any,
    optimizer_state: Any,
    data: Any,
    cursor: Array,
    rates: Array,
    steps: Array,
    *,
    layout: tuple,
) -> tuple[Any, Any, Array]:
    def body(index: Array, carry: tuple) -> tuple[Any, Any, Array]:
        params, optimizer_state, losses = carry
        params, optimizer_state, loss = update(
            params, optimizer_state, data, cursor + index, rates[index]
        )
        params, optimizer_state = _constrain((params, optimizer_state), layout)
        return params, optimizer_state, losses.at[index].set(loss)

    losses = jnp.zeros_like(rates)
    params, optimizer_state, losses = jax.lax.fori_loop(
        0, steps, body, (params, optimizer_state, losses)
    )
    return params, optimizer_state, _marked(params, losses)


def _step(
    update: Callable,
    params: Any,
    optimizer_state: Any,
    data: Any,
    cursor: Array,
    rate: Array,
    *,
    layout: tuple,
) -> tuple[Any, Any, Array]:
    params, optimizer_state, loss = update(params, optimizer_state, data, cursor, rate)
    params, optimizer_state = _constrain((params, optimizer_state), layout)
    return params, optimizer_state, _marked(params, loss)


def _marked(params: Any, losses: Array) -> Array:
    # The last update comes after the last loss, which knows nothing of its outcome.
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    is_finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))
    return jnp.where(is_finite, losses, jnp.nan)


def _layout(tree: Any) -> tuple:
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    return tuple(s if isinstance(s, NamedSharding) else None for s in shardings)


def _constrain(tree: Any, layout: tuple) -> Any:
    """Keeps arrays on a mesh where they came in: a layout of the compiler's choice would make the
    second call another program than the first.
    """
    if not any(layout):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    leaves = [
        leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in zip(leaves, layout, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def _drawn(batches: Callable, data: None, step: Array) -> Any:
    return batches(step)


def _row_of(data: Any, step: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[step % len(leaf)], data)
