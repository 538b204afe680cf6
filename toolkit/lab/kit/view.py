"""The result of a panel: numbers, and the table and caption made of them."""

import html
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from toolkit.measure.words import SPOKEN_UNITS, in_words

Progress = tuple[int, int, str]
"""Pieces done, pieces in all, what is being done."""

Data = dict[str, Any]
"""Heading -> per row a number, a pair (number, error) or a word. A heading ends with its unit in
parentheses: one of `SPOKEN_UNITS`, which its cells then speak, or any other."""

Points = tuple[tuple[float, float], ...]
"""A curve: points, straight between them."""

_CELL = "padding:2px 12px;text-align:right;border-bottom:1px solid #e3e7eb"


def heights_at(points: Points, places: np.ndarray) -> np.ndarray:
    """A curve's heights at places in [0, 1]."""
    return np.interp(places, *np.array(points).T)


class Table(NamedTuple):
    """The plotted numbers as text: headings, and as many cells in every row."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


class View:
    """The result of `Panel.compute`: numbers to draw, with a caption and a table."""

    def data(self) -> Data:
        """The plotted numbers, in columns of one length; `pandas.DataFrame` takes them."""
        raise NotImplementedError

    def cells(self) -> dict[str, list[str]]:
        """`data()` in words, column by column: what the table shows."""
        return {name: [in_cell(v, unit) for v in vs] for name, unit, vs in self._columns()}

    def row(self, index: int) -> dict[str, str]:
        """One row of `cells()`, heading -> cell, for the caption."""
        return {name: in_cell(values[index], unit) for name, unit, values in self._columns()}

    def _columns(self) -> Iterator[tuple[str, str, Any]]:
        for heading, values in self.data().items():
            name, _, unit = heading.removesuffix(")").partition(" (")
            yield (name if unit in SPOKEN_UNITS else heading), unit, values

    def sentence(self) -> str:
        """The caption, which is also the alternative text and the plain-text form."""
        raise NotImplementedError

    def footnote(self) -> str:
        """The note below the plots: the origin of the numbers, and the meaning of marks."""
        return ""

    def table(self) -> Table:
        """`cells()`, row by row."""
        cells = self.cells()
        return Table(tuple(cells), list(zip(*cells.values(), strict=True)))


def in_cell(value: Any, unit: str = "") -> str:
    """A number as tables and captions write it; infinity stands for a diverged run."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return " ± ".join(in_cell(part, unit) for part in value)
    if value is None or np.isnan(value):
        return "–"
    if np.isinf(value):
        return "diverged"
    return in_words(value, unit if unit in SPOKEN_UNITS else "")


def as_html(table: Table) -> str:
    """A table of numbers as one `<table>` with proper header cells, its text escaped."""
    head = "".join(f"<th scope='col' style='{_CELL}'>{html.escape(c)}</th>" for c in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td style='{_CELL}'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return f"<table style='border-collapse:collapse'><tr>{head}</tr>{body}</table>"
