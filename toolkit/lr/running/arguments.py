"""What `search` refuses or warns of before it spends anything: losses and optimisers that would run
and silently do something else.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from toolkit.lr.running.batches import used_inputs
from toolkit.parallel.updates import TrainState

GRADIENT = 1e-3  # so small that no clipping touches it
OWN_RATE = 0.3  # a unit optimiser moves parameters by more than this


def check_loss(loss_fn: Callable, state: TrainState, batch: Any) -> None:
    """Refuses a loss of another form; warns of parameters that it does not depend on.

    Averages of batch normalisation among the parameters run without an error and never move.
    """
    paths = jax.tree.leaves_with_path(state.params)
    for path, leaf in paths:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"params: must be floating point to be trained; got {jnp.result_type(leaf)}"
                f"{' at ' * bool(path)}{jax.tree_util.keystr(path)}"
            )
    own = () if state.model_state is None else (state.model_state,)
    closed, form = jax.make_jaxpr(loss_fn, return_shape=True)(state.params, *own, batch)
    loss, *rest = form if own and isinstance(form, tuple) else (form,)
    is_scalar = hasattr(loss, "shape") and not loss.shape
    if not is_scalar or list(map(_shapes, rest)) != list(map(_shapes, own)):
        wanted = "a scalar loss; a state that it also returns has to be given as model_state"
        if own:
            wanted = "(loss, model_state), a scalar and a tree like the one that it was given"
        raise ValueError(f"loss_fn must return {wanted}; got {_in_words(form)}")
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    used = used_inputs(closed)
    if idle := [name for name, is_used in zip(names, used, strict=False) if not is_used]:
        warnings.warn(
            f"params: the loss does not depend on {', '.join(idle[:3])}{' ...' * (len(idle) > 3)}, "
            "which will not move; what the model itself changes belongs in model_state",
            stacklevel=3,
        )


def warn_of_own_rate(optimizer: optax.GradientTransformation) -> None:
    """Warns of an optimiser that was not built with learning rate 1."""
    rate = _own_rate(optimizer)
    if rate is not None and rate < OWN_RATE:
        warnings.warn(
            f"optimizer: it seems to bring a learning rate of its own, about {rate:.2g}, by which "
            "every rate of the search is multiplied; build it with learning rate 1",
            stacklevel=3,
        )


@functools.lru_cache(maxsize=32)
def _own_rate(optimizer: optax.GradientTransformation) -> float | None:
    """How far a first step goes, of those optimisers where that does not depend on the gradient
    (Adam) or is proportional to it (SGD); None for others.
    """
    optimizer, ones = optax.with_extra_args_support(optimizer), jnp.ones(2)

    def moved(gradient: jax.Array) -> jax.Array:
        updates, _ = optimizer.update(gradient * ones, optimizer.init(ones), ones, value=1.0)
        return jnp.abs(jnp.asarray(updates)).max()  # pyright: ignore

    try:
        none, once, twice = jax.jit(jax.vmap(moved))(GRADIENT * jnp.arange(3.0))
    except (TypeError, ValueError, KeyError, AttributeError):  # made for one tree of parameters
        return None
    once, twice = float(once - none), float(twice - none)
    if np.isclose(once, twice, rtol=0.05):
        return once
    return once / GRADIENT if np.isclose(2 * once, twice, rtol=0.05) else None


def _shapes(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _in_words(form: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", form))
