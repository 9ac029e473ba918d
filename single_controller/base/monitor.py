"""The monitor: one per process. Every wait for a call goes through it.

A thread that waits for a call drives that call itself. A daemon thread named "call-monitor" drives all calls that
nobody waits for, so that their timeouts, deaths and errors count too. The first such call starts the thread. It is
never ended: it sleeps while there is nothing to watch, and ends with the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable

from single_controller.base.call import Call, wait_timed_out
from single_controller.base.errors import CallTimeoutError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
AWAITED_POLL_SECONDS = 0.005
"""Pause between two looks while somebody awaits a call in an event loop, which drives nothing itself."""

FIRST_WAIT_SECONDS = 0.01
MAX_WAIT_SECONDS = 0.2
"""Bounds of one wait of the engine. In between, deadlines are checked."""


class Monitor:
    """Waits for calls. `monitor` is the process's instance.

    Locks (order: see `single_controller.base.call`): ``_round`` is held while the monitor's thread looks at its calls,
    so that `forget` returns only when that thread holds none of them. ``_changed`` protects ``_watched`` and wakes the
    thread.
    """

    def __init__(self) -> None:
        self._orphans: list[Call] = []
        self._reset()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def _reset(self) -> None:
        self._watched: set[Call] = set()
        self._changed = threading.Condition()
        self._round = threading.RLock()
        self._thread: threading.Thread | None = None

    def _leave_to_parent(self) -> None:
        """A fork has neither the thread nor the calls of its parent, whose threads may have held the locks. The calls
        are kept, because dropping Ray's references needs Ray."""
        self._orphans += self._watched
        self._reset()

    def watch(self, call: Call) -> None:
        """Drive a call that nobody waits for, until it has ended."""
        with self._changed:
            self._watched.add(call)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="call-monitor", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, calls: Iterable[Call]) -> None:
        """Release calls that have ended. Afterwards the monitor's thread has no reference to them."""
        with self._round, self._changed:
            self._watched.difference_update(calls)

    def wait(self, call: Call, timeout: float | None = None, *, just_sent: bool = False) -> None:
        """Wait until a call has an outcome.

        Args:
            call: the call.
            timeout: seconds to wait; the call continues after that.
            just_sent: the engine was connected a moment ago, and need not be asked before the first look.

        Raises:
            CallTimeoutError: the wait ended before the call did.
            ForkedProcessError: another process sent the call.
        """
        call.check_process()
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_WAIT_SECONDS
        try:
            while not call.settled:
                left = pause if end is None else min(pause, end - time.monotonic())
                call.drive(max(0.0, left), first=just_sent)
                if not call.settled and end is not None and time.monotonic() >= end:
                    raise wait_timed_out(call, timeout or 0.0)
                pause, just_sent = min(2 * pause, MAX_WAIT_SECONDS), False
        finally:
            if not call.ended:  # after an error or a timeout, ranks may still be running
                self.watch(call)
            elif call in self._watched:
                self.forget((call,))

    def poll(self, call: Call) -> bool:
        """Whether a call has an outcome now."""
        with contextlib.suppress(CallTimeoutError):
            self.wait(call, 0.0)
        return call.settled

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
            with self._round:
                awaited = self._look_at_all()
            time.sleep(AWAITED_POLL_SECONDS if awaited else POLL_SECONDS)

    def _look_at_all(self) -> bool:
        """Drive every watched call once. Returns whether one of them is awaited."""
        with self._changed:
            calls = list(self._watched)
        ended = []
        for call in calls:
            try:
                if not call.ended:
                    call.drive(0.0)
            except Exception:  # the engine was shut down at this very moment
                logger.warning("%s() can no longer be watched", call.label, exc_info=call.engine.connected)
                call.engine_lost()
            if call.ended:
                ended.append(call)
                if not call.engine.connected:
                    # Ray crashes if one thread drops references while another shuts it down, so keep these.
                    self._orphans.append(call)
        self.forget(ended)
        return any(call.awaited for call in calls)


monitor = Monitor()
