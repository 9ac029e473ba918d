"""How a Layout is shown: a table as text, and a picture for a notebook.

Both show, for the MEGATRON modes and for every named mesh, which ranks share a shard and which of them answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dispatch.errors import DispatchError
from dispatch.svg import COLORS, LETTER, document, text

if TYPE_CHECKING:
    from dispatch.layout import Layout, Routing

LARGEST_PICTURE = 512
"""Ranks beyond which there is no picture: nobody could read it."""

_BOX_WIDTH, _BOX_HEIGHT, _GAP, _TITLE, _WIDTH = 96, 40, 8, 24, 920


def table(layout: Layout) -> str:
    """One line for each rank: its coordinates, its shard, and ``*`` where it answers for the shard."""
    axes = list(layout.axes)
    views = list(_views(layout))
    columns = [["rank", *map(str, range(layout.world_size))]]
    columns += [[axis, *map(str, layout.axes[axis])] for axis in axes]
    for title, routing in views:
        answers = frozenset(routing.answers)
        shards = (f"{shard} {'*' if rank in answers else ' '}" for rank, shard in enumerate(routing.shard_of))
        columns.append([f"{title}  ", *shards])
    widths = [max(map(len, column)) for column in columns]
    rows = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in zip(*columns, strict=True))
    legend = ["* answers for its shard"] if views else []
    return "\n".join([*(row.rstrip() for row in rows), *legend])


def picture(layout: Layout) -> str | None:
    """An SVG: a panel for each shard, the ranks that share it inside, stages from left to right; a thick border
    where a rank answers. None for a layout of more than `LARGEST_PICTURE` ranks, or without anything to show."""
    views = list(_views(layout))
    if not views or layout.world_size > LARGEST_PICTURE:
        return None
    parts: list[str] = []
    y = _GAP
    for title, routing in views:
        heading = "MEGATRON modes, by dp" if title == "shard" else title
        count = f"{routing.shards} shard{'s' if routing.shards > 1 else ''}"
        parts.append(text(_GAP, y + 15, f"{heading}: {count}", size=13, weight="bold"))
        y = _panels(parts, layout, routing, y + _TITLE)
    height = y + _TITLE - _GAP
    parts.append(
        text(_GAP, height - 8, "ranks in one panel get the same shard; one with a thick border answers", size=11)
    )
    return document(_WIDTH, height, parts)


def _views(layout: Layout) -> Iterator[tuple[str, Routing]]:
    """(name, routing) of the axes and of every mesh; one that leaves a gap has no routing to show."""
    try:
        if layout.known:
            yield "shard", layout.by_dp
    except DispatchError:
        pass
    for name, mesh in layout.meshes.items():
        try:
            yield f"mesh {name}", mesh.routing
        except DispatchError:
            continue


def _panels(parts: list[str], layout: Layout, routing: Routing, top: int) -> int:
    """Draw a panel for each shard, as many in a row as fit. Returns where the next thing may begin."""
    ranks_of: list[list[int]] = [[] for _ in range(routing.shards)]
    for rank, shard in enumerate(routing.shard_of):
        if shard is not None:
            ranks_of[shard].append(rank)
    box = max([_BOX_WIDTH, *(12 + math.ceil(LETTER * len(_place(layout, r))) for r in range(layout.world_size))])
    grids = [_grid(layout, ranks, box) for ranks in ranks_of]
    x, row_height = _GAP, 0
    for shard, grid in enumerate(grids):
        width = max(len(row) for row in grid) * (box + _GAP) + _GAP
        height = len(grid) * (_BOX_HEIGHT + _GAP) + _GAP + 16
        if x > _GAP and x + width > _WIDTH:
            x, top, row_height = _GAP, top + row_height + _GAP, 0
        color = COLORS[shard % len(COLORS)]
        parts.append(f'<rect x="{x}" y="{top}" width="{width}" height="{height}" rx="6" fill="{color}"/>')
        parts.append(text(x + _GAP, top + 14, f"shard {shard}", size=11))
        for line, ranks in enumerate(grid):
            for column, rank in enumerate(ranks):
                left = x + _GAP + column * (box + _GAP)
                _box(parts, layout, rank, rank in routing.answers, left, top + 22 + line * (_BOX_HEIGHT + _GAP), box)
        x, row_height = x + width + _GAP, max(row_height, height)
    return top + row_height + 2 * _GAP


def _grid(layout: Layout, ranks: Sequence[int], box: int) -> list[list[int]]:
    """The ranks of one shard in lines: one line for each tp and cp coordinate, its stages from left to right."""
    lines: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: layout.coordinate("pp", rank)):
        lines.setdefault((layout.coordinate("cp", rank), layout.coordinate("tp", rank)), []).append(rank)
    per_line = max(1, _WIDTH // (box + _GAP) - 1)
    return [
        line[start : start + per_line] for _, line in sorted(lines.items()) for start in range(0, len(line), per_line)
    ]


def _box(parts: list[str], layout: Layout, rank: int, answers: bool, x: int, y: int, width: int) -> None:
    border = 'stroke="#222" stroke-width="2.5"' if answers else 'stroke="#999" stroke-width="1"'
    parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{_BOX_HEIGHT}" rx="4" fill="white" {border}/>')
    weight = "bold" if answers else "normal"
    parts.append(text(x + 6, y + 16, f"rank {rank}", size=12, weight=weight))
    parts.append(text(x + 6, y + 32, _place(layout, rank), size=10))


def _place(layout: Layout, rank: int) -> str:
    return " ".join(f"{axis}{layout.coordinate(axis, rank)}" for axis in layout.axes if layout.size(axis) > 1)
