"""RewardProgress: how far the rewards are, for the log and the metrics.

Thread: "rewards-log", a daemon, runs while rewards are pending, and ends when none is. A reward function may block
every other thread that knows of it: the caller's, and the event loop's.
Lock: ``_lock`` protects all fields. It is a leaf.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from workers.rollout.rewards.reward_calls import RewardCall

logger = logging.getLogger(__name__)

LOG_SECONDS = 30.0


class RewardProgress:
    """Logs at intervals how far the rewards are: a reward function need not have a time limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[object, float] = {}
        """When each computation that has not ended began, the oldest first."""
        self._running: dict[RewardCall, float] = {}
        """When each call of the function that has not returned began, the oldest first."""
        self._total = self._done = 0  # samples since nothing was pending
        self._slowest = 0.0
        self._timeouts = 0
        self._none_pending = threading.Event()
        """Ends the thread. Each thread has an event of its own, so none misses its end because rewards are pending
        again."""

    def begin(self, samples: int) -> object:
        """The computation of some rewards begins. Give what this returns to `end`."""
        key = object()
        with self._lock:
            if not self._pending:  # under the lock, so that two computations that begin at once start one thread
                self._total = self._done = 0
                self._none_pending = none_pending = threading.Event()
                threading.Thread(target=self._log, args=(none_pending,), name="rewards-log", daemon=True).start()
            self._pending[key] = time.monotonic()
            self._total += samples
        return key

    def end(self, key: object) -> None:
        with self._lock:
            self._pending.pop(key, None)
            if not self._pending:
                self._none_pending.set()

    @contextmanager
    def running(self, call: RewardCall) -> Iterator[None]:
        """Inside, the function is running."""
        begun = time.monotonic()
        with self._lock:
            self._running[call] = begun
        try:
            yield
        finally:
            with self._lock:
                del self._running[call]
                self._done += len(call.samples)
                self._slowest = max(self._slowest, time.monotonic() - begun)

    def timed_out(self, call: RewardCall) -> None:
        with self._lock:
            self._timeouts += len(call.samples)

    def metrics(self) -> dict[str, float]:
        """See `RewardRunner.metrics`."""
        with self._lock:
            found = {"rewards/timeouts": float(self._timeouts), "rewards/slowest_seconds": self._slowest}
            self._timeouts, self._slowest = 0, 0.0
        return found

    def _log(self, none_pending: threading.Event) -> None:
        while not none_pending.wait(LOG_SECONDS):
            with self._lock:
                now = time.monotonic()
                seconds = now - next(iter(self._pending.values()), now)
                call, begun = next(iter(self._running.items()), (None, now))
                total, done = self._total, self._done
            # Outside the lock: a handler of the user's may take long, and `end` must not wait for it.
            if seconds >= LOG_SECONDS:
                slowest = f"the slowest has been running for {now - begun:.0f} s, {call.where()}" if call else ""
                logger.warning(
                    "the reward function has been running for %.0f s, for %d completions: %d are done; %s",
                    seconds,
                    total,
                    done,
                    slowest or "none runs now",
                )
