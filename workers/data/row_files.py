"""Row files: JSON Lines, Parquet and Hugging Face datasets as sequences of rows that are read one at a time.

Only the positions of the rows are in memory: 8 bytes for each line of JSON Lines. Parquet, which can only be decoded by
many rows at a time, is decoded once into a temporary file, from which single rows are read.
"""

from __future__ import annotations

import bisect
import errno
import glob
import json
import os
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import parse_qsl

import numpy as np

from single_controller import SingleControllerError
from workers.extras import require

MAX_LINE_BYTES = 64 * 2**20
"""Default of ``open_rows(max_line_bytes=)``."""

_BLOCK_BYTES = 4 * 2**20
_BATCH_ROWS = 1024

HUB = "hf:"
"""Prefix of a dataset's name on the hub."""

_UTF8 = b"\xef\xbb\xbf"
"""The byte order mark that a file in UTF-8 may begin with."""

_JSONL, _PARQUET = (".jsonl", ".ndjson", ".json"), (".parquet", ".pq")

_OTHER_CONTENT = (
    (b"PAR1", "is a Parquet file; name it .parquet"),
    (b"ARROW1", "is an Arrow file; pass the dataset's folder, or an opened datasets.Dataset"),
    (b"\x1f\x8b", "is compressed (gzip), so that its rows cannot be read one at a time; decompress it"),
    (b"\x28\xb5\x2f\xfd", "is compressed (zstd), so that its rows cannot be read one at a time; decompress it"),
    (b"BZh", "is compressed (bzip2), so that its rows cannot be read one at a time; decompress it"),
    (b"\xfd7zXZ", "is compressed (xz), so that its rows cannot be read one at a time; decompress it"),
    (b"PK\x03\x04", "is a ZIP archive; unpack it"),
    (b"\xff\xfe", "is UTF-16 or UTF-32; convert it to UTF-8"),
    (b"\xfe\xff", "is UTF-16; convert it to UTF-8"),
    (b"\x00\x00\xfe\xff", "is UTF-32; convert it to UTF-8"),
    (b"{\x00", "is UTF-16 or UTF-32; convert it to UTF-8"),
    (b"\x00{", "is UTF-16; convert it to UTF-8"),
    (b"\x00\x00\x00{", "is UTF-32; convert it to UTF-8"),
    (b"version https://git-lfs", "is a pointer of Git LFS, not the data; fetch it with `git lfs pull`"),
    (b"<", "is HTML or XML, not data; perhaps a page with an error was downloaded"),
    (b"[", "is one JSON array; write each of its objects on a line of its own (JSON Lines)"),
)
"""How a file that is no JSON Lines may begin, and what is said about it. Nothing of this begins a JSON object."""


class DataError(SingleControllerError, ValueError):
    """Data cannot be read, or has a row that cannot be used.

    Attributes:
        path: the file, or the name of another source; None if all sources are meant.
        row: number of the row, from 1: in JSON Lines, that of the line. None if the whole source is meant.
    """

    def __init__(self, message: str, *, path: str | None = None, row: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.row = row


class FilledRow(dict[str, Any]):
    """A row of Parquet or of a dataset. Each dict in it has the keys that its column has in any row, with null for
    those that are not its own."""


class RowFile(Protocol):
    """A source of rows.

    Attributes:
        name: its path, for messages.
        unit: what its rows are called in messages.
        bytes: its size, by which a run that continues notices that it was changed; 0 if it is not known.
    """

    name: str
    unit: str
    bytes: int

    def __len__(self) -> int: ...

    def read(self, row: int) -> Mapping[str, Any]:
        """Return a row.

        Raises:
            ValueError: the row is malformed.
            DataError: the source cannot be read any more.
        """

    def number(self, row: int) -> int:
        """Return the row's number for messages; see `DataError.row`."""


def open_sources(given: Any, *, max_line_bytes: int = MAX_LINE_BYTES) -> list[RowFile]:
    """Open sources of rows.

    Args:
        given: one source, or a list of them; see `workers.data.row_reader.open_rows`.
        max_line_bytes: a longer line of JSON Lines is a malformed row.

    Raises:
        DataError: a source does not exist, is of another format, or has no rows.
        ImportError: Parquet or a dataset is given, and its library is not installed.
    """
    sources = [given] if _is_source(given) else given
    if isinstance(sources, Mapping):
        splits = ", ".join(map(repr, sources))
        raise DataError(f"the data is a {type(given).__name__} with the splits {splits}; pass one of them")
    if not isinstance(sources, (list, tuple)):
        raise DataError(f"the data is {given!r:.80}; pass a path, a datasets.Dataset, or a list of these")
    if not sources:
        raise DataError("there are no sources: the list is empty")
    return [one for source in sources for one in _open(source, max_line_bytes)]


def _is_source(given: Any) -> bool:
    if isinstance(given, Mapping):
        return False  # such as a DatasetDict, which has column names, too
    rows = isinstance(given, (list, tuple)) and bool(given) and all(isinstance(one, Mapping) for one in given)
    return isinstance(given, (str, os.PathLike)) or rows or hasattr(given, "column_names")


def _open(source: Any, max_line_bytes: int) -> Iterator[RowFile]:
    if not isinstance(source, (str, os.PathLike)):
        yield ListedRows(source, type(source).__name__)
        return
    name = os.fspath(source)
    if name.startswith(HUB):
        yield ListedRows(_from_hub(name), name)
        return
    if "://" in name:
        _refuse(name, "is a URL; download it, or pass hf:NAME for a dataset on the Hugging Face hub")
    pattern = not os.path.exists(name) and any(c in name for c in "*?[")
    found = sorted(glob.glob(name, recursive=True)) if pattern else [name]
    if not found:
        _refuse(name, "matches no file")
    for path in found:
        yield _open_path(path, max_line_bytes)


def _open_path(path: str, max_line_bytes: int) -> RowFile:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            if not Path(path, "dataset_info.json").exists():
                _refuse(path, "is a folder, but not one of Dataset.save_to_disk; pass its files, such as 'DIR/*.jsonl'")
            return ListedRows(_loaded(path, lambda: require("datasets", extra="data").load_from_disk(path)), path)
        if not stat.S_ISREG(mode):
            _refuse(path, "is not a regular file")
        suffix = Path(path).suffix.lower()
        if suffix in _PARQUET:
            return ParquetRows(path)
        if suffix in _JSONL:
            return JsonLines(path, max_line_bytes)
        with open(path, "rb") as file:
            _refuse_other_content(path, file.read(64))
    except FileNotFoundError:
        _refuse(path, "does not exist")
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror or error}")
    _refuse(path, f"has the suffix {suffix!r}; expected one of {', '.join((*_JSONL, *_PARQUET))}")


def _refuse(path: str, what: str) -> NoReturn:
    raise DataError(f"{path}: {what}", path=path)


def _refuse_other_content(path: str, head: bytes) -> None:
    if not head:
        _refuse(path, "is empty")
    for begin, what in _OTHER_CONTENT:
        if head.removeprefix(_UTF8).lstrip(b" \t\r\n").startswith(begin):
            _refuse(path, what)


class JsonLines:
    """A file with a JSON object on each line, in UTF-8. Empty lines are no rows.

    The file is read once when it is opened, to find its lines. It must not be changed meanwhile or afterwards.

    Args:
        path: the file.
        max_line_bytes: a longer line is malformed. It is not read.
    """

    unit = "line"

    def __init__(self, path: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.name = path
        self._max_line_bytes = max_line_bytes
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        head = os.pread(self._file, 64, 0)
        _refuse_other_content(path, head)
        begin = len(_UTF8) if head.startswith(_UTF8) else 0
        self._starts, self._empty, self.bytes = _lines(self._file, begin)
        if not len(self):
            _refuse(path, "has no rows, only empty lines")

    def __len__(self) -> int:
        return len(self._starts) - 1 - len(self._empty)

    def number(self, row: int) -> int:
        return nth_kept(self._empty, row) + 1

    def read(self, row: int) -> Mapping[str, Any]:
        line = self.number(row) - 1
        begin, end = int(self._starts[line]), int(self._starts[line + 1])
        if end - begin > self._max_line_bytes:
            raise ValueError(f"the line has {end - begin:,} bytes; max_line_bytes is {self._max_line_bytes:,}")
        try:
            text = os.pread(self._file, end - begin, begin)
        except OSError as error:
            _refuse(self.name, f"cannot be read: {error.strerror or error}")
        if len(text) != end - begin:
            _refuse(self.name, "was truncated since it was opened")
        try:
            found = _DECODER.decode(text.decode().strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"byte {error.start + 1} ({text[error.start]:#04x}) is not UTF-8") from None
        except json.JSONDecodeError as error:
            hint = "; the file may be truncated" if line == len(self._starts) - 2 and text[-1:] != b"\n" else ""
            if text.strip() == b"{":
                hint = "; write each object on one line (JSON Lines)"
            raise ValueError(f"not valid JSON: {error.msg} (character {error.pos + 1}){hint}") from None
        except RecursionError:
            raise ValueError("its JSON is nested too deeply") from None
        if not isinstance(found, dict):
            raise ValueError(f"the line is not a JSON object, but {_kind(found)}")
        return found


def _lines(file: int, begin: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return where each line begins and the last one ends, the keys of the empty lines for `nth_kept`, and the size of
    the file."""
    found, at = [np.array([begin], np.int64)], begin
    while block := os.pread(file, _BLOCK_BYTES, at):
        found.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (at + 1))
        at += len(block)
    starts = np.concatenate(found)
    if starts[-1] != at:  # the last line has no end
        starts = np.append(starts, at)
    lengths = np.diff(starts)
    short = np.flatnonzero(lengths <= 2).tolist()
    empty = [line for line in short if not os.pread(file, int(lengths[line]), int(starts[line])).strip()]
    return starts, np.array(empty, np.int64) - np.arange(len(empty)), at


def nth_kept(keys: Sequence[int] | np.ndarray, number: int) -> int:
    """Return the number, counting all, of the n-th element that was not left out.

    Args:
        keys: for each element that was left out, in order, its number less how many were left out before it.
        number: n, from 0.
    """
    return number + bisect.bisect_right(keys, number)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; leave the number out, or write null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


class ListedRows:
    """Rows that can be had by their number: a ``datasets.Dataset``, or a list of dicts."""

    unit = "row"
    bytes = 0

    def __init__(self, rows: Any, name: str) -> None:
        self.name = name
        self._rows = rows
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            kind = type(rows).__name__
            _refuse(name, f"{kind} has no length, so its rows have no order that a run could continue; load it whole")
        if isinstance(rows, Mapping):
            _refuse(
                name, f"has the splits {', '.join(map(repr, rows))}; choose one of them: ?split=NAME after the name"
            )
        if not len(rows):
            _refuse(name, "has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, row: int) -> int:
        return row + 1

    def read(self, row: int) -> Mapping[str, Any]:
        try:
            found = self._rows[row]
        except Exception as error:  # whatever a decoder or a transform raises
            raise ValueError(f"cannot be read: {_described(error)}") from error
        if not isinstance(found, Mapping):
            raise ValueError(f"the row is a {type(found).__name__}, not a dict")
        return FilledRow(found) if hasattr(self._rows, "column_names") else found


def _from_hub(name: str) -> Any:
    """Load ``hf:NAME?name=CONFIG&split=SPLIT&revision=REVISION``."""
    path, _, query = name.removeprefix(HUB).partition("?")
    options = dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))  # in train+test, + is no space
    if unknown := [key for key in options if key not in ("name", "split", "revision")]:
        _refuse(name, f"{unknown[0]!r} is none of the options name, split and revision")
    datasets = require("datasets", extra="data")
    return _loaded(name, lambda: datasets.load_dataset(path, **{"split": "train", **options}))


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError:
        raise
    except Exception as error:  # datasets raises errors of many kinds
        raise DataError(f"{name}: cannot be loaded: {_described(error)}", path=name) from error


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: " + str(error).partition("\n")[0]


class ParquetRows:
    """A Parquet file, decoded into a temporary file that is mapped into memory. It is in the folder that TMPDIR names,
    and as large as the decoded data."""

    unit = "row"

    def __init__(self, path: str) -> None:
        self.name, self.bytes = path, os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(64)
        if not head.startswith(b"PAR1"):
            _refuse_other_content(path, head)
            _refuse(path, "is not a Parquet file" + ("; name it .jsonl" if head.lstrip()[:1] == b"{" else ""))
        pa, parquet = require("pyarrow", extra="data"), require("pyarrow.parquet", extra="data")
        try:
            with parquet.ParquetFile(path) as source:
                names = source.schema_arrow.names
                if twice := [name for name in names if names.count(name) > 1]:
                    _refuse(path, f"has two columns {twice[0]!r}")
                self._batches = self._decoded(pa, source)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                _refuse(path, f"does not fit into {tempfile.gettempdir()}; set TMPDIR to a folder with more room")
            _refuse(path, f"cannot be read as Parquet, and may be truncated or damaged: {_described(error)}")
        self._ends = [0, *accumulate(batch.num_rows for batch in self._batches)]
        if not self._ends[-1]:
            _refuse(path, "has no rows")

    @staticmethod
    def _decoded(pa: Any, source: Any) -> list[Any]:
        handle, spill = tempfile.mkstemp(prefix="rows-", suffix=".arrow")
        os.close(handle)
        try:
            with pa.OSFile(spill, "wb") as sink, pa.ipc.new_stream(sink, source.schema_arrow) as writer:
                for batch in source.iter_batches(batch_size=_BATCH_ROWS):
                    writer.write_batch(batch)
            return list(pa.ipc.open_stream(pa.memory_map(spill)))  # nothing is copied
        finally:
            os.unlink(spill)  # the map keeps the bytes, and the disk gets them back with the process

    def __len__(self) -> int:
        return self._ends[-1]

    def number(self, row: int) -> int:
        return row + 1

    def read(self, row: int) -> Mapping[str, Any]:
        batch = bisect.bisect_right(self._ends, row) - 1
        return FilledRow(self._batches[batch].slice(row - self._ends[batch], 1).to_pylist()[0])
