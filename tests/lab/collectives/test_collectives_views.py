"""What the instruments of collectives show, held against the room that computes it."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("anywidget")

from toolkit.lab.collectives.chunks import chunks_scene, chunks_view, run_of
from toolkit.lab.collectives.cut import SPEEDS, CutPanel, cut_view
from toolkit.lab.collectives.networks import NETWORKS, changed, drawing_of, trees_of
from toolkit.lab.collectives.ring import COLLECTIVES, ring_scene, ring_view
from toolkit.schedules.collectives import named_topology, optimum, to_program

EXACT = 1e-9  # sums of floats
OPEN = {"collective": "all-gather", "schedule": "trees", "cable": 3, "speed": 0.5}


@pytest.mark.parametrize("devices", [3, 7])
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_ring_ends_with_what_the_collective_promises(devices, ways, collective):
    view = ring_view(devices=devices, collective=collective, size=1.0, ways=ways)
    reduces, gathers = collective != "all-gather", collective != "reduce-scatter"
    assert len(view.program.rounds) == (reduces + gathers) * (devices - 1)
    assert view.carried()[-1] == pytest.approx(1e6 * (reduces + gathers) * (devices - 1) / devices)
    assert view.carried(by_link=True)[-1] == pytest.approx(view.carried()[-1] / ways)
    whole = np.isclose(view.summed[-1], 1)
    assert whole.all() if gathers else (whole.sum(0) >= 1).all()
    # A sum that is not finished is nowhere taken for a whole: one round before, something misses.
    assert not np.isclose(view.summed[-2], 1).all()
    scene = ring_scene(view)
    assert {message.kind for message in scene.messages} == set(range(len(scene.kinds)))


@pytest.mark.parametrize("name", NETWORKS)
def test_places_are_apart_and_cables_are_the_network_s(name):
    drawing, topology = drawing_of(name), named_topology(name)
    assert {*drawing.cables} == {link for link in topology.links if link[0] < link[1]}
    apart = [np.hypot(*(a - b)) for a, b in itertools.combinations(drawing.places, 2)]
    assert min(apart) > 0.09
    assert drawing.places.min() >= 0
    assert drawing.places.max() <= 1
    # Cables around the ends of a grid are stubs, instead of lines across the nodes.
    stubs = [len(drawing.path(*cable)) == 5 for cable in drawing.cables]
    assert sum(stubs) == (8 if name == "torus:4x4" else 0)


@pytest.mark.parametrize("name", ["mesh:3x3", "leaf-spine:2x4x1", "dgx1"])
def test_the_red_links_are_busy_all_the_time_and_prove_the_rate(name):
    view = cut_view(network=name, **OPEN)
    network = changed(name, 3, 0.5)
    assert view.rates["trees"] == view.best.rate == optimum(network).rate
    assert view.rates["rings"] <= view.best.rate
    inside = sum(node < network.compute for node in view.best.cut)
    rate = sum(network.links[link] for link in view.crossing)
    assert view.best.rate == Fraction(network.compute) * rate / inside
    assert [view.busy[link] for link in view.crossing] == pytest.approx([1] * len(view.crossing))
    assert max(view.busy.values()) <= 1 + EXACT
    assert view.data()["busy there (share)"][0] == view.busy[view.drawing.cables[0]]
    assert view.curve[SPEEDS.index(0.5)] == tuple(map(float, view.rates.values()))
    rings = cut_view(network=name, **{**OPEN, "schedule": "rings"})
    assert rings.rates == view.rates
    assert rings.moved != view.moved


def test_a_slower_cable_never_helps_the_best_trees_and_may_hurt_rings_more_than_its_loss():
    view = cut_view(network="torus:4x4", **{**OPEN, "cable": 5, "speed": 0.25})
    best, rings = (np.array(rates) for rates in zip(*view.curve, strict=True))
    assert (np.diff(best) >= -EXACT).all()
    assert rings[SPEEDS.index(0.25)] < rings[SPEEDS.index(0.0)]
    assert (rings <= best + EXACT).all()


def test_no_cable_is_none_and_a_cut_that_parts_the_ranks_is_refused():
    plain = cut_view(network="ring:8", **{**OPEN, "cable": 0, "speed": 0.0})
    assert plain.best.rate == optimum(named_topology("ring:8")).rate
    last = cut_view(network="ring:8", **{**OPEN, "cable": 30})
    assert last.best.rate == Fraction(12, 7)
    with pytest.raises(ValueError, match="disconnected"):
        cut_view(network="leaf-spine:2x4x1", **{**OPEN, "cable": 9, "speed": 0.0})
    parted = cut_view(network="leaf-spine:2x4x1", **{**OPEN, "cable": 9})
    assert parted.curve[0] == (0.0, 0.0)


@pytest.mark.parametrize("collective", ["all-gather", "all-reduce"])
@pytest.mark.parametrize("name", ["mesh:3x3", "a100:2x4"])
def test_a_run_ends_with_everything_everywhere(name, collective):
    run = run_of(name, collective, "trees", 1.0)
    forest = trees_of(name, collective, "trees", 0, 1.0)
    assert len(run.ends) == len(to_program(forest).rounds)
    ranks = forest.topology.compute
    start = np.eye(ranks) if collective == "all-gather" else np.zeros((ranks, ranks))
    np.testing.assert_array_equal(run.shares[0], start)
    np.testing.assert_array_equal(run.shares[-1], np.ones((ranks, ranks)))
    assert (np.diff(run.shares, axis=0) >= 0).all()
    assert (np.diff(run.ends) > 0).all()
    # A rank sends one chunk to a neighbour in a round, by a double cable too.
    of_dgx1 = to_program(trees_of("dgx1", collective, "trees", 0, 1.0))
    for moved in of_dgx1.rounds:
        assert len({(source, target) for _, source, target, _ in moved}) == len(moved)
    view = chunks_view(network=name, collective=collective, size=64.0)
    for one in view.runs.values():
        assert one.ends[-1] >= view.bound


def test_the_scene_sends_every_message_along_a_cable_in_its_round():
    view = chunks_view(network="a100:2x4", collective="all-reduce", size=1.0)
    scene = chunks_scene(view)
    nodes = len(view.drawing.places)
    for message in scene.messages:
        assert 0 <= message.start < message.end <= scene.end * (1 + EXACT)
        ends = sorted((message.source % nodes, message.target % nodes))
        assert tuple(ends) in view.drawing.cables
        assert message.source // nodes == message.target // nodes  # each on its own side
    hops = sum(
        len(path) - 1
        for run in view.runs.values()
        for moved in run.messages
        for _, path, _ in moved
    )
    assert len(scene.messages) == hops
    for times, values in scene.levels:
        assert list(times) == sorted(times)
        assert len(times) == len(values)
    assert (
        len(chunks_scene(chunks_view(network="a100:2x4", collective="all-gather", size=1.0)).kinds)
        == 1
    )


def test_a_click_on_a_cable_slows_it_and_the_same_again_restores_it():
    panel = CutPanel(network="torus:4x4", cable=5, speed=1.0)
    spots = panel.page.above[0]
    assert [spot["name"] for spot in spots.spots][:1] == ["cable 1: 0,0 – 0,1"]
    assert [len(spot["points"]) for spot in spots.spots].count(2) == 8  # stubs
    wide, high = spots.size
    ends = [at for spot in spots.spots for part in spot["points"] for at in part]
    assert all(0 <= x <= wide and 0 <= y <= high for x, y in ends)
    for second, speed in ((False, 0.5), (True, 0.0), (True, 1.0), (False, 0.5), (False, 1.0)):
        spots._handle_custom_msg({"spot": 2, "second": second}, [])
        assert (panel.cable, panel.speed, spots.chosen) == (3, speed, 2)
    path = CutPanel(network="leaf-spine:2x4x1", cable=0)
    path.page.above[0]._handle_custom_msg({"spot": 0, "second": True}, [])
    assert "rank" in path.error or "connect" in path.error
    assert path.cable == 0
