"""RunReader: follows a run folder for the page, and answers what the page asks. Needs only JSON and numpy.

Nothing here writes, runs code of a file, or follows a link out of the folder. Not thread-safe: the server has a lock.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import zipfile
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from single_controller.view import run_files
from single_controller.view.run_files import RunFolderError
from single_controller.view.sample_table import StepTable

MAX_LINE_BYTES = 64 * 2**20
"""A longer line of a file is skipped."""

LINES_AT_ONCE = 200
"""Lines that are parsed together."""

WINDOW_BYTES = 8 * 2**20
"""What is read at most of the timeline at once."""

KEPT_TEXT_FILES = 2
"""Number of steps whose texts are kept in memory."""


class JsonLines:
    """Follows a file of JSON objects, one a line.

    Args:
        path: the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self._last = b""  # the bytes before the offset: whether the file was cut and written anew

    def new(self) -> tuple[bool, Iterator[dict[str, Any]]]:
        """The objects that were appended since the last call. A last line without its end is left for later; a line
        that is no JSON object is skipped.

        Returns:
            Whether the file began anew, so that what was read before no longer counts; and the objects.
        """
        try:
            file = open(self._path, "rb")  # noqa: SIM115  (the with statement follows)
        except FileNotFoundError:
            return self._restart(0, bool(self._offset)), iter(())
        with file:
            about = os.fstat(file.fileno())
            anew = False
            if self._offset:
                file.seek(max(0, self._offset - 64))
                same = about.st_ino == self._inode and about.st_size >= self._offset
                anew = not same or file.read(min(64, self._offset)) != self._last
            if anew or not self._offset:
                self._restart(about.st_ino, anew)
            file.seek(self._offset)
            text = file.read(about.st_size - self._offset)
        whole = text.rfind(b"\n") + 1
        if whole:
            self._offset += whole
            self._last = (self._last + text[max(0, whole - 64) : whole])[-64:]
        return anew, _objects(text[: whole - 1].decode(errors="replace").split("\n") if whole else [])

    def _restart(self, inode: int, anew: bool) -> bool:
        self._offset, self._inode, self._last = 0, inode, b""
        return anew


class Metrics:
    """Metrics by step, in columns."""

    def __init__(self) -> None:
        self.steps, self.times = array("q"), array("d")
        self.columns: dict[str, array[float]] = {}
        self._rows: dict[int, int] = {}  # step -> row
        self._sorted = True

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl. A step that is there already gets the later values."""
        step, metrics = record.get("step"), record.get("metrics")
        if not isinstance(step, int) or not isinstance(metrics, dict):
            return
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = len(self.steps)
            self._sorted = self._sorted and (not row or step > self.steps[-1])
            self.steps.append(step)
            self.times.append(_number(record.get("time")))
        else:
            self.times[row] = _number(record.get("time"))
        known = self.columns
        for name, value in metrics.items():
            if type(value) is not float:  # millions of them: no call for what is a float already
                value = _number(value)
            column = known.get(name)
            if column is None:
                column = known[name] = array("d")
            if len(column) == row:
                column.append(value)
                continue
            if len(column) < row:
                column.extend([math.nan] * (row + 1 - len(column)))
            column[row] = value

    def series(self, name: str, *, by_time: bool, first: float, last: float, points: int) -> dict[str, list[Any]]:
        """A metric in at most ``points`` buckets of equally many steps.

        Returns:
            ``x``, the step or seconds since the epoch where each bucket ends, with ``mean``, ``min`` and ``max`` in it.
            None stands for a value that is not finite.
        """
        values = np.full(len(self.steps), np.nan)
        column = self.columns.get(name, array("d"))
        values[: len(column)] = column
        x = np.array(self.times if by_time else self.steps, dtype=np.float64)
        keep = (x >= first) & (x <= last) & ~np.isnan(values)
        if not self._sorted:
            order = np.argsort(x, kind="stable")
            x, values, keep = x[order], values[order], keep[order]
        x, values = x[keep], values[keep]
        if not len(x):
            return {"x": [], "mean": [], "min": [], "max": []}
        starts = np.unique(np.linspace(0, len(x), min(points, len(x)), endpoint=False).astype(np.int64))
        ends = np.append(starts[1:], len(x)) - 1
        counts = ends - starts + 1
        with np.errstate(invalid="ignore", over="ignore"):
            mean = np.add.reduceat(values, starts) / counts
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        return {"x": x[ends].tolist(), "mean": _finite(mean), "min": _finite(low), "max": _finite(high)}

    def latest(self) -> dict[str, float | None]:
        """The last value of each metric."""
        found: dict[str, float | None] = {}
        for name, column in self.columns.items():
            value = next((one for one in reversed(column) if not math.isnan(one)), math.nan)
            found[name] = value if math.isfinite(value) else None
        return found


class RunReader:
    """One run's folder.

    Args:
        folder: the folder of a run.

    Attributes:
        about: what run.json says.
        metrics: its `Metrics`.
        events: the objects of events.jsonl, oldest first.

    Raises:
        RunFolderError: it is no run folder, or has another format.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.about: dict[str, Any] = {}
        self.metrics = Metrics()
        self.events: list[dict[str, Any]] = []
        self._metric_lines = JsonLines(self._inside(run_files.METRICS))
        self._event_lines = JsonLines(self._inside(run_files.EVENTS))
        self._vocabulary_lines = JsonLines(self._inside(run_files.VOCABULARY))
        self._tables: dict[int, StepTable] = {}
        self._texts: OrderedDict[tuple[int, int], list[dict[str, Any]]] = OrderedDict()
        self._pieces: dict[int, str] = {}
        self._read_about()

    def refresh(self) -> None:
        """Read what was written since the last call."""
        self._read_about()
        anew, records = self._metric_lines.new()
        if anew:
            self.metrics = Metrics()
        for record in records:
            self.metrics.add(record)
        anew, records = self._event_lines.new()
        self.events = [*([] if anew else self.events), *records]

    def _read_about(self) -> None:
        self._inside(run_files.RUN)
        self.about = run_files.read_run(self.folder)

    def _inside(self, name: str) -> Path:
        """The path of a file of the run.

        Raises:
            RunFolderError: the file is a link that leads out of the folder.
        """
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder):
            raise RunFolderError(f"{name} is outside of the run's folder")
        return path

    def summary(self) -> dict[str, Any]:
        """The run in a few words: ``name``, ``state``, ``last_step`` and ``last_time`` (None before the first one), the
        latest ``metrics``, and the last ``alarms``."""
        ended, steps, times = self.about.get("ended"), self.metrics.steps, self.metrics.times
        state = f"ended: {ended.get('reason')}" if isinstance(ended, dict) else "running"
        return {
            "name": str(self.about.get("name") or self.folder.name),
            "state": state if ended or not self._killed else "killed",
            "last_step": max(steps, default=None),
            "last_time": max((one for one in times[-1:] if math.isfinite(one)), default=None),
            "metrics": self.metrics.latest(),
            "alarms": [event for event in self.events if event.get("kind") == "alarm"][-20:],
        }

    @property
    def _killed(self) -> bool:
        """Whether the run's process was on this host, and is gone."""
        process = self.about.get("process")
        if not isinstance(process, dict) or process.get("host") != socket.gethostname():
            return False
        return isinstance(process.get("pid"), int) and not os.path.exists(f"/proc/{process['pid']}")

    def silent(self, seconds: float) -> str | None:
        """A problem in words if the run has not ended, but has logged no step for so long; else None."""
        last = [*self.metrics.times[-1:], *(one.get("time") for one in self.about.get("resumed") or [])]
        begun = [one for one in (*last, self.about.get("started")) if isinstance(one, (int, float))]
        waited = time.time() - max(begun, default=0.0)
        if self.about.get("ended") or waited <= seconds:
            return None
        return f"{self.folder.name} has logged no step for {waited:.0f} s"

    def update_of(self, version: int) -> dict[str, Any] | None:
        """The last update that made a version of the weights."""
        return next(
            (one for one in reversed(self.events) if one.get("kind") == "update" and one.get("version") == version),
            None,
        )

    # --- samples ----------------------------------------------------------------------------------------------------

    def sample_steps(self) -> list[int]:
        """The steps whose samples are kept, in order."""
        self._inside(run_files.SAMPLES)
        return run_files.sample_steps(self.folder)

    def table(self, step: int) -> StepTable:
        """What the table of samples shows of a step.

        Raises:
            RunFolderError: no samples of that step are kept, or its file cannot be read.
        """
        path = self._samples(step)
        try:
            changed = path.stat().st_mtime_ns
            known = self._tables.get(step)
            if known is None or known.changed != changed:
                known = self._tables[step] = StepTable.of(step, changed, Arrays(path), self.texts(step))
        except FileNotFoundError:
            raise RunFolderError(f"no samples of step {step} are kept") from None
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            raise RunFolderError(f"the samples of step {step} cannot be read: {error}") from error
        return known

    def arrays(self, step: int) -> Arrays:
        """The arrays of a step's samples. Raises as `table`."""
        try:
            return Arrays(self._samples(step))
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise RunFolderError(f"the samples of step {step} cannot be read: {error}") from error

    def texts(self, step: int) -> list[dict[str, Any]]:
        """What the JSON beside a step's arrays says of each row; [] without one."""
        path = self._inside(str(run_files.sample_files(Path(), step)[1]))
        try:
            key = step, path.stat().st_mtime_ns
            if key not in self._texts:
                read = json.loads(path.read_bytes())
                self._texts[key] = [row if isinstance(row, dict) else {} for row in read["rows"]]
                while len(self._texts) > KEPT_TEXT_FILES:
                    self._texts.popitem(last=False)
            self._texts.move_to_end(key)
            return self._texts[key]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError) as error:
            raise RunFolderError(f"{path.name} cannot be read: {error}") from error

    def pieces(self, tokens: Sequence[int]) -> list[str | None]:
        """The text of each token; None where the run has none."""
        if isinstance(self.about.get("vocabulary"), dict):
            anew, lines = self._vocabulary_lines.new()
            if anew:
                self._pieces = {}
            self._pieces |= {one["id"]: str(one.get("text")) for one in lines if isinstance(one.get("id"), int)}
        return [self._pieces.get(one) for one in tokens]

    def _samples(self, step: int) -> Path:
        return self._inside(str(run_files.sample_files(Path(), step)[0]))

    # --- timeline ---------------------------------------------------------------------------------------------------

    def timeline_span(self) -> tuple[float, float] | None:
        """When the first recorded part began and the last one ended, in seconds since the epoch; None without any."""
        try:
            with open(self._inside(run_files.TIMELINE), "rb") as file:
                first = _object(file.readline(MAX_LINE_BYTES))
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 2**18))
                tail = file.read()
        except FileNotFoundError:
            return None
        lines = tail[: tail.rfind(b"\n") + 1].splitlines()
        ends = [_end(one) for line in lines[-200:] if (one := _object(line)) is not None]
        return None if first is None or not ends else (_begin(first), max(ends))

    def timeline(self, begin: float, end: float) -> tuple[list[dict[str, Any]], bool]:
        """The parts of the timeline that overlap a time, in seconds since the epoch. Lines are written when a part has
        ended, so their ends increase but for what ranks did at the same time.

        Returns:
            The parts, and whether there are more than `WINDOW_BYTES`, so that the later ones are missing.
        """
        try:
            file = open(self._inside(run_files.TIMELINE), "rb")  # noqa: SIM115  (likewise)
        except FileNotFoundError:
            return [], False
        with file:
            low, high = 0, os.fstat(file.fileno()).st_size
            while high - low > 2**16:  # the first line that ends at or after ``begin`` is behind ``low``
                middle = (low + high) // 2
                file.seek(middle)
                file.readline(MAX_LINE_BYTES)
                one = _object(file.readline(MAX_LINE_BYTES))
                if one is not None and _end(one) < begin:
                    low = middle
                else:
                    high = middle
            file.seek(max(0, low - 2**16))
            text = file.read(WINDOW_BYTES)
            more = bool(file.read(1))
        parts = []
        for line in text[text.find(b"\n") + 1 if low > 2**16 else 0 : text.rfind(b"\n") + 1].splitlines():
            one = _object(line)
            if one is not None and _end(one) >= begin:
                if _begin(one) > end:
                    continue
                parts.append(one)
        return parts, more and bool(parts) and _end(parts[-1]) < end


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of an .npz file. Those that are not compressed are mapped into memory, so that a slice reads only
    itself. No pickles.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        zipfile.BadZipFile: it is no .npz file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with zipfile.ZipFile(path) as archive:
            self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    def __getitem__(self, name: str) -> np.ndarray:
        info = self._members[name]
        if info.compress_type != zipfile.ZIP_STORED:
            with np.load(self._path, allow_pickle=False) as archive:
                read: np.ndarray = archive[name]
                return read
        with open(self._path, "rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
            name_bytes, extra_bytes = header[26] + 256 * header[27], header[28] + 256 * header[29]
            file.seek(info.header_offset + 30 + name_bytes + extra_bytes)
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read_header(file)
            if dtype.hasobject:
                raise ValueError(f"the array {name!r} has Python objects")
            if not math.prod(shape):
                return np.empty(shape, dtype)
            return np.memmap(self._path, dtype, "r", file.tell(), shape, "F" if fortran else "C")

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


def _objects(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects. Many at once are read twice as fast as one by one."""
    for start in range(0, len(lines), LINES_AT_ONCE):
        part = lines[start : start + LINES_AT_ONCE]
        try:
            read = json.loads(f"[{','.join(part)}]")
        except (ValueError, RecursionError):
            read = []
        for one in read if len(read) == len(part) else map(_object, part):
            if isinstance(one, dict):
                yield one


def _object(line: bytes | str) -> dict[str, Any] | None:
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        read = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _finite(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _begin(part: Mapping[str, Any]) -> float:
    begin = part.get("start")
    return _number(begin if begin is not None else part.get("sent"))


def _end(part: Mapping[str, Any]) -> float:
    end = part.get("end")
    return _number(end) if end is not None else _begin(part)
