"""What pages say of the package and its records; their sentences name the test that holds them."""

import itertools
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
