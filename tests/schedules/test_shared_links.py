"""Transfers inside a schedule share links fairly: closed forms, a linear program, a control."""

import random
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import linprog

from toolkit.schedules import (
    Durations,
    Schedule,
    Task,
    Transfer,
    fair_rates,
    gpipe,
    gradient_sums,
    interleaved,
    one_forward_one_backward,
    simulate,
    simulate_on_links,
    stage_messages,
    zero_bubble_h1,
)
from toolkit.schedules.collectives import forest, gpu_boxes

CLOSE = 1e-7  # of a linear program in floats


def wires(devices, rate):
    return {(a, b): rate for a in range(devices) for b in range(devices) if a != b}


def direct(a, b):
    return [(a, b)]


def alone(*transfers):
    """The ends of transfers that start together, beside one short task."""
    order = (Task("F", 0, 0), Task("B", 0, 0))
    return simulate_on_links(Schedule("one", 1, (0,), (order,)), {"a": 1, "b": 2}, transfers)


def equal_split(loads, links):
    """A control: every link is divided equally among its transfers, used or not."""
    count = {link: sum(link in load for load in loads) for link in links}
    return [min(Fraction(links[link]) / count[link] for link in load) for load in loads]


def by_linear_programs(loads, links):
    """Max-min fairness from its definition: raise the smallest rate as far as it goes, fix those
    that cannot be above it, go on with the rest."""
    fixed, count = {}, len(loads)
    rows = [
        [float(load.get(link, 0)) / float(max(load.values())) for load in loads] for link in links
    ]
    rates = [float(rate) for rate in links.values()]
    while len(fixed) < count:
        free = [at for at in range(count) if at not in fixed]

        def best(goal, least, fixed=fixed, free=free):
            bounds = [(fixed[at], fixed[at]) if at in fixed else (0, None) for at in range(count)]
            above = [[*row, 0.0] for row in rows]
            above += [[-(at == other) for other in range(count)] + [1.0] for at in free]
            limits = [*rates, *[0.0] * len(free)]
            bounds.append((least, None))
            found = linprog(-np.array(goal), A_ub=above, b_ub=limits, bounds=bounds)
            return -found.fun

        level = best([0.0] * count + [1.0], 0)
        for at in free:
            goal = [float(at == other) for other in range(count)] + [0.0]
            if best(goal, level * (1 - CLOSE)) < level * (1 + 10 * CLOSE):
                fixed[at] = level
    return [fixed[at] for at in range(count)]


def test_rates_are_max_min_fair_where_an_equal_split_wastes_a_link():
    loads, links = [{"a": 1}, {"a": 1, "b": 1}, {"b": 1}], {"a": 1, "b": 2}
    assert fair_rates(loads, links) == [Fraction(1, 2), Fraction(1, 2), Fraction(3, 2)]
    assert equal_split(loads, links)[2] == 1  # the control leaves a quarter of b idle
    # In proportion: 4 GB over a and 1 GB over b move as one.
    assert fair_rates([{"a": 4, "b": 1}, {"b": 1}], links) == [1, Fraction(7, 4)]
    draw, differs = random.Random(0), 0
    for _ in range(25):
        links = {link: draw.randint(1, 9) for link in range(draw.randint(1, 5))}
        loads = [
            {
                link: draw.randint(1, 4)
                for link in draw.sample(list(links), draw.randint(1, len(links)))
            }
            for _ in range(draw.randint(1, 6))
        ]
        found = fair_rates(loads, links)
        np.testing.assert_allclose(
            by_linear_programs(loads, links), [*map(float, found)], rtol=1e-5
        )
        differs += [*map(float, equal_split(loads, links))] != [*map(float, found)]
    assert differs > 10


def test_transfers_that_share_a_link_end_as_by_hand():
    a, b = Transfer("short", {"a": 3}), Transfer("long", {"a": 5})
    assert [end for *_, end in alone(a).transfers] == [3]
    # Half of the link each until the short one has ended, then all of it for the long one.
    assert [end for *_, end in alone(a, b).transfers] == [6, 8]
    assert alone(a, b).makespan == 8
    # Over a and b at once, the rate is that of a's half; b's rest goes to the third.
    both, other = Transfer("both", {"a": 3, "b": 3}), Transfer("other", {"b": 9})
    ends = [end for *_, end in alone(a, both, other).transfers]
    assert ends == [6, 6, 6]


@pytest.mark.parametrize(
    "schedule", [one_forward_one_backward(4, 8), zero_bubble_h1(4, 6), interleaved(4, 8, 2)]
)
def test_messages_that_never_meet_are_delays(schedule):
    sent = stage_messages(schedule, 1, direct)
    shared = simulate_on_links(schedule, wires(4, 8), sent)
    delayed = simulate(schedule, Durations(delay=Fraction(1, 8)))
    assert shared.timeline.spans == delayed.spans
    assert simulate_on_links(schedule, wires(4, 8), []).timeline.spans == simulate(schedule).spans
    # A delay of its own counts beside the link.
    late = Durations(delay=Fraction(1, 8))
    assert simulate_on_links(schedule, wires(4, 8), [], late).timeline.spans == delayed.spans


def test_messages_that_meet_on_one_link_are_slower_than_delays():
    schedule = one_forward_one_backward(4, 8)
    sent = stage_messages(schedule, 1, lambda a, b: ["bus"])
    shared = simulate_on_links(schedule, {"bus": 2}, sent)
    free = simulate(schedule, Durations(delay=Fraction(1, 2)))
    assert shared.makespan > free.makespan
    took = [end - start for _, start, end in shared.transfers]
    assert min(took) >= Fraction(1, 2)
    assert max(took) > Fraction(1, 2)
    # No link moves more than it can: all messages need half a second of it each.
    assert shared.makespan >= len(sent) * Fraction(1, 2)


def test_gradients_are_summed_on_links_that_messages_use_too():
    # Two stages on a box each, every stage twice; the sums of both stages and the messages
    # between them pass the boxes' network cards.
    network = gpu_boxes(2, 2, rate=8, network_rate=1)
    schedule = gpipe(devices=2, microbatches=4)
    rank = {0: 0, 1: 2}
    loads = forest(network, "all-reduce").loads
    sums = gradient_sums(schedule, [{link: share * 2 for link, share in loads.items()}] * 2)

    def path(a, b):
        return [(rank[a], 6), (6, rank[b])]

    sent = stage_messages(schedule, Fraction(1, 4), path)
    together = simulate_on_links(schedule, network.links, [*sent, *sums])
    apart = simulate_on_links(schedule, network.links, sent)
    # Stage 1 ends first: its sum slows the gradients that stage 0 still waits for.
    assert together.timeline.makespan > apart.timeline.makespan
    rate = forest(network, "all-reduce").rate
    last, first = (end - start for _, start, end in together.transfers[-2:])
    assert first > 2 / rate
    assert last == 2 / rate  # nothing else is on its way then
    assert together.makespan == together.timeline.makespan + 2 / rate


def test_what_cannot_run_is_refused():
    schedule = gpipe(devices=2, microbatches=1)
    first, last = Task("F", 0, 0), Task("B", 0, 0)
    with pytest.raises(ValueError, match="GB above 0 on known links"):
        simulate_on_links(schedule, {"a": 1}, [Transfer("x", {"b": 1})])
    with pytest.raises(ValueError, match="GB above 0 on known links"):
        simulate_on_links(schedule, {"a": 1}, [Transfer("x", {})])
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="GB above 0 on known links"):
            fair_rates([{"a": wrong}], {"a": 1})
        with pytest.raises(ValueError, match="links: want GB/s above 0"):
            fair_rates([{"a": 1}], {"a": wrong})
    with pytest.raises(ValueError, match="'x' names F7@0, which is no task"):
        simulate_on_links(schedule, {"a": 1}, [Transfer("x", {"a": 1}, (Task("F", 7, 0),))])
    with pytest.raises(ValueError, match="waits for F0@0, which waits for it"):
        simulate_on_links(schedule, {"a": 1}, [Transfer("x", {"a": 1}, (last,), (first,))])
    with pytest.raises(ValueError, match="one mapping for each of 2 stages"):
        gradient_sums(schedule, [{"a": 1}])
