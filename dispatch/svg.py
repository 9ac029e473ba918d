"""The few pieces of SVG that our pictures for notebooks are made of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLORS = ("#cfe3f7", "#fde2c4", "#d5efd0", "#f6cfd4", "#e2d8f3", "#fff3b8", "#cdeeea", "#e8ddd2")
"""Fills of panels, one after the other."""

LETTER = 6.2
"""Width of a letter at size 10, in the widest of the usual fonts."""


def text(x: int, y: int, words: str, size: int, weight: str = "normal") -> str:
    """A line of text; ``x``, ``y`` is the left end of its base line."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="#222">{escape(words)}</text>'


def document(width: int, height: int, parts: Sequence[str]) -> str:
    """The whole picture, on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>'
    )
