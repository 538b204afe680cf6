"""The documentation site with its panels recorded, as one folder that needs no server."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import toolkit
from toolkit.lab.lessons.catalogue import INSTRUMENTS, LESSONS
from toolkit.lab.site.panels import REPLAYED
from toolkit.lab.site.python import vendor
from toolkit.lab.site.questions import record_questions
from toolkit.lab.site.replay import as_script, record_panel
from toolkit.parallel import simulate_devices

SCRIPTS = "_static/replays"


def docs_folder() -> Path:
    """The site's sources, which are in a checkout only."""
    folder = Path(toolkit.__file__).parents[1] / "docs"
    if not (folder / "conf.py").is_file():
        raise ValueError("the site's sources are not installed; run this in a checkout of toolkit")
    return folder


def record_all(names: Sequence[str] = ()) -> Iterator[Path]:
    """Record panels and the lessons' questions, all unless some are named, for the site to find."""
    folder = docs_folder() / SCRIPTS
    questions = {f"questions-{lesson}": lesson for lesson in (*LESSONS, *INSTRUMENTS)}
    known = [*REPLAYED, *questions]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"only: got {unknown[0]!r}, wanted some of {', '.join(known)}")
    simulate_devices(8)  # the answers of some lessons count what a compiled program sends
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or known:
        if name in questions:
            recorded = record_questions(questions[name])
        else:
            recorded = record_panel(REPLAYED[name].make(), REPLAYED[name].grid)
        path = folder / f"{name}.js"
        path.write_text(as_script(name, recorded), encoding="utf-8")
        yield path


def add_python() -> Iterator[Path]:
    """Bring what the site checks exercises and sets formulas with, from npm."""
    yield from vendor(docs_folder() / "_static")


def build_site(output: Path) -> None:
    """Build the pages; a warning is an error."""
    if importlib.util.find_spec("sphinx") is None:
        raise ValueError("Sphinx is missing; install it with: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q"]
    done = subprocess.run([*command, str(docs_folder()), str(output)], check=False)
    if done.returncode:
        raise ValueError("the site was not built; Sphinx says why above")
