"""Training with exchanged gradients: the same steps, fewer bytes, resumed to the bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.measure import collectives
from toolkit.parallel import layout, make_mesh, partitioned_train_step, sharded_train_step
from toolkit.parallel.gradients import Exchange, ExchangePlan
from toolkit.training import CheckpointError, FitOptions, Recipe, fit, prepare

SUMS = 1e-6  # float32 sums in another order
DEVICES = 8
LEVELS = {"node": 2, "gpu": 2, "gcd": 2}
DEGREES = {"weights": 2, "gradient": 4, "optimizer": 8}
RECIPE = Recipe(steps=6, optimizer="sgd", learning_rate=0.1, warmup=0, clip_norm=0.05)
PARAMS = {"up": (48, 1024), "down": (1024, 48), "bias": (48,)}


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        name: jax.random.normal(key, shape) / 10
        for (name, shape), key in zip(PARAMS.items(), keys, strict=True)
    }


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] + params["bias"]) ** 2)


def batch():
    return jax.random.normal(jax.random.key(1), (32, 48))


def sent(program, *arguments):
    found = collectives(program.lower(*arguments).compile())
    return sum(each.total_bytes_sent for each in found), found


def placed(axes=None, scheme="data", count=DEVICES, **options):
    mesh = make_mesh(axes or {"data": count}, devices=jax.devices()[:count])
    return layout(params(), mesh, scheme, min_elements=0, **options)


def one_device(steps=3):
    state, step = prepare(loss, params(), RECIPE)
    for _ in range(steps):
        state, _ = step(state, batch())
    return state.params


def close(found, wanted, atol=SUMS):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), found, wanted)


@pytest.mark.parametrize(
    ("axes", "scheme", "options", "text"),
    [
        ({"data": 4, "model": 2}, "data+tensor", {"loss_fn": loss, "batch": batch()}, "two_hop=2"),
        pytest.param({"data": 8}, "zero1", {}, "scatter_gather", marks=pytest.mark.slow),
        pytest.param({"data": 8}, "zero3", {}, "two_hop=4", marks=pytest.mark.slow),
    ],
)
def test_updates_are_those_of_one_device(axes, scheme, options, text):
    """With accumulation and clipping by the norm of the mean; one exchange per update."""
    found = placed(axes, scheme, **options)
    recipe = dataclasses.replace(RECIPE, accumulate=2, exchange=f"float32:{text}")
    state, step = prepare(loss, found.apply(params()), recipe, layout=found)
    single = dataclasses.replace(recipe, accumulate=1)
    once = prepare(loss, found.apply(params()), single, layout=found)
    given = found.apply_batch(batch())
    assert sent(step, state, given)[0] == sent(once[1], once[0], given)[0]
    for _ in range(3):
        state, _ = step(state, given)
    close(state.params, one_device())
    assert step._run.program._cache_size() == 1


@pytest.mark.parametrize(
    ("axes", "scheme", "options", "text"),
    [
        ({"data": 8}, "data", {}, "float32:two_hop=2"),
        ({"data": 8}, "zero3", {}, "float32:scatter_gather:none:float32"),
        (LEVELS, "hierarchical", {"degrees": DEGREES}, "float32:far"),
        ({"data": 4, "model": 2}, "zero3+tensor", {"loss_fn": loss, "batch": batch()},
         "float32:two_hop=2:none:float32"),
        pytest.param({"data": 8}, "zero1", {}, "float32:far=4", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_explicit_step_with_exact_messages_is_the_step_without(axes, scheme, options, text):
    found = placed(axes, scheme, **options)
    exchange = dataclasses.replace(Exchange.parse(text), dense_below=64)
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9))
    weights, moments = found.apply((params(), optimizer.init(params())))
    given, plan = found.apply_batch(batch()), ExchangePlan(exchange, found, is_gathered=True)
    plain = sharded_train_step(loss, optimizer, found)(weights, moments, given)
    step = sharded_train_step(loss, optimizer, found, exchange=exchange)
    exchanged = step(weights, moments, plan.init(), given)
    close(exchanged[0], plain[0])
    close(exchanged[3], plain[2])
    step(*exchanged[:3], given)
    assert step._cache_size() == 1


@pytest.mark.parametrize("memory", ["none", pytest.param("error_feedback", marks=pytest.mark.slow)])
def test_the_compilers_step_takes_an_exchange_beside_tensor_axes(memory):
    found = placed({"data": 4, "model": 2}, "data+tensor", loss_fn=loss, batch=batch())
    exchange = Exchange("float32", "scatter_gather", memory, dense_below=64)
    optimizer = optax.sgd(0.1, momentum=0.9)
    arguments = found.apply((params(), optimizer.init(params())))
    given, plan = found.apply_batch(batch()), ExchangePlan(exchange, found)
    plain = partitioned_train_step(loss, optimizer, found)(*arguments, given)
    step = partitioned_train_step(loss, optimizer, found, exchange=exchange)
    exchanged = step(*arguments, plan.init(), given)
    close(exchanged[0], plain[0])
    close(exchanged[3], plain[2])
    step(*exchanged[:3], given)
    assert step._cache_size() == 1
    few = partitioned_train_step(
        loss, optimizer, found, exchange=dataclasses.replace(exchange, compressor="int4=32")
    )
    kinds = {each.kind for each in sent(few, *arguments, plan.init(), given)[1]}
    assert "all-to-all" in kinds


def test_a_second_copy_within_the_node_is_the_hierarchical_scheme():
    """hpZ: the same update as ZeRO-3; across nodes weights are gathered once per step, not twice,
    for 1 / (devices of a node) of the weights more memory."""
    optimizer, gathered, updated, kept = optax.sgd(0.1, momentum=0.9), {}, {}, {}
    axes = {"node": 2, "gpu": 4}
    for scheme, options in (
        ("zero3", {}),
        ("hierarchical", {"degrees": {"weights": 4, "gradient": 8, "optimizer": 8}}),
    ):
        found = placed(axes, scheme, **options)
        arguments = *found.apply((params(), optimizer.init(params()))), found.apply_batch(batch())
        step = sharded_train_step(loss, optimizer, found)
        updated[scheme] = step(*arguments)[0]
        kept[scheme] = arguments[0]["up"].addressable_shards[0].data.size
        far = [each for each in sent(step, *arguments)[1] if each.kind == "all-gather"]
        gathered[scheme] = sum(each.total_bytes_sent for each in far if each.group_size != 4)
    close(updated["hierarchical"], updated["zero3"])
    assert kept == {"zero3": 48 * 1024 // 8, "hierarchical": 48 * 1024 // 4}
    assert gathered["hierarchical"] < gathered["zero3"] / 2


def test_without_an_exchange_the_program_is_the_same_to_the_letter():
    found = placed({"data": 8}, "zero1")
    state, step = prepare(loss, found.apply(params()), RECIPE)
    other, same = prepare(loss, found.apply(params()), RECIPE, layout=found)
    given = found.apply_batch(batch())
    assert step.lower(state, given).as_text() == same.lower(other, given).as_text()
    optimizer = optax.sgd(0.1)
    arguments = *found.apply((params(), optimizer.init(params()))), given
    texts = {
        sharded_train_step(loss, optimizer, found, **how).lower(*arguments).as_text()
        for how in ({}, {"exchange": None})
    }
    assert len(texts) == 1
    assert "all_to_all" not in texts.pop()


def test_zero_plus_plus_sends_a_quarter():
    """qwZ and qgZ on ZeRO-3: int8 weights, int4 gradients, in the formula's bytes."""
    found = placed({"data": 8}, "zero3")
    exchange = Exchange("int4=32", weights="int8=32", dense_below=64)
    optimizer = optax.sgd(0.1)
    arguments = *found.apply((params(), optimizer.init(params()))), found.apply_batch(batch())
    kept = {"gather_again": False}  # so that weights are gathered once
    plain_step = sharded_train_step(loss, optimizer, found, **kept)
    plan = ExchangePlan(exchange, found, is_gathered=True)
    step = sharded_train_step(loss, optimizer, found, exchange=exchange, **kept)
    given = *arguments[:2], plan.init(), arguments[2]
    quantised, matrices = sent(step, *given)[0], 7 / 8 * 2 * 48 * 1024
    small = 7 / 8 * (8 * 48 + 8)  # the bias, gathered and scattered, and the loss
    assert quantised == matrices * (1 + 4 / 32 + 1 / 2 + 4 / 32) + small
    dense = sent(plain_step, *arguments)[0]
    assert dense == matrices * 8 + small
    assert dense > 4.5 * quantised
    after, plain = step(*given)[0], plain_step(*arguments)[0]
    moved = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b), plain, params())
    error = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b), plain, after)
    assert 0.01 < error["up"] / moved["up"] < 0.3


@pytest.mark.slow
def test_tensor_parallel_exchanges_send_local_shards_only():
    how = {"loss_fn": loss, "batch": batch()}
    recipe = dataclasses.replace(RECIPE, exchange="int8=64:scatter_gather")
    found = {}
    for axes, scheme, options in (
        ({"data": 4, "model": 2}, "data+tensor", how), ({"data": 4}, "data", {}),
    ):  # fmt: skip
        cut = placed(axes, scheme, count=4 * axes.get("model", 1), **options)
        state, step = prepare(loss, cut.apply(params()), recipe, layout=cut)
        assert {leaf.axes for leaf in step.exchange.leaves} == {("data",)}
        found[scheme] = step.exchange, sent(step, state, cut.apply_batch(batch()))[1]
    plan, collected = found["data+tensor"]
    quantised = [each for each in collected if each.kind in ("all-to-all", "all-gather")]
    assert {each.group_size for each in quantised} == {4}
    halves = plan.bytes_sent - 6 * 48, found["data"][0].bytes_sent - 6 * 48  # the bias apart
    assert halves[0] == halves[1] / 2


def test_what_is_whole_on_another_axis_stays_the_same_along_it():
    """Rounding is drawn per replica, and alike on the devices that share one."""
    mesh = make_mesh({"data": 4, "model": 2})
    found = layout(params(), mesh, "data+tensor", loss_fn=loss, batch=batch())
    found = found.replace("down", jax.P(), "whole, beside one that is cut")
    recipe = dataclasses.replace(RECIPE, exchange="int4:scatter_gather:error_feedback")
    state, step = prepare(loss, found.apply(params()), recipe, layout=found)
    for _ in range(2):
        state, _ = step(state, found.apply_batch(batch()))
    for leaf in (state.params["down"], state.params["bias"]):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(other, first)


ALIKE = "int4=64:scatter_gather:error_feedback"
APART = "up@top_k=0.01:gather:momentum,d*@low_rank=4:all_reduce:error_feedback"


def run(directory, total, plan_layout, exchange):
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    state, step = prepare(
        loss, plan_layout.apply(params()), recipe, layout=plan_layout, most_steps=1,
    )  # fmt: skip
    options = FitOptions(total, log_every=1, checkpoint_every=3, is_progress_shown=False)
    given = plan_layout.apply_batch(batch())
    settings = dataclasses.asdict(recipe)
    return fit(state, step, given, options, directory=directory, configuration=settings)


@pytest.mark.parametrize("exchange", [ALIKE, pytest.param(APART, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_to_the_bit_and_fits_fewer_replicas(tmp_path, exchange):
    eight = placed()
    whole = run(None, 6, eight, exchange)
    first = run(tmp_path, 3, eight, exchange).state
    fewer = run(tmp_path, 3, placed(count=4), exchange).state  # reads, and makes no update
    resumed = run(tmp_path, 6, eight, exchange)
    for found, wanted in zip(
        jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    assert whole.history[-1]["residual_norm"] > 0
    both = (
        [first_hop[0] for first_hop, *_ in state.exchange_state.residuals]
        for state in (first, fewer)
    )
    for before, after in zip(*both, strict=True):
        pairs = np.asarray(before).reshape(4, 2, -1).mean(axis=1)
        np.testing.assert_allclose(np.asarray(after).reshape(4, -1), pairs, atol=SUMS)
    with pytest.raises(CheckpointError, match=r"exchange.*int8.*other run|another run.*exchange"):
        run(tmp_path, 6, eight, "int8:scatter_gather:error_feedback")


@pytest.mark.slow
def test_each_tensor_goes_its_own_way():
    """Bytes of every way, of weights too; what nothing names is summed."""
    sizes, own = 48 * 1024, "up@int4=32:scatter_gather:none:int8=32"
    exchange = Exchange.parse(f"{own},down@random_k=0.1:all_reduce")
    plan = ExchangePlan(exchange, placed({"data": 8}))
    assert [group.exchange.pattern for group in plan.groups] == ["all_reduce", "scatter_gather"]
    assert plan.bytes_sent == 7 / 4 * (4 * 4916 + sizes * (1 / 2 + 4 / 32) + 4 * 48)
    exchange, found = Exchange.parse(own), placed({"data": 8}, "zero3")
    assert str(exchange) == f"{own},float32:dense"
    optimizer, plan = optax.sgd(0.1), ExchangePlan(exchange, found, is_gathered=True)
    arguments = *found.apply((params(), optimizer.init(params()))), found.apply_batch(batch())
    step = sharded_train_step(loss, optimizer, found, exchange=exchange, gather_again=False)
    quantised = 7 / 8 * sizes * (1 + 4 / 32 + 1 / 2 + 4 / 32)
    total = sent(step, *arguments[:2], plan.init(), arguments[2])[0]
    assert total == quantised + 7 / 8 * (8 * sizes + 8 * 48 + 8)


@pytest.mark.slow
def test_a_skipped_update_keeps_what_is_pending():
    found = placed()
    recipe = dataclasses.replace(
        RECIPE, exchange="int4:scatter_gather:error_feedback", loss_scaling=True
    )
    state, step = prepare(loss, found.apply(params()), recipe, layout=found)
    state, _ = step(state, found.apply_batch(batch()))
    before = jax.device_get(state.exchange_state.residuals)
    state, metrics = step(state, found.apply_batch(batch().at[0, 0].set(jnp.nan)))
    assert int(metrics["skipped"][0]) == 1
    jax.tree.map(np.testing.assert_array_equal, state.exchange_state.residuals, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(exchange="int4:ring"), "pattern must be one of"),
        (lambda: Recipe(exchange="int4:far=2:none:int8"), "the compiler gathers the weights here"),
        (lambda: Recipe(exchange="up@int8:gather:none:int8"), "the compiler gathers the weights"),
        (lambda: Recipe(exchange="up@,int8"), "got 'up@' in 'up@,int8', wanted PATTERN@exchange"),
        (
            lambda: ExchangePlan(Exchange.parse("op*@int8,int4"), placed()),
            r"got 'op\*', which no tensor matches; wanted a pattern of paths such as 'bias'",
        ),
        (
            lambda: ExchangePlan(Exchange("low_rank=49", "all_reduce"), placed()),
            "rank: got 49, wanted 1 to 48 for a matrix of 1024 x 48",
        ),
        (lambda: prepare(loss, params(), Recipe(exchange="int4")), "without a layout"),
        (
            lambda: ExchangePlan(Exchange(feedback="error_feedback"), placed(scheme="zero3")),
            "a residual would be as large as the whole gradient",
        ),
        (
            lambda: ExchangePlan(
                Exchange(), layout({"n": jnp.zeros(8, jnp.int32)}, make_mesh({"data": 8}))
            ),
            "n: got int32, wanted a float type",
        ),
        (
            lambda: ExchangePlan(
                Exchange(), placed({"data": 2, "context": 4}, "ring")
            ),
            "attention 'ring'",
        ),
    ],
)  # fmt: skip
def test_what_no_run_can_exchange_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
