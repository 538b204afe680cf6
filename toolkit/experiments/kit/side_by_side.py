"""Training the seeds of one setting side by side in one program.

A small model leaves most of an accelerator idle. Its seeds have separate parameters, optimiser
states and batches, and share the step, so that one program trains all of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from toolkit.parallel.updates import TrainState, make_update, run_updates

_AXES: Any = TrainState(None, 0, 0)  # pyright: ignore


class SeedTrainer:
    """Trains the seeds of a setting in one program, compiled once per number of seeds.

    Each seed ends where it would end alone, up to rounding. Products have the precision of their
    type, as on a CPU: for a state that is multiplied 512 times, the ten bits of a GPU's fast
    products are too few.

    Args:
        init: key of a seed -> parameters.
        loss: (parameters, batch) -> mean loss.
        sample: (seed, step) -> batch.
        optimizer: the optax transformation.
        evaluate: (parameters, seed) -> number, for the curve.
        every: steps between evaluations.
    """

    def __init__(
        self, *, init: Callable[[Array], Any], loss: Callable[[Any, Any], Array],
        sample: Callable[[Array, Array], Any], optimizer: optax.GradientTransformation,
        evaluate: Callable[[Any, Array], Array], every: int,
    ):  # fmt: skip
        def start(seed: Array) -> tuple[Any, Any]:
            params = init(jax.random.key(seed))
            return params, optimizer.init(params)

        update = make_update(loss, optimizer, sample)
        steps = functools.partial(run_updates, update, most_steps=every)
        along_seeds = jax.vmap(steps, in_axes=(_AXES, 0, None), out_axes=(_AXES, 0))
        self._every = every
        self._start = jax.jit(jax.vmap(start))
        self._run = jax.jit(along_seeds, donate_argnums=0)
        self._evaluate = jax.jit(jax.vmap(evaluate))

    def train(self, seeds: Sequence[int], steps: int) -> tuple[list[Any], list[int], np.ndarray]:
        """Parameters of each seed; the steps that were evaluated, the last among them; and the
        numbers [seeds, evaluations] found there.
        """
        chosen = jnp.asarray(seeds, jnp.int32)
        reached, rows = [], []
        with jax.default_matmul_precision("float32"):
            state = TrainState(jnp.int32(0), *self._start(chosen))
            for begin in range(0, steps, self._every):
                reached.append(min(begin + self._every, steps))
                state, _ = self._run(state, chosen, jnp.int32(reached[-1] - begin))
                rows.append(np.asarray(self._evaluate(state.params, chosen), np.float64))
        found = [
            jax.tree.map(lambda leaf, at=at: leaf[at], state.params) for at in range(len(seeds))
        ]
        return found, reached, np.transpose(rows)
