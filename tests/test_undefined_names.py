"""Every name is defined.

The rule is off in `pyproject.toml`, for ruff and for pyright, as both read the shape strings of
jaxtyping as names. Here it is on for all that stands outside of strings.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUFF = (sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F821")


def undefined_in(*paths):
    """Place and message of names that are defined nowhere; of those in strings, none."""
    command = [*RUFF, "--output-format=json", *map(str, paths)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    for fault in found:
        path, place = Path(fault["filename"]), fault["location"]
        line = path.read_text(encoding="utf-8").splitlines()[place["row"] - 1]
        if line[: place["column"] - 1].count('"') % 2 == 0:
            yield f"{path.name}:{place['row']}: {fault['message']}"


def test_every_name_is_defined():
    assert not [*undefined_in(ROOT / "toolkit", ROOT / "tests", ROOT / "docs")]


def test_an_undefined_name_is_found_and_a_shape_is_not(tmp_path):
    (tmp_path / "module.py").write_text('def f(x: Float[Array, "time heads"]):\n    return y\n')
    names = [fault.split("`")[1] for fault in undefined_in(tmp_path)]
    assert names == ["Float", "Array", "y"]
