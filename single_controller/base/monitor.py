"""The monitor: one per process. Every wait for a call goes through it.

A thread that waits for a call drives that call itself. A call that nobody waits for is looked at by the
monitor's own thread, so that its timeout, its death and its error count all the same.
"""

from __future__ import annotations

import logging
import threading
import time

from single_controller.base.call import Call, timed_out

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
FIRST_SLICE_SECONDS = 0.01
LAST_SLICE_SECONDS = 0.2


class Monitor:
    """Waits for calls. `monitor` is the process's one instance."""

    def __init__(self) -> None:
        self._watched: set[Call] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, call: Call) -> None:
        """Look after a call that nobody waits for, until it has ended."""
        with self._changed:
            self._watched.add(call)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="call-monitor", daemon=True)
                self._thread.start()
            self._changed.notify()

    def wait(self, call: Call, timeout: float | None = None) -> None:
        """Wait until a call has an outcome.

        Args:
            call: the call.
            timeout: seconds to wait at the most; the call goes on after that.

        Raises:
            CallTimeoutError: the wait ended before the call did.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_SLICE_SECONDS
        try:
            while not call.settled:
                left = pause if end is None else min(pause, end - time.monotonic())
                call.absorb(call.engine.wait(call.pending, max(0.0, left)))
                if not call.settled and end is not None and time.monotonic() >= end:
                    raise timed_out(call, timeout or 0.0)
                pause = min(2 * pause, LAST_SLICE_SECONDS)
        finally:
            if not call.ended:
                self.watch(call)

    def poll(self, call: Call) -> bool:
        """Whether a call has an outcome now."""
        if not call.settled:
            call.absorb(call.engine.wait(call.pending, 0.0))
        return call.settled

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
                calls = list(self._watched)
            ended = set()
            for call in calls:
                try:
                    if not call.ended:
                        call.absorb(call.engine.wait(call.pending, 0.0))
                except Exception:  # the engine is gone, at the end of the program say: nothing is left to watch
                    logger.debug("%s() can no longer be watched", call.method, exc_info=True)
                    call.abandon()
                if call.ended:
                    ended.add(call)
            del call, calls
            with self._changed:
                self._watched -= ended
            del ended
            time.sleep(POLL_SECONDS)


monitor = Monitor()
