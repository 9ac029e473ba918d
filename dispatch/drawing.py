"""Tables and pictures of a layout: which ranks share a shard, and which of them collects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

MAX_PICTURE_RANKS = 512
"""A larger layout has no picture; nobody could read it."""

COLORS = ("#cfe3f7", "#fde2c4", "#d5efd0", "#f6cfd4", "#e2d8f3", "#fff3b8", "#cdeeea", "#e8ddd2")
"""Fill colors of the panels, in turn."""

LETTER = 6.2
"""Width of a letter at size 10, in the widest of the usual fonts."""

_BOX_WIDTH, _BOX_HEIGHT, _GAP, _TITLE, _WIDTH = 96, 40, 8, 24, 920

Axes = Mapping[str, Sequence[int]]


class View(NamedTuple):
    """One way of sharding that is drawn: the axes, or a mesh. See `dispatch.layout.Routing` for the last three."""

    title: str
    shards: int
    shard_of: Sequence[int | None]
    collecting: Sequence[int]


def table(world_size: int, axes: Axes, views: Sequence[View]) -> str:
    """One line per rank: its coordinates, its shards, and ``*`` where it collects for a shard."""
    columns = [["rank", *map(str, range(world_size))]]
    columns += [[axis, *map(str, coordinates)] for axis, coordinates in axes.items()]
    for view in views:
        collecting = frozenset(view.collecting)
        shards = (f"{shard} {'*' if rank in collecting else ' '}" for rank, shard in enumerate(view.shard_of))
        columns.append([f"{view.title}  ", *shards])
    widths = [max(map(len, column)) for column in columns]
    rows = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in zip(*columns, strict=True))
    legend = ["* collecting rank of its shard"] if views else []
    return "\n".join([*(row.rstrip() for row in rows), *legend])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def picture(world_size: int, axes: Axes, views: Sequence[View]) -> str | None:
    """An SVG with a panel per shard and the ranks that share it inside, pipeline stages from left to right. Collecting
    ranks have a thick border. None for more than `MAX_PICTURE_RANKS` ranks, or if there is nothing to show."""
    if not views or world_size > MAX_PICTURE_RANKS:
        return None
    parts: list[str] = []
    y = _GAP
    for view in views:
        heading = "MEGATRON modes, by dp" if view.title == "shard" else view.title
        count = f"{view.shards} shard{'s' if view.shards > 1 else ''}"
        parts.append(_text(_GAP, y + 15, f"{heading}: {count}", size=13, weight="bold"))
        y = _panels(parts, world_size, axes, view, y + _TITLE)
    height = y + _TITLE - _GAP
    legend = "Ranks in one panel get the same shard. Collecting ranks have a thick border."
    parts.append(_text(_GAP, height - 8, legend, size=11))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>{"".join(parts)}</svg>'
    )


def _panels(parts: list[str], world_size: int, axes: Axes, view: View, top: int) -> int:
    """Draw a panel per shard, as many in a row as fit, and return the y coordinate below them."""
    ranks_of: list[list[int]] = [[] for _ in range(view.shards)]
    for rank, shard in enumerate(view.shard_of):
        if shard is not None:
            ranks_of[shard].append(rank)
    labels = [_coordinates(axes, rank) for rank in range(world_size)]
    box = max([_BOX_WIDTH, *(12 + math.ceil(LETTER * len(label)) for label in labels)])
    grids = [_grid(axes, ranks, box) for ranks in ranks_of]
    collecting = frozenset(view.collecting)
    x, row_height = _GAP, 0
    for shard, grid in enumerate(grids):
        width = max(len(row) for row in grid) * (box + _GAP) + _GAP
        height = len(grid) * (_BOX_HEIGHT + _GAP) + _GAP + 16
        if x > _GAP and x + width > _WIDTH:
            x, top, row_height = _GAP, top + row_height + _GAP, 0
        color = COLORS[shard % len(COLORS)]
        parts.append(f'<rect x="{x}" y="{top}" width="{width}" height="{height}" rx="6" fill="{color}"/>')
        parts.append(_text(x + _GAP, top + 14, f"shard {shard}", size=11))
        for line, ranks in enumerate(grid):
            for column, rank in enumerate(ranks):
                left, upper = x + _GAP + column * (box + _GAP), top + 22 + line * (_BOX_HEIGHT + _GAP)
                border = 'stroke="#222" stroke-width="2.5"' if rank in collecting else 'stroke="#999" stroke-width="1"'
                parts.append(
                    f'<rect x="{left}" y="{upper}" width="{box}" height="{_BOX_HEIGHT}" rx="4" fill="white" {border}/>'
                )
                weight = "bold" if rank in collecting else "normal"
                parts.append(_text(left + 6, upper + 16, f"rank {rank}", size=12, weight=weight))
                parts.append(_text(left + 6, upper + 32, labels[rank], size=10))
        x, row_height = x + width + _GAP, max(row_height, height)
    return top + row_height + 2 * _GAP


def _grid(axes: Axes, ranks: Sequence[int], box: int) -> list[list[int]]:
    """The ranks of one shard: one line per (cp, tp) coordinate, pipeline stages from left to right."""

    def at(axis: str, rank: int) -> int:
        return axes[axis][rank] if axis in axes else 0

    lines: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: at("pp", rank)):
        lines.setdefault((at("cp", rank), at("tp", rank)), []).append(rank)
    per_line = max(1, _WIDTH // (box + _GAP) - 1)
    return [
        line[start : start + per_line] for _, line in sorted(lines.items()) for start in range(0, len(line), per_line)
    ]


def _coordinates(axes: Axes, rank: int) -> str:
    return " ".join(f"{axis}{coordinates[rank]}" for axis, coordinates in axes.items() if max(coordinates) > 0)


def _text(x: int, y: int, words: str, size: int, weight: str = "normal") -> str:
    """A line of text; (x, y) is the left end of its baseline."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="#222">{escape(words)}</text>'
