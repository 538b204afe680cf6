"""`implementation=None` claims nothing that no record shows."""

import json
from pathlib import Path

import jax
import pytest

from toolkit.experts import mixture, route
from toolkit.experts.best_known import BEST_KNOWN, FORMS

RECORDS = Path(__file__).parents[2] / "data" / "measurements"


@pytest.mark.parametrize("row", [row for row in BEST_KNOWN if row.record], ids=lambda r: r.platform)
def test_a_row_cites_a_record_in_which_its_form_is_the_fastest_with_many_tokens(row):
    seconds = {}
    for record in json.loads((RECORDS / row.record).read_text()):
        case, _, name = record["name"].rpartition(" | ")
        if record["unit"] == "s" and " T=2 " not in case:
            assert record["kind"] == "measured"
            seconds.setdefault(case, {})[name] = record["value"]
    assert len(seconds) >= 4
    for case in seconds.values():
        assert min(case, key=case.get) == f"toolkit, {row.implementation}"


def test_every_platform_has_one_row_and_those_without_a_record_say_why():
    platforms = [row.platform for row in BEST_KNOWN]
    assert len(set(platforms)) == len(platforms)
    assert "default" in platforms
    assert all(row.implementation in FORMS and row.why for row in BEST_KNOWN)


def test_the_platform_is_chosen_where_the_program_is_lowered():
    """A program for TPUs, made on a machine without one, has kernels; that for CPUs has none."""
    arguments = [
        jax.ShapeDtypeStruct(s, "float32") for s in ((64, 8), (4, 8, 8), (4, 8, 8), (4, 8, 8))
    ]

    def run(x, gate, up, down):
        return mixture(x, route(x[:, :4], 2), gate, up, down)

    def program(platform):
        return jax.jit(run).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()

    assert "tpu_custom_call" in program("tpu")
    assert "while" in program("cpu")
    assert "tpu_custom_call" not in program("cpu")
