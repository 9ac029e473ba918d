"""What start-ups and empty calls are for every contender: processes that come, answer and go."""

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
    """Check what the ranks of one start-up answered, and wait until their processes, which were ended, are gone.

    Args:
        where: (rank, process) in order of rank.
        ranks: how many there should be.
    """
    found = list(where)
    wait_until_gone(pid for _, pid in found)
    data.same([rank for rank, _ in found], list(range(ranks)))


def empty_calls(call: Callable[[], Any], ranks: int, times: int = 200) -> dict[str, Call]:
    """A call that gives nothing, by each rank, so many times that one can be timed."""

    def run() -> Any:
        for _ in range(times):
            last = call()
        return last

    return {"": Call(run, functools.partial(data.same, wanted=[None] * ranks), times=times)}
