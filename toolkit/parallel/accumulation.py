"""The gradient of a batch in several passes, for batches larger than the memory.

Pass i takes the rows i, i + passes, i + 2 passes, ..., so that a batch that is cut over devices
stays where it is: each pass takes the same number of rows from every device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Params = Any
Batch = Any


def gradient_in_passes(
    loss_fn: Callable[[Params, Any, Batch], tuple[Float[Array, ""], Any]],
    passes: int,
    weigh: Callable[[Batch], Float[Array, ""]] | None,
) -> Callable[[Params, Any, Batch, Array | None], tuple[Float[Array, ""], Any, Params]]:
    """(params, model_state, batch, scale) -> (loss, model_state, gradients) of the whole batch.

        loss = sum_i w_i loss_i / sum_i w_i,    w_i = weigh(batch_i), or 1

    The loss is multiplied by `scale` in the backward pass, and the gradients divided by it. Sums
    are in float32 at least. The model state goes from pass to pass.
    """

    def single(params: Params, model_state: Any, batch: Batch, scale: Array | None) -> tuple:
        def scaled(params: Params) -> tuple[Array, tuple[Array, Any]]:
            # Rebuilt in this trace, because a loss may change its arguments, as nnx does.
            own = jax.tree.map(lambda leaf: leaf, model_state)
            loss, after = loss_fn(params, own, batch)
            return (loss if scale is None else loss.astype(scale.dtype) * scale), (loss, after)

        gradients, (loss, after) = jax.grad(scaled, has_aux=True)(params)
        if scale is not None:
            gradients = jax.tree.map(lambda leaf: leaf / scale.astype(leaf.dtype), gradients)
        return loss, after, gradients

    def accumulated(params: Params, model_state: Any, batch: Batch, scale: Array | None) -> tuple:
        parts = jax.tree.map(lambda leaf: _in_passes(leaf, passes), batch)
        like = jax.eval_shape(
            single, params, model_state, jax.tree.map(lambda p: p[0], parts), scale
        )
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _wide(leaf)), (like[0], like[2]))
        weights = jnp.ones(passes) if weigh is None else jax.vmap(weigh)(parts)
        shares = (weights / weights.sum()).astype(zeros[0].dtype)

        def add(carry: tuple, part: tuple) -> tuple[tuple, None]:
            (model_state, sums), (batch, share) = carry, part
            loss, model_state, gradients = single(params, model_state, batch, scale)

            def plus(total: Array, new: Array) -> Array:
                return total + (share.astype(total.dtype) * new.astype(total.dtype))

            return (model_state, jax.tree.map(plus, sums, (loss, gradients))), None

        (model_state, (loss, gradients)), _ = jax.lax.scan(
            add, (model_state, zeros), (parts, shares)
        )
        gradients = jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), gradients, like[2])
        return loss.astype(like[0].dtype), model_state, gradients

    return single if passes == 1 else accumulated


def _in_passes(leaf: Array, passes: int) -> Array:
    """[batch, ...] as [passes, batch / passes, ...]."""
    if not jnp.ndim(leaf) or leaf.shape[0] % passes:
        raise ValueError(
            f"accumulate: got {passes} passes for a batch with an array of shape "
            f"{jnp.shape(leaf)}; wanted a divisor of its first axis"
        )
    rows = leaf.reshape(leaf.shape[0] // passes, passes, *leaf.shape[1:])
    return jnp.moveaxis(rows, 1, 0)


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)
