"""What Ray puts before a worker's lines on the driver: its class and rank, not its class alone."""

from __future__ import annotations

import sys

try:
    from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME
except ImportError:  # a Ray that does it in another way: its own prefix stays
    LOG_PREFIX_ACTOR_NAME = ""


def name_lines(name: str) -> None:
    """Have the lines that this process prints from now on reach the driver as ``(<name> pid=...) ...``.

    Ray's log monitor reads a name out of the process's output, where Ray itself writes the actor's class when it makes
    the actor. A worker learns its rank later, so the name is written once more, to both streams. Nothing stands between
    the worker and its streams: what C++ or a subprocess prints has the name too. Ray still shows a line that several
    workers print alike once, with their number, unless ``RAY_DEDUP_LOGS=0``.
    """
    if LOG_PREFIX_ACTOR_NAME:
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"{LOG_PREFIX_ACTOR_NAME}{name}\n")
            stream.flush()
