"""The location of packaged data: notebooks, models and schedules."""

from pathlib import Path

import toolkit


def stored_folder(name: str) -> Path:
    """The data folder of this name, which is beside the package in a checkout and inside it in a
    wheel."""
    package = Path(toolkit.__file__).parent
    beside = package.parent
    for folder in (beside / "data" / name, beside / name, package / f"_{name}"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"{name}: not found beside or inside {package.name!r}; "
        "reinstall with: python -m pip install mlsys-toolkit"
    )
