"""Killed at any moment and started again, a run ends with the same bits as one left alone."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.training import read_metrics

SCRIPT = Path(__file__).parents[1] / "support/training_small_run.py"
REPOSITORY = Path(__file__).parents[2]
LONGEST_DELAY_SECONDS = 0.3


def start(directory):
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-W", "error", str(SCRIPT), str(directory)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_until_training(process):
    line = process.stdout.readline()
    assert line == "training\n", process.communicate()[1]


def kill(process):
    assert process.poll() is None, "the run was over before it could be killed"
    process.kill()
    process.communicate()


def final_digest(process):
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors == ""
    return output.splitlines()[-1]


def unfinished_saves(directory):
    return list((directory / "checkpoints").glob("*.orbax-checkpoint-tmp"))


def rows_without_clock(directory):
    rows = read_metrics(directory / "metrics.jsonl")
    return [{key: row[key] for key in row if key != "seconds"} for row in rows]


@pytest.mark.parametrize(
    ("in_a_save", "at_random", "while_starting"),
    [
        pytest.param(2, 1, 1, marks=pytest.mark.slow),
        pytest.param(4, 4, 2, marks=pytest.mark.nightly),
    ],
)
def test_kills_change_no_bit(tmp_path, in_a_save, at_random, while_starting):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    reference = start(undisturbed)
    chance = random.Random(0)
    kinds = ["save"] * in_a_save + ["random"] * at_random + ["starting"] * while_starting
    chance.shuffle(kinds)
    kills_in_a_save = 0
    for kind in kinds:
        process = start(disturbed)
        if kind == "starting":
            time.sleep(chance.uniform(0.5, 1.5))
        else:
            wait_until_training(process)
        if kind == "random":
            time.sleep(chance.uniform(0.0, LONGEST_DELAY_SECONDS))
        while kind == "save" and not unfinished_saves(disturbed):
            assert process.poll() is None
        kill(process)
        kills_in_a_save += bool(unfinished_saves(disturbed))
    assert kills_in_a_save >= in_a_save // 2, "too few kills met a save under way"
    assert final_digest(start(disturbed)) == final_digest(reference)
    assert rows_without_clock(disturbed) == rows_without_clock(undisturbed)
    assert not unfinished_saves(disturbed)
