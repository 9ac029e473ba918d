"""Describe the machine of a run, without its name and without paths."""

from __future__ import annotations

import os
import platform
from typing import Any


def machine() -> dict[str, Any]:
    """Return cores, processor, memory in GiB, system, and load."""
    return {
        "cores": os.cpu_count(),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def _field(path: str, name: str) -> str:
    try:
        with open(path) as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
    except OSError:
        return ""
