"""Tables as text."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], sides: str) -> str:
    """Aligned lines, one per row; `sides` has "<" or ">" for each column, left or right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows)
