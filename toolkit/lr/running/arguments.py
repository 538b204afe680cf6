"""Checks of `search` before it runs: losses and optimisers that would go wrong in silence."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from toolkit.lr.running.batches import used_inputs
from toolkit.lr.running.fingerprints import digest_of
from toolkit.parallel.updates import TrainState

GRADIENT = 1e-3  # so small that no clipping touches it
LARGE = 2**16  # parameters; of more, the first step of an optimiser is not made in full
FIRST_STEPS = 32  # most may only accumulate gradients
OWN_RATE = 0.3  # a unit optimiser moves parameters by more than this


def check_loss(loss_fn: Callable, state: TrainState, batch: Any) -> None:
    """Trace a loss. Refuse a wrong form; warn of parameters on which it does not depend.

    Batch-normalisation averages among the parameters would run without an error and never change.
    """
    paths = jax.tree.leaves_with_path(state.params)
    if not paths:
        raise ValueError("params: got a tree without arrays")
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
    names = [jax.tree_util.keystr(path) or "them" for path, _ in paths]
    used = used_inputs(closed)
    if idle := [name for name, is_used in zip(names, used, strict=False) if not is_used]:
        warnings.warn(
            f"params: the loss does not depend on {', '.join(idle[:3])}{' ...' * (len(idle) > 3)}, "
            "which will not move; what the model itself changes belongs in model_state",
            stacklevel=4,
        )


def check_validation(validation: Callable, state: TrainState) -> None:
    """Refuse a validation that returns no scalar."""
    own = () if state.model_state is None else (state.model_state,)
    form = jax.eval_shape(validation, state.params, *own)
    if getattr(form, "shape", None) != ():
        raise ValueError(f"validation must return a scalar loss; got {_in_words(form)}")


def check_start(state: TrainState, optimizer: Any, params: Any, model_state: Any) -> None:
    """Refuse a start with the state of another optimiser, or with contradicting arguments."""
    given = {"params": (params, state.params), "model_state": (model_state, state.model_state)}
    for name, (argument, own) in given.items():
        if argument is not None and not (
            _shapes(argument) == _shapes(own)
            and bytes(digest_of(jax.tree.leaves(argument)))
            == bytes(digest_of(jax.tree.leaves(own)))
        ):
            raise ValueError(f"{name}: differs from that of start; give that, or None")
    wanted, came = jax.eval_shape(optimizer.init, state.params), state.optimizer_state
    if _shapes(wanted) != _shapes(came):
        raise ValueError(
            f"start: its optimizer_state must be that of optimizer, {_in_words(wanted)}; "
            f"got {_in_words(came)}"
        )


def warn_of_own_rate(optimizer: optax.GradientTransformation, params: Any) -> None:
    """Warn of an optimiser with a learning rate other than 1."""
    rate = _own_rate(optimizer, params)
    if rate is not None and rate < OWN_RATE:
        warnings.warn(
            f"optimizer: it seems to bring a learning rate of its own, about {rate:.2g}, by which "
            "every rate of the search is multiplied; build it with learning rate 1",
            stacklevel=4,
        )


def _own_rate(optimizer: optax.GradientTransformation, params: Any) -> float | None:
    """The largest move of the first effective step, for optimisers where it does not depend on the
    gradient (Adam) or is proportional to it (SGD); None for others.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    # Groups, masks and labels follow the tree: two rows of each array suffice, but for an optimiser
    # that holds arrays like the parameters.
    most = 2 if sum(map(jnp.size, jax.tree.leaves(params))) > LARGE else LARGE
    ones = jax.tree.map(lambda leaf: jnp.ones([min(n, most) for n in jnp.shape(leaf)]), params)

    def moved(gradient: jax.Array) -> jax.Array:
        def step(state: Any, _: None) -> tuple:
            gradients = jax.tree.map(lambda leaf: gradient * leaf, ones)
            updates, state = optimizer.update(gradients, state, ones, value=1.0)
            return state, jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)])

        return jax.lax.scan(step, optimizer.init(ones), length=FIRST_STEPS)[1]

    try:
        none, once, twice = jax.jit(jax.vmap(moved))(GRADIENT * jnp.arange(3.0))
    except (TypeError, ValueError, KeyError, AttributeError):  # made for other shapes
        return None
    once, twice = np.abs(once - none), np.abs(twice - none)
    moving = np.flatnonzero(once.max(1))
    if not len(moving):
        return None
    once, twice = once[moving[0]], twice[moving[0]]
    rates = np.where(np.isclose(once, twice, rtol=0.05), once, once / GRADIENT)
    is_known = np.isclose(once, twice, rtol=0.05) | np.isclose(2 * once, twice, rtol=0.05)
    return float(rates.max()) if is_known.all() else None


def _shapes(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _in_words(form: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", form))
