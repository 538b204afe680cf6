"""Pipelined plans as programs: loss and gradients of the model, and bytes as predicted."""

from collections import Counter

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.planning import Strategy, predict, train_program
from toolkit.planning.grade.forms import packed, unpacked
from toolkit.planning.grade.sent import sent_by_device

ROUNDING = 1e-5  # float32, relative to the largest gradient of an array
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
}  # fmt: skip
ALL = [
    name if name == "zb-h1" else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES
]


@pytest.fixture(scope="module")
def reference():
    graph, state = nnx.split(LoopedLM(CONFIG, rngs=nnx.Rngs(0)))
    state["rho"][...] += 0.5  # off the zero at which the gate starts
    tokens = jax.random.randint(jax.random.key(0), (BATCH, TIME + 1), 0, CONFIG.vocabulary)
    batch = (tokens[:, :-1], tokens[:, 1:])

    def loss(state):
        logits = nnx.merge(graph, state)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return state, batch, *jax.jit(jax.value_and_grad(loss))(state)


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
def test_a_pipelined_plan_computes_the_model_and_sends_what_was_predicted(reference, name):
    state, batch, wanted, gradients = reference
    strategy, sizes = STRATEGIES[name], {"batch": BATCH, "sequence_length": TIME}
    program = train_program(CONFIG, strategy, **sizes)
    params = program.layout.apply(packed(CONFIG, strategy, state))
    run = jax.jit(jax.value_and_grad(program.loss))
    compiled = run.lower(params, program.layout.apply_batch(batch)).compile()
    loss, found = compiled(params, program.layout.apply_batch(batch))
    found = unpacked(CONFIG, strategy, found, state)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=ROUNDING * np.abs(b).max(), rtol=0)
    predicted, other = (
        predict(CONFIG, "h100:8", each, **sizes)
        for each in (strategy, Strategy(pipeline=2, fsdp=4, microbatches=4))
    )
    for device, sent in enumerate(sent_by_device(compiled, CONFIG, strategy)):
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
