"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """The lines of a table, each column as wide as its widest cell.

    Args:
        rows: the cells of each row, all of one length.
        right: align the cells to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if right else str.ljust
    return ["  ".join(map(pad, cells, widths)).rstrip() for cells in rows]
