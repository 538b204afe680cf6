"""One constant names the repository, and the pins of Binder's image stay within our bounds."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWNER, NAME = PROJECT["urls"]["Repository"].removeprefix("https://github.com/").split("/")
# Owner and name in links to files, to Binder, to Colab, and to files as they are.
LINK = re.compile(
    r"(?:github\.com/|mybinder\.org/v2/gh/|colab\.research\.google\.com/github/"
    r"|raw\.githubusercontent\.com/|(?=[\w-]+\.github\.io))([\w-]+)(?:\.github\.io)?/([\w-]+)"
)
TEXTS = ("*.md", "*.cff", "docs/**/*.md", "docs/**/*.py", "notebooks/*.ipynb", ".github/**/*.y*ml")


@pytest.mark.parametrize("pattern", TEXTS)
def test_links_to_the_repository_agree(pattern):
    files = [path for path in ROOT.glob(pattern) if path.is_file()]
    links = {
        (str(path.relative_to(ROOT)), *match.groups())
        for path in files
        for match in LINK.finditer(path.read_text(encoding="utf-8"))
    }
    wrong = {link for link in links if (link[1] == OWNER) != (link[2] == NAME)}
    assert not wrong, f"wanted {OWNER}/{NAME}"
    if pattern == "notebooks/*.ipynb":
        assert {link[1:] for link in links} == {(OWNER, NAME)}


def test_binder_pins_every_dependency_within_its_bounds():
    lines = (ROOT / "binder/requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert "-e .[lab]" in lines
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(r) for r in PROJECT["dependencies"] + extras["widgets"] + extras["lab"]]
    for requirement in wanted:
        if requirement.name != PROJECT["name"]:
            assert pins[requirement.name] in requirement.specifier, requirement


def test_no_two_test_files_have_one_name():
    """Tests import one another by bare names."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]
