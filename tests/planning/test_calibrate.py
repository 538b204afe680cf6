"""Calibration: known constants are found again; files that are no measurements are refused."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from toolkit.planning import Constants, Strategy, calibrate, cluster, plan, predict
from toolkit.planning.time.seconds import constants_of
from toolkit.planning.time.step import transfer_seconds

# What is left of the error of other steps where two of them calibrate, at most.
CARRIED = 0.75
KNOWN = Constants(matmul=0.43, memory=0.71, link=0.55, latency=3.0, slowdown=1.6)
CHIPS = "h100:64"
# By what share a constant may miss the known one, which lies far from where a prior expects it: one
# row tells each of the first three, few tell the others.
NEAR = {"matmul": 0.01, "memory": 0.02, "link": 0.02, "latency": 0.02, "slowdown": 0.15}
MATMUL = {"measured": "matmul", "chips": CHIPS, "flops": 1e12}


def measured(constants):
    """What would be measured if the model were true."""
    where = cluster(CHIPS)
    rows = [{**MATMUL, "seconds": 1e12 / (where.chip.flops_per_second * constants.matmul)}]
    rate = where.chip.bytes_per_second * constants.memory
    rows.append({"measured": "memory", "chips": CHIPS, "bytes": 1e9, "seconds": 1e9 / rate})
    for sent, degree, inner in ((1e4, 8, 1), (1e8, 8, 1), (1e5, 8, 8), (1e9, 64, 1)):
        took = transfer_seconds(where.link(inner, degree), sent, degree, constants)
        row = {"degree": degree, "inner": inner, "bytes_sent": sent, "seconds": took}
        rows.append({"measured": "collective", "chips": CHIPS, **row})
    cuts: tuple[dict[str, Any], ...] = (
        {"fsdp": 64, "recompute": "layer"},
        {"fsdp": 16, "tensor": 4},
    )
    for strategy in cuts:
        sizes = {"batch": 64, "sequence_length": 2048}
        found = predict("llama-3-8b", CHIPS, Strategy(**strategy), constants=constants, **sizes)
        row = {"model": "llama-3-8b", "strategy": strategy, **sizes}
        row["seconds"] = found.step_seconds
        rows.append({"measured": "step", "chips": CHIPS, **row})
    return rows


def written(folder, rows, *, as_list=False):
    path = folder / "measured.jsonl"
    path.write_text(json.dumps(rows) if as_list else "\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("as_list", [False, True])
def test_known_constants_are_found_again(tmp_path, as_list):
    found = calibrate(written(tmp_path, measured(KNOWN), as_list=as_list))
    for name, near in NEAR.items():
        assert getattr(found.constants, name) == pytest.approx(getattr(KNOWN, name), rel=near), name
    assert set(found.fitted) == set(NEAR)
    assert found.error_after < 0.01 < 0.1 < found.error_before
    assert found.error_left_out is not None
    assert "on rows left out" in str(found)


def test_what_was_not_measured_keeps_its_default(tmp_path):
    found = calibrate(written(tmp_path, measured(KNOWN)[:1]))
    assert found.fitted == ("matmul",)
    assert found.constants.matmul == pytest.approx(0.43, rel=NEAR["matmul"])
    assert found.error_left_out is None
    assert dataclasses.replace(found.constants, matmul=found.prior.matmul) == found.prior


# By what factor constants of chips differ: name -> one deviation of the logarithm, and the bounds.
SPREAD = {"matmul": (0.25, 0.1, 1), "attention": (0.4, 0.01, 1), "elementwise": (0.3, 0.1, 1),
          "launch": (0.7, 1e-6, 1e-3), "memory": (0.15, 0.1, 1), "link": (0.25, 0.1, 1),
          "latency": (1.0, 0.1, 100), "slowdown": (0.2, 1, 2)}  # fmt: skip
CUTS: tuple[dict[str, Any], ...] = (
    {"fsdp": 8, "recompute": "layer"},
    {"fsdp": 4, "tensor": 2, "recompute": "layer"},
    {"tensor": 8},
    {"fsdp": 2, "tensor": 4, "recompute": "elementwise"},
    {"data": 2, "fsdp": 4, "recompute": "layer"},
    {"fsdp": 8, "recompute": "elementwise"},
)


def steps(seed):
    """Steps of a chip that is off the defaults, each off the model by a tenth."""
    random = np.random.default_rng(seed)
    usual = constants_of(cluster("h100:8"), None)
    truth = {
        name: float(np.clip(getattr(usual, name) * np.exp(spread * random.normal()), *bounds))
        for name, (spread, *bounds) in SPREAD.items()
    }
    constants = dataclasses.replace(usual, **truth)
    rows = []
    for cut in CUTS:
        sizes = {"batch": 16, "sequence_length": 2048}
        found = predict("llama-3.2-3b", "h100:8", Strategy(**cut), constants=constants, **sizes)
        seconds = found.step_seconds * float(np.exp(0.1 * random.normal()))
        row = {"model": "llama-3.2-3b", "strategy": cut, **sizes, "seconds": seconds}
        rows.append({"measured": "step", "chips": "h100:8", **row})
    return rows


def test_two_steps_carry_over_to_others(tmp_path):
    """Once two rows determined four constants, and other steps were predicted worse than before."""
    before, after = [], []
    for seed in range(12):
        rows = steps(seed)
        found = calibrate(written(tmp_path, rows[:2]))
        assert len(found.fitted) <= 2
        for row in rows[2:]:
            step = Strategy(**row["strategy"])
            sizes = {"batch": row["batch"], "sequence_length": row["sequence_length"]}
            for errors, constants in ((before, None), (after, found.constants)):
                told = predict(row["model"], "h100:8", step, constants=constants, **sizes)
                errors.append(abs(np.log(told.step_seconds / row["seconds"])))
    # A tenth of noise of their own is left to all.
    assert np.mean(after) < CARRIED * np.mean(before)
    assert np.quantile(after, 0.95) < np.quantile(before, 0.95)


def test_rows_left_out_say_when_constants_do_not_carry_over(tmp_path):
    """Rows that contradict each other: fitted to one, the constant is wrong for the other."""
    rows = [{**MATMUL, "seconds": MATMUL["flops"] / 9.89e14 / share} for share in (0.4, 0.9)]
    found = calibrate(written(tmp_path, rows))
    assert found.error_left_out is not None
    assert found.error_left_out > found.error_before
    assert "do not carry over" in str(found)


def test_a_row_may_be_of_any_model(tmp_path):
    row = steps(0)[0]
    model = {"vocabulary": 50_000, "width": 1024, "heads": 8, "pattern": "full full", "loops": 2,
             "residual_gate": False, "options": {"full": {"key_value_heads": 2}}}  # fmt: skip
    found = calibrate(written(tmp_path, [row | {"model": model, "seconds": 0.02}]))
    # Products of narrow layers take less time than what is read and written between them.
    assert found.fitted == ("elementwise",)
    with pytest.raises(ValueError, match=r"line 1: .*layers") as refused:
        calibrate(written(tmp_path, [row | {"model": model | {"layers": 2}}]))
    assert "\n" not in str(refused.value)


def test_predictions_and_plans_take_the_constants(tmp_path):
    constants = calibrate(written(tmp_path, measured(KNOWN))).constants
    step: dict[str, Any] = {"strategy": Strategy(fsdp=64, recompute="layer"), "batch": 64}
    slow = predict("llama-3-8b", CHIPS, **step, constants=constants)
    assert slow.step_seconds > predict("llama-3-8b", CHIPS, **step).step_seconds
    found = plan("llama-3.2-1b", "h100:8", batch=8, constants=constants)
    assert found.best.constants == constants


GOOD = {**MATMUL, "seconds": 0.01}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "want 1 to"),
        ("{", "line 1, is not JSON"),
        (f"{json.dumps(GOOD)}\n\nx", "line 3, is not JSON"),
        ("[1]", "want an object; got 1"),
        ("[", "the list, is not JSON"),
        (json.dumps({**GOOD, "measured": "speed"}), "measured must be one of matmul"),
        (json.dumps({**GOOD, "seconds": -1}), "seconds must be a positive number; got -1"),
        (json.dumps({**GOOD, "seconds": True}), "seconds must be a positive number"),
        (json.dumps({**GOOD, "speed": 1}), "speed is not a field of 'matmul'"),
        (json.dumps({**GOOD, "chips": "abacus:2"}), "not known"),
        (json.dumps({**GOOD, "chips": 8}), "chips must be such as"),
        (f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, 'chips': 'v5e:4'})}", "one kind of chip"),
        (
            json.dumps({"measured": "collective", "chips": "h100:8", "bytes_sent": 1, "degree": 16,
                        "seconds": 1}),
            "degree 16 x inner 1 is more than 8 chips",
        ),
        (
            json.dumps({"measured": "step", "chips": "h100:8", "model": "llama-3-8b",
                        "strategy": {"rows": 8}, "batch": 8, "sequence_length": 512, "seconds": 1}),
            "rows",
        ),
        (
            json.dumps({"measured": "step", "chips": "h100:8", "model": "llama-9",
                        "strategy": {"fsdp": 8}, "batch": 8, "sequence_length": 512, "seconds": 1}),
            "nor a known name",
        ),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as refused:
        calibrate(path)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="cannot be read"):
        calibrate(tmp_path / "nothing.jsonl")
