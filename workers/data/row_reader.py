"""RowReader: the rows of a run's data, in an order that a run can continue, without those that cannot be used.

Threads: none are started. A `RolloutStream` reads in the router's thread, while the driver takes the state for a
checkpoint. ``RowReader._lock`` makes reading a row one step.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, Literal, get_args

from dispatch.checks import check_count
from workers.data.row_files import MAX_LINE_BYTES, DataError, RowFile, nth_kept, open_sources
from workers.data.row_order import RowOrder

logger = logging.getLogger(__name__)

OnBadRow = Literal["error", "skip"]
Prepare = Callable[[Mapping[str, Any]], Any]
"""Makes of a row what the reader returns for it; None leaves it out, as too long. A ValueError or an IndexError
says why a row is bad, a `DataError` why no row could be used."""

_LOGGED = 5
"""How many bad rows are logged, each with its number; afterwards they are only counted."""


def open_rows(
    sources: Any,
    *,
    weights: Sequence[float] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    epochs: int | None = None,
    on_bad_row: OnBadRow = "error",
    prepare: Prepare | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> RowReader:
    """Open data to train on.

    Args:
        sources: a source, or a list of them: the path of a file of JSON Lines (.jsonl, .ndjson, .json) or of Parquet
            (.parquet, .pq), or a pattern such as ``"data/*.parquet"``; a folder that ``Dataset.save_to_disk`` has
            written; ``"hf:NAME?name=CONFIG&split=SPLIT&revision=REVISION"`` for a dataset on the Hugging Face hub, by
            default its split ``train``; a ``datasets.Dataset``; or a list of dicts.
        weights: the share of each source in the run, in any unit, rounded to 1/1000; a pattern's files have a weight
            each. By default all sources are one, and each row comes once per epoch. See `RowOrder`.
        shuffle: whether each epoch has an order of its own. The order depends on ``seed`` and the number of rows alone,
            and takes no memory.
        seed: of the order.
        epochs: after how many the rows end; None for never. Not with ``weights``.
        on_bad_row: "error" raises a `DataError` for a row that cannot be used; "skip" leaves it out, logs the first
            ones and counts all.
        prepare: see `Prepare`; by default rows are returned as they are.
        max_line_bytes: a longer line of JSON Lines is a bad row. It is not read.

    Raises:
        DataError: a source does not exist, is in another format, or has no rows.
        ValueError: an option is out of range.
        ImportError: a source is Parquet or a dataset, and ``single-controller[data]`` is not installed.
    """
    if on_bad_row not in get_args(OnBadRow):
        raise ValueError(f"on_bad_row={on_bad_row!r}: expected 'error' or 'skip'")
    if epochs is not None:
        check_count("epochs", epochs)
    check_count("max_line_bytes", max_line_bytes)
    files = open_sources(sources, max_line_bytes=max_line_bytes)
    order = RowOrder([len(one) for one in files], weights=weights, shuffle=shuffle, seed=seed, epochs=epochs)
    return RowReader(files, order, on_bad_row=on_bad_row, prepare=prepare)


class RowReader:
    """Rows by their position in the run: ``reader[n]`` is the n-th row that was not left out, from 0, over all epochs.
    Or one batch after the other, with `take`.

    To know which row is the n-th, all rows before it are read once; a state of `state_dict` saves that. Create it with
    `open_rows`.

    Args:
        files: the sources.
        order: of their rows.
        on_bad_row: see `open_rows`.
        prepare: see `open_rows`; may be set until the first row is read.

    Attributes:
        position: the number of rows that `take` has returned.
    """

    def __init__(
        self,
        files: Sequence[RowFile],
        order: RowOrder,
        *,
        on_bad_row: OnBadRow = "error",
        prepare: Prepare | None = None,
    ) -> None:
        self.files = list(files)
        self.order = order
        self.on_bad_row = on_bad_row
        self.prepare = prepare
        self.position = 0
        self._lock = threading.Lock()
        """Protects the attributes below, and `position`. Held while a row is read and prepared."""
        self._read = 0
        """How many rows were read, in order, with those left out."""
        self._left_out = array("q")
        """Of the rows left out, the keys for `nth_kept`: 8 bytes each."""
        self._counts = {"too_long": 0, "bad": 0}
        self._last: tuple[int, Any] = (-1, None)
        """The row that was read last: its number among all, and what was made of it."""

    def __getitem__(self, position: int) -> Any:
        """Return a row, prepared.

        Raises:
            DataError: the row, or with ``on_bad_row="error"`` one before it, cannot be used; or none of an epoch can.
            IndexError: the position is after the last epoch.
        """
        with self._lock:
            return self._at(index(position))  # the order needs larger integers than those of NumPy

    def take(self, count: int) -> list[Any]:
        """Return the next rows, at most ``count``: fewer, or none, at the end of the last epoch.

        Raises:
            DataError: a row cannot be used.
        """
        taken: list[Any] = []
        with self._lock:
            while len(taken) < count:
                try:
                    taken.append(self._at(self.position + len(taken)))
                except IndexError:
                    break
            self.position += len(taken)
        return taken

    def metrics(self) -> dict[str, float]:
        """Return counts since the beginning of the run: ``data/read`` rows in all, of which ``data/too_long`` and
        ``data/bad`` were left out, in each epoch again; and ``data/epoch``, the epochs that they make; with weights,
        those of the source that is repeated most."""
        with self._lock:
            counts: dict[str, float] = {"read": self._read, "epoch": self.order.epoch(self._read), **self._counts}
        return {f"data/{name}": float(count) for name, count in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: `position`, and which rows were left out."""
        with self._lock:
            return {
                "about": self._about(),
                "position": self.position,
                "read": self._read,
                "left_out": self._left_out[:],  # a copy: the router's thread goes on while the state is written
                "counts": dict(self._counts),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`.

        Raises:
            DataError: it is of other data, or of another order.
        """
        with self._lock:
            about, was = self._about(), state["about"]
            for name in about:
                if about[name] != was[name]:
                    raise DataError(
                        f"the state is of a run with other data: {name} was {was[name]}, and is {about[name]}. "
                        "Continue with the same files and options, or begin a new run"
                    )
            self.position, self._read = state["position"], state["read"]
            self._left_out, self._counts = state["left_out"][:], dict(state["counts"])
            self._last = (-1, None)

    def _about(self) -> dict[str, Any]:
        """What the order depends on."""
        order = self.order
        sizes = [f"{len(file)} rows" + f" in {file.bytes} bytes" * bool(file.bytes) for file in self.files]
        about = {"the size of the sources": ", ".join(sizes), "their share": order.shares or None}
        return {**about, "seed": order.seed, "shuffle": order.shuffle}

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _at(self, position: int) -> Any:
        if position < 0:
            raise IndexError(f"position {position}: expected at least 0")
        useless, block = 0, len(self.order.block) or 1
        epoch = -(-self.order.total // block) * block  # with weights, in blocks, each of which has rows of all sources
        # In order, because only the rows before it say which row is the n-th that is kept. A thread that asks for an
        # earlier one in between reads nothing twice: what was counted stays counted.
        while (kept := self._read - len(self._left_out)) <= position:
            self._read_next()
            useless = useless + 1 if self._read - len(self._left_out) == kept else 0
            # Only at the end of an epoch: the one good row may be the first of an epoch, and the last of the next one.
            if useless >= epoch and self._read % epoch == 0:
                counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self._counts.items())
                raise DataError(f"none of the last {useless} rows can be used; since the beginning {counts}")
        number = nth_kept(self._left_out, position)
        # Usually it was read just now. It is another one after a load, or where the driver repeats a rollout while the
        # router's thread reads ahead.
        if self._last[0] != number:
            self._last = number, self._prepared(number)
        if self._last[1] is None:
            raise DataError(
                f"{self._where(number)}: was kept before the run continued, and is too long now; set max_prompt_len as "
                "before"
            )
        return self._last[1]

    def _read_next(self) -> None:
        why = "too_long"
        try:
            made = self._prepared(self._read)
        except DataError as error:
            if self.on_bad_row == "error" or error.row is None:
                raise
            made, why = None, "bad"
            if self._counts["bad"] < _LOGGED:
                logger.warning("%s. The row is left out; data/bad counts such rows", error)
        # Nothing above has changed the state, so a row that raises is read again by whoever asks next.
        if made is None:
            self._left_out.append(self._read - len(self._left_out))
            self._counts[why] += 1
        else:
            self._last = self._read, made
        self._read += 1

    def _prepared(self, number: int) -> Any:
        source, row = self.order.at(number)
        file = self.files[source]
        try:
            found = file.read(row)
            return found if self.prepare is None else self.prepare(found)
        except DataError:
            raise
        except (ValueError, IndexError) as error:  # `take` would read an IndexError as the end of the rows
            raise DataError(f"{self._where(number)}: {error}", path=file.name, row=file.number(row)) from error

    def _where(self, number: int) -> str:
        source, row = self.order.at(number)
        file = self.files[source]
        return f"{file.name}, {file.unit} {file.number(row)}"
