"""Experts laid out by their loads: the planner's figures, and the program that follows its plan."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from toolkit.experts import expert_loads, mixture, route, router_logits
from toolkit.measure import collectives
from toolkit.parallel import make_mesh
from toolkit.parallel.experts import (
    break_even_pairs,
    relaid_mixture,
    relayout,
    restored,
    sharded_mixture,
    static_layout,
)
from toolkit.parallel.experts.restoring import _places

DEVICES, EXPERTS, SLOTS, CHOSEN, WIDTH, HIDDEN = 8, 16, 4, 2, 8, 16
TOLERANCE = 2e-6


def zipf_loads(seed=0, power=0.8, pairs=4096):
    draw = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, EXPERTS + 1) ** power
    popularity /= popularity.sum()
    return np.stack([draw.multinomial(pairs, popularity) for _ in range(DEVICES)])


def test_the_published_planner_gives_these_figures():
    """Golden values of an independent prototype: loads of a Zipf law, two nodes of four devices."""
    loads = zipf_loads()
    static = static_layout(loads, SLOTS, devices_per_node=4)
    np.testing.assert_allclose(static.imbalance, 1.4746, atol=5e-5)
    assert static.share_across_nodes == 0
    near = relayout(loads, SLOTS, devices_per_node=4)
    np.testing.assert_allclose(near.imbalance, 1.2666, atol=5e-5)
    assert near.share_across_nodes == 0
    free = relayout(loads, SLOTS, devices_per_node=4, across_cost=0.0)
    copies = np.bincount(free.slots.ravel())
    np.testing.assert_array_equal(copies, [6, 4, 3] + [2] * 6 + [1] * 7)
    figures = free.imbalance, free.moved_share, free.share_across_nodes
    np.testing.assert_allclose(figures, (1.1361, 0.7760, 0.1049), atol=5e-5)


@pytest.mark.parametrize(("width", "hidden"), [(64, 16), (7168, 2048)])
def test_a_layout_pays_from_as_many_pairs_as_the_page_says(width, hidden):
    """Of H100s, 989 TFLOP/s over links of 450 GB/s, in bfloat16."""
    loads, flops, link = zipf_loads(), 989e12, 450e9
    before = static_layout(loads, SLOTS, devices_per_node=4)
    after = relayout(loads, SLOTS, devices_per_node=4, across_cost=0.0)
    least = break_even_pairs(before, after, flops / link)
    np.testing.assert_allclose(least, 15_151, atol=1)
    assert math.ceil(least / 8) == 1894

    def seconds(layout, pairs, is_restored):
        sent = 2 * SLOTS * 3 * width * hidden * 2 * (DEVICES - 1) / DEVICES
        computed = 18 * width * hidden * pairs * layout.imbalance / flops
        return computed + is_restored * sent / link

    for pairs, pays in ((0.99 * least, False), (1.01 * least, True)):
        assert (seconds(after, pairs, True) < seconds(before, pairs, False)) == pays
    assert break_even_pairs(after, before, flops / link) == float("inf")


@pytest.mark.parametrize("across_cost", [0.0, 1.0])
def test_no_layout_is_worse_than_the_static_one_by_its_own_objective(across_cost):
    def objective(layout, loads):
        nodes = np.arange(DEVICES) // 4
        pairs = (loads[:, :, None] * layout.shares).sum(1) * (nodes[:, None] != nodes)
        crossing = max(pairs.sum(0).max(), pairs.sum(1).max())
        return 4 * across_cost * crossing + 3 * layout.device_loads.max()

    better = 0
    for seed in range(100):
        loads = zipf_loads(seed, power=0.1 + 0.02 * seed, pairs=500)
        found = relayout(loads, SLOTS, devices_per_node=4, across_cost=across_cost)
        static = objective(static_layout(loads, SLOTS, devices_per_node=4), loads)
        assert objective(found, loads) <= static
        better += objective(found, loads) < 0.95 * static
        again = relayout(loads, SLOTS, devices_per_node=4, across_cost=across_cost)
        np.testing.assert_array_equal(found.slots, again.slots)
        assert set(found.slots.ravel()) == set(range(EXPERTS))
        np.testing.assert_allclose(found.shares.sum(-1), 1)
        np.testing.assert_allclose(found.device_loads.sum(), loads.sum())
    assert better > 50


def drawn(seed=0, tokens=96):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(tokens, WIDTH)) + 1
    kernel = draw.normal(size=(WIDTH, EXPERTS)) / 2
    gate, up = draw.normal(size=(2, EXPERTS, WIDTH, HIDDEN)) / 4
    down = draw.normal(size=(EXPERTS, HIDDEN, WIDTH)) / 4
    return [array.astype("f") for array in (x, kernel, gate, up, down)]


def loads_of(routing):
    by_device = routing.experts.reshape(DEVICES, -1, CHOSEN)
    return np.stack([expert_loads(experts, EXPERTS) for experts in by_device])


def test_any_layout_gives_the_plain_mixture_and_compiles_nothing_new():
    mesh = make_mesh({"e": DEVICES})
    x, kernel, *weights = drawn()

    def loss(mix):
        def of(x, kernel, gate, up, down):
            y = mix(x, route(router_logits(x, kernel), CHOSEN), gate, up, down)
            return (y**2).sum(), y

        return jax.value_and_grad(of, argnums=(0, 1, 2, 3, 4), has_aux=True)

    routing = route(router_logits(x, kernel), CHOSEN)
    loads = loads_of(routing)
    plain = loss(mixture)(x, kernel, *weights)
    traced = []

    @jax.jit
    def under(slots, shares, *arrays):
        traced.append(1)
        layout = static_layout(loads, SLOTS)._replace(slots=slots, shares=shares)
        mix = lambda *a: relaid_mixture(*a, layout, mesh, axis="e").outputs  # noqa: E731
        return loss(mix)(*arrays)

    layouts = [static_layout(loads, SLOTS), relayout(loads, SLOTS), relayout(zipf_loads(), SLOTS)]
    for layout in layouts:
        found = under(layout.slots, layout.shares.astype("f"), x, kernel, *weights)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
            atol = TOLERANCE * np.abs(other).max()
            np.testing.assert_allclose(one, other, rtol=0, atol=atol)
    assert len(traced) == 1


def test_devices_compute_as_many_pairs_as_the_plan_says():
    x, kernel, *_ = drawn(tokens=800)
    routing = route(router_logits(x, kernel), CHOSEN)
    loads = loads_of(routing)
    layout = relayout(loads, SLOTS)
    count = np.zeros(DEVICES)
    by_device = np.asarray(routing.experts).reshape(DEVICES, -1, CHOSEN)
    for device in range(DEVICES):
        shares = jnp.asarray(layout.shares[device], jnp.float32)
        places = np.asarray(_places(by_device[device], jnp.asarray(layout.slots), shares))
        np.testing.assert_array_equal(layout.slots.ravel()[places], by_device[device])
        held = layout.shares[device][by_device[device].ravel(), places.ravel() // SLOTS]
        assert (held > 0).all()
        count += np.bincount(places.ravel() // SLOTS, minlength=DEVICES)
    assert np.abs(count - layout.device_loads).max() < 0.03 * layout.device_loads.mean()
    assert count.max() < static_layout(loads, SLOTS).device_loads.max()


def test_restoring_sends_the_held_experts_and_no_more():
    mesh = make_mesh({"e": DEVICES})
    whole = np.arange(EXPERTS * 24.0, dtype="f").reshape(EXPERTS, 24)
    slots = np.random.default_rng(0).integers(0, EXPERTS, (DEVICES, SLOTS))

    def total(whole, slots):
        get = lambda shards, slots: restored(shards, slots, "e").reshape(SLOTS, 24)  # noqa: E731
        spread = jax.shard_map(get, mesh=mesh, in_specs=(P(None, "e"), P()), out_specs=P("e"))
        out = spread(whole, slots)
        return (out**2).sum() / 2, out

    arrays = jax.device_put(whole, NamedSharding(mesh, P(None, "e"))), jnp.asarray(slots)
    step = jax.jit(jax.value_and_grad(total, has_aux=True)).lower(*arrays).compile()
    (_, out), gradient = step(*arrays)
    np.testing.assert_array_equal(out, whole[slots.ravel()])
    copies = np.bincount(slots.ravel(), minlength=EXPERTS)[:, None]
    np.testing.assert_allclose(gradient, copies * whole)
    sent = [c.bytes_sent for c in collectives(step) if c.kind == "all-to-all"]
    assert sent == [SLOTS * 24 * 4 * (DEVICES - 1) / DEVICES] * 2


def test_busy_experts_drop_fewer_pairs_when_they_have_more_copies():
    """A reason for it: at equal memory for rows, the static layout loses more."""
    mesh = make_mesh({"e": DEVICES})
    x, kernel, *weights = drawn(tokens=800)
    routing = route(router_logits(x + 1, kernel), CHOSEN)
    loads = loads_of(routing)
    layouts = {"static": static_layout(loads, SLOTS), "new": relayout(loads, SLOTS)}
    kept = {
        name: relaid_mixture(x, routing, *weights, layout, mesh, axis="e", capacity=1.5).is_kept
        for name, layout in layouts.items()
    }
    assert kept["new"].mean() > kept["static"].mean()
    plain = sharded_mixture(
        x, routing, *weights, mesh, axes="e", tokens=P("e"), capacity=1.5
    ).is_kept
    assert kept["new"].mean() > plain.mean()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": 1}, "slots must be at least 2, for 16 experts on 8 devices; got 1"),
        ({"slots": 17}, "slots must be at most the 16 experts; got 17"),
        ({"devices_per_node": 3}, "devices_per_node must divide the 8 devices; got 3"),
        ({"loads": -zipf_loads()}, "loads must be at least 0"),
    ],
)
def test_what_no_layout_fits_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        relayout(**({"loads": zipf_loads(), "slots": SLOTS} | arguments))


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
def test_a_given_expert_that_is_none_shows_in_its_token_alone(wrong):
    mesh = make_mesh({"e": DEVICES})
    x, kernel, *weights = drawn()
    chosen = np.array(route(router_logits(x, kernel), CHOSEN).experts)
    layout = relayout(zipf_loads(), SLOTS)
    chosen[5, 0] = wrong
    routing = route(router_logits(x, kernel), CHOSEN, experts=jnp.asarray(chosen))
    out = relaid_mixture(x, routing, *weights, layout, mesh, axis="e").outputs
    is_nan = np.isnan(out).any(-1)
    assert is_nan[5]
    assert is_nan.sum() == 1
