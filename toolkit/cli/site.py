"""The subcommand of `toolkit` for the documentation site."""

from pathlib import Path
from typing import Annotated

import tyro


def export_site(
    output: Path = Path("build/site"),
    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    python: bool = True,
) -> None:
    """Record the panels over grids of settings and build the site, which needs no kernel.

    Args:
        output: the folder of pages; opens from the disk or from any file server.
        only: record only this panel, or questions-LESSON (repeatable); the others stay as they are.
        python: bring Python (Pyodide) and MathJax from npm, so that the site checks exercises and
            sets formulas without a network.
    """
    from toolkit.lab.site.export import add_python, build_site, record_all

    for path in add_python() if python else ():
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", flush=True)
    for path in record_all(only):
        print(f"{path.stem}: {path.stat().st_size / 1000:.0f} kB", flush=True)
    build_site(output)
    print(f"The site is built. Open {output / 'index.html'} in a browser.")
