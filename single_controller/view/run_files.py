"""The files of a run folder, and functions that read them, also while the run writes. docs/runs.md has the format."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 1
RUN = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
TIMELINE = "timeline.jsonl"
VOCABULARY = "vocabulary.jsonl"
SAMPLES = "samples"


class RunFolderError(ValueError):
    """A folder is not a run folder, or has another format."""


def pid_namespace() -> int | None:
    """Identify the processes among which pids are unique: in a container, other ones than on its host."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def sample_files(folder: Path, step: int) -> tuple[Path, Path]:
    """Return the ``.npz`` and the ``.json`` of a step's samples."""
    stem = folder / SAMPLES / f"step_{step:08d}"
    return stem.with_suffix(".npz"), stem.with_suffix(".json")


def sample_steps(folder: Path) -> list[int]:
    """Return the steps that have samples, in order."""
    names = (re.fullmatch(r"step_(-?[0-9]{7,15})", path.stem) for path in (folder / SAMPLES).glob("step_*.npz"))
    return sorted(int(match[1]) for match in names if match is not None)


def read_run(folder: Path, text: bytes | None = None) -> dict[str, Any]:
    """Read ``run.json``, or its ``text``.

    Raises:
        RunFolderError: there is none, or it has another format.
    """
    try:
        run = json.loads((folder / RUN).read_bytes() if text is None else text)
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{folder} is not a run folder: {RUN} cannot be read: {error}") from None
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise RunFolderError(f"{folder / RUN}: its format is not {FORMAT}; read it with the version that wrote it")
    return run


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a ``.jsonl`` file. A file that does not exist has none; an incomplete last line is
    left out."""
    try:
        file = open(path, "rb")  # noqa: SIM115  (the with statement follows)
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)
