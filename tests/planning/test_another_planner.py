"""mlsysim 0.3 beside this planner: its predictions are recorded, the page shows their scores."""

from pathlib import Path

import pytest

from toolkit.measure import in_words
from toolkit.planning.grade.by_compiler import predicted, score_memory
from toolkit.planning.grade.peer import EFFICIENCY, beside_peer, mlsysim_seconds, table_beside_peer
from toolkit.planning.grade.published import graded_rows

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "data" / "planning" / "published.jsonl"
RECORDED = ROOT / "data" / "planning" / "mlsysim-0.3.0.jsonl"


def test_the_page_says_what_is_recorded():
    page = (ROOT / "docs" / "published.md").read_text()
    scores = beside_peer(PUBLISHED, RECORDED)
    assert sum(ours.rows for ours, *_ in scores.values()) == 465
    for (source, chip), ways in scores.items():
        row = next(
            line for line in page.splitlines()
            if line.startswith(f"| {source} | {chip} |") and line.count("|") == 9
        )  # fmt: skip
        for score in ways:
            assert in_words(score.error, "share") in row
    assert EFFICIENCY == 0.5
    nearer = {
        way: {key for key, (ours, *theirs) in scores.items() if theirs[at].error < ours.error}
        for at, way in enumerate(("as it comes", "fitted"))
    }
    as_it_comes = {("llama-3", "H100 SXM"), ("bigscience", "A100 80GB SXM")}
    assert nearer["as it comes"] == as_it_comes
    assert nearer["fitted"] - as_it_comes == {("maxtext", "TPU v5p"), ("tpu-recipes", "TPU v7x")}
    assert "mlsysim 0.3" in table_beside_peer(PUBLISHED, RECORDED)


def test_memory_is_scored_for_any_planner():
    record = ROOT / "data" / "planning" / "libtpu-0.0.42.jsonl"
    rows, error = score_memory(record, lambda case: predicted(case)[0])
    assert rows == 100
    assert error < 0.02
    assert score_memory(record, lambda case: 2 * predicted(case)[0])[1] > 0.9


def test_the_mapping_predicts_what_is_recorded():
    pytest.importorskip("mlsysim")
    rows = {each.number: each for each in graded_rows(PUBLISHED)[0]}
    assert mlsysim_seconds(rows[1], 0.5) == pytest.approx(17.3598, rel=1e-4)
