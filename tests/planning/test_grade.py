"""The record of compiled configurations: complete lines, and predictions within what is claimed."""

import json
import statistics
from pathlib import Path

import pytest

from toolkit.looped import LoopedConfig
from toolkit.planning.clusters import cluster
from toolkit.planning.grade.by_compiler import grade_record, graded
from toolkit.planning.grade.cases import Case, cases, is_possible
from toolkit.planning.grade.plans import grade_plans, graded_plans
from toolkit.planning.memory.gpus import memory_setting, shown_bytes, usable_bytes
from toolkit.planning.predict import predict
from toolkit.planning.strategy import Strategy

# Shares of the bytes sent by which predictions may be off: the median, and the 95th percentile.
SENT_MEDIAN, SENT_HIGH = 0.001, 0.12
RECORD = Path(__file__).parents[2] / "data" / "planning" / "libtpu-0.0.42.jsonl"
# Configurations whose compiled schedules the model of memory was read off.
SEEN = (*range(27, 38), 42, 44, 52, 94)


@pytest.fixture(scope="module")
def rows():
    return graded(RECORD)


@pytest.mark.parametrize("what", ["memory", "sent"])
@pytest.mark.parametrize("unseen", [False, True], ids=["all", "unseen"])
def test_errors_are_within_the_claim(rows, what, unseen):
    seen = {cases()[index].key for index in SEEN} if unseen else ()
    kept = [row for row in rows if row["case"] not in seen]
    errors = sorted(abs(row[f"{what}_error"]) for row in kept)
    assert statistics.median(errors) <= 0.10
    assert errors[int(0.95 * (len(errors) - 1))] <= 0.25


def test_bytes_sent_are_what_a_user_of_predict_gets(rows):
    """Once by a correction of the grade's own: without it 8.9% off (median), 28.6% (95th)."""
    of_case = {case.key: case for case in cases()}
    errors = []
    for row in rows:
        case = of_case[row["case"]]
        sent = predict(
            case.model, case.topology, case.strategy, batch=case.batch, sequence_length=case.length
        ).sent_bytes
        assert sent / row["sent"] - 1 == pytest.approx(row["sent_error"])
        errors.append(abs(row["sent_error"]))
    assert statistics.median(errors) <= SENT_MEDIAN
    assert sorted(errors)[int(0.95 * (len(errors) - 1))] <= SENT_HIGH


def test_a_gpu_scatters_for_half_of_what_libtpu_sends():
    """Libtpu sums and cuts what has a single sequence; the time is that of what is sent."""
    strategy = Strategy(tensor=4)
    found = {
        (chips, batch): predict("llama-3.2-1b", chips, strategy, batch=batch)
        for chips in ("v5e:2x2", "h100:4")
        for batch in (1, 2)
    }
    kinds = {key: {each.kind for each in one.transfers} for key, one in found.items()}
    assert kinds["v5e:2x2", 1] == {"all-gather", "all-reduce"}
    assert kinds["v5e:2x2", 2] == kinds["h100:4", 1] == {"all-gather", "reduce-scatter"}
    tensor = {key: one.seconds["tensor communication"] for key, one in found.items()}
    assert 2 * tensor["v5e:2x2", 1] > 1.2 * tensor["v5e:2x2", 2]
    assert 2 * tensor["h100:4", 1] < 1.2 * tensor["h100:4", 2]


def test_no_recorded_memory_is_far_off(rows):
    """A row was once predicted 31% too large, and one 28% too small.

    Where libtpu keeps what it gathered, which shows in a sixth fewer bytes sent, it holds more.
    """
    for row in rows:
        keeps = row["sent_error"] > 0.15
        assert abs(row["memory_error"]) <= (0.25 if keeps else 0.15), row["case"]


def test_the_record_is_of_the_configurations(rows):
    assert len(rows) == 100
    assert len({case.key for case in cases()}) == 100


def test_a_record_that_is_complete_compiles_nothing(tmp_path, rows):
    copy = tmp_path / "record.jsonl"
    copy.write_text(RECORD.read_text())
    words = grade_record(copy, minutes=0)
    assert f"{len(rows)} of 100 configurations" in words
    assert float(words.split()[-4].replace(",", "")) > 100  # times faster than compiling
    assert copy.read_text() == RECORD.read_text()
    with pytest.raises(ValueError, match="minutes must lie"):
        grade_record(copy, minutes=-1)


@pytest.mark.parametrize("line", ['{"a": 1}', "not JSON", "[1]", '{"case": "one"}'])
def test_a_file_that_is_no_record_is_refused_in_one_line(tmp_path, line):
    path = tmp_path / "record.jsonl"
    assert "0 of 100" in grade_record(path, minutes=0)
    path.write_text(line)
    for grade in (grade_record, grade_plans):
        with pytest.raises(ValueError, match=r"record .* line [12]: want what") as refused:
            grade(path, minutes=0)
        assert "\n" not in str(refused.value)


def test_peaks_of_programs_for_a_gpu_are_near():
    """Thirty steps that XLA compiled for an H100; no row shaped the model."""
    errors = []
    for line in (RECORD.parent / "xla-h100.jsonl").read_text().splitlines():
        row = json.loads(line)
        config = LoopedConfig(
            vocabulary=row["vocabulary"], width=row["width"], heads=row["heads"],
            pattern=" ".join(["full"] * row["layers"]), feed_forward=row["hidden"],
            options={"full": {"key_value_heads": row["key_value_heads"]}}, dtype="bfloat16",
            residual_gate=False, tied_embedding=row["tied"],
        )  # fmt: skip
        strategy, sizes = Strategy(**row["strategy"]), (row["batch"], row["length"])
        found = predict(config, "h100:1", strategy, batch=sizes[0], sequence_length=sizes[1])
        errors.append(found.memory.total / row["peak_bytes"] - 1)
    assert len(errors) == 30
    # JAX takes three quarters of a GPU by itself; beside it are CUDA's kernels and NCCL's buffers.
    where = cluster("h100:8")
    assert memory_setting(where, 5e10) == memory_setting(cluster("v5e:2x4"), 7e10) == ""
    assert memory_setting(where, 7e10) == "XLA_PYTHON_CLIENT_MEM_FRACTION=0.84 "
    assert usable_bytes(where) == 80e9 < shown_bytes(where) - 2e9
    assert usable_bytes(cluster("l40s:8")) < 48e9 - 2e9
    assert statistics.median(map(abs, errors)) < 0.04
    assert max(map(abs, errors)) < 0.09


def test_what_does_not_divide_is_not_graded():
    where = cluster("v5e:2x2")
    assert not is_possible(Case("llama-3.2-1b", where.name, Strategy(fsdp=4), 3, 512), where)


def test_plans_that_fit_fit_as_compiled(tmp_path):
    """Recorded by libtpu: what fits as predicted fits, all within a quarter of the prediction."""
    plans = RECORD.with_name("plans-libtpu-0.0.42.jsonl")
    found = graded_plans(plans)
    assert sum(row["is_planned"] for row in found) >= 20
    assert all(row["fits"] or not row["is_planned"] for row in found)
    # llama-3-8b with FSDP 16 was once predicted 39% too low.
    assert max(abs(row["memory_error"]) for row in found) <= 0.25
    copy = tmp_path / "plans.jsonl"
    copy.write_text(plans.read_text())
    planned = sum(row["is_planned"] for row in found)
    assert f"{planned} of {planned} plans that fit as predicted fit" in grade_plans(copy, minutes=0)
    with pytest.raises(ValueError, match="minutes must lie"):
        grade_plans(copy, minutes=-1)
