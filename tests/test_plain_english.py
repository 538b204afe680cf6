"""Phrases that a native speaker stumbles over stand in no source, page or lesson."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WRITTEN = ("toolkit/**/*.py", "*.md", "docs/*.md", "docs/teaching/*.md", "tutorials/*.ipynb")
BANNED = {
    r"\bhangs? on\b": "depends on",
    r"\bmust be a text\b": "must be a string",
    r"\bwhich nobody\b": "say who, or use the passive",
    r"\bCost:\s+(None|A dictionary look-up)\b": "leave the section out",
    r"\ba head in every\b": "per head",
    r": into which the\b": "a full sentence",
    r"\btakes the stream\b": "takes the residual stream",
}


@pytest.mark.parametrize("pattern", WRITTEN)
def test_banned_phrases_are_in_no_text(pattern):
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}; write: {better}"
        for path in sorted(ROOT.glob(pattern))
        for banned, better in BANNED.items()
        for match in re.finditer(banned, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("banned", BANNED)
def test_every_ban_finds_its_own_phrase(banned):
    phrases = (
        "it hangs on tau", "x must be a text", "which nobody reads", "Cost:\n        None",
        "a head in every layer", "parts: into which the channels are cut", "it takes the stream",
    )  # fmt: skip
    assert any(re.search(banned, phrase) for phrase in phrases)
