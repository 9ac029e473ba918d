"""Arguments that are futures: described on the driver, taken by each rank when they exist."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dispatch import batch
from dispatch.errors import BatchError, DispatchError, ResultError
from dispatch.modes import Join
from dispatch.rows import share_rows
from single_controller.base.receipt import Receipt


class Answers(Protocol):
    """The answers of one call, as any process can ask for them. The engine's own; it pickles."""

    method: str

    def receipts(self, timeout: float | None = None) -> list[Receipt]:
        """The collecting ranks' receipts, in order, when all ranks have ended. Raises the call's error as soon as
        one rank has failed or died, and CallTimeoutError after ``timeout`` seconds."""
        ...

    def failed_on(self, rank: int) -> None:
        """Whoever sent the call knows that it failed on this rank: nobody else need be told."""
        ...

    def refs(self) -> list[Any]:
        """The engine's references to the answers, in order; a reference stands for the bare answer."""
        ...

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """The answers of some collecting ranks; only theirs are brought here."""
        ...


class ReadAnswers:
    """Answers that came with the receipts.

    Args:
        method: name of the method.
        ranks: the collecting ranks, in order.
        packed: their answers, packed.
        unpack: makes the value of one, in memory that nobody else has or not.
    """

    def __init__(
        self, method: str, ranks: Sequence[int], packed: Sequence[Any], unpack: Callable[[Any, bool], Any]
    ) -> None:
        self.method = method
        self._ranks = ranks
        self._packed = packed
        self._unpack = unpack

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """Some of the answers."""
        return [
            unpacked(self.method, self._ranks[k], functools.partial(self._unpack, self._packed[k], private))
            for k in which
        ]


@dataclass(slots=True)
class Taken:
    """What a rank got of an argument that was a future.

    Attributes:
        value: its piece.
        total: rows of the whole argument; None for one that went whole.
        rows: rows of the piece, padding included.
        real: rows of the piece without padding.
    """

    value: Any
    total: int | None = None
    rows: int | None = None
    real: int | None = None


@dataclass(slots=True)
class LaterPart:
    """One rank's part of an answer that is still being computed.

    Attributes:
        answers: where to ask.
        join: what the producing call's mode promises: a list of answers is cut by items, a joined one by rows.
        part: rows of a shard, one item of the list, or everything.
        index: which shard or item.
        of: how many of them.
        uneven: the consuming call's rule for rows that do not divide.
    """

    answers: Answers
    join: Join
    part: Literal["rows", "item", "whole"]
    index: int = 0
    of: int = 1
    uneven: str = "error"

    def take(self, *, private: bool) -> Taken:
        """Wait for the receipts, then bring only the pieces that overlap this part.

        Raises:
            DispatchError: the answer cannot be cut so.
            ResultError: the answer cannot be joined.
            SingleControllerError: the producing call's own error.
        """
        receipts = self.answers.receipts()
        if self.part == "item":
            return self._item(receipts, private)
        if self.part == "whole":
            return Taken(join_answers(self.answers, receipts, self.join, private=private))
        return self._rows(receipts, private)

    def _item(self, receipts: list[Receipt], private: bool) -> Taken:
        if self.join is not Join.LIST or len(receipts) != self.of:
            promised = f"a list of {len(receipts)}" if self.join is Join.LIST else "not a list of answers by rank"
            raise DispatchError(
                f"the future of {self.answers.method}() is {promised}; a list of {self.of} items is needed here",
                method=self.answers.method,
            )
        return Taken(self.answers.values([self.index], private=private)[0])

    def _rows(self, receipts: list[Receipt], private: bool) -> Taken:
        lengths: list[int] = []
        for receipt in receipts:
            if self.join is Join.LIST:
                lengths.append(1)
            elif receipt.empty:
                lengths.append(0)
            elif receipt.not_rows is not None:
                raise DispatchError(
                    f"the answer of {self.answers.method}() cannot be cut into rows: {receipt.not_rows}",
                    method=self.answers.method,
                )
            elif receipt.rows is None:
                if len(receipts) > 1:
                    raise ResultError(
                        f"the answers of {self.answers.method}() have no rows to join",
                        method=self.answers.method,
                    )
                return Taken(self.answers.values([0], private=private)[0])
            else:
                lengths.append(receipt.rows)
        total = sum(lengths)
        try:
            share = share_rows(total, self.of, self.uneven)[self.index]
        except BatchError:
            raise DispatchError(
                f"the future of {self.answers.method}() has {total} rows, which do not divide over {self.of} "
                "shards; set uneven='pad' or 'ragged'",
                method=self.answers.method,
            ) from None
        pieces = [piece for start, stop in share.ranges for piece in _overlaps(lengths, start, stop)]
        if not pieces:  # an empty shard: no rows, but of the right type
            pieces = [(next((k for k, receipt in enumerate(receipts) if not receipt.empty), 0), 0, 0)]
        wanted = sorted({k for k, _, _ in pieces})
        if self.join is Join.LIST:
            items = dict(zip(wanted, self.answers.values(wanted, private=private), strict=True))
            value: Any = [items[k] for k, start, stop in pieces if stop > start]
            return Taken(value, total, share.rows, share.real)
        answers, copies = _to_join(self.answers, wanted, private)
        found = dict(zip(wanted, answers, strict=True))
        cuts = [batch.cut(found[k], start, stop) for k, start, stop in pieces]
        value = batch.join(cuts) if copies or len(cuts) > 1 else cuts[0]
        return Taken(value, total, share.rows, share.real)


def join_answers(answers: Answers | ReadAnswers, receipts: list[Receipt], join: Join, *, private: bool = True) -> Any:
    """The whole result of a call, as its mode promises it.

    Raises:
        ResultError: the answers cannot be joined.
    """
    which = [k for k, receipt in enumerate(receipts) if not (join is Join.ROWS and receipt.empty)]
    if join is Join.LIST:
        return answers.values(which, private=private)
    if join is Join.VALUE:
        return answers.values(which, private=private)[0]
    if len(which) == 1:
        values, copies = answers.values(which, private=private), False
    else:
        values, copies = _to_join(answers, which, private)
    try:
        if copies or len(values) > 1:
            return batch.join(values)
        if values[0] is not None and batch.length(values[0]) is None:
            raise BatchError(f"{batch.describe(values[0])} has no rows to join")
        return values[0]
    except BatchError as error:
        raise ResultError(
            f"{answers.method}(): the answers of {len(values)} ranks do not join: {error}. "
            "Dispatch.DP_COMPUTE_METRIC and ONE_TO_ALL give a list by rank instead",
            method=answers.method,
        ) from error


def _to_join(answers: Answers | ReadAnswers, which: Sequence[int], private: bool) -> tuple[list[Any], bool]:
    """Some answers that are going to be joined, and whether only joining gives them memory of their own.

    Joining copies tensors and arrays anyway, so they are brought as views; what else there is is copied here.
    """
    values = answers.values(which, private=False)
    if not private:
        return values, False
    if all(map(batch.joins_into_new_memory, values)):
        return values, True
    return answers.values(which, private=True), False


def unpacked(method: str, rank: int, unpack: Callable[[], Any]) -> Any:
    """One rank's answer.

    Raises:
        ResultError: it does not unpickle in this process.
    """
    try:
        return unpack()
    except Exception as error:
        raise ResultError(
            f"{method}(): the answer of rank {rank} arrived but does not unpickle here: "
            f"{type(error).__name__}: {error}. Return plain data, or install here what its class needs",
            method=method,
        ) from error


def _overlaps(lengths: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(answer, start, stop) of the pieces of consecutive answers that make up rows ``start:stop``."""
    pieces = []
    offset = 0
    for k, rows in enumerate(lengths):
        first, last = max(start, offset), min(stop, offset + rows)
        if first < last:
            pieces.append((k, first - offset, last - offset))
        offset += rows
    return pieces
