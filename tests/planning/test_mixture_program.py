"""Mixtures of experts as compiled: the model's loss and gradients, sizes and bytes as predicted."""

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.measure import collectives
from toolkit.planning import Strategy, predict, train_program
from toolkit.planning.grade.by_compiler import INEXACT, grade_record, graded, read_rows
from toolkit.planning.grade.cases import ROUTED, mixture_cases
from toolkit.planning.memory.categories import memory_of

RECORD = Path(__file__).parents[2] / "data" / "planning" / "experts-libtpu-0.0.42.jsonl"
# Shares of the memory by which predictions may be off: the median, and the farthest.
MEDIAN, FARTHEST = 0.05, 0.12
SENT_MEDIAN, SENT_FARTHEST = 0.02, 0.05  # the same of bytes sent
# Configurations that taught the model of memory: the others judge it.
SEEN = {mixture_cases()[index].key for index in (0, 1, 2, 3, 4, 5, 8, 10, 19)}
CONFIG = LoopedConfig.tiny(
    "full full full", width=64, heads=4, vocabulary=203, feed_forward=64, residual_gate=False,
    feed_forwards="swiglu moe moe",
    options={
        "full": {"key_value_heads": 2},
        "moe": {"experts": 8, "chosen": 2, "hidden": 64, "shared_hidden": 32, "router_bias": True},
    },
)  # fmt: skip
RUNS = (1, 2)  # layers: one dense, two mixtures
ALL = 8.0  # capacity at which nothing is dropped
CUTS = {
    "folded": Strategy(
        data=2, fsdp=2, tensor=2, expert=4, capacity=ALL, microbatches=2, shard_optimizer=True,
        recompute="elementwise",
    ),
    "all chips": Strategy(fsdp=8, expert=8, capacity=ALL),
    "gathered": Strategy(fsdp=4, tensor=2, expert=2, dispatch="gather", recompute="layer"),
    "none": Strategy(fsdp=4, tensor=2),
    "mixed": Strategy(
        data=2, fsdp=4, expert=4, capacity=ALL, recompute="1 layer, 2 none", shard_optimizer=True
    ),
    "replicas": Strategy(data=8, expert=8, dispatch="gather"),
}  # fmt: skip
SIZES: dict[str, Any] = {"batch": 8, "sequence_length": 16}


def stacked(state):
    """The parameters of a model as the program has them: runs of stacked layers."""
    pure = nnx.to_pure_dict(state)
    ends = np.cumsum((0, *RUNS))
    blocks = [
        [jax.tree.map(lambda *x: jnp.stack(x), *(pure["blocks"][i] for i in range(a, b)))]
        for a, b in itertools.pairwise(ends)
    ]
    table = pure["embedding"]["embedding"]
    table = jnp.pad(table, ((0, table.shape[0] % 2), (0, 0)))  # rows that two chips divide
    return {"blocks": blocks, "embedding": table, "norm": pure["norm"]["scale"]}


@pytest.fixture(scope="module")
def reference():
    graph, state = nnx.split(LoopedLM(CONFIG, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (8, 17), 0, CONFIG.vocabulary)
    batch = (tokens[:, :-1], tokens[:, 1:])

    def loss(state):
        logits = nnx.merge(graph, state)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return state, batch, *jax.jit(jax.value_and_grad(loss))(state)


def found_by(reference, strategy):
    state, batch, _, _ = reference
    program = train_program(CONFIG, strategy, **SIZES)
    whole = jax.tree.map(lambda x, like: x[: like.shape[0]], stacked(state), program.params)
    params, given = program.layout.apply(whole), program.layout.apply_batch(batch)
    return jax.jit(jax.value_and_grad(program.loss))(params, given)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "folded" else pytest.mark.nightly)
        for name in ("folded", "all chips", "gathered", "none", "mixed", "replicas")
    ],
)
def test_loss_and_gradients_are_the_models(reference, name):
    _, _, wanted, gradients = reference
    loss, found = found_by(reference, CUTS[name])
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    whole = jax.tree.map(lambda x, like: x[: like.shape[0]], stacked(gradients), found)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * max(1e-3, np.abs(b).max()) + 1e-8, rtol=1e-4)


@pytest.mark.nightly
def test_a_full_expert_drops_tokens(reference):
    """The control of the test above: with too little room the loss is another."""
    strategy = dataclasses.replace(CUTS["all chips"], capacity=0.5)
    loss, _ = found_by(reference, strategy)
    assert abs(float(loss) - float(reference[2])) > 1e-4


@pytest.mark.parametrize("name", CUTS)
def test_arguments_are_those_of_the_program(name):
    """What a chip holds between steps, to the byte, before compiling."""
    program = train_program(CONFIG, CUTS[name], **SIZES)
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.arguments)
    )
    assert held - memory_of(CONFIG, CUTS[name], 8, 16).arguments == 4  # the count of steps


@pytest.mark.parametrize("name", ["folded", pytest.param("gathered", marks=pytest.mark.nightly)])
def test_tokens_are_sent_as_often_as_predicted(name):
    compiled = train_program(CONFIG, CUTS[name], **SIZES).compile()
    kind = "all-gather" if name == "gathered" else "all-to-all"
    sent = Counter()
    for found in collectives(compiled):
        sent[found.kind, found.bytes_sent] += found.count
    transfers = predict(CONFIG, "h100:8", CUTS[name], **SIZES).transfers
    wanted = Counter()
    for each in transfers:
        if each.part == "expert" and each.kind == kind:
            wanted[each.kind, each.bytes_sent] += each.runs
    assert wanted
    assert all(sent[key] >= count for key, count in wanted.items())
    if kind == "all-to-all":
        assert sum(count for (kind, _), count in sent.items() if kind == "all-to-all") == sum(
            wanted.values()
        )


@pytest.mark.parametrize(
    ("config", "strategy", "match"),
    [
        (
            CONFIG.with_options(moe={"choice_bias": True}), Strategy(),
            "moe.choice_bias.*modelled, not built",
        ),
        (
            CONFIG.with_options(moe={"biases": True}), Strategy(tensor=2),
            "moe.biases: every chip of tensor 2",
        ),
        (
            CONFIG.with_options(full={"output_bias": True}), Strategy(tensor=2, expert=2),
            "full.output_bias: every chip of tensor 2",
        ),
    ],
)  # fmt: skip
def test_what_is_modelled_only_is_not_built(config, strategy, match):
    with pytest.raises(ValueError, match=match) as refused:
        train_program(config, strategy, **SIZES)
    assert "\n" not in str(refused.value)
    assert predict(config, f"h100:{strategy.chips}", strategy, **SIZES).memory.total > 0


@pytest.fixture(scope="module")
def rows():
    return graded(RECORD, mixture_cases())


def predicted_of(config, case, strategy):
    sizes: dict[str, Any] = {"batch": case.batch, "sequence_length": case.length}
    return predict(config, case.topology, strategy, **sizes)


@pytest.mark.parametrize("unseen", [False, True], ids=["all", "unseen"])
def test_memory_and_bytes_of_mixtures_are_as_compiled(rows, unseen):
    rows = [row for row in rows if not (unseen and row["case"] in SEEN)]
    for what, median, farthest in (
        ("memory", MEDIAN, FARTHEST), ("sent", SENT_MEDIAN, SENT_FARTHEST)
    ):  # fmt: skip
        errors = {row["case"]: abs(row[f"{what}_error"]) for row in rows}
        assert statistics.median(errors.values()) <= median
        assert max(errors.values()) <= farthest, max(errors, key=lambda case: errors[case])


def test_each_ragged_exchange_is_predicted():
    """Their bytes depend on the data, their number does not."""
    recorded, of_case = read_rows(RECORD), {case.key: case for case in mixture_cases()}
    ragged = [row for key, row in recorded.items() if of_case[key].strategy.dispatch == "ragged"]
    assert ragged
    for row in ragged:
        case = of_case[row["case"]]
        found = predicted_of(case.config, case, case.strategy).transfers
        runs = sum(count for kind, _, _, count in row["collectives"] if kind in INEXACT)
        assert runs == sum(each.runs for each in found if each.kind in INEXACT)


def test_a_record_that_is_no_record_is_refused_in_one_line(tmp_path):
    for content in ("[" * 100_000, '{"case": ', "[]", '{"peak_bytes": 1}'):
        (tmp_path / "record.jsonl").write_text(content)
        with pytest.raises(ValueError, match=r"^record .*record\.jsonl, line 1: want what"):
            read_rows(tmp_path / "record.jsonl")


def test_a_mixture_is_no_dense_model(rows):
    """The control, where experts are cut: with one layer of all experts' size, or of the chosen
    ones', it is far off."""
    of_case = {case.key: case for case in mixture_cases()}
    far = {"whole": [], "chosen": []}
    for row in rows:
        case = of_case[row["case"]]
        if case.strategy.expert == 1:
            continue
        moe = case.config.moe
        options = {word: own for word, own in case.config.options.items() if word != "moe"}
        strategy = dataclasses.replace(case.strategy, expert=1, dispatch="all_to_all")
        for name, count in (("whole", moe.experts), ("chosen", moe.chosen)):
            hidden = count * moe.hidden + (moe.shared_hidden or 0)
            dense = dataclasses.replace(
                case.config, feed_forwards="swiglu", feed_forward=hidden, options=options
            )
            found = predicted_of(dense, case, strategy)
            far[name].append(
                max(
                    abs(found.memory.total / row["memory"] - 1),
                    abs(found.sent_bytes / row["sent"] - 1),
                )
            )
    for errors in far.values():
        assert min(errors) > FARTHEST
        assert statistics.median(errors) > 0.4


def test_the_record_is_of_the_configurations(rows):
    assert len(rows) == len(RECORD.read_text().splitlines()) >= 15
    assert {each.strategy.dispatch for each in mixture_cases()} == {
        "all_to_all",
        "gather",
        "ragged",
    }
    assert len({(config.moe.experts, config.moe.chosen) for config in ROUTED.values()}) == 5
    words = grade_record(RECORD, minutes=0, cases_of=mixture_cases)
    assert f"{len(rows)} of {len(mixture_cases())} configurations" in words
