"""The loss and gradients of a pipelined strategy, in the order of its schedule.

Inside one `jax.shard_map` over all axes, the ticks of `toolkit.parallel.pipeline` run the same
layers, with the same collectives, as `forward.py`. The embedding and the head are on every stage,
and their gradients are summed over all.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from toolkit.parallel.pipeline.program import Program, program_of
from toolkit.parallel.pipeline.rows import Rows
from toolkit.parallel.pipeline.tasks import Kind, Tasks
from toolkit.parallel.pipeline.ticks import run_ticks
from toolkit.planning.grade.forward import after_loop, embedded, loss_after, through
from toolkit.planning.memory.categories import layer_kinds
from toolkit.planning.memory.kept import POLICIES
from toolkit.planning.memory.placing import layers_by_row, stage_places, stores_of
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


def pipelined(config, strategy, graphs, specs):
    """(parameters, tokens, tables of the schedule) -> (loss, gradients), not yet summed over the
    batch's shards, for one chip; and those tables."""
    program, works = ticks_of(config, strategy), work_by_stage(config, strategy)
    blocks, rows_of_weights = specs["blocks"], len(works) // config.loops

    def stage(work, rows, x, context):
        h = x["h"]
        for at, recompute in work.layers:
            run = functools.partial(through, config, strategy, recompute)
            run = functools.partial(run, graphs[at][0], blocks[at][0])
            if recompute != "none":
                run = jax.checkpoint(run, policy=POLICIES[recompute])
            h = run(h, rows[at][0])
        if not work.ends_loop:
            return x | {"h": h}
        shared = context.shared
        rho = shared["rho"][context.stage // rows_of_weights] if config.residual_gate else None
        h = after_loop(config, shared["norm"], rho, x.get("start"), h)
        return dict.fromkeys(x, h)

    @jax.named_scope(FIRST)
    def first(shared, data):
        h = embedded(config, strategy, specs["embedding"], shared["embedding"], data[0])
        return {"h": h} | ({"start": h} if config.residual_gate else {})

    @jax.named_scope(LAST)
    def last(shared, x, data):
        return loss_after(config, strategy, specs, shared, x["h"], data[1])

    functions = {work: functools.partial(stage, work) for work in dict.fromkeys(works)}

    def run(params, tokens, columns):
        cut = (strategy.microbatches, -1)
        batch = jax.tree.map(lambda x: x.reshape(*cut, *x.shape[1:]), tokens)
        weights = params["blocks"]
        shared = {name: leaf for name, leaf in params.items() if name != "blocks"}
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (weights, batch))
        kinds = [Kind(function, False, 0) for function in functions.values()]
        given = first, last, weights, shared, like[1]
        tasks = Tasks(kinds, program.stores, Rows([like[0]]), *given)
        mine = {name: table[:, 0] for name, table in columns.items()}
        given = (weights, shared, batch)
        loss, (of_rows, of_rest) = run_ticks(program, tasks, (STAGE, ()), given, mine)
        return loss, {"blocks": of_rows, **of_rest}

    tables = {name: np.asarray(table) for name, table in program.columns.items()}
    return run, tables, jax.tree.map(lambda _: PartitionSpec(None, STAGE), tables)
