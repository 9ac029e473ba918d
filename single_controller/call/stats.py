"""What calls cost: summed by method, kept for the latest calls, shown as a table or as a Chrome trace.

What a call costs is added up while its results arrive, so a call keeps the same few hundred bytes however many ranks
it has. What each rank did is kept only after `CallStats.record_ranks`, which the trace's rows of ranks need.

A call has these phases. On the driver: *dispatch* (bind, plan, encode, send). On each rank: *queue* (until it starts
the call, after earlier ones), *open* (decode the arguments, wait for futures among them), *method*, and *return*
(encode the result, and the way back). On the driver again: *join*. Each rank uses its own clock: between hosts, queue
and return are only as exact as the clocks agree.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dispatch.checks import check_count
from dispatch.register import label

KEPT_CALLS = 1000
"""Number of the latest calls that are kept, without their ranks."""

RECORDED_CALLS = 100
"""Number of the latest calls whose ranks are kept too, once that was asked for. A rank takes about 400 bytes of each
call: 40 MB for 100 calls of 1,024 ranks."""


class Clock(NamedTuple):
    """When a rank did what, in seconds since the epoch by its own clock."""

    received: float  # it started the call
    began: float  # the arguments were available
    ended: float  # the method had returned
    encoded: float  # the result was ready to be sent


@dataclass(slots=True)
class RankRecord:
    """One rank's part of a call."""

    sent: int = 0  # bytes of arguments sent to the rank; arguments that are futures are not counted
    returned: int = 0  # bytes of its result; 0 on ranks that do not collect
    clock: Clock | None = None  # None until the rank has returned, and for a rank that raised or died
    arrived: float = 0.0  # when the driver had its `RankResult`, by the driver's clock


@dataclass(slots=True)
class CallRecord:
    """One call."""

    method: str
    begun: float  # when it began, in seconds since the epoch
    dispatched: float = 0.0  # when it had been sent
    settled: float = 0.0  # when it had an outcome; 0 before
    joined: float = 0.0  # seconds that the join took; 0 if nobody asked for the value
    failed: str | None = None  # the type of its error, or None
    sent: int = 0  # bytes of arguments, over all ranks
    returned: int = 0  # bytes of results, over all ranks
    received: float = 0.0  # when the last rank started it, by that rank's clock; 0 before
    opened: float = 0.0  # seconds that the slowest rank took in the phase open
    ran: float = 0.0  # likewise in the phase method
    back: float = 0.0  # likewise in the phase return
    # rank -> its part, if the group keeps it: see `CallStats.record_ranks`
    ranks: dict[int, RankRecord] = field(default_factory=dict)

    def phases(self) -> dict[str, float]:
        """Seconds in each phase; those of the slowest rank where ranks take part."""
        queue = max(0.0, self.received - self.dispatched)  # a rank may start before all are sent
        by_rank = {"queue": queue, "open": self.opened, "method": self.ran, "return": self.back}
        return {"dispatch": self.dispatched - self.begun, **by_rank, "join": self.joined}


@dataclass(slots=True)
class MethodStats:
    """All calls of one method."""

    calls: int = 0  # how many have an outcome
    failed: int = 0  # how many of them raised
    sent: int = 0  # bytes of arguments, over all ranks
    returned: int = 0  # bytes of results, over all ranks
    # phase -> seconds of the slowest rank, summed over the calls
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stats:
    """What a group's calls cost. Prints as a table.

    Attributes:
        methods: method -> its `MethodStats`, since the group was made.
        calls: the last calls, oldest first. They have ``ranks`` only after ``group.record_ranks()``.
    """

    methods: Mapping[str, MethodStats]
    calls: Sequence[CallRecord]

    @classmethod
    def together(cls, parts: Mapping[str | None, Stats]) -> Stats:
        """Merge several, by name, with methods named ``<name>.<method>``. Methods under None keep their names."""
        methods = {label(name, method): stats for name, part in parts.items() for method, stats in part.methods.items()}
        calls = [replace(call, method=label(name, call.method)) for name, part in parts.items() for call in part.calls]
        return cls(methods, sorted(calls, key=lambda call: call.begun))

    def __str__(self) -> str:
        phases = ("dispatch", "queue", "open", "method", "return", "join")
        rows = [["method", "calls", "failed", "sent", "returned", *(f"{phase} ms" for phase in phases)]]
        for name, stats in self.methods.items():
            means = (1000 * stats.seconds.get(phase, 0.0) / max(stats.calls, 1) for phase in phases)
            counts = [str(stats.calls), str(stats.failed), _bytes(stats.sent), _bytes(stats.returned)]
            rows.append([name, *counts, *(f"{mean:.2f}" for mean in means)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([*lines, "bytes over all calls and ranks; times are means over calls, of the slowest rank"])


class _Latest(deque[CallRecord]):
    """The latest calls, oldest first; of earlier ones, the sums by method, and those that had no outcome yet."""

    def __init__(
        self, calls: Iterable[CallRecord], methods: dict[str, MethodStats], unsettled: list[CallRecord]
    ) -> None:
        super().__init__(calls)
        self.methods, self.unsettled = methods, unsettled


class CallStats:
    """The records of one group. A call appends its record to `calls` and fills it in: that is all that recording costs.

    No lock: calls are appended and trimmed by one thread at a time (`GroupState.sending`), and filled in under
    `GroupState.lock`. Any thread may read: `trim` replaces `calls` with all that it has, so that a reader finds each
    call once.
    """

    def __init__(self) -> None:
        self.calls = _Latest((), {}, [])
        self.recorded = 0  # how many of the latest calls keep their ranks

    def record_ranks(self, calls: int, at_least: bool = False) -> None:
        """See `WorkerGroup.record_ranks`."""
        calls = check_count("record_ranks(): calls", calls, 0, "; 0 keeps none")
        self.recorded = max(calls, self.recorded) if at_least else calls
        known = list(self.calls)
        for record in known[: max(0, len(known) - self.recorded)]:
            record.ranks = {}

    def trim(self) -> None:
        """Keep no more than the latest calls and as many again, and no more of their ranks than was asked for."""
        calls, recorded = self.calls, self.recorded
        if recorded and len(calls) > recorded:
            calls[-recorded - 1].ranks = {}
        if (most := max(KEPT_CALLS, recorded)) + KEPT_CALLS > len(calls):
            return
        methods, still = _copies(calls.methods), list[CallRecord]()
        for record in (*calls.unsettled, *islice(calls, len(calls) - most)):
            if record.settled:
                _add(methods, record)
            else:
                still.append(record)
        self.calls = _Latest(islice(calls, len(calls) - most, None), methods, still)

    def stats(self) -> Stats:
        """A snapshot."""
        latest = self.calls
        methods, calls = _copies(latest.methods), list(latest)
        for record in (*latest.unsettled, *calls):
            if record.settled:
                _add(methods, record)
        return Stats(methods, calls[-max(KEPT_CALLS, self.recorded) :])


def _copies(methods: Mapping[str, MethodStats]) -> dict[str, MethodStats]:
    return {name: replace(stats, seconds=dict(stats.seconds)) for name, stats in methods.items()}


def _add(methods: dict[str, MethodStats], record: CallRecord) -> None:
    """Add a call that has an outcome to the sums of its method."""
    stats = methods.setdefault(record.method, MethodStats())
    stats.calls += 1
    stats.failed += record.failed is not None
    stats.sent += record.sent
    stats.returned += record.returned
    for phase, seconds in record.phases().items():
        stats.seconds[phase] = stats.seconds.get(phase, 0.0) + seconds


def write_trace(path: str | Path, name: str, calls: Iterable[CallRecord]) -> None:
    """Write calls as a Chrome trace, which Perfetto opens: a row for the driver and one for each recorded rank.

    Events are written one by one, so that a trace of millions of them needs no memory.
    """
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(json.dumps({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}))
        for event in _events(calls):
            file.write(",\n" + json.dumps(event))
        file.write("\n]}\n")


def _events(calls: Iterable[CallRecord]) -> Iterator[dict[str, Any]]:
    rows = {-1: "driver"}
    for number, call in enumerate(calls):
        about = {"call": number, **({"failed": call.failed} if call.failed else {})}
        phases = {f"{phase} ms": 1000 * seconds for phase, seconds in call.phases().items()}
        yield _event(-1, f"{call.method}: dispatch", call.begun, call.dispatched, {**about, **phases})
        if call.joined:
            yield _event(-1, f"{call.method}: join", call.settled, call.settled + call.joined, about)
        for number_of_rank, rank in call.ranks.items():
            rows[number_of_rank] = f"rank {number_of_rank}"
            if rank.clock is None:
                continue
            sizes = {**about, "bytes sent": rank.sent, "bytes returned": rank.returned}
            received, began, ended, encoded = rank.clock
            for phase, start, stop in (("open", received, began), ("", began, ended), ("return", ended, encoded)):
                title = f"{call.method}: {phase}" if phase else call.method
                yield _event(number_of_rank, title, start, stop, sizes)
    for row, title in sorted(rows.items()):
        yield {"ph": "M", "pid": 1, "tid": row + 1, "name": "thread_name", "args": {"name": title}}


def _event(row: int, title: str, start: float, stop: float, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": row + 1,
        "name": title,
        "ts": 1e6 * start,
        "dur": max(1e6 * (stop - start), 0.0),
        "args": about,
    }


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
