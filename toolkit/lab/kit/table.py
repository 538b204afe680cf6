"""What a panel shows, without its widgets: numbers to draw that also tell themselves in words."""

import html
from typing import NamedTuple, Protocol

Progress = tuple[int, int, str]
"""Pieces done, pieces in all, what is being done."""


class Table(NamedTuple):
    """The plotted numbers as text.

    Attributes:
        columns: headings, with units.
        rows: one tuple of cells a row, as many as there are columns.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


class View(Protocol):
    """What `Panel.compute` returns: numbers to draw that can also tell themselves in words."""

    def sentence(self) -> str:
        """The figure in words: caption, alternative text and plain-text form in one."""
        ...

    def table(self) -> Table:
        """The plotted numbers."""
        ...


def as_html(table: Table) -> str:
    """A table of numbers as HTML with proper header cells.

    Args:
        table: headings and rows of text; escaped here.

    Returns:
        One `<table>` element.

    Cost:
        Linear in the number of cells.
    """
    head = "".join(f"<th scope='col' style='{_CELL}'>{html.escape(c)}</th>" for c in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td style='{_CELL}'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return f"<table style='border-collapse:collapse'><tr>{head}</tr>{body}</table>"


_CELL = "padding:2px 12px;text-align:right;border-bottom:1px solid #e3e7eb"
