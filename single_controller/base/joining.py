"""Joining: what a call's results make together, and which of their rows one shard needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from dispatch import batch
from dispatch.errors import BatchError, DispatchError, ResultError
from dispatch.modes import Join
from dispatch.plan import DeferredArgument
from dispatch.rows import share_rows
from single_controller.base.codec import decoded, private_copy
from single_controller.base.result import RankResult


class CallResults(Protocol):
    """The results of one call, as any process can ask for them. Each engine has its own class; it pickles.

    Attributes:
        label: the call's method, for messages.
    """

    label: str

    def wait(self, timeout: float | None = None) -> list[RankResult]:
        """Wait until all ranks have ended; the collecting ranks' `RankResult`s, in order. Raise the call's error as
        soon as one rank has failed or died, and `CallTimeoutError` after ``timeout`` seconds."""
        ...

    def refs(self) -> list[Any]:
        """The engine's references to the results, in order."""
        ...

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """Fetch and decode the results of some collecting ranks, by their position."""
        ...

    def mark_reported(self, rank: int) -> None:
        """The caller was told that this rank failed, so that the engine need not report it again."""
        ...


class InlineResults:
    """Results that came inside the `RankResult`s. Only `values` is needed of them.

    Args:
        label: the call's method, for messages.
        results: the collecting ranks' results, in order.
    """

    def __init__(self, label: str, results: Sequence[RankResult]) -> None:
        self.label = label
        self._results = results

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """See `CallResults.values`."""
        return [self._value(self._results[k], private) for k in which]

    def _value(self, result: RankResult, private: bool) -> Any:
        encoded = result.value
        if encoded is None:
            return None
        # Nobody else reads this value, so even a private one may stay in shared memory.
        decode = encoded.decode_result if private else functools.partial(encoded.decode, private=False)
        return decoded(self.label, result.rank, decode)


def join_results(
    source: CallResults | InlineResults, results: list[RankResult], join: Join, *, private: bool = True
) -> Any:
    """The whole value of a call, as its mode promises it.

    Raises:
        ResultError: the results cannot be joined.
    """
    which = [k for k, result in enumerate(results) if not (join is Join.ROWS and result.empty)]
    if join is not Join.ROWS:
        values = source.values(which, private=private)
        return values if join is Join.LIST else values[0]
    if len(which) == 1:
        values, must_copy = source.values(which, private=private), False
    else:
        values, must_copy = _values_to_join(source, which, private)
    try:
        if must_copy or len(values) > 1:
            return batch.join(values)
        if values[0] is not None and batch.length(values[0]) is None:
            raise BatchError(f"{batch.describe(values[0])} has no rows to join")
        return values[0]
    except BatchError as error:
        raise ResultError(
            f"{source.label}(): the results of {len(values)} ranks cannot be joined: {error}. Use a mode that returns "
            "a list by rank instead, such as Dispatch.DP_COMPUTE_METRIC or ONE_TO_ALL",
            method=source.label,
        ) from error


def fetch_deferred(
    source: CallResults, join: Join, argument: DeferredArgument, *, private: bool
) -> tuple[Any, int | None, int | None, int | None]:
    """Wait for another call, then fetch only what one rank needs of its results.

    Args:
        source: the other call's results.
        join: what they make together: a list is cut by items, a joined batch by rows.
        argument: which shard, item or whole.
        private: whether the value needs memory of its own.

    Returns:
        The value, and, if it was cut along rows: rows of the whole batch, rows of this shard with padding, and without.

    Raises:
        DispatchError: the result cannot be cut as the call needs.
        ResultError: the results cannot be joined.
        SingleControllerError: the other call's own error.
    """
    results = source.wait()
    if argument.kind == "whole":
        return join_results(source, results, join, private=private), None, None, None
    if argument.kind == "item":
        if join is not Join.LIST or len(results) != argument.count:
            promised = f"a list of {len(results)}" if join is Join.LIST else "not a list of results by rank"
            raise DispatchError(
                f"the future of {source.label}() is {promised}; a list of {argument.count} items is needed here",
                method=source.label,
            )
        return source.values([argument.index], private=private)[0], None, None, None
    lengths = _lengths(source, results, join)
    if lengths is None:
        return source.values([0], private=private)[0], None, None, None
    total = sum(lengths)
    try:
        share = share_rows(total, argument.count, argument.uneven)[argument.index]
    except BatchError:
        raise DispatchError(
            f"the future of {source.label}() has {total} rows, which do not divide evenly over {argument.count} "
            "shards; set uneven='pad' or 'ragged'",
            method=source.label,
        ) from None
    overlaps = [overlap for start, stop in share.ranges for overlap in _overlaps(lengths, start, stop)]
    if not overlaps:  # an empty shard: no rows, but of the right type
        overlaps = [(next((k for k, result in enumerate(results) if not result.empty), 0), 0, 0)]
    wanted = sorted({k for k, _, _ in overlaps})
    if join is Join.LIST:
        items = dict(zip(wanted, source.values(wanted, private=private), strict=True))
        value: Any = [items[k] for k, start, stop in overlaps if stop > start]
        return value, total, share.rows, share.real
    values, must_copy = _values_to_join(source, wanted, private)
    found = dict(zip(wanted, values, strict=True))
    cuts = [batch.cut(found[k], start, stop) for k, start, stop in overlaps]
    value = batch.join(cuts) if must_copy or len(cuts) > 1 else cuts[0]
    return value, total, share.rows, share.real


def _lengths(source: CallResults, results: list[RankResult], join: Join) -> list[int] | None:
    """Rows of each result; None for a single result that has no rows and is therefore sent whole."""
    lengths: list[int] = []
    for result in results:
        if result.not_rows is not None and join is not Join.LIST and not result.empty:
            raise DispatchError(
                f"the result of {source.label}() cannot be cut into rows: {result.not_rows}", method=source.label
            )
        if join is Join.LIST:
            lengths.append(1)
        elif result.empty:
            lengths.append(0)
        elif result.rows is not None:
            lengths.append(result.rows)
        elif len(results) > 1:
            raise ResultError(f"the results of {source.label}() have no rows to join", method=source.label)
        else:
            return None
    return lengths


def _values_to_join(source: CallResults | InlineResults, which: Sequence[int], private: bool) -> tuple[list[Any], bool]:
    """Results that are about to be joined, and whether only joining gives all of them memory of their own.

    Joining copies tensors and arrays anyway, so they are fetched as views. Everything else is copied here.
    """
    values = source.values(which, private=False)
    if not private:
        return values, False
    if any(map(batch.joins_into_new_memory, values)):
        return [batch.copy_the_rest(value, private_copy) for value in values], True
    return source.values(which, private=True), False


def _overlaps(lengths: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(result, start, stop) of the row ranges of consecutive results that make up rows ``start:stop``."""
    found = []
    offset = 0
    for k, rows in enumerate(lengths):
        first, last = max(start, offset), min(stop, offset + rows)
        if first < last:
            found.append((k, first - offset, last - offset))
        offset += rows
    return found
