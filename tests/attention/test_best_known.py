"""`implementation=None` claims nothing that no record shows."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from toolkit.attention.best_known import BEST_KNOWN, Known, in_best_form

RECORDS = Path(__file__).parents[2] / "data" / "measurements"


@pytest.mark.parametrize("row", BEST_KNOWN, ids=lambda row: f"{row.family} {row.platform}")
def test_every_row_cites_a_record_in_which_its_form_is_faster(row):
    records = json.loads((RECORDS / row.record).read_text())
    found = {record["name"]: record for record in records}
    ours, other = (found[f"{row.case} | {name}"] for name in (row.form, row.slower))
    assert ours["kind"] == other["kind"] == "measured"
    assert ours["value"] < other["value"]


def test_every_family_has_a_form_for_any_platform_and_one_each():
    keys = [(row.family, row.platform) for row in BEST_KNOWN]
    assert len(set(keys)) == len(keys)
    assert {family for family, platform in keys if platform is None} == {"softmax", "recurrent"}


def test_the_form_of_a_platform_runs_there_unless_it_refuses():
    known = [Known("f", platform, str(platform), "", "", "", "") for platform in (None, "cpu", "x")]

    def form(name):
        def run(x):
            if name == "x" or (name == "cpu" and x.dtype == jnp.float32):
                raise ValueError(f"{name} refuses")
            return x + {"None": 1, "cpu": 2}[name]

        return run

    def of(dtype, implementation=None):
        run = partial(in_best_form, "f", implementation, form, known=known)
        return int(jax.jit(run)(jnp.zeros((), dtype)))

    assert of(jnp.float32) == 1
    assert of(jnp.bfloat16) == (2 if jax.device_count() == 1 else 1)
    with pytest.raises(ValueError, match="x refuses"):
        of(jnp.bfloat16, "x")
