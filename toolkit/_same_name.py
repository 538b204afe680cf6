"""Other packages named `toolkit`, as many repositories have: Python imports the first of them."""

import os
import sys

MARK = "_checks.py"  # a file that every version of this package has


def others(*folders: str) -> list[str]:
    """Packages or modules of this name, in folders, that are not this package or a copy of it."""
    here = os.path.dirname(os.path.abspath(__file__))
    found = []
    for folder in folders:
        package = os.path.join(os.path.abspath(folder), "toolkit")
        # A folder without `__init__.py` gives way to a package, wherever that lies.
        if os.path.isfile(os.path.join(package, "__init__.py")):
            is_copy = os.path.isfile(os.path.join(package, MARK))
            found += [] if package == here or is_copy else [package]
        elif os.path.isfile(f"{package}.py"):
            found.append(f"{package}.py")
    return found


def hidden() -> str | None:
    """One line about another package on the path that this one hides, or None."""
    if not (found := others(*sys.path)):
        return None
    return f"import toolkit reads {os.path.dirname(__file__)} and hides {found[0]}: rename one"


def hiding() -> str | None:
    """One line about a package of this name in the working directory, or None."""
    if not (found := others(os.getcwd())):
        return None
    return f"started in this folder, Python imports {found[0]} instead of this package"
