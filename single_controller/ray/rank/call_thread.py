"""CallThread: the thread of a rank that runs its methods, one after the other, in the order in which they arrive.

Frames of drivers bring the calls; Ray's tasks bring direct calls, ``group.workers[i].m.remote()``. Calls of methods
with ``concurrent=True`` run in a pool of threads instead.
"""

from __future__ import annotations

import concurrent.futures as cf
import contextlib
import queue
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from single_controller.wire.link import Session

MAX_CONCURRENT_CALLS = 64

LOOK_SECONDS = 0.2
"""Time between two looks of Ray's thread whether the call thread still runs."""

current: ContextVar[tuple[Session, int] | None] = ContextVar("current", default=None)
"""Session and number of the call that runs: also in its coroutines, and in threads that wait in their place."""


class CallThread:
    """Runs functions.

    Threads: a daemon thread named "worker-calls", which ends with the process, or when a function raises SystemExit;
    and up to `MAX_CONCURRENT_CALLS` named "concurrent-calls", one of them from the start, which end with the process.

    Args:
        end: ends the process with a SystemExit that a call has raised.
    """

    def __init__(self, end: Callable[[SystemExit], None]) -> None:
        self._end = end
        self._queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._pool = cf.ThreadPoolExecutor(MAX_CONCURRENT_CALLS, "concurrent-calls")
        self._ended: SystemExit | None = None
        threading.Thread(target=self._serve, name="worker-calls", daemon=True).start()
        self._pool.submit(lambda: None)  # starts a thread, which runs what is submitted when no other can be started

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function after those that have been submitted."""
        self._queue.put(function)

    def submit_concurrent(self, function: Callable[[], None]) -> None:
        """Run a function beside all others."""
        with contextlib.suppress(RuntimeError):  # no further thread can be started; the function is queued by then
            self._pool.submit(self._run_concurrent, function)

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a function on the call thread, and wait for it. Called by a thread of Ray.

        Raises:
            BaseException: what the function raises.
        """
        done: cf.Future[Any] = cf.Future()

        def job(done: cf.Future[Any] = done) -> None:
            current.set(None)
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.submit(job)
        try:
            while not cf.wait((done,), LOOK_SECONDS).done:
                if self._ended is not None:  # nothing runs any more
                    raise self._ended
            return done.result()
        finally:
            del done, job  # the error's traceback refers to this frame

    def _serve(self) -> None:
        while self._ended is None:
            function = self._queue.get()
            try:
                function()
            except SystemExit as error:
                self._ended = error
                self._end(error)
            del function  # it refers to the arguments of the call

    def _run_concurrent(self, function: Callable[[], None]) -> None:
        try:
            function()
        except SystemExit as error:
            self._end(error)


def call_cancelled() -> bool:
    """Whether a call has failed whose future is an argument of the call that runs here, if one does."""
    call = current.get()
    return call is not None and call[0].withdrawn(call[1])
