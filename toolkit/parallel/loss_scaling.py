"""Loss scaling, which keeps gradients in float16 above the smallest number of that type."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

FIRST_SCALE = 2.0**15
GROW_AFTER = 2000
_MOST_SKIPPED = 2**31 - 1  # apply_if_finite never gives up; `fit` does


class LossScaleState(NamedTuple):
    """The state of `with_loss_scale`: the scale, the updates since it changed, and the rest."""

    loss_scale: Float[Array, ""]
    good_steps: Int[Array, ""]
    inner: optax.ApplyIfFiniteState


def with_loss_scale(
    optimizer: optax.GradientTransformation, *, grow_after: int = GROW_AFTER
) -> optax.GradientTransformationExtraArgs:
    """An optimiser that skips updates with infinite gradients, and adapts the scale of the loss.

        scale <- scale / 2 after a gradient that is not finite, and that update is skipped
        scale <- 2 scale   after `grow_after` finite ones in succession

    The train step finds the scale in the state, multiplies the loss by it and divides the
    gradients.

    Source: Micikevicius et al., Mixed precision training (arXiv:1710.03740), section 3.2.
    """
    guarded: Any = optax.apply_if_finite(optimizer, max_consecutive_errors=_MOST_SKIPPED)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(
            jnp.float32(FIRST_SCALE), jnp.zeros((), jnp.int32), guarded.init(params)
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple:
        updates, inner = guarded.update(updates, state.inner, params, **extra)
        good = jnp.where(inner.last_finite, state.good_steps + 1, 0)
        grown = jnp.where(good == grow_after, 2.0, 1.0)
        scale = state.loss_scale * jnp.where(inner.last_finite, grown, 0.5)
        scale = jnp.minimum(scale, 2.0**100)
        return updates, LossScaleState(scale, jnp.where(good == grow_after, 0, good), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale_of(optimizer_state: Any) -> Float[Array, ""] | None:
    """The scale of the loss, or None without loss scaling."""
    if isinstance(optimizer_state, LossScaleState):
        return optimizer_state.loss_scale
    return None


def where_finite(optimizer_state: Any, new: Any, old: Any) -> Any:
    """What a skipped update leaves as it was: `new` after a finite gradient, else `old`."""
    if not isinstance(optimizer_state, LossScaleState):
        return new
    is_finite = optimizer_state.inner.last_finite
    return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)
