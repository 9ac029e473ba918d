"""The timeline of a run folder: the groups' calls as lines of ``timeline.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from single_controller.call.stats import CallRecord

SHORT_SECONDS = 0.005
"""Calls that took less, and did not fail, are left out: an asynchronous rollout makes dozens per second."""

LONG_SECONDS = 0.05
"""Calls that took less have no lines for their ranks."""

MOST_RANKS = 64


class CallLines:
    """Turns the calls of one group into lines, each call once.

    Args:
        group: a `WorkerGroup`.
        first: number of its first call.

    Attributes:
        count: number of the next call.
    """

    def __init__(self, group: Any, first: int = 0) -> None:
        self._group = group
        self.count = first
        self._written: set[tuple[float, str]] = set()
        self._numbers: dict[tuple[float, str], int] = {}

    def new(self) -> list[dict[str, Any]]:
        """Return the lines of the calls that have ended since the last call."""
        calls = list(self._group.stats().calls)
        known = {(call.begun, call.method) for call in calls}
        self._written &= known
        self._numbers = {key: number for key, number in self._numbers.items() if key in known}
        lines: list[dict[str, Any]] = []
        for call in calls:
            key = call.begun, call.method
            if key not in self._numbers:
                self._numbers[key], self.count = self.count, self.count + 1
            if call.settled and key not in self._written:
                self._written.add(key)
                if call.failed or call.settled - call.begun >= SHORT_SECONDS:
                    lines += call_lines(self._group.name, self._numbers[key], call)
        return lines


def call_lines(group: str, number: int, call: CallRecord) -> Iterator[dict[str, Any]]:
    """Yield the driver's line of a call that has ended, and those of its ranks, if they were recorded.

    Args:
        group: name of the group.
        number: of the call in the group.
        call: the call.
    """
    whole: dict[str, Any] = {"group": group, "rank": None, "method": call.method, "call": number, "sent": call.begun}
    whole |= {"start": call.begun, "end": call.settled, "waits": _rounded(call.phases())}
    whole["bytes"] = [call.sent, call.returned]
    yield whole | ({"failed": call.failed} if call.failed else {})
    if call.settled - call.begun < LONG_SECONDS:
        return
    ranks = [(rank, part) for rank, part in call.ranks.items() if part.clock is not None]
    ranks.sort(key=lambda one: one[1].clock.began - one[1].clock.ended if one[1].clock else 0.0)  # longest first
    for rank, part in sorted(ranks[:MOST_RANKS], key=lambda one: one[0]):
        if part.clock is None:
            continue
        received, began, ended, _ = part.clock
        waits = {"queue": received - call.dispatched, "open": began - received, "return": part.arrived - ended}
        line = {"group": group, "rank": rank, "method": call.method, "call": number, "sent": call.begun}
        yield line | {
            "start": began,
            "end": ended,
            "waits": _rounded({name: max(0.0, seconds) for name, seconds in waits.items()}),
            "bytes": [part.sent, part.returned],
        }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}
