"""The update loop of all training here: several optimiser updates in one program.

    params, optimizer_state <- optimizer(grad loss(params, sample(data, step)))

The number of updates is a traced bound of the loop, so that one program serves every number. This
makes resuming exact: however a run is divided into calls, each update is the same machine code on
the same numbers. Rates may be data, so that schedules and candidates of a search share a program.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from toolkit._pytrees import register_dataclass
from toolkit.parallel.accumulation import gradient_in_passes
from toolkit.parallel.dataflow.reductions import check_is_mean
from toolkit.parallel.gradients.plan import ExchangePlan, ExchangeState
from toolkit.parallel.gradients.replicas import exchanged_gradient
from toolkit.parallel.loss_scaling import loss_scale_of, where_finite

Params = Any
Batch = Any
Metrics = dict[str, Array]


@register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training, which a checkpoint must hold.

    Attributes:
        step: int32 scalar, the updates made so far; seeds every random choice of the next one.
        params: any pytree of arrays, for instance an `nnx.State`.
        optimizer_state: the state of the optax transformation.
        model_state: state that the loss itself changes, such as averages of batch normalisation or
            counts of random streams, or None.
        exchange_state: what an exchange of gradients remembers, or None.

    Example:
        >>> import optax
        >>> state = TrainState.create({"w": jnp.ones(3)}, optax.adam(0.1))
        >>> int(state.step)
        0
    """

    step: Int[Array, ""]
    params: Params
    optimizer_state: Any
    model_state: Any = None
    exchange_state: ExchangeState | None = None

    @classmethod
    def create(
        cls, params: Params, optimizer: optax.GradientTransformation, model_state: Any = None,
        exchange: ExchangePlan | None = None,
    ) -> "TrainState":  # fmt: skip
        """Start at step 0 with a copy of `params`, because a train step donates its state.

        Optimiser state follows the sharding of the parameters; scalars are put on their mesh.
        """
        params, model_state = jax.tree.map(jnp.copy, (params, model_state))
        state = cls(jnp.zeros((), jnp.int32), params, optimizer.init(params), model_state)
        if exchange is not None:
            state = replace(state, exchange_state=exchange.init())
        shardings = (leaf.sharding for leaf in jax.tree.leaves(params) if _is_on_mesh(leaf))
        if (first := next(shardings, None)) is None:
            return state
        replicated = NamedSharding(first.mesh, PartitionSpec())
        return jax.tree.map(
            lambda leaf: leaf if _is_on_mesh(leaf) else jax.device_put(leaf, replicated), state
        )


def make_update(
    loss_fn: Callable, optimizer: optax.GradientTransformation,
    sample: Callable[[Any, Int[Array, ""]], Batch],
    metrics_of: Callable[[Array, Params, Any], Metrics] | None = None, *,
    passes: int = 1, weigh: Callable[[Batch], Float[Array, ""]] | None = None,
    exchange: ExchangePlan | None = None,
) -> Callable[[TrainState, Any, Array | None], tuple[TrainState, Metrics]]:  # fmt: skip
    """One update, (state, data, rate) -> (state, metrics): scaled by `rate` unless that is None.

    `loss_fn` is (params, batch) -> loss; with a model state in the TrainState (params, model_state,
    batch) -> (loss, model_state). `metrics_of` takes loss, gradients and new optimiser state; None
    for the loss alone. `passes` and `weigh` are those of `gradient_in_passes`; in several parts and
    without weights, the loss must be a mean. With an exchange, replicas' gradients become their
    mean by it; a skipped update leaves its memory as it was.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def loss_of(params: Params, model_state: Any, batch: Batch) -> tuple[Array, Any]:
        if model_state is None:
            return loss_fn(params, batch), None
        return loss_fn(params, model_state, batch)

    gradient = gradient_in_passes(loss_of, passes, weigh)
    by_exchange = None if exchange is None else exchanged_gradient(gradient, exchange, weigh)

    def update(state: TrainState, data: Any, rate: Array | None) -> tuple[TrainState, Metrics]:
        batch = sample(data, state.step)
        if weigh is None and (exchange is None or exchange.program is None):
            parts = passes * (1 if exchange is None else exchange.replicas)
            given = state.params, state.model_state
            check_is_mean(loss_of, given, batch, parts, remedy=", or weigh=", allows_mixed=True)
        scale = loss_scale_of(state.optimizer_state)
        model_state, exchange_state = state.model_state, state.exchange_state
        if by_exchange is None:
            loss, model_state, gradients = gradient(state.params, model_state, batch, scale)
        elif model_state is not None or exchange_state is None:
            raise ValueError(
                "exchange: got a state with a model state or without one for the exchange; wanted "
                "TrainState.create(params, optimizer, exchange=plan)"
            )
        else:
            loss, gradients, exchange_state = by_exchange(
                state.params, batch, scale, exchange_state
            )
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer_state, state.params, value=loss
        )
        if rate is not None:
            updates = jax.tree.map(lambda leaf: (rate * leaf).astype(leaf.dtype), updates)
        params = optax.apply_updates(state.params, updates)
        model_state, exchange_state = where_finite(
            optimizer_state,
            (model_state, exchange_state),
            (state.model_state, state.exchange_state),
        )
        metrics = {"loss": loss}
        if metrics_of is not None:
            metrics = metrics_of(loss, gradients, optimizer_state)
        if exchange is not None and exchange_state is not None:
            norm = exchange.residual_norm(exchange_state.residuals)
            metrics |= {} if norm is None else {"residual_norm": norm}
        state = TrainState(state.step + 1, params, optimizer_state, model_state, exchange_state)
        return state, metrics

    return update


def run_updates(
    update: Callable, state: TrainState, data: Any, steps: Int[Array, ""],
    rates: Float[Array, "most"] | None = None, *,
    most_steps: int, layout: tuple = (),
) -> tuple[TrainState, Metrics]:  # fmt: skip
    """`steps` updates of `make_update`; of the metrics [most_steps] the first `steps` count."""
    first = None if rates is None else rates[0]
    metrics = jax.tree.map(
        lambda row: jnp.zeros((most_steps, *row.shape), row.dtype),
        jax.eval_shape(update, state, data, first)[1],
    )

    def body(index: Int[Array, ""], carry: tuple) -> tuple[TrainState, Metrics]:
        state, metrics = carry
        state, row = update(state, data, None if rates is None else rates[index])
        return keep_layout(state, layout), {
            name: metrics[name].at[index].set(row[name]) for name in metrics
        }

    state, metrics = jax.lax.fori_loop(0, steps, body, (state, metrics))
    if state.exchange_state is not None:  # whose cut mean would cut the parameters after the loop
        state = keep_layout(state, layout)
    return state, metrics


def run_along(
    update: Callable, state: TrainState, data: Any, steps: Int[Array, ""],
    rates: Float[Array, "most"], *,
    layout: tuple = (),
) -> tuple[TrainState, Float[Array, "most"]]:  # fmt: skip
    """`steps` updates at the first `rates`; the loss before each, all NaN if the run diverged."""
    state, metrics = run_updates(
        update, state, data, steps, rates, most_steps=len(rates), layout=layout
    )
    return state, nan_if_diverged(state.params, metrics["loss"].astype(jnp.float32))


def nan_if_diverged(params: Params, losses: Array) -> Array:
    """The losses, or NaN for all of them if a parameter is not finite.

    The last update comes after the last loss, which does not reflect it.
    """
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    is_finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]))
    return jnp.where(is_finite, losses, jnp.nan)


def layout_of(tree: Any) -> tuple:
    """The sharding of every leaf on a mesh, None for the others."""
    leaves = jax.tree.leaves(tree)
    return tuple(leaf.sharding if _is_on_mesh(leaf) else None for leaf in leaves)


def keep_layout(tree: Any, layout: tuple) -> Any:
    """Keep the sharding of a tree. With another choice of the compiler, the second call would
    compile anew, and a restored run would differ from an unbroken one.
    """
    if not any(layout):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    leaves = [
        leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in zip(leaves, layout, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def _is_on_mesh(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)
