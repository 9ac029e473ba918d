"""RankResult: what a rank returns. Joining: what the results of a call make together, and which rows a shard needs."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from dispatch import batch
from dispatch.batch import share_rows
from dispatch.errors import BatchError, DispatchError, ResultError, SingleControllerError
from dispatch.modes import Join
from dispatch.plan import CallPlan, DeferredArgument, Parameter, join_values
from dispatch.register import MethodSpec
from single_controller.call.codec import Encoded, cannot_send, private_copy
from single_controller.call.errors import Failure, LocalGroupError

logger = logging.getLogger(__name__)


class RankResult(NamedTuple):
    """How a call ended on one rank. A frame has it as a plain tuple, whose pickle names no class."""

    rank: int
    layout_version: int = 0  # version of the worker's `LayoutReport` after the call
    value: Encoded | None = None  # the encoded result, if this rank collects. None also stands for a result of None.
    rows: int | None = None  # rows of the result, if it is a batch
    not_rows: str | None = None  # why the result cannot be cut into rows
    # Whether results are joined along rows, and all rows of this rank's shard were padding: there is nothing to join
    empty: bool = False
    nbytes: int = 0  # bytes of the encoded result
    clock: tuple[float, float, float, float] | None = None  # the fields of a `Clock`; None if the method raised
    failure: Failure | None = None  # the exception that the method raised
    kept: bool = False  # whether the value stays on the rank until somebody asks for it
    died: str | None = None  # why the rank's process has ended, if it did before the call ended


class CallResults(Protocol):
    """The results of one call, as any process can ask for them. Each transport has its own class; it pickles."""

    label: str  # the call's method, for messages
    # Whether others may fetch the same results, so that a private value needs memory of its own, not the transport's
    shared: bool

    def wait(self, timeout: float | None = None) -> list[RankResult]:
        """Wait until all ranks have ended; the collecting ranks' `RankResult`s, in order. Raise the call's error as
        soon as it has one, and `CallTimeoutError` after ``timeout`` seconds."""

    def refs(self) -> list[Any]:
        """The transport's references to the results, in order."""

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """Fetch and decode the results of some collecting ranks, by their position."""

    def check_sendable(self) -> None:
        """Raise a `LocalGroupError` if only this process can have the results."""

    def only(self, which: Sequence[int]) -> CallResults:
        """The results of some collecting ranks, by their position. Only `values` is needed of them."""


def join_results(source: CallResults, results: Sequence[RankResult], join: Join) -> Any:
    """The whole value of a call, as its mode promises it; a `ResultError` if the results cannot be joined."""
    which = [k for k, result in enumerate(results) if not result.empty]
    return _fetch_and_join(source, which, join, private=True)


def _fetch_and_join(source: CallResults, which: Sequence[int], join: Join, *, private: bool) -> Any:
    if join is Join.ROWS and len(which) > 1:
        values, _ = _values_to_join(source, which, private)
    else:
        values = source.values(which, private=private)
    return join_values(source.label, values, join)


@dataclass(frozen=True, slots=True)
class Located:
    """What one rank fetches of a deferred argument. It holds no reference to the results."""

    join: Join  # what the other call's results make together
    which: tuple[int, ...]  # the positions of the results to fetch
    # (index into ``which``, start, stop) of the row ranges that make up the shard; None for all of each result
    cuts: tuple[tuple[int, int, int], ...] | None = None
    item: bool = False  # whether the value is one result, instead of what several make together
    total: int | None = None  # rows of the whole batch; None if the value is not cut along rows
    rows: int | None = None  # rows of the shard, padding included
    real: int | None = None  # rows of the shard without padding

    def narrowed(self, source: CallResults) -> tuple[CallResults, Located]:
        """A source that has only the results to fetch, and what to fetch of it."""
        return source.only(self.which), replace(self, which=tuple(range(len(self.which))))

    def fetch(self, source: CallResults, *, private: bool) -> Any:
        """Fetch the value of the other call's results; ``private``: in memory of its own. A `ResultError` if a result
        is lost, or the results cannot be joined."""
        if self.item:
            return source.values(self.which, private=private)[0]
        if self.cuts is None:
            return _fetch_and_join(source, self.which, self.join, private=private)
        if self.join is Join.LIST:
            items = source.values(self.which, private=private)
            return [items[k] for k, start, stop in self.cuts if stop > start]
        values, must_copy = _values_to_join(source, self.which, private)
        try:
            cuts = [batch.cut(values[k], start, stop) for k, start, stop in self.cuts]
            return batch.join(cuts) if must_copy or len(cuts) > 1 else cuts[0]
        except BatchError as error:
            text = f"the results of {len(values)} ranks of {source.label}() cannot be joined: {error}"
            raise ResultError(text, method=source.label) from error


class Input(NamedTuple):
    """A deferred argument, as a rank gets it."""

    label: str  # the method that computes it
    # What to fetch; None as long as that method runs. The rank is then told later.
    source: CallResults | None = None
    located: Located | None = None
    error: SingleControllerError | None = None  # why there is nothing to fetch

    @property
    def unknown(self) -> bool:
        """Whether the rank is told later."""
        return self.source is None and self.error is None


class Inputs:
    """The deferred arguments of one call, on the driver that sends it. Its other arguments are not kept."""

    def __init__(self, spec: MethodSpec, plan: CallPlan) -> None:
        self._spec = spec
        self._arguments = [
            {key: value for key, value in values.items() if isinstance(value, DeferredArgument)}
            for values in (plan.whole, *(shard.values for shard in plan.shards))
        ]
        found = dict.fromkeys(value.source for values in self._arguments for value in values.values())
        # Now: this acquires the locks of their groups, one of which whoever is told of an end may hold.
        self._sources = {future: future.source() for future in found}
        self._futures = list(found or plan.deferred)
        shards = tuple(replace(shard, values={}) for shard in plan.shards)
        self._plan = replace(plan, whole={}, shards=shards, deferred=())
        self._left: list[int] = []
        # Popped by the one thread that tells the ranks: calls may end at the same moment
        self._give: list[Callable[[CallPlan | None], None]] = []

    def fill(self, plan: CallPlan, *, ended: bool, in_process: bool) -> CallPlan:
        """The plan with an `Input` for each deferred argument: with what to fetch, if all calls that compute them have
        ended; otherwise ranks are told later, by `follow`. ``ended``: the caller has waited for them.
        A `DispatchError` if the ranks are not ``in_process``, as the results are."""
        for key, value in () if in_process else (pair for values in self._arguments for pair in values.items()):
            try:
                self._sources[value.source][0].check_sendable()
            except LocalGroupError as error:
                name = self._spec.parameter(key)
                raise cannot_send(
                    f"{self._spec.label}(): argument {name!r}, a future,", error, self._spec.name, name
                ) from error
        if self._sources and (ended or all(future.ended for future in self._futures)):
            filled = self._located(plan)
            self._clear()
            return filled
        return self._unlocated(plan, None)

    def follow(self, give: Callable[[CallPlan | None], None]) -> None:
        """Tell the ranks what to fetch once all calls have ended that compute the arguments; and as soon as one has
        failed, give them its error. ``give`` does so. Does nothing if `fill` has told them."""
        futures = self._futures
        self._give, self._left = [give], list(range(len(futures)))
        for future in futures:
            future.when_ended(self._ended)

    def withdraw(self) -> None:
        """Tell the ranks that the arguments will not come, unless they were told what to fetch."""
        try:
            give = self._give.pop()
        except IndexError:
            return
        self._clear()
        give(None)

    def _ended(self, failed: bool) -> None:
        try:
            if not failed and self._left.pop() > 0:
                return
            give = self._give.pop()
        except IndexError:  # the ranks were told
            return
        try:
            if failed:
                give(self._unlocated(self._plan, self._failure()) if self._sources else None)
            elif self._sources:
                give(self._located(self._plan))
        except Exception as error:  # without an answer, the ranks would wait for ever
            logger.exception("%s(): its deferred arguments cannot be sent", self._spec.label)
            give(self._unlocated(self._plan, error) if isinstance(error, SingleControllerError) else None)
        finally:
            self._clear()  # the calls keep this object

    def _clear(self) -> None:
        self._arguments, self._futures, self._sources, self._left = [], [], {}, []

    def _failure(self) -> SingleControllerError:
        """The error of the first call that has failed. The ranks raise it themselves: whoever reads their results by
        references, and not from the future, learns of no other."""
        failed = next((one for one in self._futures if one.failed is not None), self._futures[0])
        error = failed.failed
        error = error if isinstance(error, SingleControllerError) else will_not_come(self._sources[failed][0].label)
        return error.of_consumer(self._spec.label)

    def _unlocated(self, plan: CallPlan, error: SingleControllerError | None) -> CallPlan:
        """The plan for ranks that raise the error, all of them, so that none waits in a collective for the others; or,
        without one, that are told later."""
        made = [
            {key: Input(value.source.label, error=error) for key, value in values.items()} for values in self._arguments
        ]
        return _with_values(plan, made)

    def _located(self, plan: CallPlan) -> CallPlan:
        if any(future.failed is not None for future in self._futures):
            return self._unlocated(plan, self._failure())
        total, error = self._plan.rows, None
        known: dict[tuple[Any, ...], list[Input]] = {}
        made: list[dict[Parameter, Input]] = []
        for values in self._arguments:
            of_part: dict[Parameter, Input] = {}
            for key, value in values.items():
                same = (value.source, value.kind, value.count, value.uneven)
                if same not in known:
                    try:
                        known[same] = places = self._locate(value, total)
                        first = places[0].located
                        total = total if first is None or first.total is None else first.total
                    except SingleControllerError as caught:
                        error = error or self._of_argument(key, caught)
                        known[same] = [Input(value.source.label)] * value.count
                of_part[key] = known[same][value.index]
            made.append(of_part)
        return _with_values(plan, made) if error is None else self._unlocated(plan, error)

    def _locate(self, argument: DeferredArgument, total: int | None) -> list[Input]:
        source, join = self._sources[argument.source]
        places = locate(source, join, argument)
        if total is not None and places[0].total not in (None, total):
            raise DispatchError(
                f"the future of {source.label}() has {places[0].total} rows, but another batch of the same call has "
                f"{total}; all batches of one call need the same number of rows"
            )
        return [Input(source.label, *one.narrowed(source)) for one in places]

    def _of_argument(self, key: Parameter, error: SingleControllerError) -> SingleControllerError:
        """Say of which call and argument an error is, which comes from the call that computes the argument."""
        consumer, name = self._spec.label, self._spec.parameter(key)
        if not isinstance(error, DispatchError):
            return error.of_consumer(consumer)
        return DispatchError(f"{consumer}(): argument {name!r}: {error}", method=self._spec.name, argument=name)


def will_not_come(label: str) -> ResultError:
    """The error of a rank that lacks a deferred argument."""
    return ResultError(f"{label}() has failed on its driver, so its results will not come", method=label)


def _with_values(plan: CallPlan, made: list[dict[Parameter, Input]]) -> CallPlan:
    shards = zip(plan.shards, made[1:], strict=True)
    return replace(
        plan,
        whole=plan.whole | made[0],
        shards=tuple(replace(shard, values=shard.values | values) for shard, values in shards),
    )


def locate(source: CallResults, join: Join, argument: DeferredArgument) -> list[Located]:
    """Wait for another call, then find which of its results each shard of a deferred argument needs. All shards at
    once, so that the results' lengths are added up once.

    Args:
        source: the other call's results.
        join: what they make together: a list is cut by items, a joined batch by rows.
        argument: any shard of the argument.

    Returns:
        What to fetch, by the number of the shard or item; one element if the result is needed whole.

    Raises:
        DispatchError: the result cannot be cut as the call needs.
        ResultError: the results cannot be joined.
        SingleControllerError: the other call's own error.
    """
    results, count = source.wait(), argument.count
    if argument.kind == "whole":
        return [Located(join, tuple(k for k, result in enumerate(results) if not result.empty))]
    if argument.kind == "item":
        if join is not Join.LIST or len(results) != count:
            promised = f"a list of {len(results)}" if join is Join.LIST else "not a list of results by rank"
            raise DispatchError(
                f"the future of {source.label}() is {promised}; a list of {count} items is needed here",
                method=source.label,
            )
        return [Located(join, (k,), item=True) for k in range(count)]
    lengths = _lengths(source, results, join)
    if argument.kind == "setting" and lengths is not None:
        raise DispatchError(
            f"the future of {source.label}() has {sum(lengths)} rows, and is in a dataclass, which is sent whole. Pass "
            "it in a dict or as an argument to have it cut, or the dataclass in Broadcast(...) to send all rows to "
            "every rank",
            method=source.label,
        )
    if lengths is None:
        return [Located(join, (0,), item=True)] * count
    starts = list(itertools.accumulate(lengths, initial=0))  # of each result's rows, and at the end their number
    total = starts[-1]
    try:
        shares = share_rows(total, count, argument.uneven)
    except BatchError:
        raise DispatchError(
            f"the future of {source.label}() has {total} rows, which do not divide evenly over {count} "
            "shards; set uneven='pad' or 'ragged'",
            method=source.label,
        ) from None
    # An empty shard has no rows, but they are of the right type.
    nothing = [(next((k for k, result in enumerate(results) if not result.empty), 0), 0, 0)]
    located = []
    for share in shares:
        overlaps = [overlap for start, stop in share.ranges for overlap in _overlaps(starts, start, stop)] or nothing
        which = sorted({k for k, _, _ in overlaps})
        index = {k: position for position, k in enumerate(which)}
        cuts = tuple((index[k], start, stop) for k, start, stop in overlaps)
        located.append(Located(join, tuple(which), cuts, False, total, share.rows, share.real))
    return located


def _lengths(source: CallResults, results: list[RankResult], join: Join) -> list[int] | None:
    """Rows of each result; None for a single result, or several None, without rows, which is therefore sent whole."""
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
        elif len(results) > 1 and any(one.nbytes for one in results):  # all None are joined to None
            raise ResultError(f"the results of {source.label}() have no rows to join", method=source.label)
        else:
            return None
    return lengths


def _values_to_join(source: CallResults, which: Sequence[int], private: bool) -> tuple[list[Any], bool]:
    """Results that are about to be joined, and whether only joining gives all of them memory of their own.

    Joining copies tensors and arrays anyway, so they are fetched as views. Everything else is copied here.
    """
    values = source.values(which, private=False)
    if not private:
        return values, False
    if any(map(batch.joins_into_new_memory, values)):
        return [batch.copy_the_rest(value, private_copy) for value in values], True
    return source.values(which, private=True), False


def _overlaps(starts: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(result, start, stop) of the row ranges of consecutive results that make up rows ``start:stop``. ``starts`` has
    the first row of each result, and the number of all rows."""
    found = []
    k = bisect.bisect_right(starts, start) - 1
    while start < stop:
        last = min(stop, starts[k + 1])
        if start < last:
            found.append((k, start - starts[k], last - starts[k]))
        start, k = last, k + 1
    return found
