"""Stages on nodes whose links differ: as good as every order tried, and never worse than none."""

import itertools
import json

import numpy as np
import pytest

from toolkit.planning import Constants, place_stages, plan
from toolkit.planning.uneven.placement import placed_in_words


def row_seconds(row, rates, seconds, sent, microbatches):
    """1F1B of one pipeline, task by task, in passes until nothing moves."""
    stages, ends = len(row), {}
    changed = True
    while changed:
        changed = False
        for stage, node in enumerate(row):
            ahead, free = min(stages - 1 - stage, microbatches), 0.0
            tasks = [("F", i) for i in range(ahead)]
            for i in range(ahead, microbatches):
                tasks += [("F", i), ("B", i - ahead)]
            tasks += [("B", i) for i in range(microbatches - ahead, microbatches)]
            for kind, i in tasks:
                other = stage - 1 if kind == "F" else stage + 1
                arrived = 0.0
                if 0 <= other < stages:
                    hop = sent / rates[row[other]][node]
                    arrived = ends.get((kind, i, other), 0.0) + hop
                free = max(free, arrived) + seconds * (1 if kind == "F" else 2) / 3
                changed |= ends.get((kind, i, stage)) != free
                ends[kind, i, stage] = free
    return max(ends.values())


def seconds_of(order, rates, stages, stage_seconds, stage_bytes, gradient_bytes, microbatches):
    """Pipelines and the rings of their stages, link by link."""
    rows = [order[at : at + stages] for at in range(0, len(order), stages)]
    piped = max(row_seconds(r, rates, stage_seconds, stage_bytes, microbatches) for r in rows)
    gradients = 0.0
    if (count := len(rows)) > 1:
        for column in zip(*rows, strict=True):
            slowest = min(rates[column[i]][column[(i + 1) % count]] for i in range(count))
            gradients = max(gradients, 2 * (count - 1) / count * gradient_bytes / slowest)
    return piped + gradients


@pytest.mark.parametrize(("nodes", "stages", "microbatches"), [(6, 3, 7), (6, 2, 1), (5, 5, 5)])
def test_placement_equals_brute_force(nodes, stages, microbatches):
    rates = np.random.default_rng(nodes + stages).uniform(1, 20, (nodes, nodes))
    sizes = {"stage_seconds": 0.3, "stage_bytes": 5.0, "gradient_bytes": 11.0}
    found = place_stages(rates, stages=stages, microbatches=microbatches, **sizes)
    every = [
        seconds_of(order, rates, stages, *sizes.values(), microbatches)
        for order in itertools.permutations(range(nodes))
    ]
    assert found.seconds == pytest.approx(min(every))
    assert found.seconds_as_counted == pytest.approx(every[0])
    assert sorted(itertools.chain(*found.nodes)) == list(range(nodes))


def test_every_microbatch_costs_time():
    """4 to 7 microbatches on 4 stages once cost the same; with even links each adds one stage."""
    rates, sizes = np.full((4, 4), 10.0), {"stage_seconds": 1.0, "stage_bytes": 0.001}
    found = [place_stages(rates, stages=4, microbatches=m, steps=0, **sizes) for m in range(1, 10)]
    assert [round(each.seconds) for each in found] == [m + 3 for m in range(1, 10)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bandwidth": [[1, 2]]}, "bandwidth must be a table"),
        ({"bandwidth": [[1, 0], [2, 1]]}, "bandwidth must be positive"),
        ({"stages": 3}, "do not divide the 4 nodes; nearest that works: 2"),
        ({"steps": 10**12}, "steps must lie in"),
    ],
)
def test_bad_links_are_refused_in_one_line(given, words):
    usual = {"bandwidth": np.ones((4, 4)), "stages": 2, "stage_seconds": 1.0, "stage_bytes": 1.0}
    with pytest.raises(ValueError, match=words) as refused:
        place_stages(**(usual | {"microbatches": 2} | given))
    assert "\n" not in str(refused.value)


def test_a_plan_is_placed_on_the_links_of_a_file(tmp_path):
    found = plan("llama-3-8b", "a100:16", batch=64, constants=Constants(link=0.1))
    rates = np.where(np.arange(4)[:, None] % 2 == np.arange(4) % 2, 25e9, 5e9)
    path = tmp_path / "links.json"
    path.write_text(json.dumps(rates.tolist()))
    words = placed_in_words(found, path)
    assert "on these 4 nodes, stage by stage: " in words
    assert "as counted (modelled)" in words
    path.write_text("[[1, 2")
    with pytest.raises(ValueError, match="is not JSON"):
        placed_in_words(found, path)
    path.write_text("[[1]]")
    with pytest.raises(ValueError, match="1 nodes must divide 16 chips"):
        placed_in_words(found, path)
