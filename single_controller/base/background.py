"""Background: short jobs that must not run in the thread that has them, such as the join of an awaited result."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

THREADS = 8
"""Threads that are started without hesitation. With more, they wait for each other: awaiting 200 calls at once took
0.6 s with 8 and 0.8 s with 64 on two cores."""

MAX_THREADS = 64
STUCK_SECONDS = 0.1
"""After this time without an ended job, further threads are started: all of them may be fetching from a slow host."""


class Background:
    """Runs jobs at once, each in a daemon thread. `background` is the process's instance.

    Threads: named "call-background", at most `MAX_THREADS`. One is started when a job finds none idle. They end with
    the process, and are not those of a ThreadPoolExecutor, because the interpreter joins those at exit: a job that
    hangs, such as the fetch of a lost result, would keep the process alive.
    No locks: `run` is called while locks are held, and the garbage collector may run finalizers inside it. Both queues
    are reentrant.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a fork has none of the threads

    def _reset(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One entry per idle thread."""
        self._threads = 0
        self._last_end = 0.0

    def run(self, job: Callable[[], object]) -> None:
        """Run a job without waiting for it. Exceptions that it raises are logged."""
        self._jobs.put(job)
        try:
            self._idle.get_nowait()
        except queue.Empty:
            stuck = time.monotonic() - self._last_end > STUCK_SECONDS
            if self._threads < (MAX_THREADS if stuck else THREADS):
                self._threads += 1
                threading.Thread(target=self._serve, name="call-background", daemon=True).start()

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                logger.exception("a background job raised")
            self._last_end = time.monotonic()
            del job  # it refers to a call, and must not keep it while this thread is idle
            self._idle.put(None)


background = Background()
