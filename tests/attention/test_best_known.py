"""`implementation=None` claims nothing that no record shows."""

import json
from pathlib import Path

import pytest

from toolkit.attention.best_known import BEST_KNOWN

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
