"""The gradient of each replica, which the compiler would otherwise sum, and then their exchange.

The replicas are an axis of `jax.vmap`, cut along the batch's mesh axes, so that no manual axis
touches the model: its kernels, loops and sums over "model" are compiled as ever. The exchange
itself is manual along all axes and sees local shards only, which it never gathers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from toolkit.parallel.axes import unshared, without
from toolkit.parallel.gradients.plan import ExchangePlan, ExchangeState

Weigh = Callable[[Any], Array]


def exchanged_gradient(gradient: Callable, plan: ExchangePlan, weigh: Weigh | None) -> Callable:
    """(params, batch, scale, state) -> (loss, mean gradients, state), by an exchange.

        loss = mean_i w_i loss_i,    gradients = exchange_i(w_i gradient_i)

    `gradient` is that of `gradient_in_passes`: one replica accumulates all of its passes, and sends
    once. The weights w_i of the replicas' parts of a batch have the mean 1.
    """
    if (program := plan.program) is not None:
        return lambda params, batch, scale, state: program(params, batch, state)
    mesh, axes = plan.layout.mesh, plan.axes
    replicas = plan.replicas
    rows = NamedSharding(mesh, PartitionSpec(axes))

    def of_replicas(params: Any, batch: Any, scale: Array | None) -> tuple[Array, Any]:
        def split(leaf: Array) -> Array:
            if leaf.shape[0] % replicas:
                raise ValueError(
                    f"exchange: got a batch with an array of shape {leaf.shape}; wanted a multiple "
                    f"of {replicas} replicas"
                )
            parts = leaf.reshape(replicas, leaf.shape[0] // replicas, *leaf.shape[1:])
            return jax.lax.with_sharding_constraint(parts, rows)

        def own(part: Any) -> tuple[Array, Any]:
            loss, _, gradients = gradient(params, None, part, scale)
            return loss, gradients

        parts = jax.tree.map(split, batch)
        losses, gradients = jax.vmap(own, spmd_axis_name=axes)(parts)
        if weigh is not None:
            weights = jax.vmap(weigh)(parts)
            weights = (weights / jnp.mean(weights)).astype(losses.dtype)
            losses = losses * weights
            gradients = jax.tree.map(
                lambda leaf: (
                    leaf * jnp.expand_dims(weights, range(1, leaf.ndim)).astype(leaf.dtype)
                ),
                gradients,
            )
        return jnp.mean(losses), gradients

    def exchanged(
        params: Any, batch: Any, scale: Array | None, state: ExchangeState
    ) -> tuple[Array, Any, ExchangeState]:
        loss, gradients = of_replicas(params, batch, scale)
        is_spec = {"is_leaf": lambda leaf: isinstance(leaf, PartitionSpec)}
        final = plan.layout.specs(params, "optimizer")
        local = jax.tree.map(
            lambda spec: PartitionSpec(axes, *without(spec, axes)),
            plan.layout.specs(params, "weights"),
            **is_spec,
        )
        owned = jax.tree.map(lambda spec: unshared(spec, spec, axes), final, **is_spec)

        def mean(gradients: Any, residuals: Any, step: Array) -> tuple[Any, Any]:
            return plan.mean(jax.tree.map(lambda leaf: leaf[0], gradients), residuals, step)

        given = (local, plan.layout.replica_spec, PartitionSpec())
        found = jax.shard_map(
            mean,
            mesh=mesh,
            in_specs=given,
            out_specs=(owned, plan.layout.replica_spec),
            check_vma=False,
        )(gradients, state.residuals, state.step)
        return loss, found[0], ExchangeState(state.step + 1, found[1])

    return exchanged
