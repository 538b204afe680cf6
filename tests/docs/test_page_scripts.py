"""The scripts of pages, those of widgets among them: small, and they ask nothing of the network."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*ROOT.glob("docs/_static/*.js"), *ROOT.glob("toolkit/**/*.js")]
NAMESPACE = "http://www.w3.org/2000/svg"
MOST_BYTES = 60_000


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_small_and_asks_no_other_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    asked = [line for line in text.replace(NAMESPACE, "").splitlines() if "//" in line]
    assert not [line for line in asked if "http" in line or "'//" in line or '"//' in line]


def test_the_scripts_are_found() -> None:
    assert {"replay.js", "curve_editor.js", "player.js"} <= {path.name for path in SCRIPTS}
