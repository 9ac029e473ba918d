"""GroupMetrics: what groups do, as metrics of Ray, which its nodes export to Prometheus.

Thread: each `GroupMetrics` has a daemon thread named "group-metrics". It ends when the object is closed or garbage
collected.
Lock: ``_counting`` protects the groups, what Ray was told of them, and the start of the thread, because any thread may
call `add`, `log` and `look`. It is held for one counter at a time, and shared, as what Ray was told is: counters of one
name are one for Ray, so a group that several objects look at one after the other must not be counted again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from ray.util.metrics import Counter, Gauge

from dispatch.checks import check_seconds
from single_controller.call.call import LATE_LOG_SECONDS
from single_controller.call.errors import start_thread
from single_controller.call.group import WorkerGroup
from single_controller.call.state import Closing
from single_controller.call.stats import MethodStats, Stats

logger = logging.getLogger(__name__)

PREFIX = "single_controller_"
"""What the names begin with. Ray puts ``ray_`` before them, and ``_total`` behind those of counters."""

COUNTERS = {
    "calls": "calls that have an outcome",
    "failed_calls": "calls that raised",
    "call_seconds": "seconds of calls, from the driver's first step to the join, of the slowest rank",
    "sent_bytes": "bytes of arguments, over all ranks",
    "returned_bytes": "bytes of results, over all ranks",
    "deaths": "ranks that died",
}
"""Metrics that only grow, with the tags ``group`` and ``method``; ``deaths`` has an empty method."""

GAUGES = {
    "ranks": "ranks of the group",
    "alive_ranks": "ranks whose process is alive",
    "late_ranks": f"ranks that have not returned from a call after {LATE_LOG_SECONDS:g} s",
    "running_calls": "calls that some rank is running",
    "oldest_call_seconds": "how long the oldest running call has been running; 0 without one",
    "broken": "1 if the group takes no calls until it is restarted",
}
"""Metrics of now, with the tag ``group``."""

RUN_GAUGES = {
    "run_step": "the last logged step",
    "run_metric": "a metric of the last logged step, such as the buffer's and the staleness",
}
"""Metrics of a run, with the tags ``run`` and, but for the step, ``metric``."""


LONGEST_INTERVAL = 5.0
"""Ray exports every 10 s the gauges that were set since, and drops one that it did not get twice in a row: so gauges
are set again more often, and are gone 20 s after the group or the run."""


Totals = dict[tuple[str, str], float]
"""(counter, method) -> total."""


class GroupMetrics(Closing):
    """Exports metrics of groups as Ray's own, until it is closed. Off unless you make one: a look takes some tens of
    microseconds for each method and group, in a thread of the driver.

    Args:
        *groups: the groups. They are not kept alive. `add` adds more.
        interval: seconds between two looks, at most `LONGEST_INTERVAL`.

    Raises:
        TypeError: one of them is no group of workers.
        ValueError: the interval is not a positive number.
        StartError: the process has as many threads as it may have.
    """

    _counting = threading.Lock()  # of the process, see above
    _told: ClassVar[weakref.WeakKeyDictionary[WorkerGroup, Totals]] = weakref.WeakKeyDictionary()  # names may be equal

    def __init__(self, *groups: WorkerGroup, interval: float = LONGEST_INTERVAL) -> None:
        self._interval = min(check_seconds("interval", interval), LONGEST_INTERVAL)
        self._groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        self._counters = {name: Counter(PREFIX + name, text, ("group", "method")) for name, text in COUNTERS.items()}
        self._gauges = {name: Gauge(PREFIX + name, text, ("group",)) for name, text in GAUGES.items()}
        self._run_gauges: dict[str, Gauge] = {}
        self._runs: dict[str, tuple[int, dict[str, float]]] = {}  # run -> its last step, and the metrics of it
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        for group in groups:
            self.add(group)

    def add(self, group: WorkerGroup) -> None:
        """Export the metrics of one more group.

        Raises:
            TypeError: it is no group of workers.
            StartError: the process has as many threads as it may have.
        """
        if not isinstance(group, WorkerGroup):
            raise TypeError(
                f"GroupMetrics: expected worker groups, got {group!r:.80}; pass a RayTrainGroup's worker_group"
            )
        group = getattr(group, "_whole", group)  # a role's group is a new object each time, and may be gone soon
        with self._counting:
            self._groups.add(group)
        self._start()

    def _start(self) -> None:
        with self._counting:
            if self._thread is None and not self._ended.is_set():
                args = weakref.ref(self), self._ended, self._interval
                thread = threading.Thread(target=_run, args=args, name="group-metrics", daemon=True)
                start_thread(thread.start, "reports the metrics of groups")
                self._thread = thread  # only now: `close` joins it

    def look(self) -> None:
        """Tell Ray what the groups have done until now. The thread does that by itself."""
        with self._counting:
            known = list(self._groups)
        for group in known:
            closed = group.closed
            if not closed:
                self._set_gauges(group)
            stats: Stats = group.stats()
            for method, of_method in stats.methods.items():
                for counter, total in _totals(of_method).items():
                    self._count(group, counter, method, total)
            self._count(group, "deaths", "", group._state.died)
            if closed:
                with self._counting:
                    self._groups.discard(group)
        for run, (step, metrics) in list(self._runs.items()):
            self._tell_run(run, step, metrics)

    def log(self, step: int, metrics: Mapping[str, float], run: str = "") -> None:
        """Tell Ray the metrics of a step.

        Args:
            step: number of the step.
            metrics: by name, as `RunLog` has them. Values that are not finite are left out.
            run: name of the run.
        """
        if not self._run_gauges:
            tags = {"run_step": ("run",), "run_metric": ("run", "metric")}
            self._run_gauges = {name: Gauge(PREFIX + name, text, tags[name]) for name, text in RUN_GAUGES.items()}
        known = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._runs[run] = step, known
        self._tell_run(run, step, known)
        self._start()

    def _tell_run(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        self._run_gauges["run_step"].set(step, {"run": run})
        for name, value in metrics.items():
            self._run_gauges["run_metric"].set(value, {"run": run, "metric": name})

    def close(self) -> None:
        """Look for the last time, and end the thread."""
        if not self._ended.is_set():
            self._ended.set()
            if self._thread is not None and threading.current_thread() is not self._thread:
                self._thread.join(timeout=self._interval)
            self.look()

    def _set_gauges(self, group: WorkerGroup) -> None:
        state, now = group._state, time.monotonic()
        calls = state.running()
        late = {rank for call in calls if now - call.started > LATE_LOG_SECONDS for rank in call.late}
        alive = sum(group.alive())  # also notes deaths
        known = {
            "ranks": group.world_size,
            "alive_ranks": alive,
            "late_ranks": len(late),
            "running_calls": len(calls),
            "oldest_call_seconds": max((now - call.started for call in calls), default=0.0),
            "broken": state.broken is not None,
        }
        for gauge, value in known.items():
            self._gauges[gauge].set(float(value), {"group": state.name})

    def _count(self, group: WorkerGroup, counter: str, method: str, total: float) -> None:
        with self._counting:
            told = self._told.setdefault(group, {})
            more = total - told.get((counter, method), 0.0)
            if more > 0:
                self._counters[counter].inc(more, {"group": group._state.name, "method": method})
                told[counter, method] = total


def _totals(stats: MethodStats) -> dict[str, float]:
    return {
        "calls": stats.calls,
        "failed_calls": stats.failed,
        "call_seconds": sum(stats.seconds.values()),
        "sent_bytes": stats.sent,
        "returned_bytes": stats.returned,
    }


def _run(weak: weakref.ref[Any], ended: threading.Event, interval: float) -> None:
    while not ended.wait(interval):
        metrics = weak()
        if metrics is None:
            return
        try:
            metrics.look()
        except Exception:  # Ray was shut down, or the group's owner is a fork: the next look tries again
            logger.debug("the metrics of groups could not be taken", exc_info=True)
        del metrics  # this thread must not keep it while it waits
