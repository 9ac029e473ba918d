"""RunReader: follows a run folder for the page, and answers what the page asks. Needs only orjson and numpy.

Nothing here writes, runs code of a file, or follows a link out of the folder. Not thread-safe: the server has a lock.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import stat
import time
import zipfile
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from single_controller.call.state import Closing
from single_controller.view import run_files
from single_controller.view.run_files import RunFolderError
from single_controller.view.sample_table import StepTable

MAX_LINE_BYTES = 32 * 2**20
"""A longer line of a file is skipped."""

CHUNK_BYTES = 4 * 2**20
"""What is read at once of a file that is followed."""

MAX_FILE_BYTES = 2**30
"""A larger JSON file is not read."""

MAX_EVENTS = 100_000
"""How many of the latest events are kept in memory."""

MAX_METRICS = 20_000
"""How many metrics are kept in memory. Further names are ignored."""

LINES_AT_ONCE = 200
"""Lines that are parsed together."""

WINDOW_BYTES = 8 * 2**20
"""What is read at most of the timeline at once."""

MAX_PIECES = 2_000_000
"""How many texts of tokens are kept in memory."""

KEPT_TEXT_FILES = 2
"""Number of steps whose texts are kept in memory."""


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a file of a run, which may be replaced or deleted meanwhile.

    Raises:
        FileNotFoundError: there is none.
        RunFolderError: it is a link that leads out of the folder, no regular file, or cannot be opened.
    """
    path = inside(folder, name)
    try:
        # Opening a named pipe would wait for a writer. `open` closes what its opener has opened, if it is a folder.
        file = open(path, "rb", opener=lambda at, how: os.open(at, how | os.O_NONBLOCK))  # noqa: SIM115  (the caller closes it)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunFolderError(f"{name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RunFolderError(f"{name} is not a regular file")
    return file


def inside(folder: Path, name: str) -> Path:
    """The path of a file of a run.

    Raises:
        RunFolderError: the file is a link that leads out of the folder.
    """
    try:
        path = (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise RunFolderError(f"{name} cannot be read: {error}") from None
    if not path.is_relative_to(folder):
        raise RunFolderError(f"{name} is outside of the run's folder")
    return path


class JsonLines:
    """Follows a file of JSON objects, one a line.

    Args:
        folder: of the run.
        name: of the file, which may not exist yet.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        inside(folder, name)
        self._offset, self._inode = 0, 0
        self._last = b""  # the bytes before the offset: whether the file was cut and written anew
        self._skips = False  # whether the offset is within a line that is too long

    def new(self) -> tuple[bool, Iterator[list[dict[str, Any]]]]:
        """The objects that were appended since the last call, which must all be taken. A last line without its end is
        left for later; a line that is no JSON object, or too long, is skipped.

        Returns:
            Whether the file began anew, so that what was read before no longer counts; and the objects, many at once.
        """
        before = self._offset
        try:
            file = open_inside(self._folder, self._name)
        except FileNotFoundError:
            self._restart(0)
            return before > 0, iter(())
        about = os.fstat(file.fileno())
        same = about.st_ino == self._inode and about.st_size >= before
        if same and before:
            file.seek(before - len(self._last))
            same = file.read(len(self._last)) == self._last
        if not same:
            self._restart(about.st_ino)
        return not same and before > 0, self._read(file, about.st_size)

    def _read(self, file: BinaryIO, size: int) -> Iterator[list[dict[str, Any]]]:
        with file:
            file.seek(self._offset)
            begun = b""  # of a line
            while (left := size - self._offset - len(begun)) > 0 and (read := file.read(min(CHUNK_BYTES, left))):
                text = begun + read
                whole = text.rfind(b"\n") + 1
                begun = text[whole:]
                if whole:
                    self._advance(text[:whole])
                    lines = text[: whole - 1].decode(errors="replace").split("\n")
                    yield from _objects(lines[1:] if self._skips else lines)
                    self._skips = False
                if len(begun) > MAX_LINE_BYTES:
                    self._advance(begun)
                    begun, self._skips = b"", True

    def _advance(self, text: bytes) -> None:
        self._offset += len(text)
        self._last = (self._last + text[-64:])[-64:]

    def _restart(self, inode: int) -> None:
        self._offset, self._inode, self._last, self._skips = 0, inode, b"", False


class Metrics:
    """Metrics by step, in columns."""

    def __init__(self) -> None:
        self.steps, self.times = array("q"), array("d")
        self.columns: dict[str, array[float]] = {}
        self._first: dict[str, int] = {}  # metric -> the row of its first value, unless that is 0
        self._rows: dict[int, int] = {}  # step -> row

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines of metrics.jsonl. A step that is there already gets the later values."""
        if not self._add_columns(records):
            for record in records:
                self._add_row(record)

    def _add_columns(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Add new steps that have the same known metrics, column by column, which takes a fraction of the time.

        Returns:
            Whether they are such steps. Otherwise, nothing is added.
        """
        steps: list[Any] = [record.get("step") for record in records]
        lines: list[Any] = [record.get("metrics") for record in records]
        if not all(type(step) is int and abs(step) <= 2**53 and step not in self._rows for step in steps):
            return False
        if not lines or len(set(steps)) < len(steps) or not all(isinstance(line, dict) for line in lines):
            return False
        names = list(lines[0])
        if any(list(line) != names for line in lines[1:]):
            return False
        row, known = len(self.steps), self.columns
        if any(name not in known or self._first.get(name, 0) + len(known[name]) != row for name in names):
            return False
        for name, values in zip(names, zip(*(line.values() for line in lines), strict=True), strict=True):
            known[name].extend(values if set(map(type, values)) == {float} else map(as_number, values))
        self._rows.update(zip(steps, range(row, row + len(steps)), strict=True))
        self.steps.extend(steps)
        self.times.extend(as_number(record.get("time")) for record in records)
        return True

    def _add_row(self, record: Mapping[str, Any]) -> None:
        step, metrics = record.get("step"), record.get("metrics")
        if type(step) is not int or abs(step) > 2**53 or not isinstance(metrics, dict):
            return
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = len(self.steps)
            self.steps.append(step)
            self.times.append(as_number(record.get("time")))
        else:
            self.times[row] = as_number(record.get("time"))
        known, begins = self.columns, self._first
        for name, value in metrics.items():
            if type(value) is not float:  # millions of them: no call for what is a float already
                value = as_number(value)
            column = known.get(name)
            if column is None:
                if len(known) == MAX_METRICS:
                    continue
                column = known[name] = array("d")
                if row:
                    begins[name] = row
            place = row - begins.get(name, 0) if begins else row
            if len(column) == place:
                column.append(value)
                continue
            if place < 0:  # an earlier step is logged again
                column[:0] = array("d", [math.nan]) * -place
                begins[name], place = row, 0
            elif len(column) < place:
                column.extend(array("d", [math.nan]) * (place + 1 - len(column)))
            column[place] = value

    def series(self, name: str, *, by_time: bool, first: float, last: float, points: int) -> dict[str, list[Any]]:
        """A metric in at most ``points`` buckets of equally many steps.

        Returns:
            ``x``, the step or seconds since the epoch where each bucket ends, with ``mean``, ``min`` and ``max`` in it.
        """
        values = np.full(len(self.steps), np.nan)
        column, begin = self.columns.get(name, array("d")), self._first.get(name, 0)
        values[begin : begin + len(column)] = column
        x = np.array(self.times if by_time else self.steps, dtype=np.float64)
        keep = (x >= first) & (x <= last) & ~np.isnan(values) & np.isfinite(x)
        if (x[1:] < x[:-1]).any():  # a clock was set back, or steps come in another order
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
        return {"x": x[ends].tolist(), "mean": mean.tolist(), "min": low.tolist(), "max": high.tolist()}

    def latest(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: column[-1] for name, column in self.columns.items()}


class RunReader:
    """One run's folder.

    Args:
        folder: the folder of a run.

    Attributes:
        about: what run.json says, without values of other types than the format has.
        owner: id of the user who has written it.
        metrics: its `Metrics`.
        events: the objects of events.jsonl, oldest first; the last `MAX_EVENTS`.
        unreadable: why the folder can no longer be read; None if it can.

    Raises:
        RunFolderError: it is no run folder, or has another format.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.about: dict[str, Any] = {}
        self.metrics = Metrics()
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.unreadable: str | None = None
        self._metric_lines = JsonLines(self.folder, run_files.METRICS)
        self._event_lines = JsonLines(self.folder, run_files.EVENTS)
        self._vocabulary_lines = JsonLines(self.folder, run_files.VOCABULARY)
        self._tables: dict[int, StepTable] = {}
        self._texts: OrderedDict[tuple[int, ...], list[dict[str, Any]]] = OrderedDict()
        self._pieces: dict[int, str] = {}
        self._read_about()

    def refresh(self) -> None:
        """Read what was written since the last call. What is known stays if the folder is gone or damaged meanwhile."""
        try:
            self._read_about()
            anew, records = self._metric_lines.new()
            if anew:
                self.metrics = Metrics()
            for part in records:
                self.metrics.add(part)
            anew, records = self._event_lines.new()
            if anew:
                self.events.clear()
            self.events.extend(chain.from_iterable(records))
            self.unreadable = None
        except RunFolderError as error:
            self.unreadable = str(error)

    def _read_about(self) -> None:
        text: bytes | None = None
        owner = -1
        with contextlib.suppress(FileNotFoundError), open_inside(self.folder, run_files.RUN) as file:
            with telling(run_files.RUN):
                owner, text = os.fstat(file.fileno()).st_uid, _bounded(file)
        read = run_files.read_run(self.folder, text)
        about = {key: value for key, value in read.items() if isinstance(value, _TYPES.get(key, object))}
        about["groups"] = [one for one in about.get("groups") or [] if isinstance(one, str)]
        about["resumed"] = [one for one in about.get("resumed") or [] if isinstance(one, dict)]
        self.about, self.owner = about, owner

    def summary(self) -> dict[str, Any]:
        """The run in a few words: ``name``, ``state``, ``last_step`` and ``last_time`` (None before the first one),
        ``age``, the seconds since then or since the start, the latest ``metrics``, and the last ``alarms``."""
        ended, steps, times = self.about.get("ended"), self.metrics.steps, self.metrics.times
        state = f"ended: {ended.get('reason')}" if ended is not None else "killed" if self._killed else "running"
        return {
            "name": str(self.about.get("name") or self.folder.name),
            "state": state if self.unreadable is None else f"{state}; {self.unreadable}",
            "last_step": max(steps, default=None),
            "last_time": max((one for one in times[-1:] if math.isfinite(one)), default=None),
            "age": self._age(),
            "metrics": self.metrics.latest(),
            "alarms": [event for event in self.events if event.get("kind") == "alarm"][-20:],
        }

    @property
    def _killed(self) -> bool:
        """Whether the run's process was on this host, and is gone. Containers may have its name, with other pids."""
        process = self.about.get("process") or {}
        namespace = process.get("pid_namespace")
        if process.get("host") != socket.gethostname() or namespace not in (None, run_files.pid_namespace()):
            return False
        try:
            os.kill(process["pid"], 0)  # not /proc, which need not show processes of other users
        except ProcessLookupError:
            return True
        except (KeyError, TypeError, OverflowError, OSError):  # another user's, which runs; or no pid
            pass
        return False

    def silent(self, seconds: float) -> str | None:
        """A problem in words if the run has not ended, but has logged no step for so long; else None."""
        waited = self._age()
        if self.about.get("ended") is not None or waited <= seconds:
            return None
        return f"{self.folder.name} has logged no step for {waited:.0f} s"

    def _age(self) -> float:
        """Seconds since the last step, or since the run began or resumed. The times of the files are by the clock of
        this host or of a file server, so they count if the run's clock is another host's, or is ahead."""
        last = [
            *self.metrics.times[-1:],
            *(one.get("time") for one in self.about["resumed"]),
            self.about.get("started"),
        ]
        logged = max((one for one in map(as_number, last) if math.isfinite(one)), default=0.0)
        try:
            written = max(os.stat(inside(self.folder, one)).st_mtime for one in (run_files.METRICS, run_files.RUN))
        except (OSError, RunFolderError):
            written = math.inf
        process, now = self.about.get("process") or {}, time.time()
        if process.get("host") not in (None, socket.gethostname()) and written < math.inf:
            return max(0.0, now - written)
        begun = as_number(process.get("started"))  # of a run that has resumed, and logged no step since
        return max(0.0, now - max(min(logged, written), begun if begun <= now else 0.0))

    def update_of(self, version: int) -> dict[str, Any] | None:
        """The last update that made a version of the weights."""
        return next(
            (one for one in reversed(self.events) if one.get("kind") == "update" and one.get("version") == version),
            None,
        )

    # --- samples ----------------------------------------------------------------------------------------------------

    def sample_steps(self) -> list[int]:
        """The steps whose samples are kept, in order; none if their folder is a link that leads out."""
        try:
            inside(self.folder, run_files.SAMPLES)
        except RunFolderError:
            return []
        steps = run_files.sample_steps(self.folder)
        for gone in self._tables.keys() - set(steps):
            del self._tables[gone]
        return steps

    def table(self, step: int) -> StepTable:
        """What the table of samples shows of a step.

        Raises:
            RunFolderError: no samples of that step are kept, or its file cannot be read.
        """
        with self.arrays(step) as arrays:
            known = self._tables.get(step)
            if known is None or known.changed != arrays.changed:
                with telling(f"the samples of step {step}"):
                    known = StepTable.of(step, arrays.changed, arrays, self.texts(step))
                self._tables[step] = known
        return known

    def arrays(self, step: int) -> Arrays:
        """The arrays of a step's samples, to be closed. Raises as `table`."""
        try:
            file = open_inside(self.folder, str(run_files.sample_files(Path(), step)[0]))
        except FileNotFoundError:
            raise RunFolderError(f"no samples of step {step} are kept") from None
        with telling(f"the samples of step {step}"):
            return Arrays(file)

    def texts(self, step: int) -> list[dict[str, Any]]:
        """What the JSON beside a step's arrays says of each row; [] without one."""
        name = str(run_files.sample_files(Path(), step)[1])
        try:
            file = open_inside(self.folder, name)
        except FileNotFoundError:
            return []
        with file, telling(name):
            key = step, *_identity(file)
            if key not in self._texts:
                rows = _loads(_bounded(file))["rows"]
                self._texts[key] = [row if isinstance(row, dict) else {} for row in rows]
                while len(self._texts) > KEPT_TEXT_FILES:
                    self._texts.popitem(last=False)
            self._texts.move_to_end(key)
            return self._texts[key]

    def pieces(self, tokens: Sequence[int]) -> list[str | None]:
        """The text of each token; None where the run has none."""
        if self.about.get("vocabulary") is not None:
            anew, lines = self._vocabulary_lines.new()
            if anew:
                self._pieces = {}
            for one in chain.from_iterable(lines):
                if type(one.get("id")) is int and len(self._pieces) < MAX_PIECES:
                    self._pieces[one["id"]] = str(one.get("text"))[:1000]
        return [self._pieces.get(one) for one in tokens]

    # --- timeline ---------------------------------------------------------------------------------------------------

    def timeline_span(self) -> tuple[float, float] | None:
        """When the first recorded part began and the last one ended, in seconds since the epoch; None without any."""
        try:
            file = open_inside(self.folder, run_files.TIMELINE)
        except FileNotFoundError:
            return None
        with file:
            head = file.read(2**18)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2**18))
            tail = file.read(2**18)
        first, last = _parts(head.splitlines()[:200]), _parts(tail[: tail.rfind(b"\n") + 1].splitlines()[-200:])
        begin = min(map(_begin, first), default=math.nan)
        return (begin, max(begin, *map(_end, last))) if first and last else None

    def timeline(self, begin: float, end: float) -> tuple[list[dict[str, Any]], bool]:
        """The parts of the timeline that overlap a time, in seconds since the epoch. Lines are written when a part has
        ended, or a little later, so the ends nearly increase.

        Returns:
            The parts, and whether there are more than `WINDOW_BYTES`, so that the later ones are missing.
        """
        try:
            file = open_inside(self.folder, run_files.TIMELINE)
        except FileNotFoundError:
            return [], False
        with file:
            low, high = 0, os.fstat(file.fileno()).st_size
            while high - low > 2**16:  # the first line that ends at or after ``begin`` is behind ``low``
                middle = (low + high) // 2
                file.seek(middle)
                file.readline(MAX_LINE_BYTES)
                # The latest of several: the script's parts and the groups' calls are written some time after they end.
                ends = [at for at in map(_end, _parts(file.read(2**15).splitlines())) if math.isfinite(at)]
                if ends and max(ends) < begin:
                    low = middle
                else:
                    high = middle
            file.seek(max(0, low - 2**16))
            text = file.read(WINDOW_BYTES)
            more = bool(file.read(1))
        parts = []
        for line in text[text.find(b"\n") + 1 if low > 2**16 else 0 : text.rfind(b"\n") + 1].splitlines():
            one = _object(line)
            if one is not None and _end(one) >= begin and _begin(one) <= end:
                parts.append(one)
        return parts, more and bool(parts) and _end(parts[-1]) < end


class Arrays(Mapping[str, np.ndarray], Closing):
    """The arrays of an .npz file, read when they are asked for. No pickles, and nothing compressed: no run writes that.
    The file stays open, and is not mapped into memory: it may be replaced, deleted or cut meanwhile.

    Args:
        file: the file, which `close` closes.

    Attributes:
        changed: other for another content.

    Raises:
        zipfile.BadZipFile: it is no .npz file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.changed = _identity(file)
        try:
            with zipfile.ZipFile(file) as archive:
                self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        except BaseException:
            file.close()
            raise
        self._found: dict[str, tuple[tuple[int, ...], bool, np.dtype[Any], int]] = {}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, without reading it."""
        return self._look(name)[0]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Some rows of an array along its first dimension. Raises ValueError if it does not have them."""
        shape, fortran, dtype, offset = self._look(name)
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"the array {name!r} of the shape {shape} has no rows {start} to {stop}")
        if fortran:
            part: np.ndarray = self[name][start:stop]
            return part
        size = math.prod(shape[1:])
        return self._values(name, dtype, offset + start * size * dtype.itemsize, (stop - start, *shape[1:]))

    def __getitem__(self, name: str) -> np.ndarray:
        shape, fortran, dtype, offset = self._look(name)
        values = self._values(name, dtype, offset, shape[::-1] if fortran else shape)
        return values.T if fortran else values

    def _values(self, name: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> np.ndarray:
        wanted = math.prod(shape) * dtype.itemsize
        self._file.seek(offset)
        values = self._file.read(wanted)
        if len(values) < wanted:
            raise ValueError(f"the array {name!r} is cut")
        return np.frombuffer(values, dtype, math.prod(shape)).reshape(shape)

    def _look(self, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
        """An array's shape, order, dtype and place."""
        if name not in self._found:
            self._found[name] = self._header(self._members[name])
        return self._found[name]

    def _header(self, info: zipfile.ZipInfo) -> Any:
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"the array {info.filename!r} is compressed")
        self._file.seek(info.header_offset)
        header = self._file.read(30)
        if len(header) < 30:
            raise ValueError("the file is cut")
        begin = info.header_offset + 30 + header[26] + 256 * header[27] + header[28] + 256 * header[29]
        self._file.seek(begin)
        version = np.lib.format.read_magic(self._file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(self._file)
        if dtype.hasobject:
            raise ValueError(f"the array {info.filename!r} has Python objects")
        offset = self._file.tell()
        size = min(info.file_size, self.changed[2] - begin)  # either may lie
        if min(shape, default=0) < 0 or offset - begin + math.prod(shape) * dtype.itemsize > size:
            raise ValueError(f"the array {info.filename!r} is cut")
        return shape, fortran, dtype, offset

    def __contains__(self, name: object) -> bool:
        return name in self._members  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("config", "versions", "seeds", "git", "ended", "process", "vocabulary"), dict),
    **dict.fromkeys(("groups", "resumed"), list),
    "ray_address": str,
    "started": (int, float),
}
"""Of the values of run.json. Others are as if they were absent."""


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Say what cannot be read in place of what reading it has raised."""
    try:
        yield
    except RunFolderError:
        raise
    except Exception as error:  # numpy and zipfile raise errors of many kinds, such as TokenError
        raise RunFolderError(f"{what} cannot be read: {error}") from error


def _identity(file: BinaryIO) -> tuple[int, ...]:
    about = os.fstat(file.fileno())
    return about.st_mtime_ns, about.st_ino, about.st_size


def _bounded(file: BinaryIO) -> bytes:
    read = file.read(MAX_FILE_BYTES + 1)
    if len(read) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES:,} bytes")
    return read


def _objects(lines: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The lines that are JSON objects. Many at once are read twice as fast as one by one."""
    for start in range(0, len(lines), LINES_AT_ONCE):
        part = [line for line in lines[start : start + LINES_AT_ONCE] if len(line) <= MAX_LINE_BYTES]
        try:
            read = _loads(f"[{','.join(part)}]")
        except (ValueError, RecursionError):
            read = []
        yield [one for one in (read if len(read) == len(part) else map(_object, part)) if isinstance(one, dict)]


def _loads(text: bytes | str) -> Any:
    """orjson takes a fifth of the time of json, but refuses NaN and infinities, which runs write."""
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text)


def _object(line: bytes | str) -> dict[str, Any] | None:
    try:
        read = _loads(line)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def as_number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def _parts(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The parts of a timeline with times; those of the driver alone if there are any: clocks of ranks may be wrong."""
    found = [one for line in lines if (one := _object(line)) is not None]
    found = [one for one in found if math.isfinite(_begin(one)) and math.isfinite(_end(one))]
    return [one for one in found if one.get("rank") is None] or found


def _begin(part: Mapping[str, Any]) -> float:
    return as_number(part.get("start"))


def _end(part: Mapping[str, Any]) -> float:
    return as_number(part.get("end"))
