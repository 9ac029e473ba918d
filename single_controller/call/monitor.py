"""The monitor: one per process. Every wait for a call goes through it.

A thread that waits for a call drives that call itself. A daemon thread named "call-monitor" drives all calls that
nobody waits for, so that their timeouts, deaths and errors count too. The first such call starts the thread. It is
never ended: it waits while there is nothing to watch, and ends with the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable

from single_controller.call.call import Call, wait_timed_out
from single_controller.call.errors import CallTimeoutError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Time between two looks of the monitor's thread at a call that nobody waits for."""

FIRST_WAIT_SECONDS = 0.01
MAX_WAIT_SECONDS = 0.2
"""Bounds of one wait of the transport. In between, deadlines are checked."""


class Monitor:
    """Waits for calls. `monitor` is the process's instance.

    Lock (order: see `single_controller.call.call`): ``_changed`` protects all fields, and wakes the thread. It is not
    held while the thread looks at a call, so that a look that takes long delays nobody but `forget` of that call.
    """

    def __init__(self) -> None:
        self._orphans: list[Call] = []
        self._reset()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[Call] = set()
        self._due: set[Call] = set()
        """The calls that the thread has not looked at in this round."""
        self._looking_at: Call | None = None
        self._failed: weakref.WeakSet[Call] = weakref.WeakSet()
        """The calls of which a failed look was logged. Of the thread alone."""
        self._resting = False
        """Whether the thread waits for the first call, without a limit."""
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
                self._start()
            elif self._resting:
                self._changed.notify_all()

    def _start(self) -> None:
        """Start the thread. The caller holds ``_changed``. Without a thread, whoever waits for a call still drives it,
        and the next `watch` tries again: an error here would hide a call that the ranks are running."""
        thread = threading.Thread(target=self._run, name="call-monitor", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process has as many threads as it may have
            logger.warning("no thread could be started to look at calls that nobody waits for", exc_info=True)
        else:
            self._thread = thread

    def forget(self, calls: Iterable[Call]) -> None:
        """Release calls that have ended. Afterwards the monitor's thread has no reference to them.

        The caller must not hold the lock of a group's state: the thread may need it to finish its look.
        """
        calls = set(calls)
        with self._changed:
            self._watched -= calls
            self._due -= calls
            while self._looking_at in calls and threading.current_thread() is not self._thread:
                self._changed.wait()

    def wait(self, call: Call, timeout: float | None = None, *, just_sent: bool = False) -> None:
        """Wait until a call has an outcome.

        Args:
            call: the call.
            timeout: seconds to wait; the call continues after that.
            just_sent: the transport was connected a moment ago, and need not be asked before the first look.

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
            elif call in self._watched or call is self._looking_at:
                self.forget((call,))

    def poll(self, call: Call) -> bool:
        """Whether a call has an outcome now."""
        with contextlib.suppress(CallTimeoutError):
            self.wait(call, 0.0)
        return call.settled

    def _run(self) -> None:
        next_round = 0.0
        while True:
            with self._changed:
                self._looking_at = None
                self._changed.notify_all()  # for `forget`
                while not self._due:
                    self._resting = not self._watched
                    left = None if self._resting else next_round - time.monotonic()
                    if left is None or left > 0:
                        self._changed.wait(left)
                    else:
                        self._due = set(self._watched)
                        next_round = time.monotonic() + POLL_SECONDS
                self._looking_at = self._due.pop()
            try:
                self._look()
            except BaseException:  # whatever went wrong with one call, the others need this thread
                logger.exception("a look at a call failed")

    def _look(self) -> None:
        """Drive one watched call. Its reference to the call ends with it, as `forget` promises."""
        call = self._looking_at
        if call is None:
            return
        try:
            if not call.ended:
                call.drive(0.0)
        except Exception:
            if call.transport.connected:  # too many open files, for example; the next round looks again
                level = logging.DEBUG if call in self._failed else logging.WARNING
                logger.log(level, "%s() could not be looked at", call.label, exc_info=True)
                self._failed.add(call)
            else:  # it was shut down at this very moment
                call.transport_lost()
        if call.ended:
            if not call.transport.connected:
                # Ray crashes if one thread drops references while another shuts it down, so keep these.
                self._orphans.append(call)
            self.forget((call,))


monitor = Monitor()
