"""Stages on nodes whose links differ: as good as every order tried, and never worse than none."""

import itertools
import json

import numpy as np
import pytest

from toolkit.planning import Constants, place_stages, plan
from toolkit.planning.uneven.placement import placed_in_words


def seconds_of(order, rates, stages, stage_seconds, stage_bytes, gradient_bytes, microbatches):
    """Written out from the source's formulas, link by link."""
    rows = [order[at : at + stages] for at in range(0, len(order), stages)]
    hop = max(sum(2 * stage_bytes / rates[a][b] for a, b in itertools.pairwise(r)) for r in rows)
    gradients = 0.0
    if (count := len(rows)) > 1:
        for column in zip(*rows, strict=True):
            slowest = min(rates[column[i]][column[(i + 1) % count]] for i in range(count))
            gradients = max(gradients, 2 * (count - 1) / count * gradient_bytes / slowest)
    if microbatches >= stages:
        rounds = microbatches // stages
        return rounds * (hop + stages * stage_seconds) + (stages - 1) * stage_seconds + gradients
    return hop + (stages + microbatches - 1) * stage_seconds + gradients


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
    with pytest.raises(ValueError, match="want a JSON table"):
        placed_in_words(found, path)
    path.write_text("[[1]]")
    with pytest.raises(ValueError, match="1 nodes must divide 16 chips"):
        placed_in_words(found, path)
