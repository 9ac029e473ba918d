"""Functions in threads of their own. The caller says what the thread is for; this module starts no other ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(name: str, function: Callable[[], T], *, daemon: bool = True) -> Future[T]:
    """Begin a function in a thread of its own, which ends with it.

    A thread per function, instead of an executor's: those are few, and keep the process alive until all of them end.

    Args:
        name: of the thread.
        function: its result, or whatever it raises, is the future's.
        daemon: whether the process may end before it.

    Returns:
        A future that cannot be cancelled.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # SystemExit too, or the future would never end
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future
