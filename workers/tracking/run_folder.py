"""RunFolder: writes a run folder, in the format of docs/runs.md. It imports neither torch nor Ray.

A process that is killed leaves at most an incomplete last line in a file, which the next start cuts off: lines are
appended with one system call, and other files are renamed into place.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from single_controller.call.state import Closing
from single_controller.view.run_files import (
    EVENTS,
    FORMAT,
    METRICS,
    RUN,
    SAMPLES,
    TIMELINE,
    VOCABULARY,
    RunFolderError,
    read_run,
    sample_files,
    sample_steps,
)

logger = logging.getLogger(__name__)

LOCK = ".lock"
_LOG_BYTES = 64 << 20
"""Size at which the older half of the timeline or of the events is dropped."""

_STEP = re.compile(rb'\{"step": (-?\d+),')


class RunFolderInUse(RuntimeError):
    """Another process writes the folder."""


class _Lines:
    """A file that lines are appended to.

    Args:
        path: the file. An incomplete last line is cut off.
        most: size in bytes at which the older half is dropped; None for no limit.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self._path, self._most = path, most
        self._open()
        with open(path, "rb") as file:
            self.size = _complete(file.fileno())
        os.ftruncate(self._file, self.size)

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each entry."""
        data = b"".join(json.dumps(entry, default=_plain).encode() + b"\n" for entry in entries)
        if not data:
            return
        written = os.write(self._file, data)
        if written < len(data):  # the disk is full: without the incomplete line, the file stays valid
            os.ftruncate(self._file, self.size)
            raise OSError(28, f"the disk is full: {len(data)} bytes were not written", str(self._path))
        self.size += written
        if self._most is not None and self.size > self._most:
            self._halve()

    def cut(self, size: int) -> None:
        """Drop what is behind this offset."""
        os.ftruncate(self._file, size)
        self.size = size

    def replace(self, data: bytes) -> None:
        """Replace the whole content."""
        _write(self._path, data)
        os.close(self._file)
        self._open()
        self.size = len(data)

    def _halve(self) -> None:
        later = os.pread(self._file, self.size, self.size // 2)
        self.replace(later[later.index(b"\n") + 1 :])

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _complete(file: int) -> int:
    """Return the offset behind the last complete line."""
    end = os.fstat(file).st_size
    while end:
        begin = max(0, end - (1 << 16))
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _write(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that a reader finds the old one or the complete new one."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


def _plain(value: Any) -> Any:
    """What json writes for a value that it does not know: numbers of numpy and torch as numbers, others as text."""
    item = getattr(value, "item", None)
    if item is not None and not getattr(value, "shape", ()):
        return item()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)


class RunFolder(Closing):
    """Writes one run's folder. A context manager. Not for several threads at once.

    Opening a folder that has a run continues it: the first `step` drops what is there of that step and those after it.
    With ``resume=False`` another run begins there: it has another id, and the first `step` drops all.

    Args:
        path: the folder; it is created.
        about: entries of ``run.json``, such as ``config``. Those of an earlier start are replaced.
        resume: whether a run that is there goes on.
        keep_steps: how many of the latest steps keep their samples.
        keep_bytes: size of all samples, in bytes, above which the oldest are dropped.

    Attributes:
        path: the folder.
        run: what ``run.json`` has.
        existed: whether the folder had a run.
        resumed: whether that run goes on.

    Raises:
        RunFolderInUse: another process writes it.
        RunFolderError: it has a run of another format.
        OSError: it cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        about: Mapping[str, Any] | None = None,
        *,
        resume: bool = True,
        keep_steps: int = 200,
        keep_bytes: int = 1 << 30,
    ) -> None:
        self.path = Path(path)
        (self.path / SAMPLES).mkdir(parents=True, exist_ok=True)
        self._keep_steps, self._keep_bytes = keep_steps, keep_bytes
        self._lock = open(self.path / LOCK, "w")  # noqa: SIM115  (held until the folder is closed)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise RunFolderInUse(
                f"{self.path} is written by another process; pass another run_dir, or end that process"
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s); let no other run write it", self.path, error)
        self.existed = (self.path / RUN).exists()
        before = read_run(self.path) if self.existed else {}
        self.resumed = self.existed and resume
        now = time.time()
        self.run: dict[str, Any] = {
            "format": FORMAT,
            "name": self.path.resolve().name,
            "id": secrets.token_hex(8),
            "started": now,
            "resumed": [],
            **(before if self.resumed else {}),
            **(about or {}),
            "process": {"host": socket.gethostname(), "pid": os.getpid(), "argv": sys.argv},
            "ended": None,
        }
        for left in self.path.rglob(".*.new"):
            left.unlink(missing_ok=True)
        self._metrics = _Lines(self.path / METRICS)
        self._events = _Lines(self.path / EVENTS, _LOG_BYTES)
        self._timeline = _Lines(self.path / TIMELINE, _LOG_BYTES)
        self._vocabulary = _Lines(self.path / VOCABULARY)
        self._offsets = _offsets(self.path / METRICS)  # of each step's line
        # step -> bytes of its samples
        self._samples = {step: self._size(step) for step in sample_steps(self.path)}
        self._first = self.existed  # whether the next step is the first since there was another run
        self.update()
        if not self.resumed:
            for file in (self._events, self._timeline, self._vocabulary):
                file.cut(0)
            self.event("start", "the run has started", pid=os.getpid())

    def update(self, **about: Any) -> None:
        """Write ``run.json``, with these entries replaced."""
        self.run |= about
        _write(self.path / RUN, json.dumps(self.run, default=_plain, indent=1).encode())

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: tuple[Mapping[str, np.ndarray], Mapping[str, Any]] | None = None,
    ) -> None:
        """Write a step. If it is there, or the run was resumed, that step and those after it are dropped first.

        Args:
            step: its number.
            metrics: by name.
            samples: the arrays of the ``.npz``, and the ``.json`` without step and time.
        """
        if self._first and not self.resumed:
            self._first = False
            self._drop(min([step, *self._offsets, *self._samples]))
        elif self._first:
            self._first = False
            self._drop(step)
            self.update(resumed=[*self.run["resumed"], {"time": time.time(), "step": step}])
            self.event("resume", f"the run goes on with step {step}", step, pid=os.getpid())
        elif step in self._offsets:
            self._drop(step)
            self.event("rewind", f"training goes back to step {step}", step)
        if samples is not None:  # first: a step whose metrics are there is complete
            self._write_samples(step, *samples)
        self._offsets[step] = self._metrics.size
        self._metrics.add([{"step": step, "time": time.time(), "metrics": metrics}])

    def event(self, kind: str, text: str, step: int | None = None, **fields: Any) -> None:
        """Write an event.

        Args:
            kind: of the event, see docs/runs.md.
            text: a line for people.
            step: of the run, if the event belongs to one.
            fields: further entries.
        """
        self._events.add([{"step": step, "time": time.time(), "kind": kind, "text": text, **fields}])

    def timeline(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Write parts of calls."""
        self._timeline.add(entries)

    def words(self, texts: Mapping[int, str]) -> None:
        """Write the texts of tokens."""
        self._vocabulary.add({"id": token, "text": text} for token, text in texts.items())

    def _write_samples(self, step: int, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
        data, text = sample_files(self.path, step)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        # First: where the arrays are, the text is.
        _write(text, json.dumps({"step": step, "time": time.time(), **about}, default=_plain).encode())
        _write(data, buffer.getbuffer())
        self._samples[step] = self._size(step)
        while len(self._samples) > self._keep_steps or (
            sum(self._samples.values()) > self._keep_bytes and len(self._samples) > 1
        ):
            self._remove(min(self._samples))

    def close(self, reason: str = "finished") -> None:
        """Write why the run has ended, and close the files.

        Args:
            reason: "finished", or the error.
        """
        if self._lock.closed:
            return
        self.event("end", f"the run has ended: {reason}", reason=reason)
        self.update(ended={"time": time.time(), "reason": reason})
        for file in (self._metrics, self._events, self._timeline, self._vocabulary):
            file.close()
        self._lock.close()

    def _size(self, step: int) -> int:
        return sum(file.stat().st_size for file in sample_files(self.path, step) if file.exists())

    def _remove(self, step: int) -> None:
        for file in sample_files(self.path, step):
            file.unlink(missing_ok=True)
        self._samples.pop(step, None)

    def _drop(self, step: int) -> None:
        for later in [known for known in self._samples if known >= step]:
            self._remove(later)
        begin = min((offset for known, offset in self._offsets.items() if known >= step), default=None)
        if begin is None:
            return
        if all(offset < begin for known, offset in self._offsets.items() if known < step):
            self._metrics.cut(begin)
        else:  # steps were not logged in order
            lines = (self.path / METRICS).read_bytes().splitlines(keepends=True)
            self._metrics.replace(b"".join(line for line in lines if _step_of(line) < step))
        self._offsets = _offsets(self.path / METRICS)


def _step_of(line: bytes) -> int:
    found = _STEP.match(line)
    if found is None:
        raise RunFolderError(f"a line of {METRICS} does not begin with its step: {line[:80]!r}")
    return int(found[1])


def _offsets(path: Path) -> dict[int, int]:
    offsets, at = {}, 0
    with open(path, "rb") as file:
        for line in file:
            offsets[_step_of(line)] = at
            at += len(line)
    return offsets
