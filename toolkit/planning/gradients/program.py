"""The train step of a plan whose gradients are exchanged as was chosen, tensor by tensor."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from toolkit.looped import LoopedConfig
from toolkit.parallel import Layout
from toolkit.parallel.gradients import Exchange, ExchangePlan, ExchangeState
from toolkit.parallel.layout import placements_of
from toolkit.planning.grade.forms import by_layer, stacked
from toolkit.planning.grade.program import Program, over, own_gradients, summed
from toolkit.planning.gradients.exchanges import DENSE, ExchangeChoice, choose_exchanges
from toolkit.planning.gradients.tensors import shape_of
from toolkit.planning.memory.placing import (
    BATCH_AXES,
    layout_of,
    optimizer_specs,
    parameters,
    specs_of,
)
from toolkit.planning.search.plan import Plan
from toolkit.planning.strategy import Strategy


def exchanging(
    config: LoopedConfig, strategy: Strategy, program: Program, exchange: Exchange
) -> ExchangePlan:
    """The exchange of a program's gradients, which `training.make_train_step` takes.

    What the chips of "fsdp" and "tensor" sum is summed as ever; the replicas along "data" exchange
    their parts of it, in which the layers of a stack are tensors by themselves.
    """
    check_exchanged(strategy)
    graphs, shapes, local = parameters(config, strategy)
    specs, mesh = specs_of(strategy, shapes, local), program.layout.mesh
    own = own_gradients(config, strategy, graphs, specs)
    cut = optimizer_specs(strategy, shapes, shapes, specs)
    apart = partial(by_layer, config, strategy)
    of_layer = lambda spec, row: PartitionSpec(*spec[1:])  # noqa: E731
    is_spec = {"is_leaf": lambda leaf: isinstance(leaf, PartitionSpec)}
    rows = layout_of(mesh, jax.eval_shape(apart, shapes), apart(specs, of_layer)).placements
    moments = jax.tree.leaves(apart(cut, of_layer), **is_spec)
    rows = [replace(row, optimizer=spec) for row, spec in zip(rows, moments, strict=True)]
    plan = ExchangePlan(exchange, Layout(mesh, tuple(rows), PartitionSpec("data")))
    states = plan.layout.replica_spec

    def on_each_chip(params: Any, tokens: Any, residuals: Any, step: Array) -> tuple:
        value, gradients = own(params, tokens, {})
        gradients = jax.tree.map(
            lambda g, spec: summed(g, spec, mesh, ("fsdp", "tensor")), gradients, specs
        )
        mean, residuals = plan.mean(apart(gradients), residuals, step, is_sum=True)
        mean |= {"blocks": stacked(config, strategy, mean["blocks"])}
        return over(BATCH_AXES, mesh, value), mean, residuals

    run = jax.shard_map(
        on_each_chip,
        mesh=mesh,
        in_specs=(specs, (PartitionSpec(BATCH_AXES),) * 2, states, PartitionSpec()),
        out_specs=(PartitionSpec(), cut, states),
        check_vma=False,
    )

    def exchanged(
        params: Any, batch: Any, state: ExchangeState
    ) -> tuple[Array, Any, ExchangeState]:
        loss, mean, residuals = run(params, batch, state.residuals, state.step)
        return loss, mean, ExchangeState(state.step + 1, residuals)

    return replace(plan, program=exchanged)


def fastest_exchanged(found: Plan, exchanges: Sequence[str]) -> ExchangeChoice:
    """The choice for the plan whose step is then shortest, of those whose replicas exchange."""
    plans = [each for each in (found.best, *found.runners_up) if _is_exchanged(each.strategy)]
    if not plans:
        check_exchanged(found.best.strategy)
    choices = [choose_exchanges(each, exchanges) for each in plans]
    return min(choices, key=lambda choice: choice.step_seconds)


def _is_exchanged(strategy: Strategy) -> bool:
    return strategy.data > 1 and strategy.pipeline == strategy.expert == 1


def check_exchanged(strategy: Strategy) -> None:
    """Refuse a strategy whose gradients no replicas exchange after the backward pass."""
    if not _is_exchanged(strategy):
        raise ValueError(
            f"exchange: got {strategy}; wanted replicas (data) to exchange gradients, without "
            "pipeline stages and folded experts: gradients of fsdp alone are scattered within the "
            "backward pass"
        )


def exchange_text(choice: ExchangeChoice) -> str:
    """The exchange of every tensor that a choice names, as `Exchange.parse` reads it.

    What most tensors take comes last, for all others. Of tensors of a layer that are alike, which
    is compressed makes no difference.
    """
    config, strategy = choice.step.config, choice.step.strategy
    check_exchanged(strategy)
    shapes = jax.eval_shape(partial(by_layer, config, strategy), parameters(config, strategy)[1])
    free: dict[tuple[str, tuple], list[str]] = {}
    for row in placements_of(shapes, lambda shape: (PartitionSpec(), "")):
        label = row.path.split("/")[1] if row.path.startswith("blocks/") else row.path
        free.setdefault((label, row.shape), []).append(row.path)
    taken: dict[str, str] = {}
    for name, chosen in zip(choice.tensors.names, choice.best.options(), strict=True):
        label, shape = name.partition(": ")[0], shape_of(name)
        labels = ["unembedding", "rho"] if label == "head" else [label.removeprefix("layer ")]
        path = next(free[each, shape].pop(0) for each in labels if free.get((each, shape)))
        taken[path] = "float32:dense" if chosen == DENSE else chosen
    usual = Counter(taken.values()).most_common(1)[0][0]
    rules = [f"{path}@{text}" for path, text in taken.items() if text != usual]
    return ",".join([*rules, usual])
