"""Rings, doubling and double trees are what they claim, beside the optimum; times add up."""

from fractions import Fraction

import pytest

from toolkit.schedules.collectives import (
    best_forest,
    disjoint_rings,
    double_binary_trees,
    forest,
    forest_faults,
    grid_rings,
    halving_doubling,
    hypercube,
    joint_all_reduce,
    named_topology,
    nccl_choice,
    optimum,
    pipelined,
    plan_report,
    ring,
    ring_forest,
    star,
    torus,
)

EXACT = 1e-12  # sums of floats


def baselines(network, collective):
    yield ring_forest(network, collective)
    yield ring_forest(network, collective, is_bidirectional=True)
    yield ring_forest(network, collective, disjoint_rings(network))
    if network.compute & (network.compute - 1) == 0:
        yield halving_doubling(network, collective)
    if collective == "all-reduce":
        yield double_binary_trees(network)


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter", "all-reduce"])
@pytest.mark.parametrize("name", ["ring:6", "dgx1", "star:7", "h100:2x4", "torus:4x4", "path:4"])
def test_baselines_do_what_they_claim_and_beat_no_optimum(name, collective):
    network = named_topology(name)
    best = optimum(network, collective).rate
    for found in baselines(network, collective):
        assert forest_faults(found, found.rate) == [], found.name
        assert collective == "all-reduce" or found.rate <= best, found.name


def test_rings_that_share_nothing():
    for name, count, rate in (
        ("dgx1", 6, "1200/7"),  # six rings use all links: the optimum
        ("torus:4x4", 4, "64/15"),
        ("a100:2x8", 8, "640/3"),
        ("h100:2x8", 8, "1280/3"),
        ("star:8", 1, "8/7"),
    ):
        network = named_topology(name)
        orders = disjoint_rings(network)
        assert len(orders) == count
        assert ring_forest(network, "all-gather", orders).rate == Fraction(rate)


def test_known_costs():
    assert ring_forest(ring(8)).rate == Fraction(8, 7)
    assert halving_doubling(star(8)).height == 3
    assert halving_doubling(star(8)).rate == Fraction(8, 7)  # all of a switch's rate
    assert grid_rings(torus(4, 4), (4, 4)).rate == optimum(torus(4, 4)).rate
    assert grid_rings(torus(4, 8), (4, 8)).rate < optimum(torus(4, 8)).rate
    assert forest_faults(grid_rings(torus(3, 2), (3, 2), "all-reduce")) == []
    # Of the time of a ring, the delays are those of its steps: (N - 1) (delay + M / (N rate)).
    network, size = ring(8, rate=2), 1e6
    seconds = 7 * (network.seconds + size / 8 / 2e9)
    assert pipelined(ring_forest(network), size, 1).seconds == pytest.approx(seconds, rel=EXACT)


def test_every_rank_is_inside_one_binary_tree_and_a_leaf_in_the_other():
    for ranks in (2, 3, 4, 5, 7, 8, 12, 31):
        found = double_binary_trees(star(ranks))
        assert forest_faults(found) == []
        parents = [{edge.parent for edge in tree.edges} for tree in found.gather]
        assert ranks < 4 or len(parents[0] & parents[1]) <= 1
        assert found.height <= 4 * ranks.bit_length()


def test_chunks_trade_delays_for_bandwidth():
    network = named_topology("hypercube:4")
    found = forest(network)
    size = 1e8
    times = {count: pipelined(found, size, count).seconds for count in (1, 4, 64, 4096)}
    best = pipelined(found, size)
    assert best.seconds <= min(times.values())
    limit = size / 1e9 / float(found.rate)
    assert times[1] > times[4] > limit
    for count in (1, 2, 3, 7, 50, 1000):
        each = pipelined(found, size, count)
        assert each.steps == found.height + count - 1
        assert each.seconds >= limit + network.seconds * each.steps
        bound = limit * (1 + (found.height - 1) / count) + network.seconds * each.steps
        assert each.seconds <= bound * (1 + EXACT)
    assert pipelined(found, 1e14).seconds == pytest.approx(1e5 / float(found.rate), rel=1e-3)
    for wrong in (0.0, float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="size must be"):
            pipelined(found, wrong)


def test_short_chunks_of_steps_slide_over_each_other():
    """The sum over steps, written out: chunk c is in step s of its own at step s + c."""
    found, size = forest(named_topology("dgx1")), 3e7
    for chunks in (1, 2, 3, 9):
        total = 0.0
        for step in range(found.height + chunks - 1):
            load = dict.fromkeys(found.loads, Fraction(0))
            for chunk in range(chunks):
                if 0 <= step - chunk < found.height:
                    for link, share in found.stages[step - chunk].items():
                        load[link] += share / chunks
            busy = max(load[link] / found.topology.links[link] for link in load)
            total += found.topology.seconds + float(busy) * size / 1e9
        assert pipelined(found, size, chunks).seconds == pytest.approx(total, rel=EXACT)


def test_what_nccl_would_take_depends_on_the_size():
    network = star(64)
    assert nccl_choice(network, 1e3).name == "double binary trees"
    assert nccl_choice(network, 1e10).name == "ring"


def test_the_report_holds_the_certificate():
    text = plan_report(named_topology("a100:2x8"), "all-gather", 1e9)
    assert "346.67 GB/s = 1040/3, proved by the links out of 15 of 16 ranks: 325 GB/s" in text
    assert "rings alone  213.33 GB/s = 640/3 (8 rings)" in text
    assert "modelled" in text
    assert "from box0/0" in text


def test_the_report_tells_both_optima_of_an_all_reduce_apart():
    network = named_topology("v5e:4x4")
    lines = plan_report(network, "all-reduce", 1e9).splitlines()
    assert lines[1].startswith("optimum      48.00 GB/s = 48, one phase after the other: ")
    assert lines[2] == (
        "joint        72.00 GB/s = 72, both phases at once, proved by 16 weighted cuts"
    )
    assert lines[3].startswith("trees        72.00 GB/s = 72: ")
    found = best_forest(network, "all-reduce", 1e9)
    assert found.rate == joint_all_reduce(network).rate == 72
    assert forest_faults(found, Fraction(72)) == []
    # Of few bytes the phases apart take fewer steps.
    assert best_forest(network, "all-reduce", 1e4).name == "forest on TPU v5e 4x4"


def test_the_report_of_a_large_network_holds_the_optimum_alone():
    lines = plan_report(named_topology("a100:32x8"), "all-gather", 1e9).splitlines()
    assert "206.45 GB/s = 6400/31, proved by" in lines[1]
    assert lines[2:] == [
        "trees        not packed for more than 128 ranks without translations "
        "(rings, tori, hypercubes)"
    ]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="power of two ranks; got 6"):
        halving_doubling(ring(6))
    with pytest.raises(ValueError, match="every rank from 0 to 3 once"):
        ring_forest(ring(4), orders=[(0, 1, 2)])
    with pytest.raises(ValueError, match="have 8 ranks, not 16"):
        grid_rings(torus(4, 4), (2, 4))
    with pytest.raises(ValueError, match="got 'gather'"):
        halving_doubling(hypercube(2), "gather")
