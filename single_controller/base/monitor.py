"""The monitor: one per process. Every wait for a call goes through it.

A thread that waits for a call drives that call itself. A call that nobody waits for is looked at by the
monitor's own thread, so that its timeout, its death and its error count all the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from single_controller.base.call import Call, timed_out

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
AWAITED_POLL_SECONDS = 0.005
FIRST_SLICE_SECONDS = 0.01
LAST_SLICE_SECONDS = 0.2


class Monitor:
    """Waits for calls. `monitor` is the process's one instance."""

    def __init__(self) -> None:
        self._watched: set[Call] = set()
        self._changed = threading.Condition()
        self._round = threading.RLock()
        self._thread: threading.Thread | None = None
        self._orphans: list[Call] = []

    def watch(self, call: Call) -> None:
        """Look after a call that nobody waits for, until it has ended."""
        with self._changed:
            self._watched.add(call)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="call-monitor", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, calls: Iterable[Call]) -> None:
        """Let go of calls that have ended. When this returns, the monitor's thread holds nothing of theirs."""
        with self._round, self._changed:
            self._watched.difference_update(calls)

    def wait(self, call: Call, timeout: float | None = None, *, just_sent: bool = False) -> None:
        """Wait until a call has an outcome.

        Args:
            call: the call.
            timeout: seconds to wait at the most; the call goes on after that.
            just_sent: the engine was there a moment ago, and is not asked again before the first look.

        Raises:
            CallTimeoutError: the wait ended before the call did.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_SLICE_SECONDS
        try:
            if just_sent:
                call.absorb_soon(pause)
            while not call.settled:
                left = pause if end is None else min(pause, end - time.monotonic())
                self._drive(call, max(0.0, left))
                if not call.settled and end is not None and time.monotonic() >= end:
                    raise timed_out(call, timeout or 0.0)
                pause = min(2 * pause, LAST_SLICE_SECONDS)
        finally:
            self._keep_or_forget(call)

    def poll(self, call: Call) -> bool:
        """Whether a call has an outcome now."""
        if not call.settled:
            self._drive(call, 0.0)
            self._keep_or_forget(call)
        return call.settled

    def _drive(self, call: Call, timeout: float) -> None:
        if call.engine.connected:
            call.absorb(call.engine.wait(call.pending, timeout))
        else:
            call.orphan()

    def _keep_or_forget(self, call: Call) -> None:
        if not call.ended:
            self.watch(call)
        elif call in self._watched:
            self.forget((call,))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
            with self._round:
                awaited = self._look_at_all()
            time.sleep(AWAITED_POLL_SECONDS if awaited else POLL_SECONDS)

    def _look_at_all(self) -> bool:
        with self._changed:
            calls = list(self._watched)
        ended = []
        for call in calls:
            try:
                if not call.ended:
                    self._drive(call, 0.0)
            except Exception:  # the engine went away in this very moment
                logger.warning("%s() can no longer be watched", call.label, exc_info=call.engine.connected)
                call.orphan()
            if call.ended:
                ended.append(call)
                if not call.engine.connected:
                    # References must not be dropped by this thread while the engine shuts down in another.
                    self._orphans.append(call)
        self.forget(ended)
        return any(call.awaited for call in calls)


monitor = Monitor()
