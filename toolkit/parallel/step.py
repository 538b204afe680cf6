"""A training step whose communication the compiler chooses, as `pjit` let it.

`sharded_train_step` has explicit communication. Both compute what one device would compute, and
have the same signature:

    params, optimizer_state, loss = step(params, optimizer_state, batch)

The compiler may choose other collectives: XLA for CPUs, for example, all-reduces whole gradients
instead of a reduce-scatter. `toolkit.measure.collectives` compares the two.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.parallel.axes import check_auto_axes
from toolkit.parallel.gradients.exchange import Exchange
from toolkit.parallel.gradients.plan import ExchangePlan, ExchangeState
from toolkit.parallel.gradients.replicas import exchanged_gradient
from toolkit.parallel.layout import Layout

if TYPE_CHECKING:
    import optax

Params = Any
Batch = Any
LossFunction = Callable[[Params, Batch], Float[Array, ""]]


@checked
def partitioned_train_step(
    loss_fn: LossFunction, optimizer: "optax.GradientTransformation", layout: Layout, *,
    donate: bool = False, exchange: Exchange | None = None,
) -> Callable:  # fmt: skip
    """Make a train step whose communication the compiler chooses (jit with shardings).

        gradients = grad loss(params, batch)
        params, optimizer_state <- optimizer(gradients)

    Args:
        loss_fn: (params, batch) -> scalar loss: a mean, a sum, or any other.
        optimizer: an optax transformation.
        layout: shardings of parameters (and with them the optimiser's moments) and batch.
        donate: update params and optimizer_state in place, which consumes the arrays passed in.
        exchange: how the gradients of the replicas, each of its part of the batch, become their
            mean; the loss is then a mean over the batch.

    Returns:
        A jitted function (params, optimizer_state, batch) -> (params, optimizer_state, loss). Its
        arguments must be placed by `layout.apply` and `layout.apply_batch`. With an exchange,
        (params, optimizer_state, exchange_state, batch) -> (params, optimizer_state,
        exchange_state, loss), from `ExchangePlan(exchange, layout).init()`.

    Cost: The loss's forward and backward passes on 1/N of the batch, and the collectives that the
        compiler chooses.

    Source: Xu et al., "GSPMD: General and scalable parallelization for ML computation graphs",
        2021.

    Example:
        >>> import optax
        >>> w, adam = jnp.ones((64, 64)), optax.adam(0.1)
        >>> layout = fully_sharded(w, make_mesh({"data": len(jax.devices())}))
        >>> step = partitioned_train_step(lambda w, x: jnp.mean((x @ w) ** 2), adam, layout)
        >>> w, optimizer_state, loss = step(w, adam.init(w), jnp.ones((8, 64)))
    """
    check_layout(layout)

    def step(params: Params, optimizer_state: Any, batch: Batch) -> tuple[Params, Any, Array]:
        params = jax.lax.with_sharding_constraint(params, layout.shardings(params))
        batch = jax.lax.with_sharding_constraint(batch, layout.batch_sharding)
        loss, gradients = jax.value_and_grad(layout.bind(loss_fn))(params, batch)
        gradients = jax.lax.with_sharding_constraint(
            gradients, layout.shardings(params, "gradient")
        )
        return *updated(optimizer, layout, params, optimizer_state, gradients), loss

    if exchange is None:
        return jax.jit(step, donate_argnums=(0, 1) if donate else ())

    def gradient(params: Params, model_state: None, part: Batch, scale: None) -> tuple:
        loss, gradients = jax.value_and_grad(loss_fn)(params, part)
        return loss, model_state, gradients

    by_exchange = exchanged_gradient(gradient, ExchangePlan(exchange, layout), None)

    def exchanging_step(
        params: Params, optimizer_state: Any, state: ExchangeState, batch: Batch
    ) -> tuple[Params, Any, ExchangeState, Array]:
        params = jax.lax.with_sharding_constraint(params, layout.shardings(params))
        loss, gradients, state = by_exchange(params, batch, None, state)
        return *updated(optimizer, layout, params, optimizer_state, gradients), state, loss

    return jax.jit(exchanging_step, donate_argnums=(0, 1, 2) if donate else ())


def updated(
    optimizer: "optax.GradientTransformation", layout: Layout, params: Params,
    optimizer_state: Any, gradients: Params,
) -> tuple[Params, Any]:  # fmt: skip
    """The optimiser's step on the shards of its moments; results keep the layout."""
    where = layout.shardings(params, "optimizer")
    params, gradients = jax.lax.with_sharding_constraint((params, gradients), (where, where))
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
    params = jax.tree.map(lambda leaf, update: leaf + update.astype(leaf.dtype), params, updates)
    params = jax.lax.with_sharding_constraint(
        params, where
    )  # so that the new parameters are gathered
    return jax.lax.with_sharding_constraint(
        (params, optimizer_state), (layout.shardings(params), layout.shardings(optimizer_state))
    )


def check_layout(layout: Layout) -> None:
    """Refuse a layout whose specs or axes a step cannot take."""
    layout.check()
    check_auto_axes(layout.mesh)
