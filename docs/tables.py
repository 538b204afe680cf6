"""Tables that the repository's pages are given: `python docs/tables.py` writes them anew.

CONTRIBUTING.md says which room may import which: from `tests/support/floors.py`, and the map of
rooms in `toolkit/__init__.py`. README.md says which versions are tested: from .ci/legs.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

from floors import FLOORS  # noqa: E402  (found by the line above)

import toolkit  # noqa: E402


def rooms() -> str:
    """Which room holds what, and which rooms it may import."""
    lines = ["| room | holds | may import |", "|---|---|---|"]
    above: list[str] = []
    for room, may_import in FLOORS.items():
        holds = re.search(rf"^\* `toolkit\.{room}`: (.+)$", toolkit.__doc__ or "", re.M)
        if holds:
            lines.append(f"| `toolkit/{room}` | {holds[1]} | {_named(may_import, above)} |")
        above.append(room)
    return "\n".join(lines)


def _named(may_import: set[str], above: list[str]) -> str:
    absent = [room for room in above if room not in may_import]
    if len(may_import) > 6 and len(absent) <= 1:
        return "all of the above" + (f" but `{absent[0]}`" if absent else "")
    return ", ".join(f"`{room}`" for room in above if room in may_import)


def versions() -> str:
    """Which Python, jax and NumPy each leg of .ci/run tests."""
    lines = ["| leg of `.ci/run` | Python | jax | NumPy |", "|---|---|---|---|"]
    for leg in sorted((ROOT / ".ci/legs").iterdir()):
        found = re.search(r"^# Versions: Python (.+); jax (.+); NumPy (.+)$", leg.read_text(), re.M)
        if found:
            lines.append(f"| [{leg.name}](.ci/legs/{leg.name}) | {' | '.join(found.groups())} |")
    return "\n".join(lines)


TABLES = {"CONTRIBUTING.md": rooms, "README.md": versions}
PLACE = re.compile(r"(?<=<!-- python docs/tables\.py -->\n\n).*?(?=\n\n<!-- end -->)", re.S)


def with_table(page: str, text: str) -> str:
    """A page's text with its table as it is now."""
    text, count = PLACE.subn(lambda _: TABLES[page](), text)
    assert count == 1, f"{page}: found {count} places for the table, wanted one"
    return text


if __name__ == "__main__":
    for page in TABLES:
        path = ROOT / page
        path.write_text(with_table(page, path.read_text()))
