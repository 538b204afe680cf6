"""Tables that the repository's pages are given: `python docs/tables.py` writes them anew.

CONTRIBUTING.md says which room may import which: from `tests/support/floors.py`, and the map of
rooms in `toolkit/__init__.py`. README.md says which versions are tested: from .ci/legs.
docs/models.md says which models are read: from the tables of `toolkit.looped.checkpoints`.
docs/experts.md says how long programs with experts take to compile: from records in data/.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

from floors import FLOORS  # noqa: E402  (found by the line above)

import toolkit  # noqa: E402
from toolkit.looped.checkpoints.families import FAMILIES, NOT_READ, Family  # noqa: E402
from toolkit.looped.checkpoints.names import STYLES  # noqa: E402
from toolkit.looped.checkpoints.reading import FIXED, WHY  # noqa: E402
from toolkit.looped.checkpoints.settings import ARCHITECTURES  # noqa: E402
from toolkit.measure import read_records  # noqa: E402


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


def families() -> str:
    """Which families of published models are read and written, with what, and what is refused."""
    lines = [
        "| `model_type` | written | layers | block | experts | settings of its own | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    for style, family in sorted(FAMILIES.items()):
        text = f"as `{style}_text`" if f"{style}_text" in ARCHITECTURES else "no"
        written = "yes" if style in ARCHITECTURES else text
        block = {path.rpartition(".")[2]: value for path, value in family.switches.items()}
        own = [name for name, read in family.reads.items() if read and name != "hidden_act"]
        cells = (
            f"`{style}`", written, _layers(family), _ticked(_options(block)),
            f"`{family.router}`" if family.router else "", _ticked(own),
            ", ".join(f"`{name}` other than `{a[0]}`" for name, a in family.fixed.items()),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| refused of every family that does not read it | because |", "|---|---|"]
    lines += [
        f"| `{name}` other than `{allowed[0]}` | {WHY[name]} |" for name, allowed in FIXED.items()
    ]
    lines += ["", "| refused of the families above | because |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in WHY.items() if name not in FIXED]
    lines += ["", "| `model_type` that is not read | why |", "|---|---|"]
    return "\n".join(lines + [f"| `{style}` | {why} |" for style, why in NOT_READ.items()])


def compile_times() -> str:
    """How long gradients take to compile here, and training steps by libtpu."""
    found: dict[str, list[str]] = {}
    depths: list[str] = []
    for record in read_records(ROOT / "data/measurements/amd-epyc-2-cores/compiling.json"):
        case, _, contender = record.name.split(" | ")
        depth = re.search(r"of (\d+ layers)", case)
        if contender.endswith(", processor time to trace and compile") and depth:
            depths += [depth[1]] if depth[1] not in depths else []
            name = contender.rpartition(", ")[0]
            found.setdefault(name, []).append(f"{record.value:.1f} s")
    lines = [f"| gradient | {' | '.join(depths)} |", "|---|" + "---|" * len(depths)]
    lines += [f"| {name} | {' | '.join(times)} |" for name, times in found.items()]
    lines += ["", "| training step, compiled by libtpu | seconds |", "|---|---|"]
    for line in (ROOT / "data/planning/experts-libtpu-0.0.42.jsonl").read_text().splitlines():
        row = json.loads(line)
        lines.append(f"| {row['case'].replace(' | ', ', ')} | {row['seconds']:,.0f} |")
    return "\n".join(lines)


def _layers(family: Family) -> str:
    if family.layers == "listed":
        words = list(dict.fromkeys(family.words.values()))
    elif family.word or family.layers == "alike":
        words = [family.word or "full"]
    else:
        words = [w for w in STYLES[family.mixers] if w != "nope" or family.pattern]
    return _ticked(words)


def _options(block: Mapping[str, Any]) -> list[str]:
    return [
        (name if value else f"no {name}") if isinstance(value, bool) else f"{name}={value}"
        for name, value in block.items()
    ]


def _ticked(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


TABLES = {
    "CONTRIBUTING.md": rooms,
    "README.md": versions,
    "docs/models.md": families,
    "docs/experts.md": compile_times,
}
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
