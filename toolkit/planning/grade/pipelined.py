"""The loss and gradients of a pipelined strategy, in the order of its schedule.

Inside one `jax.shard_map` over all axes, the ticks of `toolkit.parallel.pipeline` run the same
layers, with the same collectives, as `forward.py`. The embedding and the head are on every stage,
and their gradients are summed over all.
"""

import functools

import jax
import numpy as np
from jax.sharding import PartitionSpec

from toolkit.parallel.pipeline.program import Program, program_of
from toolkit.parallel.pipeline.rows import Rows
from toolkit.parallel.pipeline.tasks import Kind, Tasks
from toolkit.parallel.pipeline.ticks import run_ticks
from toolkit.planning.grade.forward import embedded, loss_after, through
from toolkit.planning.memory.categories import layer_kinds
from toolkit.planning.memory.kept import POLICIES
from toolkit.planning.memory.placing import layers_by_stage
from toolkit.planning.time.orders import schedule_of

STAGE = "stage"
# Names under which the compiled program has what runs on the first or the last stage only.
FIRST, LAST = "before_the_stages", "after_the_stages"


def recomputed_by_stage(config, strategy) -> tuple[tuple[str, ...], ...]:
    """For each stage, in the order of the model, what each of its layers recomputes."""
    kinds, rows = layer_kinds(config, strategy), layers_by_stage(config, strategy)
    stages = [stage for mine in strategy.stages_by_device for stage in mine]
    words = (tuple(kinds[at][2] for at in row if at is not None) for row in rows)
    return tuple(mine for _, mine in sorted(zip(stages, words, strict=True)))


def ticks_of(config, strategy) -> Program:
    """A strategy's schedule tick by tick; stages that recompute alike are of one kind."""
    words = recomputed_by_stage(config, strategy)
    known = list(dict.fromkeys(words))
    return program_of(schedule_of(strategy), kinds=[known.index(each) for each in words])


def pipelined(config, strategy, graphs, specs):
    """(parameters, tokens, tables of the schedule) -> (loss, gradients), not yet summed over the
    batch's shards, for one chip; and those tables."""
    program, known = ticks_of(config, strategy), recomputed_by_stage(config, strategy)
    blocks = specs["blocks"]

    def stage(words, rows, x, context):
        h = x["h"]
        for recompute, graph, spec, row in zip(words, graphs, blocks, rows, strict=False):
            run = functools.partial(through, config, strategy, recompute, graph[0], spec[0])
            if recompute != "none":
                run = jax.checkpoint(run, policy=POLICIES[recompute])
            h = run(h, row[0])
        return x | {"h": h}

    @jax.named_scope(FIRST)
    def first(shared, data):
        h = embedded(config, strategy, specs["embedding"], shared["embedding"], data[0])
        return {"h": h} | ({"start": h} if config.residual_gate else {})

    @jax.named_scope(LAST)
    def last(shared, x, data):
        return loss_after(config, strategy, specs, shared, x["h"], x.get("start"), data[1])

    functions = {words: functools.partial(stage, words) for words in dict.fromkeys(known)}

    def run(params, tokens, columns):
        cut = (strategy.microbatches, -1)
        batch = jax.tree.map(lambda x: x.reshape(*cut, *x.shape[1:]), tokens)
        weights = params["blocks"]
        shared = {name: leaf for name, leaf in params.items() if name != "blocks"}
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (weights, batch))
        kinds = [Kind(function, False, 0) for function in functions.values()]
        tasks = Tasks(kinds, Rows([like[0]]), first, last, weights, shared, like[1])
        mine = {name: table[:, 0] for name, table in columns.items()}
        given = (weights, shared, batch)
        loss, (of_rows, of_rest) = run_ticks(program, tasks, (STAGE, ()), given, mine)
        return loss, {"blocks": of_rows, **of_rest}

    tables = {name: np.asarray(table) for name, table in program.columns.items()}
    return run, tables, jax.tree.map(lambda _: PartitionSpec(None, STAGE), tables)
