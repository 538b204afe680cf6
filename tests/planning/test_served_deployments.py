"""Decoding graded by published deployments: rows, errors held out, what the roofline alone says."""

import math
import re
import statistics
from pathlib import Path

import pytest

from toolkit.measure import in_words
from toolkit.planning import Strategy, plan_decode, predict
from toolkit.planning.decode.mixtures import MixtureCost
from toolkit.planning.decode.rates import ROOFLINE, SERVED
from toolkit.planning.grade.served import fit_served, grade_served, served_rows

PATH = Path(__file__).parents[2] / "data" / "planning" / "served.jsonl"
WANTED = 0.15
ROWS = served_rows(PATH)
FITTED = ("launch", "slowdown")
# DeepSeek's own figure, three reports of SGLang and one of Mooncake and SGLang.
DEPLOYMENTS = ("deepseek-online", "sglang", "mooncake", "ant-group", "eigen-ai")


def misses_of(source, rates):
    return [
        math.log(each.predicted(rates) / each.figure)
        for each in ROWS
        if each.row["source"] == source
    ]


@pytest.mark.parametrize("source", DEPLOYMENTS)
def test_deployments_are_predicted_by_the_others(source):
    held_out = misses_of(source, fit_served(ROWS, source))
    assert statistics.median(map(abs, held_out)) < WANTED
    # The roofline of published rates, with nothing beside the kernels, promises far more.
    assert statistics.median(misses_of(source, ROOFLINE)) > 0.4


def test_the_plan_for_deepseek_is_what_deepseek_runs():
    """Attention by rows and experts over all 18 nodes, two halves of the rows taking turns."""
    found = plan_decode("deepseek-v3", 144 * 88, 4989, "h800:144", weights="float8").chosen
    assert isinstance(found, MixtureCost)
    assert (found.scheme, found.expert, found.overlap) == ("data", 144, "two")


def test_tpla_figure_3():
    """Without any constant: the largest batch that fits, at the published rates of an H800."""
    misses = misses_of("tpla", SERVED)
    assert statistics.median(map(abs, misses)) < 0.08
    longest = [
        each.predicted(SERVED) / each.figure - 1
        for each in ROWS
        if each.row.get("context") == 32768
    ]
    assert len(longest) == 2
    assert max(map(abs, longest)) < WANTED


def test_constants_are_those_that_fit():
    fitted = fit_served(ROWS)
    for name in FITTED:
        assert getattr(SERVED, name) == pytest.approx(getattr(fitted, name), rel=0.02)


def test_what_the_page_says_of_deployments():
    page = (PATH.parents[2] / "docs/published.md").read_text()
    groups: dict[str, list[float]] = {}
    for each in ROWS:
        groups.setdefault(each.row["source"], []).append(each)
    assert len(FITTED) == 2
    for source, mine in groups.items():
        misses = [math.expm1(x) for x in misses_of(source, fit_served(ROWS, source))]
        error = in_words(statistics.median(map(abs, misses)), "share")
        assert re.search(rf"^\| {source} \| .* \| {len(mine)} \| {error} \|$", page, re.M), source


def test_every_row_says_whose_it_is_and_fits_its_chips():
    for each in ROWS:
        assert {"source", "url", "where", "date", "note"} <= set(each.row)
    printed = grade_served(PATH)
    assert "held out" in printed
    assert "Modelled; published figures are recorded" in printed


def test_a_forward_pass_is_slower_than_published_prefill():
    """Prefill is not planned: what trains is modelled at the rates of training."""
    strategy = Strategy(
        data=32, expert=32, dispatch="by_host", products="float8", overlapped="expert",
        microbatches=2,
    )  # fmt: skip
    found = predict("deepseek-v3", "h100:32", strategy, batch=32 * 8, sequence_length=2048)
    seconds = found.parts.forward_total(found.constants.slowdown)
    assert 8 * 16_384 / seconds == pytest.approx(43_400, rel=1e-3)
    assert seconds > 8 * 16_384 / 52_300
