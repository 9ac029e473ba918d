"""Which variables of ``worker_env`` a process needs before it starts, and setting the others in a worker."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping

from single_controller.ray.rank.devices import hide_other_devices, is_noset, own_devices, show_all_devices

_PREFIXES = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "RAY_")
"""Variables that are read once when a process starts, or may be."""

_PYTHON = (
    *("PYTHONASYNCIODEBUG", "PYTHONBREAKPOINT", "PYTHONDONTWRITEBYTECODE"),
    *("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED"),
)
"""Exceptions: Python reads the first two when it needs them, and `set_environment` has the effect of the others. Ray's
workers never buffer their output."""


def before_start(key: str, value: str) -> bool:
    """Whether a variable must be set before the process starts, by a runtime_env. This makes the start slower: Ray is
    imported twice, and processes that Ray has started in advance cannot be used."""
    at_run_time = is_noset(key, value) or (key in _PYTHON and value != "")
    return key.startswith(_PREFIXES) and not at_run_time


def set_environment(environment: Mapping[str, str]) -> None:
    """Set the variables of ``worker_env`` in this worker, and the lists of visible devices. Must run before user code
    is imported: importing torch reads the environment."""
    hide_other_devices(own_devices(), environment)
    show_all_devices(environment)
    os.environ.update(environment)
    if environment.get("PYTHONDONTWRITEBYTECODE"):
        sys.dont_write_bytecode = True
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)  # Ray has enabled it for one thread; 2 is stderr, as when Python starts
