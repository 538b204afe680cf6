"""README.md keeps its word: its examples run, its two lines are what CI calls."""

import re
from pathlib import Path

from toolkit.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_examples_run_one_after_the_other():
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.S):
        exec(compile(block, "README.md", "exec"), scope)
    assert scope["out"].shape == (1, 4096, 8, 64)
    assert scope["text"].shape == (1, 100)


def test_ci_runs_the_two_lines_at_the_top():
    first, second = [line.strip() for line in README.splitlines() if line.startswith("    ")][:2]
    assert first in (ROOT / ".ci/legs/newcomer").read_text()
    assert second in (ROOT / ".ci/legs/first-tier").read_text()
    assert README.index(second) < 200, "they stand at the top"


def test_every_command_has_its_line():
    lines = re.findall(r"^\| `toolkit ([a-z-]+)", README, flags=re.M)
    assert lines == list(COMMANDS)
