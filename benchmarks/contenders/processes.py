"""Waiting for processes that one is not the parent of."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable


def wait_until_gone(pids: Iterable[int], timeout: float = 20) -> None:
    """Wait until processes have ended, so that the next start-up does not share the cores with them."""
    left = set(pids)
    deadline = time.monotonic() + timeout
    while any(os.path.exists(f"/proc/{pid}") for pid in left) and time.monotonic() < deadline:
        time.sleep(0.02)
