"""The page on drop-in forms says what its record says."""

import re
from pathlib import Path

from toolkit.measure import read_records

ROOT = Path(__file__).parents[2]
CASE = "maxtext gated delta rule {} B=1 T=4096 H=8 D=128 float32 | 2 cores | {}"


def test_the_page_has_the_figures_of_its_record():
    records = read_records(ROOT / "data/measurements/amd-epyc-2-cores/maxtext.json")
    values = {record.name: record for record in records}
    page = (ROOT / "docs/drop_in.md").read_text()
    for title, contender in (("toolkit", "toolkit"), ("MaxText", "maxtext")):
        forward, gradient = (
            values[CASE.format(direction, contender)]
            for direction in ("forward", "forward+backward")
        )
        assert forward.check == gradient.check == "passed"
        error = values[forward.name + ", error of the second packed document"].value
        cells = [
            f"{forward.value:.2f} s",
            f"{gradient.value:.2f} s",
            f"{values[gradient.name + ', temporary memory'].value:.0f} MiB",
            f"off by {error:.3f}" if error else "exact",
        ]
        row = re.search(rf"^\| {title} \| (.*) \|$", page, re.MULTILINE)
        assert row is not None
        assert row[1].split(" | ") == cells
