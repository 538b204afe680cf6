"""Local steps: islands train by themselves and agree every H steps (DiLoCo, streaming DiLoCo)."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from toolkit._checks import check_choice, check_fields, checked
from toolkit._pytrees import register_dataclass
from toolkit.parallel.axes import check_auto_axes
from toolkit.parallel.gradients.exchange import Exchange
from toolkit.parallel.gradients.plan import ExchangePlan, ExchangeState
from toolkit.parallel.strategies import data_parallel

if TYPE_CHECKING:
    import optax

Params = Any


@dataclass(frozen=True)
class LocalSteps:
    """How often, and how, islands agree.

    Attributes:
        inner_steps: steps H of an island between two agreements on the same parameter.
        outer_rate: rate of the outer SGD on the mean difference.
        momentum: its Nesterov momentum.
        fragments: parts P of the parameters, which take turns: the same bytes, with a peak of 1/P.
        delay: steps tau between a fragment's exchange and its use, below H / P.
        blend: share alpha of its own value that an island keeps of a fragment.
        exchange: how differences are sent; None: a dense mean.

    Example:
        >>> LocalSteps(inner_steps=30, fragments=3, delay=5).steps_per_fragment
        10
    """

    inner_steps: int = 100
    outer_rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    blend: float = 0.0
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.inner_steps < 1 or self.fragments < 1 or self.inner_steps % self.fragments:
            raise ValueError(
                f"inner_steps: got {self.inner_steps}, wanted a multiple of {self.fragments} "
                "(fragments), at least 1 each"
            )
        if not 0 <= self.delay < self.steps_per_fragment:
            raise ValueError(
                f"delay: got {self.delay}, wanted 0 to {self.steps_per_fragment - 1}, below "
                "inner_steps / fragments"
            )
        if self.exchange is not None and self.exchange.exceptions:
            raise ValueError(
                f"exchange: got {self.exchange}; wanted the same for all tensors, which travel by "
                "fragments"
            )
        if not 0 <= self.blend < 1:
            raise ValueError(f"blend: got {self.blend}, wanted at least 0 and less than 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: got {self.momentum}, wanted at least 0 and less than 1")

    @property
    def steps_per_fragment(self) -> int:
        """Inner steps between two agreements on any parameter: H / P."""
        return self.inner_steps // self.fragments


@register_dataclass
@dataclass(frozen=True)
class LocalState:
    """The state of islands, which a checkpoint must hold.

    Attributes:
        rounds: int32 scalar, rounds of H steps so far.
        params: what the islands agreed on.
        islands: their own parameters, [islands, ...].
        optimizer_state: of their inner optimisers, which stays local, [islands, ...].
        momentum: of the outer optimiser.
        exchanges: what the exchange of each fragment remembers.

    Example:
        >>> import optax
        >>> from toolkit.parallel import make_mesh
        >>> mesh = make_mesh({"island": len(jax.devices())})
        >>> init, _ = local_steps(lambda w, x: jnp.mean(w * x), optax.sgd(0.1), mesh, LocalSteps(2))
        >>> int(init(jnp.ones(3)).rounds)
        0
    """

    rounds: Int[Array, ""]
    params: Params
    islands: Params
    optimizer_state: Any
    momentum: Params
    exchanges: tuple[ExchangeState, ...]


@checked
def local_steps(
    loss_fn: Callable[[Params, Any], Float[Array, ""]],
    optimizer: "optax.GradientTransformation",
    mesh: Mesh,
    how: LocalSteps,
    *,
    axis: str = "island",
) -> tuple[Callable[[Params], LocalState], Callable[[LocalState, Any], tuple[LocalState, Array]]]:
    """Make a round of local steps: H inner steps of every island, and one agreement.

        theta_k <- inner optimiser, H times, on island k's own batches
        delta   = mean_k (theta - theta_k)
        m       <- momentum m + delta
        theta   <- theta - outer_rate (delta + momentum m)
        theta_k <- blend theta_k + (1 - blend) theta                   delay steps later

    With fragments each part of the parameters does so in its turn. With H = 1, an outer rate of 1,
    no momentum and inner SGD, it is data parallel training.

    Args:
        loss_fn: (params, batch) -> scalar loss, a mean over the batch.
        optimizer: the inner optimiser of each island.
        mesh: the devices; other axes than `axis` may cut an island's batch.
        how: how often and how islands agree.
        axis: mesh axis of the islands.

    Returns:
        (init, round): params -> state, and the jitted (state, batches) -> (state, losses [H,
        islands]), with arrays [H, rows, ...] of which each island takes its part of the rows.

    Cost: Along `axis`, per device and round, 2 (K - 1) / K 4 n bytes, or those of the exchange; no
        collective along it in the inner loop.

    Source: Douillard et al., "DiLoCo", 2023 (arXiv:2311.08105), and "Streaming DiLoCo", 2025
        (arXiv:2501.18512).

    Example:
        >>> import optax
        >>> from toolkit.parallel import make_mesh
        >>> mesh, loss = make_mesh({"island": len(jax.devices())}), lambda w, x: jnp.mean(w * x)
        >>> init, round = local_steps(loss, optax.sgd(0.1), mesh, LocalSteps(2))
        >>> round(init(jnp.ones(3)), jnp.ones((2, 8, 3)))[1].shape[0]
        2
    """
    check_auto_axes(mesh)
    check_choice("axis", axis, mesh.axis_names)
    islands = mesh.shape[axis]
    own = NamedSharding(mesh, PartitionSpec(axis))
    whole = NamedSharding(mesh, PartitionSpec())

    def plans(params: Params) -> list[tuple[slice, ExchangePlan | None]]:
        leaves = jax.tree.leaves(params)
        parts = _fragments([leaf.size for leaf in leaves], how.fragments)
        if how.exchange is None:
            return [(part, None) for part in parts]
        exchange = how.exchange
        return [
            (part, ExchangePlan(exchange, data_parallel(leaves[part], mesh, axis=axis)))
            for part in parts
        ]

    def init(params: Params) -> LocalState:
        exchanges = tuple(plan.init() for _, plan in plans(params) if plan is not None)
        params = jax.device_put(jax.tree.map(jnp.copy, params), whole)
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (islands, *x.shape)), params)
        copies = jax.device_put(copies, own)
        inner = jax.device_put(jax.vmap(optimizer.init)(copies), own)
        momentum = jax.tree.map(jnp.zeros_like, params)
        rounds = jax.device_put(jnp.int32(0), whole)
        return LocalState(rounds, params, copies, inner, momentum, exchanges)

    def island_step(params: Params, inner: Any, batch: Any) -> tuple[Params, Any, Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, inner = optimizer.update(gradients, inner, params)
        return jax.tree.map(lambda x, u: x + u.astype(x.dtype), params, updates), inner, loss

    def inner_step(carry: tuple, batch: Any) -> tuple[tuple, Array]:
        def split(x: Array) -> Array:
            return x.reshape(islands, x.shape[0] // islands, *x.shape[1:])

        step = jax.vmap(island_step, spmd_axis_name=axis)
        params, inner, losses = step(carry[0], carry[1], jax.tree.map(split, batch))
        return jax.lax.with_sharding_constraint((params, inner), own), losses

    def taken(copies: list[Array], agreed: list[Array], part: slice, when: Array | bool) -> None:
        for at in range(part.start, part.stop):
            mixed = how.blend * copies[at] + (1 - how.blend) * agreed[at]
            copies[at] = jnp.where(when, mixed.astype(copies[at].dtype), copies[at])

    def one_round(state: LocalState, batches: Any) -> tuple[LocalState, Array]:
        structure = jax.tree.structure(state.params)
        agreed, momentum = jax.tree.leaves(state.params), jax.tree.leaves(state.momentum)
        copies, inner = jax.tree.leaves(state.islands), state.optimizer_state
        exchanges, losses = list(state.exchanges), []
        turns, each = plans(state.params), how.steps_per_fragment

        def train(first: int, last: int) -> None:
            nonlocal copies, inner
            if first == last:
                return
            carry = jax.tree.unflatten(structure, copies), inner
            part = jax.tree.map(lambda x: x[first:last], batches)
            (params, inner), found = jax.lax.scan(inner_step, carry, part)
            copies = jax.tree.leaves(params)
            losses.append(found)

        for turn, (part, plan) in enumerate(turns):
            train(turn * each, turn * each + how.delay)
            if how.delay:
                before = turns[turn - 1][0]
                taken(copies, agreed, before, jnp.bool_(turn > 0) | (state.rounds > 0))
            train(turn * each + how.delay, (turn + 1) * each)
            apart = [x - y for x, y in zip(agreed[part], copies[part], strict=True)]
            if plan is None:
                mean = [jnp.mean(x, axis=0) for x in apart]
            else:
                mean, exchanges[turn] = _exchanged(plan, mesh, axis, apart, exchanges[turn])
            for at, delta in zip(range(part.start, part.stop), mean, strict=True):
                momentum[at] = how.momentum * momentum[at] + delta
                step = how.outer_rate * (delta + how.momentum * momentum[at])
                agreed[at] = (agreed[at] - step).astype(agreed[at].dtype)
            if not how.delay:
                taken(copies, agreed, part, True)
        trees = (jax.tree.unflatten(structure, x) for x in (agreed, copies, momentum))
        params, copies_tree, momentum_tree = trees
        params, momentum_tree = jax.lax.with_sharding_constraint((params, momentum_tree), whole)
        copies_tree, inner = jax.lax.with_sharding_constraint((copies_tree, inner), own)
        rounds = state.rounds + 1
        state = LocalState(rounds, params, copies_tree, inner, momentum_tree, tuple(exchanges))
        return state, jnp.concatenate(losses)

    return init, jax.jit(one_round, donate_argnums=0)


def _fragments(sizes: list[int], count: int) -> list[slice]:
    """The tensors in `count` contiguous parts of about the same size."""
    if count > len(sizes):
        raise ValueError(f"fragments: got {count}, wanted at most {len(sizes)}, one per tensor")
    ends, total, at = [], 0, 0
    for index, size in enumerate(sizes):
        total += size
        is_forced = len(sizes) - index - 1 == count - at - 1
        if at < count - 1 and (total * count >= sum(sizes) * (at + 1) or is_forced):
            ends.append(index + 1)
            at += 1
    ends = [0, *ends, len(sizes)]
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def _exchanged(
    plan: ExchangePlan, mesh: Mesh, axis: str, apart: list[Array], state: ExchangeState
) -> tuple[list[Array], ExchangeState]:
    own, whole = plan.layout.replica_spec, PartitionSpec()

    def mean(apart: list[Array], residuals: Any, step: Array) -> tuple[Any, Any]:
        return plan.mean([x[0] for x in apart], residuals, step)

    found, residuals = jax.shard_map(
        mean,
        mesh=mesh,
        in_specs=(PartitionSpec(axis), own, whole),
        out_specs=(whole, own),
        check_vma=False,
    )(apart, state.residuals, state.step)
    return found, ExchangeState(state.step + 1, residuals)
