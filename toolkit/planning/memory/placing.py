"""Shardings of a stacked model's parameters and their moments, with reasons."""

import functools
import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from toolkit.looped.blocks import Block
from toolkit.parallel import Layout
from toolkit.parallel.axes import axes_of
from toolkit.parallel.layout import Placement
from toolkit.planning.memory.sizes import is_sharded
from toolkit.planning.models import group_runs, kinds_of, local_config

BATCH_AXES = ("data", "fsdp")


def placed(mesh, specs):
    """Shardings of specs."""
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def parameters(config, strategy):
    """The structure of each run's group, and the shapes of all parameters: global, and sharded by
    "tensor"."""
    tensor = strategy.tensor
    local = local_config(config, tensor, is_folded=strategy.expert > 1)
    made = {}
    for kind in kinds_of(config):
        if kind not in made:
            for sizes in (config, local):
                graph, state = nnx.split(_block(*kind, sizes))
                made[kind] = (*made.get(kind, ()), (graph, state))
    runs = stacks_of(config, strategy)
    graphs = [[made[kind][1] for kind in group] for group, _, _ in runs]

    def stacked(which):
        return [
            [
                jax.tree.map(
                    lambda x, n=n: jax.ShapeDtypeStruct((n, *x.shape), x.dtype),
                    nnx.to_pure_dict(made[kind][which][1]),
                )
                for kind in group
            ]
            for group, _, n in runs
        ]

    def tree(blocks, sizes):
        vector = jax.ShapeDtypeStruct((config.width,), jnp.float32)
        rows = -(-config.vocabulary // tensor) * (tensor if sizes is config else 1)
        table = jax.ShapeDtypeStruct((rows, config.width), jnp.float32)
        params = {"blocks": blocks, "embedding": table, "norm": vector}
        if not config.tied_embedding:
            params["unembedding"] = table
        if config.residual_gate:
            params["rho"] = jax.ShapeDtypeStruct((config.loops, config.width), jnp.float32)
        return params

    return graphs, tree(stacked(0), config), tree(stacked(1), local)


def stacks_of(config, strategy):
    """The runs of stacked groups of layers: (kinds of a group, recomputation, how many). Of a
    pipeline, a run is the layers that lie at one place of all rows."""
    if strategy.pipeline == 1:
        return group_runs(config, strategy)
    return tuple(((kind,), "", len(place)) for kind, place in stage_places(config, strategy))


def layers_by_row(config, strategy):
    """For each row of a pipeline's weights, device by device, the numbers of its layers. A row
    serves one stage of every loop."""
    sizes = strategy.layers_by_stage(len(config.layers), config.loops)
    return rows_of(sizes, config.loops, strategy.stages_by_device)


def rows_of(sizes, loops, by_device):
    """The same, from the layers of each stage and the stages of each device."""
    ends, rows = list(itertools.accumulate(sizes)), len(sizes) // loops
    return tuple(
        tuple(range(ends[row] - sizes[row], ends[row]))
        for mine in by_device
        for row in mine
        if row < rows
    )


def stage_places(config, strategy):
    """The places for layers that every row of a pipeline has, since one program runs on all
    devices: of each kind of layer as many as the row with most of them. Each is (the words of the
    mixer and the feed-forward layer, for each row the number of its layer there, or None)."""
    return places_in(kinds_of(config), layers_by_row(config, strategy))


def places_in(kinds, rows):
    """The same, from the kind of each layer and the layers of each row."""
    return tuple(
        (kind, place)
        for kind in dict.fromkeys(kinds)
        for place in itertools.zip_longest(
            *([layer for layer in row if kinds[layer] == kind] for row in rows)
        )
    )


def stores_of(kinds):
    """For each kind of stage, given by the kinds of its layers, the number of its store: stages
    whose layers another has too store in its places."""
    largest: list[Counter] = []
    found = {}
    for kind in sorted(dict.fromkeys(kinds), key=len, reverse=True):
        mine = Counter(kind)
        store = next((at for at, other in enumerate(largest) if mine <= other), len(largest))
        if store == len(largest):
            largest.append(mine)
        found[kind] = store
    return [found[kind] for kind in kinds]


def _block(word, fed, config):
    return nnx.eval_shape(lambda: Block(word, config, rngs=nnx.Rngs(0), feed_forward=fed))


def is_of(keys, name: str) -> bool:
    """Whether the path of a parameter has that name in it."""
    return any(getattr(key, "key", None) == name for key in keys)


def specs_of(strategy, whole, cut):
    """The spec of every tensor; the axis of stacked layers is scanned and never sharded."""

    def of(whole, cut, stacked):
        spec = functools.partial(_spec, strategy, stacked)
        return jax.tree_util.tree_map_with_path(spec, whole, cut)

    return {name: of(whole[name], cut[name], name == "blocks") for name in whole}


def _spec(strategy, stacked, keys, whole, cut):
    """ "tensor" where sizes differ, or all axes of experts on their number; "fsdp", if it is left,
    on the largest other dimension of a large matrix."""
    fsdp = strategy.fsdp
    entries = ["tensor" if a != b else None for a, b in zip(whole.shape, cut.shape, strict=True)]
    if stacked and strategy.pipeline > 1:
        entries[0] = "stage"
    if strategy.expert > 1 and is_of(keys, "experts"):
        entries[stacked], fsdp = strategy.expert_axes, strategy.of_experts.fsdp
    if fsdp > 1 and is_sharded(whole.shape[stacked:]):
        return _cut_further(whole.shape, entries, "fsdp", fsdp, stacked)
    return PartitionSpec(*entries)


def _cut_further(shape, entries, axis, size, stacked):
    free = [i for i in range(stacked, len(shape)) if entries[i] is None and shape[i] % size == 0]
    if free:
        entries[max(free, key=lambda i: shape[i])] = axis
    return PartitionSpec(*entries)


def layout_of(mesh: Mesh, shapes: Any, specs: Any) -> Layout:
    """The same as a `Layout`, with reasons."""
    rows = []
    for (keys, shape), spec in zip(
        jax.tree_util.tree_leaves_with_path(shapes),
        jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)),
        strict=True,
    ):
        path = "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)
        used = {axis for axes in axes_of(spec) for axis in axes}
        reason = " and ".join(
            word
            for axis, word in (
                ("tensor", "each chip computes its share"),
                ("fsdp", "gathered where used"),
                ("stage", "a stage of the pipeline"),
            )
            if axis in used
        )
        if any(isinstance(entry, tuple) for entry in spec):
            reason = "each chip computes its experts"
        rows.append(
            Placement(path, shape.shape, shape.dtype, spec, reason or "replicated: small or DDP")
        )
    return Layout(mesh, tuple(rows), PartitionSpec(BATCH_AXES))


def optimizer_specs(strategy, moments, shapes, specs):
    """The optimiser's specs: those of the parameters, with ZeRO-1 also sharded over "data"."""
    table = {}
    flat = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    for (keys, shape), spec in zip(jax.tree_util.tree_leaves_with_path(shapes), flat, strict=True):
        stacked = keys[0].key == "blocks"
        is_cut = any("data" in axes for axes in axes_of(spec))
        if (
            strategy.shard_optimizer
            and strategy.data > 1
            and not is_cut
            and is_sharded(shape.shape[stacked:])
        ):
            entries = [*spec, *[None] * (len(shape.shape) - len(spec))]
            spec = _cut_further(shape.shape, entries, "data", strategy.data, stacked)
        table[jax.tree_util.keystr(keys)] = (shape.shape, spec)

    def spec_of(keys, leaf):
        for start in range(len(keys)):
            found = table.get(jax.tree_util.keystr(keys[start:]))
            if found is not None and found[0] == leaf.shape:
                return found[1]
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec_of, moments)
