"""Functions in threads of their own. The caller says what the thread is for; this module starts no other ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(
    name: str, function: Callable[[], T], future: Future[T] | None = None, *, daemon: bool = True
) -> Future[T]:
    """Begin a function in a thread of its own, which ends with it.

    A thread per function, instead of an executor's: those are few, and keep the process alive until all of them end.

    Args:
        name: of the thread.
        function: its result, or whatever it raises, is the future's.
        future: the future to use; by default a new one.
        daemon: whether the process may end before it.

    Returns:
        A future that cannot be cancelled.
    """
    outcome: Future[T] = Future() if future is None else future
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # SystemExit too, or the future would never end
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return outcome
