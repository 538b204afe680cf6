"""What the instruments of experts show, held against the layers that do it; without widgets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from toolkit.experts import expert_loads, route
from toolkit.lab.experts import balance, dispatch, layout, tokens
from toolkit.lab.experts.small_mixture import (
    CHOSEN,
    EXPERTS,
    LAYERS,
    held_out_logits,
    logits_of_text,
    record_of,
    small_mixture,
)
from toolkit.lab.lessons.subjects.who_goes_where import dropped_share
from toolkit.parallel import make_mesh
from toolkit.parallel.experts import sharded_mixture

TEXT = "a key is found, or it is not"


def test_the_router_shown_is_the_model_s_own():
    given = jnp.asarray(np.frombuffer(TEXT.encode(), np.uint8)[None].astype(np.int32))
    _, statistics = small_mixture("plain").with_routing(given)
    logits = logits_of_text("plain", TEXT.encode())
    for layer in range(LAYERS):
        view = tokens.tokens_view(
            model="plain", layer=layer + 1, text=TEXT, token=3, capacity=4.0, devices=1
        )
        np.testing.assert_array_equal(view.loads, statistics[layer].loads.sum((0, 1)))
        wanted = route(jnp.asarray(logits[layer]), CHOSEN, scores="sigmoid")
        np.testing.assert_allclose(view.weights, wanted.weights, atol=1e-5)
        assert view.is_kept.all()
    assert view.words[view.token] == "k"


@pytest.mark.parametrize(("devices", "capacity"), [(1, 1.0), (4, 1.0), (4, 1.5)])
def test_what_is_struck_out_is_what_the_layer_drops(devices, capacity):
    logits = held_out_logits("plain")[1, :64]
    routing = route(jnp.asarray(logits), CHOSEN, scores="sigmoid")
    mesh = make_mesh({"expert": devices}, devices=jax.devices()[:devices])
    x, gate = jnp.ones((64, 2)), jnp.ones((EXPERTS, 2, 2))
    how = {"axes": "expert", "tokens": P("expert"), "capacity": capacity}
    wanted = sharded_mixture(x, routing, gate, gate, gate, mesh, **how).is_kept
    found, _ = tokens.kept_pairs(np.asarray(routing.experts), devices, capacity)
    np.testing.assert_array_equal(found, wanted)
    assert not found.all()


def test_drops_are_counted_and_depend_on_the_devices():
    views = [
        tokens.tokens_view(
            model="plain", layer=2, text=tokens.TEXT, token=1, capacity=1.0, devices=devices
        )
        for devices in (1, 8)
    ]
    for view in views:
        assert (view.loads - view.kept).sum() == (~view.is_kept).sum()
        assert view.loads.sum() == CHOSEN * len(view.words)
        assert view.kept.max() <= view.slots * view.devices
    assert (views[0].is_kept != views[1].is_kept).any()
    long = tokens.tokens_view(
        model="plain", layer=1, text="é" * 100, token=500, capacity=1.0, devices=2
    )
    assert (len(long.words), long.left_out, long.token) == (128, 72, 127)


def test_the_models_were_trained_with_and_without_the_loss():
    records = {name: record_of(name) for name in ("plain", "balanced")}
    weights = [records[name]["configuration"]["training"]["balance"] for name in records]
    assert weights[0] == 0 < weights[1]
    fullest = {
        name: max(np.asarray(expert_loads(jnp.argsort(-z)[:, :CHOSEN], EXPERTS)).max() for z in of)
        for name, of in ((name, held_out_logits(name)) for name in records)
    }
    assert fullest["balanced"] < 0.8 * fullest["plain"]


def test_the_bias_levels_the_loads_and_moves_pairs():
    slow = balance.levelling("plain", 2, 1e-3)
    assert slow.loads.sum(1).std() == 0
    assert (slow.bias[0] == 0).all()
    assert slow.moved[0] == 0
    assert slow.violation[0] > 1
    assert slow.violation[-1] < 0.5
    assert slow.moved[-1] > 0.2
    # The first step by hand: against the loads of the first windows.
    each = balance.WINDOWS_PER_STEP * 128
    chosen = np.argsort(-held_out_logits("plain")[1, :each], axis=-1)[:, :CHOSEN]
    loads = np.bincount(chosen.ravel(), minlength=EXPERTS)
    np.testing.assert_allclose(slow.bias[1], 1e-3 * np.sign(loads.mean() - loads), atol=1e-9)
    fast = balance.levelling("plain", 2, 1e-2)
    assert fast.violation[40] < slow.violation[40]


def test_a_gather_sends_less_only_on_few_devices():
    for name, sizes in dispatch.MODELS.items():
        views = [
            dispatch.dispatch_view(model=name, tokens=4096, devices=n, capacity=1.0)
            for n in dispatch.DEGREES
        ]
        for view in views:
            # A gather's sums go back in four bytes, not two.
            is_less = view.sent["gather"] < view.sent["capacity"]
            assert is_less == (view.devices < 2 / 3 * sizes.chosen)
            assert f"{'less' if is_less else 'more'} than with capacity" in view.sentence()
            assert view.devices <= sizes.experts
            assert view.sent["no drops"] >= view.sent["capacity"]
            for way in ("capacity", "no drops"):  # there and back
                assert [(one.kind, one.count) for one in view.traffic[way]] == [("all-to-all", 2)]


def test_layouts_hold_every_expert_and_hindsight_is_never_worse():
    for slots, node in ((2, 2), (2, 8), (4, 4)):
        view = layout.layout_view(model="plain", layer=1, slots=slots, node=node, step=3)
        for plan in layout.PLANS:
            assert set(view.layout(plan).slots.ravel()) == set(range(EXPERTS))
            assert view.over_even(plan).sum() == pytest.approx(layout.DEVICES)
        if node == layout.DEVICES:  # nothing but loads counts
            best, static = (view.imbalance(plan) for plan in ("in hindsight", "static"))
            assert (best <= static + 1e-9).all()
            assert view.across("static") == 0
    first = layout.layout_view(model="plain", layer=1, slots=2, node=8, step=1)
    assert not first.is_changed.any()
    assert first.layout("from the step before") is first.layout("static")


def test_what_the_notebook_and_the_lesson_say_is_so():
    assert (EXPERTS, CHOSEN, layout.DEVICES) == (8, 2, 8)
    # "A small rate takes hundreds of steps; a large one jumps to and fro and never settles."
    slow, fast = (balance.levelling("plain", 2, rate).violation for rate in (1e-3, 3e-2))
    assert np.flatnonzero(slow < 0.5)[0] > 100
    steps = [np.abs(np.diff(violation[-100:])).mean() for violation in (slow, fast)]
    assert steps[1] > 10 * steps[0]
    # "The gather grows with the number of devices, and the others hardly do."
    along = dispatch.dispatch_view(model="deepseek", tokens=2048, devices=8, capacity=1.0).along
    growth = {way: sent[-1] / sent[1] for way, sent in along.items()}
    assert growth["gather"] > 15
    assert max(growth[way] for way in growth if way != "gather") < 1.5
    # "On larger nodes fewer pairs need to cross."
    crossing = [
        layout.layout_view(model="plain", layer=1, slots=2, node=node, step=4).across(
            "from the step before"
        )
        for node in (2, 4, 8)
    ]
    assert crossing[0] > 0.1 > crossing[1] >= crossing[2] == 0
    # "Layer 2, where experts that stay are about as good"; in layer 1 they are far behind.
    behind = []
    for layer in (1, 2):
        view = layout.layout_view(model="plain", layer=layer, slots=2, node=2, step=4)
        stay, moved, best = (view.imbalance(plan)[1:] for plan in layout.PLANS)
        behind.append(stay.mean() - moved.mean())
        # "In hindsight ... another layout may have a less full device."
        assert (moved < best).any()
    assert behind[0] > 0.5 > 0.15 > abs(behind[1])
    # "Expert 6 is the first choice of nearly every space."
    text = tokens.tokens_view(
        model="plain", layer=2, text=tokens.TEXT, token=1, capacity=4.0, devices=1
    )
    of_spaces = text.experts[np.array(text.words) == " ", 0]
    assert (of_spaces == 6 - 1).mean() > 0.9
    # "1 / sqrt(2 pi m): 10 % for m = 16, and 2.5 % for m = 256."
    for mean, words in ((16, 10), (256, 2.5)):
        assert dropped_share(mean) == pytest.approx(words, rel=0.05)
        assert 100 / np.sqrt(2 * np.pi * mean) == pytest.approx(words, rel=0.05)
