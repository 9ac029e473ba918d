"""Helpers for the cases that all contenders share: starting processes, and small calls."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
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


def small_calls(call: Callable[..., Sequence[Any]], ranks: int) -> dict[str, Call]:
    """Return calls without an argument, and with one of 1, 16 and 64 kB for every rank, repeated to be timed.

    Args:
        call: calls a method on all ranks and waits for it. The method takes nothing, or ``bytes`` and whether to return
            them; otherwise it returns None.
        ranks: number of ranks.
    """
    times = max(25, min(200, 800 // ranks))

    def case(payload: bytes) -> Call:
        args = (payload,) if payload else ()

        def run() -> Any:
            for _ in range(times):
                last = call(*args)
            return last

        def prove() -> None:
            data.same(list(call(payload, True)), [payload] * ranks)

        return Call(run, functools.partial(data.same, wanted=[None] * ranks), prove, times, ranks)

    sizes = {"empty": 0, **{f"{size} kB": size * 1024 for size in (1, 16, 64)}}
    return {name: case(os.urandom(size)) for name, size in sizes.items()}


def in_flight(send: Callable[[], Any], wait: Callable[[Any], Any], ranks: int) -> Call:
    """Return calls of which 100 are in flight at once: all are sent, then all are waited for, three times."""

    def run() -> Any:
        for _ in range(3):
            sent = [send() for _ in range(100)]
            last = [wait(call) for call in sent]
        return last

    return Call(run, functools.partial(data.same, wanted=[[None] * ranks] * 100), times=300, ranks=ranks)
