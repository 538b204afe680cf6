"""Averages of the weights over training, which are evaluated and kept in place of the last ones."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.parallel.updates import TrainState, layout_of


class AverageState(NamedTuple):
    """The state of `with_average`: optax's, the decay, and that of the optimiser."""

    average: optax.EmaState
    decay_log: Float[Array, ""]
    inner: Any


@checked
def with_average(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    """An optimiser that also keeps an exponential moving average (EMA) of the weights.

        average_t = sum_i decay^(t - i) w_i / sum_i decay^(t - i),    i = 1..t

    The first weights are not in it, as with Adam's corrected moments. `evaluation_params` reads it.

    Args:
        optimizer: the whole optimiser, learning rate included.
        decay: 0.999 averages over about the last thousand updates.

    Returns:
        An optax transformation.

    Cost: A copy of the parameters, in float32 at least.

    Source: Polyak and Juditsky, 1992; optax.ema.

    Example:
        >>> optimizer = with_average(adamw(0.1), decay=0.5)
        >>> step = make_train_step(lambda w, data: (w - data) ** 2, optimizer)
        >>> state, _ = step(TrainState.create(jnp.float32(1), optimizer), jnp.float32(3))
        >>> bool(evaluation_params(state) == state.params)
        True
    """
    if not 0 < decay < 1:
        raise ValueError(f"decay must lie between 0 and 1, got {decay}")
    optimizer = optax.with_extra_args_support(optimizer)
    # optax corrects by 1 - decay**count in float32, which is off by a thousandth for 0.99999.
    moving: Any = optax.ema(decay, debias=False)

    def init(params: Any) -> AverageState:
        decay_log = jnp.float32(math.log(decay))
        return AverageState(moving.init(_wide(params)), decay_log, optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple:
        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        new = _wide(optax.apply_updates(params, updates))
        _, average = moving.update(new, state.average)
        return updates, AverageState(average, state.decay_log, inner)

    return optax.GradientTransformationExtraArgs(init, update)


@checked
def evaluation_params(state: TrainState) -> Any:
    """The weights to evaluate and to keep: the average if the optimiser has one, else the last.

    Args:
        state: of a run with `with_average`, with optax's schedule-free optimiser, or with neither.

    Returns:
        A pytree like `state.params`.

    Cost: Two reads of the parameters.

    Example:
        >>> evaluation_params(TrainState.create(jnp.ones(2), adamw(0.1))).tolist()
        [1.0, 1.0]
    """
    kinds = (AverageState, optax.contrib.ScheduleFreeState)
    leaves = jax.tree.leaves(state.optimizer_state, is_leaf=lambda node: isinstance(node, kinds))
    found = next((node for node in leaves if isinstance(node, kinds)), None)
    if found is None:
        return state.params
    layout = layout_of(state.params)
    shardings = jax.tree.unflatten(jax.tree.structure(state.params), layout)
    is_average = isinstance(found, AverageState)
    read = _of_average if is_average else optax.contrib.schedule_free_eval_params
    return jax.jit(read, out_shardings=shardings if all(layout) else None)(found, state.params)


def _of_average(found: AverageState, params: Any) -> Any:
    # Before the first update there is nothing to average.
    count = found.average.count
    correction = -jnp.expm1(count * found.decay_log)

    def corrected(average: Array, last: Array) -> Array:
        value = average / jnp.where(count, correction, 1).astype(average.dtype)
        return jnp.where(count, value, last).astype(last.dtype)

    return jax.tree.map(corrected, found.average.ema, params)


def _wide(params: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params
    )
