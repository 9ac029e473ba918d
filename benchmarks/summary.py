"""Draw docs/images/benchmark.svg and rl_step.svg, the README's pictures, from the tables in docs/benchmark.md.

    python -m benchmarks.summary

The SVG is written by hand instead of by matplotlib, so that its colors follow the reader's light or dark scheme.
"""

from __future__ import annotations

import math
import re
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLE = DOCS / "benchmark.md"
PICTURE = DOCS / "images" / "benchmark.svg"
STEPS = DOCS / "images" / "rl_step.svg"

PANELS = {
    "broadcast of 256 MB to 4 ranks": "Broadcast: 256 MB to 4 ranks",
    "dp2 x tp2 x pp2, 256 MB in and out": "dp 2 x tp 2 x pp 2: 256 MB in and out",
    "echo of 512 MB over dp 4": "Echo: 512 MB to 4 dp ranks and back",
    "chain of 256 MB, 4 -> 4 ranks": "Chain: 256 MB from group to group, 4 -> 4 ranks",
}
"""Case in the table -> title of its panel."""

BARS = {
    "this library": ("ours", "this library: private copies"),
    "this library, views": ("ours", "this library: views"),
    "plain Ray": ("other", "plain Ray: tensors"),
    "plain Ray, NumPy by hand": ("other", "plain Ray: numpy"),
    "verl": ("other", "verl 0.9.1"),
    "verl, NumPy mode": ("other", "verl 0.9.1, numpy mode"),
    "Monarch": ("other", "torchmonarch 0.7.0: tensors"),
}
"""Label of a bar -> its CSS class, and its name in the table."""

PEERS = ("TRL 1.16.0", "a loop by hand")
"""Names in the tables of steps that are not this library."""

LEAST, MOST = 10.0, 10_000.0  # milliseconds
WIDTH, BAR, LABEL, SPAN = 860, 15, 160, 190

_STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 12px }
  .ours { fill: #1b7f5c } .other { fill: #9aa4af } .grid { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) {
    text { fill: #d1d7e0 } .ours { fill: #3fb98a } .other { fill: #6b7580 } .grid { stroke: #3d444d }
  }
"""


class Row(NamedTuple):
    """One cell of the table."""

    median: str
    n: str


def read_table(text: str) -> dict[str, dict[str, Row]]:
    """Parse the table, with a column for each case, into case -> variant -> row."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    start = next(place for place, cells in enumerate(lines) if set(PANELS) <= set(cells))
    cases: dict[str, dict[str, Row]] = {title: {} for title in lines[start][1:]}
    for name, *cells in takewhile(lambda cells: len(cells) > 1, lines[start + 2 :]):
        for case, cell in zip(cases.values(), cells, strict=True):
            if found := re.fullmatch(r"([\d.]+ m?s)(?: \(n = (\d+)\))?", cell):
                case[name] = Row(found[1], found[2] or "10")
    return cases


def milliseconds(median: str) -> float:
    """Convert a time of the table, such as "76.2 ms" or "1.54 s", to milliseconds."""
    number, unit = median.split()
    return float(number) * (1000 if unit == "s" else 1)


def draw(cases: dict[str, dict[str, Row]]) -> str:
    """Return the picture as SVG."""
    height = 40 + len(BARS) * BAR
    lines = []
    for number, (case, title) in enumerate(PANELS.items()):
        left, top = (number % 2) * WIDTH // 2, (number // 2) * height
        lines.append(f'<text class="title" x="{left + 4}" y="{top + 16}">{title.replace(">", "&gt;")}</text>')
        bottom = top + 26 + len(BARS) * BAR
        for power in range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1):
            x = left + LABEL + _length(10.0**power)
            lines.append(f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="{top + 24}" y2="{bottom}"/>')
        for place, (label, (colour, name)) in enumerate(BARS.items()):
            y = top + 26 + place * BAR
            row = cases[case][name]
            length = _length(milliseconds(row.median))
            n = "" if row.n == "10" else f" (n = {row.n})"
            lines += _bar(left + LABEL, y, length, colour, label, f"{row.median}{n}")
    return _svg(lines, 2 * height)


def read_steps(text: str) -> dict[str, dict[str, float]]:
    """Parse the tables of `benchmarks.rl_step` into model -> variant -> seconds per step."""
    models: dict[str, dict[str, float]] = {}
    rows: dict[str, float] = {}
    for line in text.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells and name.startswith("Llama "):
            rows = models[name] = {}
        elif cells and (found := re.match(r"[\d.]+", cells[0])):
            rows[name] = float(found[0])
        elif not cells:
            rows = {}  # those of another table
    return models


def draw_steps(models: dict[str, dict[str, float]]) -> str:
    """Return the picture of the steps as SVG, with a panel for each model, each on a linear scale of its own."""
    lines, top = [], 0
    for model, rows in models.items():
        lines.append(f'<text class="title" x="4" y="{top + 16}">A step of GRPO, {model}: seconds</text>')
        for place, (name, seconds) in enumerate(rows.items()):
            y, length = top + 26 + place * BAR, round(3 * SPAN * seconds / max(rows.values()), 1)
            colour = "other" if name in PEERS else "ours"
            lines += _bar(LABEL + 40, y, length, colour, name, f"{seconds:.2f}")
        top += 40 + len(rows) * BAR
    return _svg(lines, top)


def _bar(x: int, y: int, length: float, colour: str, label: str, value: str) -> list[str]:
    """Return a bar that begins at ``x``, with its label before it and its value behind it."""
    return [
        f'<text x="{x - 6}" y="{y + 11}" text-anchor="end">{label}</text>',
        f'<rect class="{colour}" x="{x}" y="{y + 2}" width="{length:g}" height="{BAR - 4}" rx="2"/>',
        f'<text x="{x + length + 5:g}" y="{y + 11}">{value}</text>',
    ]


def _svg(lines: list[str], height: int) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    body = "\n".join(lines)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'


def _length(time: float) -> float:
    """Return the length of a bar in pixels, on a logarithmic scale."""
    return round(SPAN * math.log10(time / LEAST) / math.log10(MOST / LEAST), 1)


if __name__ == "__main__":
    PICTURE.write_text(draw(read_table(TABLE.read_text())))
    STEPS.write_text(draw_steps(read_steps(TABLE.read_text())))
