"""Pages that the site makes from the package: claim cards, and cheat sheets of the lessons."""

import json
import math
import sys
from pathlib import Path

import pytest

from toolkit.lab.lessons.catalogue import LESSONS

EXTENSIONS = Path(__file__).resolve().parents[1] / "docs/_ext"


@pytest.fixture(autouse=True)
def extensions(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXTENSIONS), *sys.path])


def test_every_record_is_of_an_experiment_and_so_has_its_cards():
    from toolkit.experiments import EXPERIMENTS

    records = EXTENSIONS.parents[1].glob("data/experiments/*.jsonl")
    assert {path.stem for path in records} <= set(EXPERIMENTS)


@pytest.mark.slow
def test_every_claim_has_its_card_and_no_verdict_is_hidden():
    import claims

    page = claims.claims_page()
    assert page.count(":::{admonition}") >= 30
    for experiment, verdicts, _ in claims.cards():
        assert f"toolkit experiment {experiment.name}" in page
        for verdict in verdicts:
            sign, _ = claims.LOOKS[verdict.word]
            assert f"| {sign} {verdict.word} |" in page
            assert f":::{{admonition}} {sign} {verdict.word}: {verdict.claim}\n" in page


def test_every_lesson_has_its_cheat_sheet():
    import cheat_sheets

    assert set(cheat_sheets.SHEETS) == set(LESSONS)


@pytest.mark.slow
def test_formulas_of_the_cheat_sheets_are_the_packages():
    import cheat_sheets

    for row in (row for rows in cheat_sheets.SHEETS.values() for row in rows):
        formula, value = cheat_sheets.both_values(row)
        # The error of a memory is drawn, not exact.
        assert math.isclose(formula, value, rel_tol=0.03 if "error" in row.quantity else 1e-9), row
    assert "| bubble of GPipe |" in cheat_sheets.cheat_sheets()


def test_a_lesson_that_holds_an_answer_is_not_published():
    pytest.importorskip("sphinx")
    import pages

    for path in sorted((EXTENSIONS.parents[1] / "tutorials").glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        assert pages.answered(notebook) == [], path.name
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        stubs = [cell for cell in cells if "lesson.check(" in "".join(cell["source"])]
        for stub in stubs:
            before = "".join(stub["source"])
            stub["source"] = before.replace("    ...\n", "    return 1\n", 1)
            assert len(pages.answered(notebook)) == 1, before
            stub["source"] = before
