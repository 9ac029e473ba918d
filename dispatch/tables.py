"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """The lines of a table of cells, each column as wide as its widest cell, aligned to the left or to the
    ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if right else str.ljust
    return ["  ".join(map(pad, cells, widths)).rstrip() for cells in rows]
