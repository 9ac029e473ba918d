"""RunFolder: writes a run folder, in the format of docs/runs.md. It imports neither torch nor Ray.

A process that is killed leaves at most an incomplete last line in a file, which the next start cuts off: lines are
appended with one system call, and other files are renamed into place.
"""

from __future__ import annotations

import errno
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
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
    pid_namespace,
    read_run,
    sample_files,
    sample_steps,
)
from workers.tracking.run_about import without_secrets

logger = logging.getLogger(__name__)

LOCK = ".lock"
_LOG_BYTES = 64 << 20
"""Size at which the older half of the timeline or of the events is dropped."""

_STEP = re.compile(rb'\{"step": (-?\d+),')
_TOKEN = re.compile(rb'^\{"id": (\d+),', re.MULTILINE)


class RunFolderInUse(RuntimeError):
    """Another process, or another log of this one, writes the folder."""


class _Lines:
    """A file that lines are appended to.

    Args:
        path: the file. An incomplete last line is cut off.
        most: size in bytes at which the older half is dropped; None for no limit.
    """

    # A class attribute, because `__del__` reads it even if the file could not be opened.
    _file = -1

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
            raise OSError(errno.ENOSPC, f"the disk is full: {len(data)} bytes were not written", str(self._path))
        self.size += written
        if self._most is not None and self.size > self._most:
            with suppress(OSError):  # such as of a full disk: the lines are there, and must not be written again
                later = os.pread(self._file, self.size, self.size // 2)
                self.replace(later[later.index(b"\n") + 1 :])

    @property
    def deleted(self) -> bool:
        """Whether the file was deleted: what is written into it gets lost."""
        return not os.fstat(self._file).st_nlink

    def cut(self, size: int) -> None:
        """Drop what is behind this offset."""
        os.ftruncate(self._file, size)
        self.size = size

    def replace(self, data: bytes) -> None:
        """Replace the whole content."""
        _write(self._path, data)
        # The descriptor is that of the file that was replaced. If the new one cannot be opened, `add` tries again.
        replaced = self._file
        self._open()
        self.size = len(data)
        with suppress(OSError):  # the file is deleted, so nothing gets lost
            os.close(replaced)

    def close(self) -> None:
        file, self._file = self._file, -1  # first: the number is free also if closing fails, as on a full network disk
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


class StepLines(_Lines):
    """A file with one line for each step, which begins with it.

    Args:
        path: the file. An incomplete last line is cut off.

    Attributes:
        offsets: step -> where its line begins, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._read()

    def _read(self) -> None:
        self.offsets: dict[int, int] = {}
        at = 0
        for line in self._all():
            self.offsets[_step_of(line)] = at
            at += len(line)

    def _all(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            yield from file

    def add_step(self, step: int, entry: Mapping[str, Any]) -> None:
        """Append the line of a step."""
        begin = self.size
        # Write the step twice: `_step_of` expects it at the beginning of the line, and an entry must not override it.
        self.add([{"step": step, "time": time.time(), **entry, **{"step": step}}])
        self.offsets[step] = begin

    def drop(self, step: int) -> None:
        """Drop this step and those after it."""
        begin = min((offset for known, offset in self.offsets.items() if known >= step), default=None)
        if begin is None:
            return
        if all(offset < begin for known, offset in self.offsets.items() if known < step):
            self.cut(begin)
            self.offsets = {known: offset for known, offset in self.offsets.items() if known < step}
        else:  # steps were not logged in order
            self.replace(b"".join(line for line in self._all() if _step_of(line) < step))
            self._read()


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
    try:
        fresh.write_bytes(data)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)  # on a full disk it would take the space that a line needs
        raise


def _plain(value: Any) -> Any:
    """What json writes for a value that it does not know: numbers of numpy and torch as numbers, others as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)


class RunFolder(Closing):
    """Writes one run's folder. A context manager. Not for several threads at once.

    Opening a folder that has a run continues it: the first `step` drops what is there of that step and those after it.
    With ``resume=False`` another run begins there, with another id: events, timeline and vocabulary are dropped, and
    the first `step` drops all steps.

    Args:
        path: the folder; it is created.
        about: entries of ``run.json``, such as ``config``. Those of an earlier start are replaced.
        resume: whether a run that is there goes on.
        keep_steps: how many of the latest steps keep their samples.
        keep_bytes: size of all samples, in bytes, above which the oldest are dropped.

    Attributes:
        path: the folder.
        run: what ``run.json`` has.
        resumed: whether that run goes on.
        last_step: the last step that the folder had of it; None if another run begins.
        timeline: the file of parts of calls, which its ``add`` writes.

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
        self.path = Path(path).absolute()  # the script may change its working directory
        self._keep_steps, self._keep_bytes = keep_steps, keep_bytes
        self._files: list[_Lines] = []
        self._too_large = False  # whether samples were left out for their size
        try:
            (self.path / SAMPLES).mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "w")  # noqa: SIM115  (held until the folder is closed)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the run's folder cannot be written ({error.strerror}); pass another run_dir, or None for no folder",
                str(self.path),
            ) from None
        try:
            self._open(about or {}, resume)
        except BaseException:
            self.leave()
            raise

    def _open(self, about: Mapping[str, Any], resume: bool) -> None:
        try:
            # Do not use `lockf`: its locks belong to the process, so another log of this process would get the lock.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderInUse(
                f"{self.path} is written by another process, or by a log of this one that was not closed; pass another "
                "run_dir, or end the one that writes it"
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s); let no other run write it", self.path, error)
        existed = (self.path / RUN).exists()
        before = read_run(self.path) if existed else {}
        self.resumed = existed and resume
        now = time.time()
        self.run: dict[str, Any] = {
            "format": FORMAT,
            "name": self.path.resolve().name,
            "id": secrets.token_hex(8),
            "started": now,
            "resumed": [],
            **(before if self.resumed else {}),
            **about,
            "process": {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "pid_namespace": pid_namespace(),
                "argv": without_secrets(sys.argv),
                "started": now,
            },
            "ended": None,
        }
        folder = self.path / SAMPLES
        alone = [file for file in folder.glob("step_*.json") if not file.with_suffix(".npz").exists()]
        fresh = [self.path / f".{name}.new" for name in (RUN, METRICS, EVENTS, TIMELINE)]  # see `_write`
        for left in (*fresh, *folder.glob(".step_*.new"), *alone):  # of a process that was killed
            left.unlink(missing_ok=True)
        for name, most in ((EVENTS, _LOG_BYTES), (TIMELINE, _LOG_BYTES), (VOCABULARY, None)):
            self._files.append(_Lines(self.path / name, most))
        self._events, self.timeline, self._vocabulary = self._files
        self._metrics = StepLines(self.path / METRICS)
        self._files.append(self._metrics)
        self.last_step = max(self._metrics.offsets, default=None) if self.resumed else None
        # step -> bytes of its samples
        self._samples = {step: self._size(step) for step in sample_steps(self.path)}
        self._first = existed  # whether the next step is the first since there was another run
        self._earlier = self.run["resumed"]  # kept, because an error of the disk repeats what the first step does
        self.update()
        if not self.resumed:
            for file in (self._events, self.timeline, self._vocabulary):
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
        if self._metrics.deleted:
            raise FileNotFoundError(errno.ENOENT, "the run's folder was deleted", str(self.path))
        if self._first:
            if self.resumed:
                self._drop(step)
                self.update(resumed=[*self._earlier, {"time": time.time(), "step": step}])
                self.event("resume", f"the run goes on with step {step}", step, pid=os.getpid())
            else:
                self._drop(min([step, *self._metrics.offsets, *self._samples]))
            self._first = False  # now: a step after an error of the disk tries again
        elif self.has(step):
            self._drop(step)
            self.event("rewind", f"training goes back to step {step}", step)
        failed: Exception | None = None
        if samples is not None:  # first: a step whose metrics are there is complete
            try:
                self._write_samples(step, *samples)
            except Exception as error:  # the metrics may be written where the samples cannot
                failed = error
                with suppress(OSError):
                    self._remove(step)
        self._metrics.add_step(step, {"metrics": metrics})
        if failed is not None:
            raise failed

    def has(self, step: int) -> bool:
        """Whether a step is there."""
        return step in self._metrics.offsets

    def event(self, kind: str, text: str, step: int | None = None, **fields: Any) -> None:
        """Write an event.

        Args:
            kind: of the event, see docs/runs.md.
            text: a line for people.
            step: of the run, if the event belongs to one.
            fields: further entries.
        """
        text, fields = without_secrets(text), without_secrets(fields)  # an error may quote an address or a command line
        self._events.add([{"step": step, "time": time.time(), "kind": kind, "text": text, **fields}])

    def tokens(self) -> list[int]:
        """Return the tokens whose texts are written."""
        return [int(token) for token in _TOKEN.findall((self.path / VOCABULARY).read_bytes())]

    def words(self, texts: Mapping[int, str]) -> None:
        """Write the texts of tokens."""
        self._vocabulary.add({"id": token, "text": text} for token, text in texts.items())

    def _write_samples(self, step: int, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
        data, text = sample_files(self.path, step)
        encoded = json.dumps({"step": step, "time": time.time(), **about}, default=_plain).encode()
        size = len(encoded) + sum(array.nbytes for array in arrays.values())
        if size > self._keep_bytes:
            if not self._too_large:
                self._too_large = True
                said = f"the samples of step {step} take {size} bytes, more than keep_bytes={self._keep_bytes}"
                logger.warning("%s: they are not recorded, nor are other steps' that are as large", said)
                self.event("samples", said, step, bytes=size)
            self._remove(step)
            return
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        _write(text, encoded)  # first: where the arrays are, the text is
        _write(data, buffer.getbuffer())
        self._samples[step] = self._size(step)
        while len(self._samples) > self._keep_steps or sum(self._samples.values()) > self._keep_bytes:
            self._remove(min(self._samples))

    def close(self, reason: str = "finished") -> None:
        """Write why the run has ended, and close the files.

        Args:
            reason: "finished", or the error.
        """
        if self._lock.closed:
            return
        reason = without_secrets(reason)
        try:
            self.event("end", f"the run has ended: {reason}", reason=reason)
            self.update(ended={"time": time.time(), "reason": reason})
        finally:
            with suppress(OSError):  # closing alone would not unlock: a fork has the file too until it has left it
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self.leave()

    def leave(self) -> None:
        """Close the files, and write nothing."""
        for file in self._files:
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
        self._metrics.drop(step)


def _step_of(line: bytes) -> int:
    found = _STEP.match(line)
    if found is None:
        raise RunFolderError(f"a line of {METRICS} does not begin with its step: {line[:80]!r}")
    return int(found[1])
