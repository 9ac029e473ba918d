"""RewardProgress: how far the rewards are, for the log and the metrics.

Thread: "rewards-log", a daemon, runs while rewards are pending.
Lock: ``_changed`` protects all fields. It is a leaf.
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
        self._changed = threading.Condition(threading.Lock())
        self._pending: dict[object, float] = {}
        """When each computation that has not ended began, the oldest first."""
        self._running: dict[RewardCall, float] = {}
        """When each call of the function that has not returned began, the oldest first."""
        self._total = self._done = 0  # samples since nothing was pending
        self._slowest = 0.0
        self._logging = False

    def begin(self, samples: int) -> object:
        """The computation of some rewards begins. Give what this returns to `end`."""
        key = object()
        with self._changed:
            if not self._pending:
                self._total = self._done = 0
            self._pending[key] = time.monotonic()
            self._total += samples
            begin, self._logging = not self._logging, True
        if begin:  # not under the lock, which the thread takes first
            threading.Thread(target=self._log, name="rewards-log", daemon=True).start()
        return key

    def end(self, key: object) -> None:
        with self._changed:
            self._pending.pop(key, None)
            self._changed.notify_all()

    @contextmanager
    def running(self, call: RewardCall) -> Iterator[None]:
        """Inside, the function is running."""
        begun = time.monotonic()
        with self._changed:
            self._running[call] = begun
        try:
            yield
        finally:
            with self._changed:
                del self._running[call]
                self._done += len(call.samples)
                self._slowest = max(self._slowest, time.monotonic() - begun)

    def take_slowest(self) -> float:
        """Return, and reset, the seconds of the longest call."""
        with self._changed:
            slowest, self._slowest = self._slowest, 0.0
        return slowest

    def _log(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._pending, LOG_SECONDS):
                    # Under the same lock as the look: a `begin` after it starts a new thread.
                    self._logging = False
                    return
                now = time.monotonic()
                seconds = now - next(iter(self._pending.values()))
                call, begun = next(iter(self._running.items()), (None, now))
                total, done = self._total, self._done
            if seconds >= LOG_SECONDS:
                logger.warning(
                    "the reward function has been running for %.0f s, for %d completions: %d are done; %s",
                    seconds,
                    total,
                    done,
                    f"the slowest has been running for {now - begun:.0f} s, {call.where()}"
                    if call
                    else "none runs now",
                )
