"""Many devices compute what one computes, and say what they send."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.measure import collectives, program_cost
from toolkit.parallel import (
    data_parallel,
    fully_sharded,
    layout,
    make_mesh,
    partitioned_train_step,
    sharded_train_step,
)

TOLERANCE = 1e-6  # float32; sums over the batch are taken in another order
DEVICES = 8
SHARE = (DEVICES - 1) / DEVICES
LAYOUTS = {"data_parallel": data_parallel, "fully_sharded": fully_sharded}
STEPS = {"partitioned": partitioned_train_step, "sharded": sharded_train_step}
# A norm over all gradients: a step that saw only its own shards would clip differently.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": DEVICES})


def mlp_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "first": {"kernel": jax.random.normal(keys[0], (24, 64)) / 5, "bias": jnp.zeros(64)},
        "second": {"kernel": jax.random.normal(keys[1], (64, 16)) / 8, "bias": jnp.zeros(16)},
    }


def mlp_loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["first"]["kernel"] + params["first"]["bias"])
    output = hidden @ params["second"]["kernel"] + params["second"]["bias"]
    return jnp.mean((output - batch["y"]) ** 2)


def mlp_batch():
    keys = jax.random.split(jax.random.key(1), 2)
    return {"x": jax.random.normal(keys[0], (32, 24)), "y": jax.random.normal(keys[1], (32, 16))}


def one_device(loss_fn, params, batch, optimizer=OPTIMIZER, steps=3):
    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return repeat(step, params, optimizer.init(params), batch, steps)


def repeat(step, params, state, batch, steps=3):
    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, state, losses


def assert_close(found, wanted):
    jax.tree.map(
        lambda left, right: np.testing.assert_allclose(left, right, atol=TOLERANCE, rtol=0),
        found,
        wanted,
    )


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("step_name", STEPS)
def test_mlp_equals_one_device(mesh, layout_name, step_name):
    params, batch = mlp_params(), mlp_batch()
    layout = LAYOUTS[layout_name](params, mesh)
    step = STEPS[step_name](mlp_loss, OPTIMIZER, layout)
    placed = layout.apply((params, OPTIMIZER.init(params)))
    found = repeat(step, *placed, layout.apply_batch(batch))
    assert_close(found, one_device(mlp_loss, params, batch))
    # The results lie as the layout says, so the next step is the same program.
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, found[0])
    assert specs == layout.specs(params)
    assert step._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "combinations"),
    [
        ("full", [("data_parallel", "partitioned"), ("fully_sharded", "partitioned")]),
        # The scan over chunks starts from fresh zeros, which shard_map must allow.
        ("gdn", [("fully_sharded", "sharded")]),
    ],
)
def test_looped_language_model_equals_one_device(mesh, pattern, combinations):
    config = LoopedConfig.tiny(pattern=pattern, loops=2, width=32, heads=2, vocabulary=64)
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    tokens = jax.random.randint(jax.random.key(2), (DEVICES, 9), 0, config.vocabulary)
    wanted = one_device(loss_fn, params, tokens, steps=2)
    for layout_name, step_name in combinations:
        layout = LAYOUTS[layout_name](params, mesh)
        step = STEPS[step_name](loss_fn, OPTIMIZER, layout)
        placed = layout.apply((params, OPTIMIZER.init(params)))
        assert_close(repeat(step, *placed, layout.apply_batch(tokens), steps=2), wanted)


def compiled_step(layout, optimizer=OPTIMIZER, **options):
    params = mlp_params()
    step = sharded_train_step(mlp_loss, optimizer, layout, **options)
    placed = layout.apply((params, optimizer.init(params)))
    lowered = step.lower(*placed, layout.apply_batch(mlp_batch()))
    return lowered, lowered.compile()


def bytes_of(found, kind):
    return sum(item.total_bytes_sent for item in found if item.kind == kind)


LOSS_BYTES = 4
KERNEL_BYTES = 4 * (24 * 64 + 64 * 16)
BIAS_BYTES = 4 * (64 + 16)


def test_zero_3_sends_what_the_formula_says(mesh):
    layout = fully_sharded(mlp_params(), mesh)
    _, compiled = compiled_step(layout, optax.adam(1e-3), gather_again=False)
    found = collectives(compiled)
    assert bytes_of(found, "all-gather") == SHARE * KERNEL_BYTES
    assert bytes_of(found, "reduce-scatter") == SHARE * KERNEL_BYTES
    assert bytes_of(found, "all-reduce") == 2 * SHARE * (BIAS_BYTES + LOSS_BYTES)
    assert {item.kind for item in found} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert all(item.is_count_exact and item.group_size == DEVICES for item in found)


def test_zero_3_gathers_again_where_the_backward_pass_needs_it(mesh):
    layout = fully_sharded(mlp_params(), mesh)
    lowered, compiled = compiled_step(layout, optax.adam(1e-3))
    # The first kernel's backward pass needs the data and not the kernel: 2 + 1 gathers.
    assert lowered.as_text().count("stablehlo.all_gather") == 3
    second_kernel = 4 * 64 * 16
    # A compiler with memory to spare may merge the two gathers of one tensor.
    assert bytes_of(collectives(compiled), "all-gather") in (
        SHARE * KERNEL_BYTES,
        SHARE * (KERNEL_BYTES + second_kernel),
    )


def test_data_parallel_sends_what_the_formula_says(mesh):
    layout = data_parallel(mlp_params(), mesh)
    _, compiled = compiled_step(layout, optax.adam(1e-3))
    found = collectives(compiled)
    assert {item.kind for item in found} == {"all-reduce"}
    everything = KERNEL_BYTES + BIAS_BYTES + LOSS_BYTES
    assert bytes_of(found, "all-reduce") == 2 * SHARE * everything


def test_zero_3_holds_an_eighth(mesh):
    batch_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(mlp_batch())) // DEVICES
    adam = optax.adam(1e-3)
    _, compiled = compiled_step(fully_sharded(mlp_params(), mesh), adam)
    count_bytes = 4
    # Parameters and two moments: kernels cut, biases whole.
    held = 3 * (KERNEL_BYTES // DEVICES + BIAS_BYTES) + count_bytes
    assert program_cost(compiled).argument_bytes == held + batch_bytes


@pytest.mark.parametrize("step_name", STEPS)
def test_donated_state_is_updated_in_place(mesh, step_name):
    params = mlp_params()
    layout = fully_sharded(params, mesh)
    step = STEPS[step_name](mlp_loss, OPTIMIZER, layout, donate=True)
    placed, state = layout.apply((params, OPTIMIZER.init(params)))
    step(placed, state, layout.apply_batch(mlp_batch()))
    assert placed["first"]["kernel"].is_deleted()


def test_a_batch_over_two_axes():
    params, batch = mlp_params(), mlp_batch()
    grid = make_mesh({"data": 2, "inner": 4})
    layout = fully_sharded(params, grid, axis="inner")
    layout = layout.replace("second/kernel", P(("data", "inner")), "over all devices")
    layout = dataclasses.replace(layout, batch=P(("data", "inner")))
    step = sharded_train_step(mlp_loss, OPTIMIZER, layout)
    placed = layout.apply((params, OPTIMIZER.init(params)))
    found = repeat(step, *placed, layout.apply_batch(batch))
    assert_close(found, one_device(mlp_loss, params, batch))


def test_what_cannot_be_done_is_said():
    params = mlp_params()
    explicit = data_parallel(params, make_mesh({"data": 8}, axis_type="explicit"))
    for make in STEPS.values():
        with pytest.raises(ValueError, match="want auto axes"):
            make(mlp_loss, OPTIMIZER, explicit)


@pytest.mark.parametrize("make", [partitioned_train_step, sharded_train_step])
def test_on_one_device_it_is_the_plain_step(make):
    """The compiled programs have the same instructions: no overhead to time."""
    params, batch = {"up": jnp.ones((24, 64)), "down": jnp.ones((64, 16))}, jnp.ones((32, 24))
    adam = optax.adam(1e-2)

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    def plain(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    steps = jax.jit(plain), make(loss, adam, layout(params, mesh, "zero3"))
    texts = (
        step.lower(params, adam.init(params), batch).compile().as_text() or "" for step in steps
    )
    wanted, found = (Counter(re.findall(r" = \S+ ([\w-]+)\(", text)) for text in texts)
    assert found == wanted


def errors(params, batch):
    return jnp.sum((batch["x"] @ params["first"]["kernel"]) ** 2, -1)


def masked(batch):
    return batch["x"][:, 0] > 0


def scanned(params, batch):
    """The mean by a loop over the rows of the batch, and a penalty on weights."""
    total = jax.lax.scan(
        lambda total, row: (total + errors(params, {"x": row}).sum(), None),
        0.0,
        batch["x"].reshape(-1, 2, 24),
    )[0]
    return total / batch["x"].shape[0] + jnp.sum(params["second"]["kernel"] ** 2)


def doubled(x):
    return jax.lax.while_loop(lambda x: jnp.mean(x) < 8, lambda x: 2 * x + 1, x)


MEANS = {
    "a mean": lambda p, b: errors(p, b).mean(),
    "a sum by the count of rows": lambda p, b: errors(p, b).sum() / jnp.ones(len(b["x"])).sum(),
    "rows by their number": lambda p, b: errors(p, b) @ jnp.full(len(b["x"]), 1 / len(b["x"])),
    "a loop and a penalty": scanned,
    "rows picked by their place": lambda p, b: (
        (b["x"] @ p["first"]["kernel"])[jnp.arange(len(b["x"])), (b["y"][:, 0] > 0).astype(int)]
    ).mean(),
    "a loop per row": lambda p, b: (errors(p, b) * jax.vmap(doubled)(jnp.abs(b["y"][:, 0]))).mean(),
    "a choice per row": lambda p, b: jax.lax.map(
        lambda x: jax.lax.cond(x[0] > 0, jnp.max, jnp.sum, x @ p["first"]["kernel"]), b["x"]
    ).mean(),
}
OTHERS = {
    "a sum over the batch": (
        lambda p, b: errors(p, b).sum(),
        lambda p, b: errors(p, b).mean() + b["y"].sum(),
        lambda p, b: scanned(p, b) * len(b["x"]),
    ),
    "a mean whose weights depend on the batch": (
        lambda p, b: jnp.mean(errors(p, b), where=masked(b)),
        lambda p, b: jnp.average(errors(p, b), weights=jnp.abs(b["y"][:, 0])),
    ),
    "a loss that mixes rows of the batch": (
        lambda p, b: jnp.sqrt(errors(p, b).mean()),
        lambda p, b: (errors(p, b) * jnp.roll(b["y"][:, 0], 1)).mean(),
        lambda p, b: jax.nn.logsumexp(errors(p, b)[:, None] - errors(p, b)),
        lambda p, b: jnp.var(errors(p, b)),
        lambda p, b: jax.lax.cond(jnp.mean(b["y"]) > 0, jnp.mean, jnp.sum, errors(p, b)),
        lambda p, b: (errors(p, b) * doubled(b["y"][:, 0])).mean(),
        lambda p, b: (errors(p, b) * b["y"][(b["y"][:, 1] > 0).astype(int), 0]).mean(),
        lambda p, b: jnp.prod(errors(p, b).reshape(2, -1), 0).mean(),
        lambda p, b: errors(p, b)[: len(b["x"]) // 2].mean(),
    ),
}


def one_step(make, loss, mesh):
    params, batch, descent = mlp_params(), mlp_batch(), optax.sgd(1e-3)
    layout = fully_sharded(params, mesh)
    placed = layout.apply((params, descent.init(params)))
    found = repeat(make(loss, descent, layout), *placed, layout.apply_batch(batch), steps=1)
    return found, one_device(loss, params, batch, descent, steps=1)


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_known_by_its_program(mesh, name):
    found, wanted = one_step(sharded_train_step, MEANS[name], mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.parametrize(("got", "loss"), [(got, own) for got in OTHERS for own in OTHERS[got]])
def test_a_loss_that_is_no_mean_of_its_parts_is_refused(mesh, got, loss):
    """Each device would have another loss than its share of the whole one."""
    with pytest.raises(
        ValueError, match=f"loss_fn: got {got}; wanted the mean of its rows, or part"
    ):
        one_step(sharded_train_step, loss, mesh)


def test_the_compiler_takes_any_loss(mesh):
    found, wanted = one_step(partitioned_train_step, OTHERS["a sum over the batch"][0], mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, wanted)
