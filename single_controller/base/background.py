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
"""Threads for as many jobs as there are. With more, they wait for each other: awaiting 200 calls at once took 0.6 s
with 8 and 0.8 s with 64 on two cores."""

MAX_THREADS = 64
STUCK_SECONDS = 0.1
"""When no thread has taken a job for this time, another one is started: all may be fetching from a slow host."""


class Background:
    """Runs jobs at once, each in a daemon thread. `background` is the process's instance.

    Threads: named "call-background", at most `MAX_THREADS`. One is started when a job finds none idle. They end with
    the process, and are not those of a ThreadPoolExecutor, because the interpreter joins those at exit: a job that
    hangs, such as the fetch of a lost result, would keep the process alive. "call-background-watch" starts those beyond
    `THREADS`, and ends when no job waits for a thread.
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
        self._threads = self._taken = 0
        self._watching = False

    def run(self, job: Callable[[], object]) -> None:
        """Run a job without waiting for it. Exceptions that it raises are logged."""
        self._jobs.put(job)
        try:
            self._idle.get_nowait()
        except queue.Empty:
            if self._threads < THREADS:
                self._threads += self._start(self._serve, "call-background")
            elif not self._watching:
                self._watching = True
                if not self._start(self._watch, "call-background-watch"):
                    self._watching = False

    def _start(self, target: Callable[[], None], name: str) -> bool:
        try:
            threading.Thread(target=target, name=name, daemon=True).start()
        except RuntimeError:  # the process has as many threads as it may have; a thread of ours takes the job later
            logger.warning("no further thread could be started for results that are awaited", exc_info=True)
            return False
        return True

    def _watch(self) -> None:
        taken = -1
        while True:
            if self._jobs.empty():
                self._watching = False
                if self._jobs.empty():  # `run` puts its job before it reads `_watching`, so one of the two sees it
                    return
                self._watching = True
            if self._taken == taken and self._threads < MAX_THREADS:
                self._threads += self._start(self._serve, "call-background")
            taken = self._taken
            time.sleep(STUCK_SECONDS)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            self._taken += 1
            try:
                job()
            except Exception:
                logger.exception("a background job raised")
            del job  # it refers to a call, and must not keep it while this thread is idle
            self._idle.put(None)


background = Background()
