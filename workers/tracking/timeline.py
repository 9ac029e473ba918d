"""The timeline of a run folder: the groups' calls as lines of ``timeline.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from heapq import nlargest
from typing import Any

from dispatch.register import label
from single_controller.call.stats import CallRecord

SHORT_SECONDS = 0.005
"""Calls that took less, and did not fail, are left out."""

POLL_SECONDS = 2.0
"""The same for `RolloutWorker.exchange`: a stream polls its workers dozens of times per second."""

LONG_SECONDS = 0.05
"""Calls that took less have no lines for their ranks."""

MOST_RANKS = 64


class CallLines:
    """Turns the calls of one group into lines, each call once.

    Args:
        group: a `WorkerGroup`.
        first: number of its first call.

    Attributes:
        name: of the group.
        count: number of the next call.
    """

    def __init__(self, group: Any, first: int = 0) -> None:
        self.name, self._stats = group.name, group._stats_by_role()  # not the group, which must not be kept alive
        self.count = first
        self._last: dict[str | None, CallRecord] = {}  # by role, None without roles
        self._running: list[tuple[int, str | None, CallRecord]] = []  # the group keeps the latest calls alone

    def new(self) -> list[dict[str, Any]]:
        """Return the lines of the calls that have ended since the last call."""
        candidates = self._running
        # By role: `WorkerGroup.stats` has copies of the calls of roles, which would be new each time.
        for role, stats in self._stats.items():
            # Use a copy, because other threads of the driver may append calls.
            calls = list(stats.calls)
            # Compare identities: the group drops its oldest calls, so positions change.
            known = next((number for number, call in enumerate(calls, 1) if call is self._last.get(role)), 0)
            candidates += [(number, role, call) for number, call in enumerate(calls[known:], self.count)]
            self.count += len(calls) - known
            if calls:
                self._last[role] = calls[-1]
        self._running = []
        lines: list[dict[str, Any]] = []
        for number, role, call in candidates:
            least = POLL_SECONDS if call.method == "exchange" else SHORT_SECONDS
            if not call.settled:
                self._running.append((number, role, call))
            elif call.failed or call.settled - call.begun >= least:
                lines += call_lines(self.name, number, replace(call, method=label(role, call.method)))
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
    # After a failed call, other threads may still fill in records, but add none: sending has created all of them.
    ranks = [(rank, part, part.clock) for rank, part in call.ranks.items() if part.clock is not None]
    longest = nlargest(MOST_RANKS, ranks, key=lambda one: one[2].ended - one[2].began)
    for rank, part, (received, began, ended, _) in sorted(longest, key=lambda one: one[0]):
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
