"""Phrases that a native speaker stumbles over stand in no source, page or lesson."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WRITTEN = ("toolkit/**/*.py", "*.md", "docs/*.md", "docs/teaching/*.md", "tutorials/*.ipynb")
# Pattern -> (a phrase that it finds, what to write).
BANNED = {
    r"\bhangs? on\b": ("it hangs on tau", "depends on"),
    r"\bmust be (?:a|one) text\b": ("x must be a text", "must be a string"),
    r"\bwhich nobody\b": ("which nobody reads", "say who, or use the passive"),
    r"\bCost:\s+(?:None|A dictionary look-up|That of the)\b": (
        "Cost:\n        None", "leave it out",
    ),
    r"\bSource:\s+[Aa]s `": ("Source: as `ring`", "leave it out"),
    r"\ba head in every\b": ("a head in every layer", "per head"),
    r"\b[Oo]ne a (?:contender|fact|instruction|layer|line|mixer|part|row|seed|token)\b": (
        "one a seed", "one per seed",
    ),
    r": into which the\b": ("parts: into which the channels are cut", "a full sentence"),
    r"\btakes the stream\b": ("it takes the stream", "takes the residual stream"),
    r"\bis no (?:file|looped|tokenizer|\.?safetensors|regular)\b": (
        "x is no file", "is not a file",
    ),
    r"\bwhole or not at all\b|\ball or nothing\b": ("written whole or not at all", "atomically"),
    r"\bgone (?:back )?through\b": ("a block to be gone through", "use the active voice"),
    r"\bso many of (?:them|these)\b": ("so many of them", "name the number"),
    r"\blest\b": ("lest it collapse", "so that it does not"),
    r"\bthe whole story\b|\bthose who teach\b": ("for those who teach", "say what it is"),
    r"\bnobody tuned\b|\btells? itself\b": ("a rate that nobody tuned", "use the passive"),
}  # fmt: skip
NAMES = {"said", "told", "held", "one"}  # they name nothing


@pytest.mark.parametrize("pattern", WRITTEN)
def test_banned_phrases_are_in_no_text(pattern):
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}; write: {better}"
        for path in sorted(ROOT.glob(pattern))
        for banned, (_, better) in BANNED.items()
        for match in re.finditer(banned, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("banned", BANNED)
def test_every_ban_finds_its_own_phrase(banned):
    assert re.search(banned, BANNED[banned][0])


def names_in(source):
    """What a file calls its functions, arguments and variables."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name):
            yield node.id


def test_names_say_what_they_name():
    assert {*names_in("def told(said): held = one")} == NAMES
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(ROOT.glob(WRITTEN[0]))
        for name in NAMES & {*names_in(path.read_text(encoding="utf-8"))}
    ]
    assert not found, "\n".join(found)
