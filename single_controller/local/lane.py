"""Lane: the thread of one rank, which takes its calls one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]

JOIN_SECONDS = 1.0
"""How long ending a lane waits for its thread, if that has nothing to do any more."""


class Lane:
    """A thread that carries out jobs in order. It is a daemon: one that hangs does not keep the process.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._busy = threading.Event()
        self._thread = threading.Thread(target=_serve, args=(self._jobs, self._busy), name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """After all jobs so far."""
        self._jobs.put(job)

    def beside(self, job: Job) -> None:
        """At once, in a thread of its own."""
        threading.Thread(target=job, name=f"{self._name}-concurrent", daemon=True).start()

    def end(self, *, wait: bool = False) -> None:
        """Carry out nothing more. A job that runs goes on until it returns.

        Args:
            wait: until the thread has ended, unless a job runs in it.
        """
        try:
            while True:
                self._jobs.get_nowait()
        except queue.Empty:
            self._jobs.put(None)
        if wait and not self._busy.is_set() and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)


def _serve(jobs: queue.SimpleQueue[Job | None], busy: threading.Event) -> None:
    # A function, and no reference to a job that is over: the thread must not keep the rank whose end is to end it.
    while True:
        job = jobs.get()
        if job is None:
            return
        busy.set()
        job()
        del job
        busy.clear()
