"""Describe the machine of a run, without its name and without paths."""

from __future__ import annotations

import os
import platform
from pathlib import Path
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


def memory(*fields: str, pid: int | str = "self") -> list[int]:
    """Return fields of a process's status in bytes, such as VmRSS; 0 for those that it lacks. Linux only."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return [int(lines.get(field, "0").split()[0]) << 10 for field in fields]


def _field(path: str, name: str) -> str:
    try:
        with open(path) as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
    except OSError:
        return ""
