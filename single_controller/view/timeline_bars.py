"""What the page draws of a timeline: lanes, and bars in them. Bars next to each other that are less than a pixel apart
are merged, so that a time with a million calls has as many bars as pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from single_controller.view.run_reader import as_number

MAX_LANES = 2_000
"""Lanes that are shown at most."""


def bars_of(
    parts: Sequence[Mapping[str, Any]], begin: float, end: float, pixels: int, most: int
) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Put the parts of a timeline into lanes.

    Args:
        parts: lines of timeline.jsonl.
        begin: of what is shown, in seconds since the epoch.
        end: likewise.
        pixels: how wide it is shown.
        most: how many bars to return at most. The longest stay.

    Returns:
        The lanes: the script's parts, then of each group its calls and its ranks. A lane has ``group``, ``rank``, and
        ``busy``, the share of the time in which it did something. And the bars: [number of the lane, begin and end in
        seconds after ``begin``, method, number of parts, seconds that it waited before it began, whether one failed].
    """
    found: dict[tuple[str, int], list[tuple[float, float, str, float, bool]]] = {}
    for part in parts:
        start, stop = as_number(part.get("start")), as_number(part.get("end"))
        if not begin <= stop < math.inf or not -math.inf < start <= end:  # also if one is no number
            continue
        rank = part.get("rank")
        waits = part.get("waits")
        waited = sum(as_number(waits.get(name, 0.0)) for name in ("queue", "open")) if isinstance(waits, dict) else 0.0
        key = str(part.get("group") or ""), rank if isinstance(rank, int) else -1
        found.setdefault(key, []).append((start, stop, str(part.get("method"))[:80], waited, bool(part.get("failed"))))
    lanes: list[dict[str, Any]] = []
    bars: list[list[Any]] = []
    pixel = (end - begin) / pixels
    for key in sorted(found, key=lambda one: (one[0] != "", one))[:MAX_LANES]:
        busy, until = 0.0, begin
        merged: dict[str, list[Any]] = {}  # method -> its last bar
        for start, stop, method, waited, failed in sorted(found[key]):
            busy += max(0.0, min(stop, end) - max(start, until))
            until = max(until, min(stop, end))
            last = merged.get(method)
            if last is not None and start - begin - last[2] < pixel and stop - start < 4 * pixel:
                last[2] = max(last[2], stop - begin)
                last[4] += 1
                last[5] += waited
                last[6] = last[6] or failed
                continue
            merged[method] = bar = [len(lanes), start - begin, stop - begin, method, 1, waited, failed]
            bars.append(bar)
        lanes.append({"group": key[0], "rank": None if key[1] < 0 else key[1], "busy": busy / max(end - begin, 1e-9)})
    if len(bars) > most:
        bars = sorted(bars, key=lambda bar: bar[1] - bar[2])[:most]
    return lanes, bars
