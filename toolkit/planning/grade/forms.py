"""Parameters of a model as a program holds them, and back: what a checkpoint shares among plans.

A program stacks layers: those of a run that a scan goes through, or those at one place of all rows
of a pipeline. A model has them one by one.
"""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from toolkit.looped import LoopedConfig
from toolkit.planning.memory.placing import stage_places
from toolkit.planning.models import group_runs
from toolkit.planning.strategy import Strategy

Places = list[list[tuple[int | None, ...]]]


def places_of(config: LoopedConfig, strategy: Strategy) -> Places:
    """For each stack of a program's parameters the numbers of its layers; None: none, zeros."""
    if strategy.pipeline > 1:
        return [[place] for _, place in stage_places(config, strategy)]
    found, start = [], 0
    for group, _, count in group_runs(config, strategy):
        size = len(group)
        found.append([tuple(range(start + at, start + count * size, size)) for at in range(size)])
        start += count * size
    return found


def by_layer(
    config: LoopedConfig,
    strategy: Strategy,
    found: dict[str, Any],
    row_of: Callable[[Any, int], Any] = operator.getitem,
) -> dict[str, Any]:
    """A program's tree with the layers one by one, under their numbers; `row_of` takes a layer's
    part of a stack."""
    layers, is_spec = {}, lambda leaf: isinstance(leaf, PartitionSpec)
    for place, stack in zip(
        itertools.chain(*places_of(config, strategy)),
        itertools.chain(*found["blocks"]),
        strict=True,
    ):
        for row, at in enumerate(place):
            if at is not None:
                own = lambda leaf, row=row: row_of(leaf, row)  # noqa: E731
                layers[at] = jax.tree.map(own, stack, is_leaf=is_spec)
    return found | {"blocks": layers}


def stacked(config: LoopedConfig, strategy: Strategy, layers: Any) -> list[list[Any]]:
    """Layers under their numbers as a program stacks them."""

    def stack(place: tuple[int | None, ...]) -> Any:
        like = next(layers[at] for at in place if at is not None)
        rows = [jax.tree.map(jnp.zeros_like, like) if at is None else layers[at] for at in place]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    return [[stack(place) for place in run] for run in places_of(config, strategy)]


def packed(config: LoopedConfig, strategy: Strategy, params: nnx.State) -> dict[str, Any]:
    """A model's parameters as the program of a strategy has them."""
    pure = nnx.to_pure_dict(params)
    missing = -config.vocabulary % strategy.tensor  # rows that pad the vocabulary
    pad = lambda table: jnp.pad(table, ((0, missing), (0, 0)))  # noqa: E731
    found = {
        "blocks": stacked(config, strategy, pure["blocks"]),
        "embedding": pad(pure["embedding"]["embedding"]),
        "norm": pure["norm"]["scale"],
    }
    if not config.tied_embedding:
        found["unembedding"] = pad(pure["unembedding"])
    return found | ({"rho": pure["rho"]} if config.residual_gate else {})


def unpacked(
    config: LoopedConfig, strategy: Strategy, found: dict[str, Any], like: nnx.State
) -> nnx.State:
    """The parameters of a program as a model has them; `like` gives their structure."""
    pure = {
        "blocks": by_layer(config, strategy, found)["blocks"],
        "embedding": {"embedding": found["embedding"][: config.vocabulary]},
        "norm": {"scale": found["norm"]},
    }
    if not config.tied_embedding:
        pure["unembedding"] = found["unembedding"][: config.vocabulary]
    if config.residual_gate:
        pure["rho"] = found["rho"]
    state = jax.tree.map(lambda leaf: leaf, like)
    nnx.replace_by_pure_dict(state, pure)
    return state
