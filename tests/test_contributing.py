"""The pages of CONTRIBUTING that show how to add something are executed as they stand."""

import re
from pathlib import Path

import pytest

pytest.importorskip("ipywidgets")

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = {
    title: "\n".join(re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL))
    for title, page in re.findall(
        r"^## (Add a \w+)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL
    )
}


@pytest.mark.parametrize("title", ["Add a panel", "Add a lesson", "Add a claim"])
def test_a_page_runs_as_it_stands(title, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(PAGES[title], title, "exec"), {"__name__": "page"})
    if title == "Add a claim":
        assert "seen         a coin is guessed more often than a die" in capsys.readouterr().out
