"""Helpers for the cases that all contenders share: starting processes, and empty calls."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import data
from benchmarks.protocol import Call


def wait_until_gone(pids: Iterable[int], timeout: float = 20) -> None:
    """Wait until processes have ended, so that the next start-up does not share the cores with them."""
    left = set(pids)
    deadline = time.monotonic() + timeout
    while any(os.path.exists(f"/proc/{pid}") for pid in left) and time.monotonic() < deadline:
        time.sleep(0.02)


def check_started(where: Iterable[tuple[int, int]], ranks: int) -> None:
    """Check the ranks of a start-up, and wait until their processes, which were ended before, have exited.

    Args:
        where: (rank, process id) in order of rank.
        ranks: expected number of ranks.
    """
    found = list(where)
    wait_until_gone(pid for _, pid in found)
    data.same([rank for rank, _ in found], list(range(ranks)))


def empty_calls(call: Callable[[], Any], ranks: int, times: int = 200) -> dict[str, Call]:
    """Return a case that repeats a call without a result on all ranks, often enough to time it."""

    def run() -> Any:
        for _ in range(times):
            last = call()
        return last

    return {"": Call(run, functools.partial(data.same, wanted=[None] * ranks), times=times)}
