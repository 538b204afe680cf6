"""The documentation site with its panels recorded, as one folder that needs no server."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import toolkit
from toolkit.lab.site.panels import REPLAYED
from toolkit.lab.site.replay import as_script, record_panel

SCRIPTS = "_static/replays"


def docs_folder() -> Path:
    """The site's sources, which are in a checkout only."""
    folder = Path(toolkit.__file__).parents[1] / "docs"
    if not (folder / "conf.py").is_file():
        raise ValueError("the site's sources are not installed; run this in a checkout of toolkit")
    return folder


def record_panels(names: Sequence[str] = ()) -> Iterator[Path]:
    """Record panels by name, all unless some are named, where the site looks for them."""
    folder = docs_folder() / SCRIPTS
    if unknown := [name for name in names if name not in REPLAYED]:
        raise ValueError(f"only: got {unknown[0]!r}, wanted some of {', '.join(REPLAYED)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or REPLAYED:
        one, path = REPLAYED[name], folder / f"{name}.js"
        path.write_text(as_script(name, record_panel(one.make(), one.grid)), encoding="utf-8")
        yield path


def build_site(output: Path) -> None:
    """Build the pages; a warning is an error."""
    if importlib.util.find_spec("sphinx") is None:
        raise ValueError("Sphinx is missing; install it with: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q"]
    done = subprocess.run([*command, str(docs_folder()), str(output)], check=False)
    if done.returncode:
        raise ValueError("the site was not built; Sphinx says why above")
