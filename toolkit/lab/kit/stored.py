"""Where what comes with the toolkit lies: models and schedules, found beforehand."""

from pathlib import Path

import toolkit


def stored_folder(name: str) -> Path:
    """The folder "models" or "schedules": beside the package in a checkout, inside a wheel."""
    package = Path(toolkit.__file__).parent
    for folder in (package.parent / "data" / name, package / f"_{name}"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"{name}: not found beside or inside {package.name!r}; "
        "reinstall with: python -m pip install mlsys-toolkit"
    )
