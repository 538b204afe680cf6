"""The loss and gradients of a pipelined strategy, in the order of its schedule.

Inside one `jax.shard_map` over all axes, the ticks of `toolkit.parallel.pipeline` run the same
layers, with the same collectives, as `forward.py`. The embedding and the head are on every stage,
and their gradients are summed over all.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from toolkit.looped.decoding.cache import empty_layers
from toolkit.looped.decoding.slices import SliceCaches
from toolkit.parallel.pipeline.program import Program, program_of
from toolkit.parallel.pipeline.rows import Rows
from toolkit.parallel.pipeline.tasks import Kind, Tasks
from toolkit.parallel.pipeline.ticks import run_ticks
from toolkit.planning.grade.forward import after_loop, embedded, loss_after, through
from toolkit.planning.memory.categories import layer_kinds
from toolkit.planning.memory.kept import POLICIES
from toolkit.planning.memory.placing import layers_by_row, stage_places, stores_of
from toolkit.planning.models import local_config
from toolkit.planning.time.orders import schedule_of

STAGE = "stage"
# Names under which the compiled program has what runs on the first or the last stage only.
FIRST, LAST = "before_the_stages", "after_the_stages"


class StageWork(NamedTuple):
    """What a stage runs; stages with equal work are of one kind.

    Attributes:
        layers: for each of its layers the number of its place, and what it recomputes.
        ends_loop: whether what a loop adds to its output, or its norm, comes after them.
    """

    layers: tuple[tuple[int, str], ...]
    ends_loop: bool


def work_by_stage(config, strategy) -> tuple[StageWork, ...]:
    """The work of each stage, in the order of the model."""
    kinds, rows = layer_kinds(config, strategy), sorted(layers_by_row(config, strategy))
    place_of = {
        layer: number
        for number, (_, place) in enumerate(stage_places(config, strategy))
        for layer in place
    }
    has_end = config.residual_gate or config.norm_every_loop
    once = (
        StageWork(tuple((place_of[at], kinds[at][2]) for at in row), has_end and row is rows[-1])
        for row in rows
    )
    return tuple(once) * config.loops


def ticks_of(config, strategy) -> Program:
    """A strategy's schedule tick by tick."""
    work = work_by_stage(config, strategy)
    known, rows = list(dict.fromkeys(work)), len(work) // config.loops
    places = [kind for kind, _ in stage_places(config, strategy)]
    words = [tuple((*places[at], recompute) for at, recompute in each.layers) for each in known]
    return program_of(
        schedule_of(strategy),
        tied=[stage % rows for stage in range(len(work))],
        kinds=[known.index(each) for each in work],
        stores=stores_of(words),
    )


def _empty_caches(config, strategy, work):
    """(sequences, tokens) -> the caches of a stage's layers on one chip, before the first slice."""
    local = local_config(config, strategy.tensor, is_folded=strategy.expert > 1)
    places = stage_places(config, strategy)
    words = tuple(places[at][0][0] for at, _ in work.layers)
    return functools.partial(empty_layers, local, words)


def pipelined(config, strategy, graphs, specs):
    """(parameters, tokens, tables of the schedule) -> (loss, gradients), not yet summed over the
    batch's shards, for one chip; and those tables."""
    program, works = ticks_of(config, strategy), work_by_stage(config, strategy)
    blocks, rows_of_weights = specs["blocks"], len(works) // config.loops
    is_cut = strategy.slices > 1
    caches = SliceCaches(strategy.slices, [_empty_caches(config, strategy, each) for each in works])

    def stage(number, rows, x, context):
        x, carried = x if is_cut else (x, [])
        work, h, after = works[number], x["h"], []
        before = (None,) * len(work.layers)
        if is_cut:
            before = caches.before(number, carried, context.data)
        for (at, recompute), cache in zip(work.layers, before, strict=True):
            run = functools.partial(through, config, strategy, recompute)
            run = functools.partial(run, graphs[at][0], blocks[at][0])
            if recompute != "none":
                run = jax.checkpoint(run, policy=POLICIES[recompute])
            h, cache = run(h, rows[at][0], cache)
            after.append(cache)
        if work.ends_loop:
            shared = context.shared
            rho = shared["rho"][context.stage // rows_of_weights] if config.residual_gate else None
            y = dict.fromkeys(x, after_loop(config, shared["norm"], rho, x.get("start"), h))
        else:
            y = x | {"h": h}
        return (y, caches.after(number, carried, tuple(after), context.data)) if is_cut else y

    @jax.named_scope(FIRST)
    def first(shared, data):
        h = embedded(config, strategy, specs["embedding"], shared["embedding"], data["tokens"])
        return {"h": h} | ({"start": h} if config.residual_gate else {})

    @jax.named_scope(LAST)
    def last(shared, x, data):
        return loss_after(config, strategy, specs, shared, x["h"], data["targets"])

    def cut(array):
        """Microbatches, and one after another the slices of each."""
        rows, slices = array.shape[0] // strategy.microbatches, strategy.slices
        parts = array.reshape(strategy.microbatches, rows, slices, -1).swapaxes(1, 2)
        return parts.reshape(strategy.parts, rows, -1)

    functions = [functools.partial(stage, works.index(work)) for work in dict.fromkeys(works)]

    def run(params, tokens, columns):
        inputs, targets = jax.tree.map(cut, tokens)
        batch: dict[str, jax.Array] = {"tokens": inputs, "targets": targets}
        if is_cut:
            goes_on = jnp.arange(strategy.parts) % strategy.slices > 0
            batch["continues"] = jnp.broadcast_to(goes_on[:, None], inputs.shape[:2])
        weights = params["blocks"]
        shared = {name: leaf for name, leaf in params.items() if name != "blocks"}
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (weights, batch))
        kinds = [Kind(function, False, 0) for function in functions]
        given = first, last, weights, shared, like[1]
        carried = caches.start if is_cut else None
        tasks = Tasks(kinds, program.stores, Rows([like[0]]), *given, carried)
        mine = {name: table[:, 0] for name, table in columns.items()}
        given = (weights, shared, batch)
        loss, (of_rows, of_rest) = run_ticks(program, tasks, (STAGE, ()), given, mine)
        return loss, {"blocks": of_rows, **of_rest}

    tables = {name: np.asarray(table) for name, table in program.columns.items()}
    return run, tables, jax.tree.map(lambda _: PartitionSpec(None, STAGE), tables)
