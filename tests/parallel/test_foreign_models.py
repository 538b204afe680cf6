"""Layouts of models that nobody here wrote: values of one device, and the textbook's bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from float64 import enable_x64
from foreign_models import BATCH, MODELS, TIME, WIDTH
from jax.sharding import PartitionSpec as P

from toolkit.measure import collectives, program_cost
from toolkit.parallel import (
    fully_sharded,
    layout,
    make_mesh,
    partitioned_train_step,
    sharded_train_step,
)
from toolkit.parallel.axes import axes_of

DOUBLE = 1e-11
WITHIN = 1.05
DATA, BOTH = {"data": 8}, {"data": 2, "model": 4}
MESHES = {
    **dict.fromkeys(("data", "zero1", "zero2", "zero3"), DATA),
    **dict.fromkeys(("tensor", "zero1+tensor", "zero3+tensor"), BOTH),
}
DESCENT = optax.sgd(1.0)
QUICK = [("nanochat", ["zero3+tensor"])]


def textbook(foreign, found, scatter=1):
    """Bytes that a device sends: of parameters along "data", of activations along "model"; a
    gradient whose moments are cut is summed by `scatter` times the bytes of a reduce-scatter."""
    devices, cuts = found.mesh.shape["data"], found.mesh.shape.get("model", 1)
    sent = 0.0
    for row in found.placements:
        used, moments = (
            {axis for axes in axes_of(spec) for axis in axes} for spec in (row.spec, row.optimizer)
        )
        size = np.prod(row.shape) * row.dtype.itemsize / (cuts if "model" in used else 1)
        passes = 1 + ("data" in used) + scatter if "data" in moments else 2
        sent += passes * size * (devices - 1) / devices
    array = 8 * BATCH / devices * TIME * WIDTH
    return sent + foreign.sums * 2 * (cuts - 1) / cuts * array


def check(name, scheme, make, scatter=1):
    foreign = MODELS[name]()
    given = {"loss_fn": foreign.loss, "batch": foreign.batch}
    found = layout(foreign.params, make_mesh(MESHES[scheme]), scheme, min_elements=0, **given)
    wanted, gradients = jax.jit(jax.value_and_grad(foreign.loss))(foreign.params, foreign.batch)
    state = found.apply((foreign.params, DESCENT.init(foreign.params)))
    arguments = (*state, found.apply_batch(foreign.batch))
    compiled = make(foreign.loss, DESCENT, found).lower(*arguments).compile()
    after, _, loss = compiled(*arguments)
    np.testing.assert_allclose(loss, wanted, atol=DOUBLE, rtol=0)
    leaves = map(jax.tree.leaves, (foreign.params, after, gradients))
    for old, new, gradient in zip(*leaves, strict=True):
        np.testing.assert_allclose(old - np.asarray(new), gradient, atol=DOUBLE, rtol=0)
    sent = sum(one.total_bytes_sent for one in collectives(compiled))
    return sent / textbook(foreign, found, scatter)


EVERY = [pytest.param(name, list(MESHES), marks=pytest.mark.nightly) for name in MODELS]


@pytest.mark.parametrize(("name", "schemes"), [*QUICK, *EVERY])
def test_a_step_sends_what_the_textbook_says_and_equals_one_device(name, schemes):
    """Two thirds of ZeRO-3 where XLA for CPUs keeps what is to be gathered again."""
    with enable_x64(True):
        ratios = {one: check(name, one, sharded_train_step) for one in schemes}
    assert all(0.66 < ratio <= WITHIN for ratio in ratios.values()), ratios


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_the_compiler_sends_what_the_textbook_says_but_for_scattered_sums(name):
    """XLA for CPUs all-reduces gradients where that for GPUs reduce-scatters them."""
    with enable_x64(True):
        ratios = {one: check(name, one, partitioned_train_step, scatter=2) for one in MESHES}
    assert all(ratio <= WITHIN for ratio in ratios.values()), ratios


OTHERS = [
    pytest.param(one, marks=pytest.mark.slow) for one in ("hk,rh->kr", "rh,hk->kr", "rgh,ghk->grk")
]


@pytest.mark.parametrize("of_rows", ["rh,hk->rk", *OTHERS])
def test_the_gradient_of_weights_that_steps_share_is_summed_once(of_rows):
    """Over time; the control sums the same gradient at every step."""
    weights = {"w": jnp.ones((2, 16, 16) if "g" in of_rows else (16, 16)) / 16}
    batch = jax.random.normal(jax.random.key(0), (8, 4, *([2] if "g" in of_rows else []), 16))
    last, first = of_rows.partition("->")[2], "rgh" if "g" in of_rows else "rh"

    def loss(p, batch):
        def step(h, x):
            rows = jnp.einsum(of_rows, *((p["w"], h) if of_rows[0] == "h" else (h, p["w"])))
            h = jnp.tanh(jnp.einsum(f"{last.replace('k', 'h')}->{first}", rows) + x)
            return h, None

        return jnp.mean(jax.lax.scan(step, batch[:, 0], batch.swapaxes(0, 1))[0] ** 2)

    found = layout(weights, make_mesh(DATA), "data")
    given = found.apply(weights), found.apply_batch(batch)
    sent = {}
    for kind, function in (("shared", found.bind(loss)), ("control", loss)):
        compiled = jax.jit(jax.grad(function), out_shardings=found.shardings(weights)).lower(*given)
        compiled = compiled.compile()
        (gradient,), (wanted,) = map(
            jax.tree.leaves, (compiled(*given), jax.grad(loss)(weights, batch))
        )
        np.testing.assert_allclose(gradient, wanted, atol=1e-6)
        sent[kind] = sum(one.total_bytes_sent for one in collectives(compiled))
    assert sent["shared"] == 2 * 7 / 8 * weights["w"].nbytes < sent["control"] / 3


def test_the_gradient_of_a_weight_with_several_uses_is_summed_once():
    """A tied table, and one that no row of the batch chooses from, before it spreads over rows."""
    params = {"embed": jnp.ones((64, 16)) / 8, "by_place": jnp.ones((4, 16))}
    batch = jax.random.randint(jax.random.key(0), (8, 32), 0, 64)

    def loss(p, batch):
        x = jnp.tanh(p["embed"][batch] + p["by_place"][jnp.arange(32) // 8])
        return jnp.mean(jax.nn.logsumexp(x @ p["embed"].T, -1))

    sent = {}
    found = layout(params, make_mesh(DATA), "data")
    given = found.apply(params), found.apply_batch(batch)
    for kind, function in (("shared", found.bind(loss)), ("control", loss)):
        compiled = jax.jit(jax.grad(function), out_shardings=found.shardings(params)).lower(*given)
        compiled = compiled.compile()
        leaves = map(jax.tree.leaves, (compiled(*given), jax.grad(loss)(params, batch)))
        for gradient, wanted in zip(*leaves, strict=True):
            np.testing.assert_allclose(gradient, wanted, atol=1e-6)
        sent[kind] = sum(one.total_bytes_sent for one in collectives(compiled))
    assert sent["shared"] == 2 * 7 / 8 * sum(x.nbytes for x in params.values())
    assert sent["control"] > 1.8 * sent["shared"]


@pytest.mark.parametrize("mixes", [True, False])
def test_a_cut_for_which_every_step_would_wait_is_none_of_tensor(mixes):
    """The control's units do not read each other: cut by units, its recurrence sends nothing."""
    shapes = {"inside": (64, 64), "mix": (64, 64), "outside": (64, 256)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def loss(p, batch):
        def step(h, x):
            h = jnp.tanh((h @ p["mix"] if mixes else h) + x @ p["inside"])
            return h, h

        h = jax.lax.scan(step, jnp.zeros((16, 64)), batch.swapaxes(0, 1))[1]
        return jnp.mean(jax.nn.logsumexp(h @ p["outside"], -1))

    given = {"loss_fn": loss, "batch": jnp.ones((16, 4, 64))}
    found = layout(params, make_mesh(BOTH), "tensor", **given)
    rows = {row.path: row for row in found.placements}
    assert rows["outside"].spec == (P(None, "model") if mixes else P("model"))
    assert rows["inside"].spec == (P() if mixes else P(None, "model"))
    if mixes:
        assert rows["mix"].reason.endswith("every step of a recurrence would communicate")


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ((32, 8, 8), "split"),
        pytest.param((16, 16, 16), "slices", marks=pytest.mark.slow),
        pytest.param((24, 24), "reshape", marks=pytest.mark.slow),
    ],
)
def test_of_a_fused_product_weights_change_devices_not_activations(sizes, how):
    """In a loop over layers, with a bias; the control splits what is no product any more."""

    def loss(p, batch, is_control=False):
        def layer(x, p):
            fused = x @ p["fused"] + p["bias"]
            fused, ends = jnp.tanh(fused) if is_control else fused, [0, *np.cumsum(sizes)]
            parts = (
                [fused[..., start : start + 16] for start in ends[:-1]]
                if how == "slices"
                else jnp.moveaxis(fused.reshape(*x.shape[:2], len(sizes), -1), 2, 0)
                if how == "reshape"
                else jnp.split(fused, ends[1:-1], -1)
            )
            parts = parts if is_control else map(jnp.tanh, parts)
            # The first part is gated by what the others add up to, unit by unit of a head.
            first, *others = (y.reshape(*x.shape[:2], -1, 8) for y in parts)
            others = sum(jnp.repeat(y, first.shape[2] // y.shape[2], 2) for y in others)
            return x + (first * others).reshape(*x.shape[:2], -1) @ p["out"], None

        return jnp.mean(jax.lax.scan(layer, batch, p)[0] ** 2)

    with enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = {"fused": (2, 16, sum(sizes)), "bias": (2, sum(sizes)), "out": (2, sizes[0], 16)}
        params = {
            name: jax.random.normal(key, shape, jnp.float64) / 4
            for key, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        batch = jax.random.normal(keys[3], (16, 32, 16), jnp.float64)
        found = fully_sharded(params, make_mesh({"data": 4, "model": 2}), min_elements=0)
        cuts = {"fused": P(None, "data", "model"), "out": P(None, "model", "data")}
        for name, spec in cuts.items():
            found = found.replace(name, spec, "heads")
        state = found.apply((params, DESCENT.init(params)))
        sent, wanted = {}, jax.grad(loss)(params, batch)
        for make in (sharded_train_step, partitioned_train_step):
            for is_control in (False, True):
                step = make(lambda *a, c=is_control: loss(*a, is_control=c), DESCENT, found)
                compiled = step.lower(*state, found.apply_batch(batch)).compile()
                after, *_ = compiled(*state, found.apply_batch(batch))
                for old, new, gradient in zip(
                    *map(jax.tree.leaves, (params, after, wanted)), strict=True
                ):
                    np.testing.assert_allclose(old - new, gradient, atol=DOUBLE, rtol=0)
                sent[is_control] = sum(one.total_bytes_sent for one in collectives(compiled))
            assert sent[False] < 0.8 * sent[True]


def stack_loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["stack"])
    return jnp.mean(x**2)


def test_one_layer_of_a_stack_is_whole_at_a_time():
    params, batch = {"stack": jnp.ones((64, 64, 64))}, jnp.ones((16, 64))
    mesh = make_mesh(DATA)
    found = layout(params, mesh, "zero3", loss_fn=stack_loss, batch=batch)
    assert found.placements[0].spec == P(None, "data")  # 64 layers are not the place to cut
    step = sharded_train_step(stack_loss, DESCENT, found)
    state = found.apply((params, DESCENT.init(params)))
    cost = program_cost(step.lower(*state, found.apply_batch(batch)).compile())
    assert cost.temp_bytes < params["stack"].nbytes / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "with loss_fn= and batch= it follows the program"),
        ({"loss_fn": stack_loss}, "loss_fn and batch belong together"),
        ({"loss_fn": stack_loss, "batch": jnp.ones((16, 63))}, "no cut of a loop in loss_fn"),
    ],
)
def test_what_tensor_cannot_cut_is_said(options, message):
    params = {"stack": jnp.ones((2, 63, 63))}
    with pytest.raises(ValueError, match=message):
        layout(params, make_mesh(BOTH), "tensor", **options)
