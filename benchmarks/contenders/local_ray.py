"""A Ray instance for a single contender, and the probes of its memory."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import ray

from benchmarks.machine import memory

STORE = 4 * 1024**3
CLUSTER = "BENCHMARKS_CLUSTER"
"""Environment variable with the address of the Ray cluster to connect to, instead of starting one."""
PROBING = "BENCHMARKS_PROBING"
"""Environment variable of an untimed session, in which Ray reports the use of its object store more often."""
_REPORT_OFTEN = {"raylet_report_resources_period_milliseconds": 10}


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the given packages."""
    return {"python": platform.python_version(), **{package: metadata.version(package) for package in packages}}


class LocalRay:
    """A context manager that starts Ray, shuts it down at the end, and removes its files. See `CLUSTER`."""

    def __enter__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rb", dir="/tmp")
        if CLUSTER in os.environ:
            ray.init(os.environ[CLUSTER], log_to_driver=False)
            return
        ray.init(
            "local",
            num_cpus=80,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=STORE,
            log_to_driver=False,
            _temp_dir=self._folder,
            _system_config=_REPORT_OFTEN if os.environ.get(PROBING) else None,
        )

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def probe_driver(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the peak growth of the driver's memory during a run, in bytes. Linux only."""
    try:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        (before,) = memory("VmRSS")
    except OSError:
        return {}
    run()
    return {"driver_growth": memory("VmHWM")[0] - before}


def probe_store(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the peak size of the object store over five runs, in bytes. Ray reports it every 10 ms."""
    idle = _store_free()
    least = [idle]
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            least.append(_store_free())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        for _ in range(5):
            run()
    finally:
        over.set()
        watcher.join()
    return {"store_peak": int(idle - min(least))}


PROBES = {"driver": probe_driver, "store": probe_store}


def _store_free() -> float:
    return ray.available_resources().get("object_store_memory", 0.0)
