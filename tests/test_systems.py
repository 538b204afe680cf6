"""docs/systems.md: what it names is there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/systems.md").read_text()
TABLES = re.split(r"^## .*\n", PAGE, flags=re.M)[1:]


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def imported(name: str) -> object:
    """The module or the attribute of that dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(imported(module), attribute)


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", rows(TABLES[0]), ids=lambda row: row[0].split(" (")[0])
def test_what_is_here_can_be_imported_and_is_held_by_something(row):
    system, _, code, held, _ = row
    assert names(code), system
    assert names(held), system
    for name in names(code):
        assert imported(name) is not None
    for path in names(held):
        assert (ROOT / path).is_file(), path


def test_what_comes_near_can_be_imported():
    for row in rows(TABLES[1]):
        for name in names(row[2]):
            assert imported(name) is not None


def test_every_system_stands_once():
    systems = [row[0] for table in TABLES for row in rows(table)]
    assert len(systems) == len(set(systems))


def test_a_name_that_is_not_there_is_noticed():
    with pytest.raises(AttributeError):
        imported("toolkit.attention.no_such_mixer")
