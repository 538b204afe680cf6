"""Pipelined plans as programs: loss and gradients of the model, and bytes as predicted."""

import contextlib
import dataclasses
import functools
from collections import Counter

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from float64 import enable_x64

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.planning import Strategy, predict, train_program
from toolkit.planning.grade.forms import packed, unpacked
from toolkit.planning.grade.sent import sent_by_device
from toolkit.schedules import breadth_first, to_csv

pytestmark = pytest.mark.usefixtures("not_cached")

ROUNDING = 1e-5  # float32, relative to the largest gradient of an array
FLOAT64 = 1e-11  # the same
SMALL = 0.02  # of the bytes sent: sums of vectors and of the head's scalars
# Large enough for matrices to be cut; five layers do not divide into equal stages.
CONFIG = LoopedConfig.tiny(
    "full full full full full", loops=1, width=128, heads=4, vocabulary=203, feed_forward=128,
)  # fmt: skip
BATCH, TIME = 16, 8
STRATEGIES = {
    "zb-h1": Strategy(pipeline=2, fsdp=2, tensor=2, microbatches=4, schedule="zb-h1"),
    "zb-v": Strategy(pipeline=2, data=2, tensor=2, microbatches=4, schedule="zb-v", chunks=2),
    "1f1b": Strategy(pipeline=2, data=2, fsdp=2, microbatches=4, stages=(2, 3)),
    "gpipe": Strategy(pipeline=4, data=2, microbatches=4, schedule="gpipe", recompute="layer"),
    "interleaved": Strategy(
        pipeline=2, data=2, fsdp=2, microbatches=2, schedule="interleaved", chunks=2,
        recompute="2 layer, 3 elementwise", head_chunks=2, shard_optimizer=True,
    ),
    "slices": Strategy(
        pipeline=2, fsdp=2, tensor=2, microbatches=2, slices=2, recompute="2 layer, 3 none"
    ),
}  # fmt: skip


def small(pattern, **changes):
    """A configuration in float64, for which jax must have that."""
    sizes = {"width": 16, "heads": 2, "vocabulary": 17, "feed_forward": 16, "dtype": "float64"}
    return lambda: LoopedConfig.tiny(pattern, **(sizes | changes))


def halved(schedule):
    """A table with the backward passes of a schedule in halves, such as a search finds."""
    orders = tuple(
        tuple(
            half
            for task in order
            for half in ([task._replace(kind=k) for k in "IW"] if task.kind == "B" else [task])
        )
        for order in schedule.orders
    )
    return to_csv(dataclasses.replace(schedule, orders=orders))


# Loops as stages, and stages whose layers differ: in float64, without a norm between loops but
# where it is named.
UNLIKE = {
    "window and full": (
        small("full full window", loops=1),
        Strategy(pipeline=2, tensor=2, microbatches=4),
    ),
    "looped": (
        small("full full window", loops=2, norm_every_loop=True),
        Strategy(pipeline=2, microbatches=4, schedule="breadth-first", chunks=2),
    ),
    "looped hybrid": (
        small("gdn full gdn full", loops=3, options={"gdn": {"heads": 2}}),
        Strategy(
            pipeline=2, data=2, microbatches=2, schedule="interleaved", chunks=6,
            recompute="layer",
        ),
    ),
    "looped, uneven": (
        small("full full full full full", loops=2),
        Strategy(
            pipeline=2, fsdp=2, tensor=2, microbatches=3, schedule="breadth-first", chunks=4,
            stages=(1, 1, 2, 1) * 2,
        ),
    ),
    "looped, from a table": (
        small("full full window", loops=2),
        Strategy(
            pipeline=2, data=2, microbatches=4, chunks=2, schedule=halved(breadth_first(2, 4, 2)),
        ),
    ),
    "hybrid, halves": (
        small("gdn gdn gdn full", loops=1, residual_gate=False),
        Strategy(pipeline=2, microbatches=4, schedule="zb-v", chunks=2),
    ),
    "hybrid, slices": (
        small("gdn full window full", loops=1, norm_every_loop=True),
        Strategy(
            pipeline=2, data=2, microbatches=2, slices=4, schedule="gpipe", recompute="elementwise"
        ),
    ),
    "mixture": (
        small("full full full", loops=1, feed_forwards="swiglu moe moe"),
        Strategy(pipeline=3, microbatches=3, schedule="zb-h1"),
    ),
}  # fmt: skip
LOOPED = LoopedConfig.tiny(
    "full full window", loops=2, width=128, heads=4, vocabulary=203, feed_forward=128,
)  # fmt: skip
CASES = {name: (lambda: CONFIG, strategy) for name, strategy in STRATEGIES.items()} | UNLIKE
CASES["looped, with its bytes"] = (
    lambda: LOOPED,
    Strategy(
        pipeline=2, fsdp=2, tensor=2, microbatches=4, schedule="breadth-first", chunks=2,
    ),
)  # fmt: skip
FIRST_TIER = ("zb-h1", "looped")
ALL = [name if name in FIRST_TIER else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@functools.cache
def reference(config, batch):
    graph, state = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda leaf: leaf.astype(config.dtype), state)
    if config.residual_gate:
        state["rho"][...] += 0.5  # off the zero at which the gate starts
    tokens = jax.random.randint(jax.random.key(0), (batch, TIME + 1), 0, config.vocabulary)
    given = (tokens[:, :-1], tokens[:, 1:])

    def loss(state):
        logits = nnx.merge(graph, state)(given[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, given[1]).mean()

    return state, given, *jax.jit(jax.value_and_grad(loss))(state)


def test_ticks_that_wait_for_their_slowest_task_take_longer():
    """Equal halves of backward passes lose nothing, whole ones half of the forwards beside them."""
    found = {
        name: predict("llama-3-8b", "h100:4", Strategy(pipeline=4, microbatches=16, schedule=name),
                      batch=16)
        for name in ("1f1b", "zb-h1", "gpipe")
    }  # fmt: skip
    slower = {name: each.lockstep_seconds / each.step_seconds for name, each in found.items()}
    assert min(slower.values()) >= 1
    assert slower["1f1b"] > slower["zb-h1"]
    assert slower["1f1b"] > slower["gpipe"]


@pytest.mark.parametrize("name", ALL)
def test_a_pipelined_plan_computes_the_model_and_sends_what_was_predicted(name):
    config_of, strategy = CASES[name]
    sizes = {"batch": 12 if strategy.microbatches == 3 else BATCH, "sequence_length": TIME}
    is_wide = name in UNLIKE
    with enable_x64(True) if is_wide else contextlib.nullcontext():
        config = config_of()
        state, batch, wanted, gradients = reference(config, sizes["batch"])
        devices = jax.devices()[: strategy.chips]
        program = train_program(config, strategy, **sizes, devices=devices)
        params = program.layout.apply(packed(config, strategy, state))
        batch = program.layout.apply_batch(batch)
        compiled = jax.jit(jax.value_and_grad(program.loss)).lower(params, batch).compile()
        loss, found = compiled(params, batch)
        found = unpacked(config, strategy, found, state)
    rounding = FLOAT64 if is_wide else ROUNDING
    np.testing.assert_allclose(loss, wanted, rtol=rounding)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=rounding * np.abs(b).max(), rtol=0)
    if is_wide:  # plans have float32 parameters, of which bytes are predicted
        return
    control = Strategy(
        pipeline=2, fsdp=4, microbatches=4, schedule="breadth-first", chunks=max(2, config.loops)
    )
    predicted, other = (predict(config, "h100:8", each, **sizes) for each in (strategy, control))
    for device, sent in enumerate(sent_by_device(compiled, config, strategy)):
        for each, is_equal in ((predicted, True), (other, False)):  # the other is a control
            held: Counter[str] = Counter()
            for transfer in each.transfers_of(min(device, each.strategy.pipeline - 1)):
                if transfer.kind != "all-gather" or transfer.part != "data":  # of the update
                    held[transfer.kind] += transfer.total
            exact = ("all-gather", "reduce-scatter", "collective-permute")
            assert all(sent[kind] == held[kind] for kind in exact) == is_equal
        whole = sum(sent.values())
        reduced = sum(t.total for t in predicted.transfers_of(device) if t.kind == "all-reduce")
        assert abs(sent["all-reduce"] - reduced) < SMALL * whole
