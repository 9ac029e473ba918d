"""A Ray for one contender alone, and what can be read from it."""

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

STORE = 4 * 1024**3
PROBING = "BENCHMARKS_PROBING"
"""Environment variable of a session in which nothing is timed: its Ray reports more often what its store holds."""
_REPORT_OFTEN = {"raylet_report_resources_period_milliseconds": 10}


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of some packages."""
    return {"python": platform.python_version(), **{package: metadata.version(package) for package in packages}}


class LocalRay:
    """As a context: a Ray that ends with it, and leaves no files behind."""

    def __enter__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rb", dir="/tmp")
        ray.init(
            "local",
            num_cpus=16,
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
    """How far the driver's memory rises above where it was before the run, in bytes. Linux only."""
    try:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = _status("VmRSS")
    except OSError:
        return {}
    run()
    return {"driver_growth": _status("VmHWM") - before}


def probe_store(run: Callable[[], Any]) -> dict[str, Any]:
    """The most bytes that the object store held during any of five runs, as Ray reports them every 10 ms."""
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


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _store_free() -> float:
    return ray.available_resources().get("object_store_memory", 0.0)
