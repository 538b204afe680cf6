"""The list of costly tests names tests that exist, and the tiers that wait for them."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def listed():
    for line in (ROOT / "tests/costly.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield line[:8].strip(), *line[8:].partition("::")[::2]


def test_every_costly_test_exists():
    for tier, path, test in listed():
        assert tier in ("slow", "nightly")
        name = test.partition("[")[0]
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_none_is_listed_twice():
    names = [(path, test) for _, path, test in listed()]
    assert len({*names}) == len(names)
