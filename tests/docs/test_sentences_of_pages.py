"""What pages say of the package and its records; their sentences name the test that holds them."""

import inspect
import itertools
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from toolkit.attention import MIXERS
from toolkit.experiments import Comparison
from toolkit.lab.tour import sharded_step, tour
from toolkit.language import TrainingRun
from toolkit.looped import LoopedConfig
from toolkit.measure import read_records
from toolkit.parallel.hosts import meeting, processes, recipes
from toolkit.planning import Strategy
from toolkit.planning.time.orders import schedule_of
from toolkit.schedules import Durations, simulate

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_readme_says_what_an_install_needs_and_what_the_tour_trains():
    assert PROJECT["requires-python"] == ">=3.11"
    extras = PROJECT["optional-dependencies"]
    assert (extras["gpu"], extras["gpu-cuda12"]) == (["jax[cuda13]"], ["jax[cuda12]"])
    assert extras["tpu"] == ["jax[tpu]"]
    assert len(tour.contenders()) == 3
    assert sharded_step.DEVICES == 8


def test_gates_are_at_most_zero_and_states_float32():
    rows = [row for row in MIXERS.values() if row.transition]
    assert len(rows) > 10
    for row in rows:
        assert all(each.values.high == 0 for each in row.inputs if each.name == "g")
        state = jax.tree.leaves(row.empty_state(2, 3, 4, 5, 8, jnp.bfloat16, **row.options))[0]
        assert (state.shape, state.dtype) == ((2, 3, 4, 5), jnp.float32), row.name


def test_a_comparison_widens_its_grid_without_repeating_it():
    runs = {"plain": TrainingRun(LoopedConfig.tiny("full"))}
    five = Comparison(runs, "tokens", "bits per byte").grid("plain")
    seven = Comparison(runs, "tokens", "bits per byte", rates=7).grid("plain")
    assert len(five) == 5
    assert seven[1:-1] == five
    assert [b / a for a, b in itertools.pairwise(five)] == pytest.approx([2.0] * 4)


def test_latent_steps_reach_the_share_of_the_floor_that_the_page_says():
    records = read_records(ROOT / "data/measurements/nvidia-h100/accelerator.json")
    shares = [
        record.value
        for record in records
        if record.name.startswith("latents of") and record.name.endswith("fraction of floor")
    ]
    assert (round(min(shares), 2), round(max(shares), 2), len(shares)) == (0.12, 0.38, 4)
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    assert "took 12 to 38 % of the floor's rate (recorded)" in page


@pytest.mark.parametrize(("stages", "microbatches", "slices"), [(4, 1, 4), (2, 3, 2), (4, 4, 1)])
def test_slices_idle_for_the_share_of_a_step_that_the_page_says(stages, microbatches, slices):
    strategy = Strategy(pipeline=stages, microbatches=microbatches, slices=slices)
    found = simulate(schedule_of(strategy), Durations(1, 0.5, 0.5))
    assert float(found.bubble) == (stages - 1) / (microbatches * slices + stages - 1)


def test_hosts_wait_as_long_as_the_page_says():
    assert (meeting.MOST_SECONDS, meeting._NOTICE_SECONDS) == (30 * 60, 20)
    assert recipes._SAVE_SECONDS == 120
    theirs = inspect.signature(jax.distributed.initialize).parameters
    assert theirs["heartbeat_timeout_seconds"].default == 100  # which no call of ours changes
    assert "heartbeat" not in inspect.getsource(processes)


def test_the_kills_of_the_table_are_a_hundred():
    page = (ROOT / "docs/many_hosts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert sum(int(count) for row in rows for count in row) == 100
    assert len(rows) == 3
