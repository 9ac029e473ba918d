"""How a `PoolPlan` is shown: tables as text, and a picture for a notebook."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dispatch.svg import COLORS, LETTER, document, text
from single_controller.ray.packing import amount_of

if TYPE_CHECKING:
    from single_controller.ray.dry_run import NodePlan, PoolPlan, RankPlan

LARGEST_PICTURE = 512
"""Ranks beyond which there is no picture: nobody could read it."""

_WIDTH, _GAP, _BOX_WIDTH, _BOX_HEIGHT, _LINE = 920, 8, 104, 40, 16
_MOST_NODES = 64
_ORDER = ("CPU", "GPU", "memory")


def table(plan: PoolPlan) -> str:
    """The state in words, a line for each node, what is missing, and a line for each rank."""
    parts = [plan.headline, *plan.asked.splitlines(), *_node_table(plan)]
    if plan.state != "placed":
        parts.append(f"missing: {plan.missing}")
    return "\n".join([*parts, *_rank_table(plan)])


def picture(plan: PoolPlan) -> str | None:
    """An SVG: what each node has free of what it has, and in colours by entry the ranks that lie there. What is missing
    stands below in words. None for more ranks or nodes than anybody could read."""
    if len(plan.ranks) > LARGEST_PICTURE or len(plan.nodes) > _MOST_NODES:
        return None
    parts: list[str] = []
    y = _GAP
    for line, words in enumerate([plan.headline, *plan.asked.splitlines()]):
        parts.append(text(_GAP, y + 14, words, size=11 if line else 13, weight="normal" if line else "bold"))
        y += _LINE + 4
    for node in plan.nodes:
        y = _panel(parts, plan, node, y) + _GAP
    if plan.state != "placed":
        parts.append(text(_GAP, y + 12, f"missing: {plan.missing}", size=11))
        y += _LINE + _GAP
    return document(_WIDTH, y, parts)


def _panel(parts: list[str], plan: PoolPlan, node: NodePlan, top: int) -> int:
    """Draw one node. Returns where it ends."""
    ranks = [rank for rank in plan.ranks if rank.node_id == node.node_id]
    width = max([_BOX_WIDTH, *(12 + math.ceil(LETTER * len(_place(rank))) for rank in ranks)])
    per_line = max(1, (_WIDTH - 3 * _GAP) // (width + _GAP))
    lines = [ranks[start : start + per_line] for start in range(0, len(ranks), per_line)]
    words = _has(node)
    height = _GAP + _LINE * (1 + len(words)) + len(lines) * (_BOX_HEIGHT + _GAP) + _GAP
    parts.append(
        f'<rect x="{_GAP}" y="{top}" width="{_WIDTH - 2 * _GAP}" height="{height}" rx="6" fill="#f2f2f2" '
        f'stroke="{"#b00020" if node.lacks else "#ccc"}"/>'
    )
    parts.append(text(2 * _GAP, top + _LINE, f"{node.address} ({node.hostname})", size=12, weight="bold"))
    for number, line in enumerate(words):
        parts.append(text(2 * _GAP, top + _LINE * (2 + number), line, size=10))
    y = top + _GAP + _LINE * (1 + len(words)) + _GAP // 2
    for row in lines:
        for column, rank in enumerate(row):
            _box(parts, rank, 2 * _GAP + column * (width + _GAP), y, width)
        y += _BOX_HEIGHT + _GAP
    return top + height


def _has(node: NodePlan) -> list[str]:
    free = (
        f"{name} {amount_of(name, node.free.get(name, 0.0))} of {amount_of(name, node.total.get(name, 0.0))}"
        for name in _resources([node])
    )
    lines = ["free: " + ", ".join(free)]
    if node.lacks:
        lines.append("lacks " + ", ".join(f"{amount_of(name, amount)} {name}" for name, amount in node.lacks.items()))
    letters = int((_WIDTH - 4 * _GAP) / LETTER)
    return [part for line in lines for part in textwrap.wrap(line, letters)]


def _box(parts: list[str], rank: RankPlan, x: int, y: int, width: int) -> None:
    color = "white" if rank.entry is None else COLORS[rank.entry % len(COLORS)]
    parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{_BOX_HEIGHT}" rx="4" fill="{color}" stroke="#999"/>')
    parts.append(text(x + 6, y + 16, f"rank {rank.rank}", size=12))
    parts.append(text(x + 6, y + 32, _place(rank), size=10))


def _place(rank: RankPlan) -> str:
    device = "device ?" if rank.devices is None else f"device {rank.device}" if rank.devices else ""
    bundle = "" if rank.bundle is None else f"entry {rank.entry} bundle {rank.bundle}"
    return ", ".join(part for part in (bundle, device) if part)


def _resources(nodes: Sequence[NodePlan]) -> list[str]:
    """The resources that are shown: CPU, GPU and memory, then custom ones by name."""
    names = {name for node in nodes for name in node.total}
    known = [name for name in _ORDER if name in names]
    return [*known, *sorted(names - set(known))]


def _node_table(plan: PoolPlan) -> list[str]:
    resources = _resources(plan.nodes)
    counted = any(node.now is not None for node in plan.nodes)
    lacking = any(node.lacks for node in plan.nodes)
    heading = ["node", *(f"{name} free/total" for name in resources)]
    heading += ["processes now/at most"] * counted + ["lacks"] * lacking
    rows = [heading]
    for node in plan.nodes:
        amounts = [_free_of_total(name, node) for name in resources]
        lacks = ", ".join(f"{amount_of(name, amount)} {name}" for name, amount in node.lacks.items()) or "-"
        row = [f"{node.address} ({node.hostname})", *amounts]
        rows.append(row + [f"{node.now}/{node.most}"] * counted + [lacks] * lacking)
    return _aligned(rows)


def _free_of_total(name: str, node: NodePlan) -> str:
    free, total = node.free.get(name, 0.0), node.total.get(name, 0.0)
    if name == "memory":
        return f"{free / 2**30:.4g}/{total / 2**30:.4g} GiB"
    return f"{free:g}/{total:g}"


def _rank_table(plan: PoolPlan) -> list[str]:
    if not plan.ranks:
        return []
    rows = [["rank", "node", "entry", "bundle", "device"]]
    for rank in plan.ranks:
        expected = "~" if plan.state == "fits" and rank.devices else ""
        device = "?" if rank.devices is None else f"{expected}{rank.device or '-'}"
        entry, bundle = ("-" if number is None else str(number) for number in (rank.entry, rank.bundle))
        rows.append([str(rank.rank), f"{rank.address} ({rank.hostname})", entry, bundle, device])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
