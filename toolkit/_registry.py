"""Tables that packages elsewhere add rows to: by a call, or by an entry point that makes the call.

A package names a module of its own in the entry-point group "toolkit.mixers". The module is
imported when a table is first read, not with the toolkit, and registers its rows.
"""

import functools
import importlib.metadata
import warnings
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Generic, TypeVar

GROUP = "toolkit.mixers"
Row = TypeVar("Row")


class Registry(MutableMapping[str, Row], Generic[Row]):
    """Rows by name, in the order of their coming; those of installed packages last."""

    def __init__(self, rows: Iterable[tuple[str, Row]]) -> None:
        self._rows = dict(rows)
        self._own = frozenset(self._rows)

    def register(self, name: str, row: Row) -> None:
        """Add a row, or replace one that was registered before; none of the package's own."""
        if not name.isidentifier():
            raise ValueError(f"name: got {name!r}, wanted one word of letters, digits and _")
        if name in self._own and self._rows[name] is not row:
            raise ValueError(
                f"name: got {name!r}, which is one of the package's own; choose another"
            )
        self._rows[name] = row

    def __getitem__(self, name: str) -> Row:
        if name not in self._rows and not name.startswith("_"):  # Python asks for such names
            load_entry_points()
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        load_entry_points()
        return iter(dict(self._rows))

    def __len__(self) -> int:
        load_entry_points()
        return len(self._rows)

    def __setitem__(self, name: str, row: Row) -> None:
        self._rows[name] = row

    def __delitem__(self, name: str) -> None:
        del self._rows[name]


@functools.cache
def _named_elsewhere() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=GROUP))


def load_entry_points() -> None:
    """Import the modules that installed packages name, once; a warning names those that fail."""
    waiting = _named_elsewhere()
    while waiting:  # each leaves the list first, since it may read the tables as it registers
        entry_point = waiting.pop(0)
        try:
            entry_point.load()
        except Exception as error:  # whatever a module of somebody else raises
            warnings.warn(
                f"{entry_point.value}, of entry point {entry_point.name!r}, did not load: {error}",
                stacklevel=2,
            )
