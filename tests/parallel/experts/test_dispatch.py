"""Experts on several devices: equal to one device, with the collectives that the formulas say."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.experts import mixture, mixture_reference, route, router_logits
from toolkit.experts.mixture import clamped_gate
from toolkit.measure import collectives
from toolkit.parallel import make_mesh
from toolkit.parallel.experts import (
    dispatch_traffic,
    expert_axes,
    expert_specs,
    sharded_mixture,
    sharded_route,
)

WIDTH, EXPERTS, CHOSEN, HIDDEN = 32, 16, 4, 24
FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, BFLOAT16_TOLERANCE = 2e-6, 1e-13, 2e-2
CUT = P(("x", "y"), "z")
LAYOUTS = {
    "beside a hidden axis": {"axes": ("x", "y"), "tokens": CUT, "hidden_axis": "z"},
    "tokens alike along it": {"axes": ("x", "y"), "tokens": P(("x", "y")), "hidden_axis": "z"},
    "folded": {"axes": ("y", "z"), "tokens": CUT},
    "all devices": {"axes": ("x", "y", "z"), "tokens": CUT},
    "replicas": {"axes": "z", "tokens": CUT},
    "gathered": {"axes": ("y", "z"), "tokens": CUT, "dispatch": "gather"},
    "fsdp": {"axes": ("y", "z"), "tokens": CUT, "fsdp_axes": "x"},
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"x": 2, "y": 2, "z": 2})


def inputs(dtype=np.float32, shape=(8, 16)):
    draw = np.random.default_rng(0)
    gate = draw.normal(size=(2, EXPERTS, WIDTH, HIDDEN)) / 5
    down = draw.normal(size=(EXPERTS, HIDDEN, WIDTH)) / 5
    x, kernel = draw.normal(size=(*shape, WIDTH)), draw.normal(size=(WIDTH, EXPERTS))
    return tuple(array.astype(dtype) for array in (x, kernel, *gate, down))


def value_and_gradients(mix):
    def loss(*arrays):
        y = mix(*arrays)
        return (y**2).sum(), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))


def of_one_device(x, kernel, *weights):
    return mixture(x, route(router_logits(x, kernel), CHOSEN), *weights)


def over(mesh, **how):
    def mix(x, kernel, *weights):
        routing = sharded_route(x, kernel, CHOSEN, mesh, tokens=how["tokens"])
        return sharded_mixture(x, routing, *weights, mesh, **how).outputs

    return mix


def placed(mesh, arrays, how):
    names = {name: how.get(name) for name in ("hidden_axis", "fsdp_axes") if name in how}
    tuples = {k: (v,) if k == "fsdp_axes" else v for k, v in names.items()}
    axes = (how["axes"],) if isinstance(how["axes"], str) else how["axes"]
    specs = expert_specs(axes, **tuples)
    every = [how["tokens"], P(), specs["gate"], specs["up"], specs["down"]]
    return jax.device_put(arrays, tuple(NamedSharding(mesh, spec) for spec in every))


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients_equal_one_device(mesh, name):
    arrays = inputs()
    wanted = value_and_gradients(of_one_device)(*arrays)
    found = value_and_gradients(over(mesh, **LAYOUTS[name]))(*placed(mesh, arrays, LAYOUTS[name]))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=FLOAT32_TOLERANCE * scale)


@pytest.mark.parametrize("name", ["beside a hidden axis", "gathered"])
def test_float64_equals_one_device(mesh, name):
    with enable_x64(True):
        arrays = tuple(map(jnp.asarray, inputs(np.float64)))
        wanted = of_one_device(*arrays)
        found = jax.jit(over(mesh, **LAYOUTS[name]))(*placed(mesh, arrays, LAYOUTS[name]))
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, wanted, rtol=0, atol=FLOAT64_TOLERANCE * 10)


def sent(compiled):
    """Bytes by collective, without the sum of the loss."""
    return Counter((c.kind, c.bytes_sent) for c in collectives(compiled) if c.bytes_sent > 16)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_program_sends_what_the_formulas_say(mesh, name):
    how = LAYOUTS[name]
    arrays = placed(mesh, inputs(), how)
    axes = how["axes"] if isinstance(how["axes"], tuple) else (how["axes"],)
    rows = [mesh.shape[axis] for entry in how["tokens"] for axis in np.atleast_1d(entry)]
    traffic = dispatch_traffic(
        8 * 16 // int(np.prod(rows)),
        WIDTH,
        EXPERTS,
        CHOSEN,
        int(np.prod([mesh.shape[axis] for axis in axes])),
        dispatch=how.get("dispatch", "all_to_all"),
        itemsize=4,
        hidden_devices=2 if "hidden_axis" in how else 1,
        is_cut_inside=len(rows) == 3,
    )
    wanted = Counter()
    for kind, count, bytes_sent in traffic:
        wanted[kind, float(bytes_sent)] += count
    if "fsdp_axes" in how:
        wanted["all-gather", WIDTH * HIDDEN * 4 * 4 / 2] += 3
    compiled = jax.jit(lambda *a: (over(mesh, **how)(*a) ** 2).sum()).lower(*arrays).compile()
    assert sent(compiled) == wanted
    if name == "folded":  # the transposes, the router over all, and experts over their replicas
        gradient = value_and_gradients(over(mesh, **how)).lower(*arrays).compile()
        router, experts = 4 * WIDTH * EXPERTS, 3 * 4 * WIDTH * HIDDEN * EXPERTS / 4
        summed = Counter({("all-reduce", 2 * router * 7 / 8): 1, ("all-reduce", experts): 1})
        assert sent(gradient) == wanted + wanted + summed


@pytest.mark.parametrize("name", ["tokens alike along it", "gathered"])
def test_bfloat16_stays_bfloat16(mesh, name):
    arrays = tuple(jnp.asarray(array, jnp.bfloat16) for array in inputs())
    found = jax.jit(over(mesh, **LAYOUTS[name]))(*placed(mesh, arrays, LAYOUTS[name]))
    wanted = of_one_device(*(array.astype(jnp.float32) for array in arrays))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        found.astype(np.float32), wanted, atol=BFLOAT16_TOLERANCE * np.abs(wanted).max()
    )


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.25, 100.0])
def test_what_is_dropped_is_counted_and_adds_nothing(capacity):
    mesh = make_mesh({"e": 4}, devices=jax.devices()[:4])
    x, kernel, *weights = inputs(shape=(4, 30))
    routing = route(router_logits(x, kernel), CHOSEN)
    found = sharded_mixture(x, routing, *weights, mesh, axes="e", tokens=P("e"), capacity=capacity)
    slots = int(np.ceil(capacity * 30 * CHOSEN / EXPERTS))
    is_kept = np.zeros((4, 30, CHOSEN), bool)
    for device in range(4):
        taken = Counter()
        for place, expert in np.ndenumerate(np.asarray(routing.experts[device])):
            is_kept[device][place] = taken[expert] < slots
            taken[expert] += 1
    np.testing.assert_array_equal(found.is_kept, is_kept)
    assert is_kept.all() == (capacity == 100)
    assert is_kept.any()
    kept = routing._replace(weights=jnp.where(is_kept, routing.weights, 0))
    wanted = mixture(x, kept, *weights)
    np.testing.assert_allclose(found.outputs, wanted, atol=FLOAT32_TOLERANCE * np.abs(wanted).max())


def test_a_full_expert_lets_documents_meet_and_without_a_capacity_they_do_not():
    mesh = make_mesh({"e": 2}, devices=jax.devices()[:2])
    x, kernel, *weights = inputs(shape=(2, 16))
    other = x.copy()
    other[:, :8] += 3  # another document before it in the row

    def last(x, capacity):
        routing = route(router_logits(x, kernel), CHOSEN)
        how = {"axes": "e", "tokens": P("e"), "capacity": capacity}
        return np.asarray(sharded_mixture(x, routing, *weights, mesh, **how).outputs[:, 8:])

    np.testing.assert_array_equal(last(x, None), last(other, None))
    assert (last(x, 1.0) != last(other, 1.0)).any()


@pytest.mark.parametrize("dispatch", ["all_to_all", "gather"])
def test_nan_stays_with_its_token_and_with_experts_that_nobody_chose(mesh, dispatch):
    x, kernel, *weights = inputs()
    routing = route(router_logits(x, kernel), CHOSEN)
    unused = routing._replace(experts=routing.experts % (EXPERTS - 1))
    gate = weights[0].copy()
    gate[-1] = np.nan
    x[3, 5] = np.nan
    how = {"axes": ("y", "z"), "tokens": CUT, "dispatch": dispatch}
    out = sharded_mixture(x, unused, gate, *weights[1:], mesh, **how).outputs
    is_nan = np.isnan(out).any(-1)
    assert is_nan[3, 5]
    assert is_nan.sum() == 1


@pytest.mark.parametrize("wrong", [-1, EXPERTS, 99])
@pytest.mark.parametrize("dispatch", ["all_to_all", "gather"])
def test_a_given_expert_that_is_none_shows_in_its_token_alone(mesh, dispatch, wrong):
    x, kernel, *weights = inputs()
    chosen = np.array(route(router_logits(x, kernel), CHOSEN).experts)
    chosen[2, 3, 1] = wrong
    routing = route(router_logits(x, kernel), CHOSEN, experts=jnp.asarray(chosen))
    how = {"axes": ("y", "z"), "tokens": CUT, "dispatch": dispatch}
    out = sharded_mixture(x, routing, *weights, mesh, **how).outputs
    is_nan = np.isnan(out).any(-1)
    assert is_nan[2, 3]
    assert is_nan.sum() == 1


@pytest.mark.parametrize("tokens", [CUT, P(("x", "y"))])
def test_biases_are_added_once(mesh, tokens):
    x, kernel, *weights = inputs(shape=(4, 6))
    draw = np.random.default_rng(1)
    sizes = {"gate_bias": HIDDEN, "up_bias": HIDDEN, "down_bias": WIDTH}
    options = {k: draw.normal(size=(EXPERTS, n)).astype("f") for k, n in sizes.items()}
    options["activation"] = clamped_gate
    routing = route(router_logits(x, kernel), CHOSEN)
    wanted = mixture_reference(x, routing, *weights, **options)
    found = sharded_mixture(
        x, routing, *weights, mesh, axes=("x", "y"), tokens=tokens, hidden_axis="z", **options
    ).outputs
    np.testing.assert_allclose(found, wanted, atol=FLOAT32_TOLERANCE * np.abs(wanted).max())


def test_ragged_is_refused_where_there_is_no_tpu(mesh):
    x, kernel, *weights = inputs()
    routing = route(router_logits(x, kernel), CHOSEN)
    with pytest.raises(ValueError, match='dispatch="ragged" runs on TPUs'):
        sharded_mixture(x, routing, *weights, mesh, axes="z", tokens=CUT, dispatch="ragged")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axes": "w"}, "axis 'w': the mesh has 'x', 'y', 'z'"),
        ({"tokens": P("x")}, "tokens must be cut along all of axes, ('z',); P('x',) is not"),
        ({"hidden_axis": "z"}, "hidden_axis='z' cuts experts already"),
        ({"fsdp_axes": "z"}, "fsdp_axes must be axes of tokens"),
        ({"capacity": 0.0}, "capacity must be above 0; got 0.0"),
        ({"capacity": float("nan")}, "capacity must be a finite number or None; got nan"),
        ({"capacity": 1.0, "dispatch": "gather"}, 'capacity is of dispatch "all_to_all"'),
        ({"shape": (8, 15)}, "tokens=15 is not divisible by 2 parts of axis 'z'; 16 would be"),
        ({"tokens": P("x", "y", "z")}, "must cut the leading axes of x"),
    ],
)
def test_what_does_not_fit_is_refused(mesh, changed, message):
    x, kernel, *weights = inputs(shape=changed.pop("shape", (8, 16)))
    routing = route(router_logits(x, kernel), CHOSEN)
    how = {"axes": "z", "tokens": CUT} | changed
    with pytest.raises(ValueError, match=re.escape(message)):
        sharded_mixture(x, routing, *weights, mesh, **how)


def test_experts_lie_along_the_innermost_axes(mesh):
    assert expert_axes(mesh, 8) == ("x", "y", "z")
    assert expert_axes(mesh, 1) == ()
    assert expert_axes(mesh, 2, hidden_axis="z") == ("y",)
    with pytest.raises(ValueError, match=r"one of \[1, 2, 4, 8\]; got 3, and 4 is the nearest"):
        expert_axes(mesh, 3)
