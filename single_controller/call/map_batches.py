"""map_batches: what ``group.map`` does. Many batches, a few in flight, and those that a death has cost once more."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from dispatch.modes import Join
from dispatch.move import move
from dispatch.plan import CallPlan, join_values
from dispatch.register import MethodSpec
from single_controller.call.call import Call, CallOptions
from single_controller.call.errors import GroupBrokenError, WorkerDiedError
from single_controller.call.transport import Outcome, Resized

Part = tuple[int, ...]
"""The ranks of one call for a batch: all that the method has, or one, if ranks are independent."""


@dataclass(eq=False)
class _Batch:
    """A batch that was taken from the caller."""

    number: int  # its position
    batch: Any  # what the caller gave
    plan: CallPlan | None = None  # for it, as the group's ranks are; None before it is sent
    calls: dict[Part, Call] = field(default_factory=dict)  # those that were sent and not read
    values: dict[Part, Any] = field(default_factory=dict)  # what was returned
    deaths: int = 0  # how many it may have caused
    restarts: int = 0  # how often the group had been repaired when the last of its calls was sent


class BatchMap:
    """The calls of one ``group.map``. See `WorkerGroup.map`, whose module imports this one, for the arguments."""

    def __init__(
        self,
        group: Any,
        spec: MethodSpec,
        options: CallOptions,
        batches: Iterable[Any],
        *,
        in_flight: int,
        retries: int,
        ordered: bool,
        progress: Callable[[int], object],
    ) -> None:
        self._group, self._spec, self._options = group, spec, options
        self._source = enumerate(batches)
        self._in_flight, self._retries, self._ordered, self._progress = in_flight, retries, ordered, progress
        self._running: list[_Batch] = []
        self._taking = False
        """Whether the caller's iterable runs. A death that it raises is one of the group that makes the batches."""
        self._finished = 0

    def results(self) -> Iterator[Any]:
        """Yield the results."""
        try:
            while True:
                try:
                    self._fill()
                    if not self._running:
                        return
                    batch = self._wait()
                    self._read(batch)
                except (WorkerDiedError, GroupBrokenError) as error:
                    if self._taking:
                        raise
                    last = self._repair(error)
                    if last is None:
                        continue
                    # What has returned is not lost with the rest.
                    choose = itertools.takewhile if self._ordered else filter
                    for batch in list(choose(self._is_complete, self._running)):
                        yield self._take(batch)
                    raise last from None
                value = self._take(batch)
                del batch  # the caller may take long
                yield value
        finally:
            for call in [call for batch in self._running for call in batch.calls.values()]:
                call.drop()

    def _fill(self) -> None:
        """Send what is missing of the batches in flight, and take further ones."""
        for batch in self._running:
            self._send(batch)
        while len(self._running) < self._in_flight:
            self._taking = True
            taken = next(self._source, None)
            self._taking = False
            if taken is None:
                return
            self._running.append(_Batch(*taken))
            self._send(self._running[-1])

    def _parts(self, plan: CallPlan) -> list[Part]:
        if self._group.collectives or plan.deferred or plan.rows == 0 or self._spec.registration.replay:
            return [tuple(plan.ranks)]
        # A rank whose rows are all padding has nothing to do, unless the caller gets a list by rank.
        of = {rank: plan.shards[shard] for rank, shard in enumerate(plan.shard_of) if shard is not None}
        return [(rank,) for rank, shard in of.items() if shard.real != 0 or plan.join is not Join.ROWS]

    def _send(self, batch: _Batch) -> None:
        while not self._is_complete(batch):
            with contextlib.suppress(Resized):
                return self._send_parts(batch)

    def _send_parts(self, batch: _Batch) -> None:
        self._group._wait_for_unsent()
        self._group._check()  # has dead ranks replaced, if the group does
        restarts = self._group._state.restarts
        plan, spec, args, options = batch.plan, self._spec, (batch.batch,), self._options
        left = batch.calls or batch.values  # of an earlier plan. New workers may have another layout
        if plan is None or not left or len(plan.shard_of) != self._group.world_size:  # ranks were dropped or added
            plan = batch.plan = self._group._plan(spec, args, {}, options)
            # What was cut by the old plan is no part of the new one. A death among it counts all the same.
            for call in batch.calls.values():
                batch.deaths += call.settled and isinstance(call.error, WorkerDiedError)
                call.drop()
            batch.calls, batch.values = {}, {}
        for part in self._parts(plan):
            if part not in batch.calls and part not in batch.values:
                batch.restarts = restarts
                of_part, how = plan, options
                if not _is_whole(part, plan):  # `_take` collects the parts, and moves the value then
                    of_part, how = replace(plan.only(part), collect=None), replace(options, device=None)
                # The function must not refer to this object, and with it to the group that it is logged with.
                batch.calls[part] = self._group._send(
                    spec, of_part, how, lambda group, n: group._plan(spec, args, {}, options, n), restarts=restarts
                )

    def _wait(self) -> _Batch:
        """Wait until the next batch to yield, or any, is done. An error of one call ends the wait."""
        wanted = self._running[:1] if self._ordered else [*self._running]
        left = [len(batch.calls) for batch in wanted]
        if 0 in left:
            return wanted[left.index(0)]
        ended: SimpleQueue[tuple[int, bool]] = SimpleQueue()
        for at, batch in enumerate(wanted):
            for call in batch.calls.values():  # once: thousands of ranks end one after the other
                call.outcome.add_done_callback(functools.partial(_tell, ended, at))
        while True:
            at, failed = ended.get()
            left[at] -= 1
            if failed or not left[at]:
                return wanted[at]

    def _take(self, batch: _Batch) -> Any:
        """The value of a batch whose calls were read, which then is in flight no more."""
        plan = batch.plan
        if plan is None:
            raise RuntimeError("a batch that was not sent")
        self._running.remove(batch)
        self._finished += 1
        self._progress(self._finished)
        for part, value in batch.values.items():
            if _is_whole(part, plan):
                return value
        values = [batch.values[rank,] for rank in plan.collecting if (rank,) in batch.values]
        value = plan.collect(values) if plan.collect is not None else join_values(self._spec.label, values, plan.join)
        return value if self._options.device is None else move(value, self._options.device)

    def _read(self, batch: _Batch) -> None:
        """Take the values of the calls that have ended, and raise the error of the first that has failed."""
        errors: list[Exception] = []
        for part, call in [(part, call) for part, call in batch.calls.items() if call.settled]:
            del batch.calls[part]
            try:
                batch.values[part] = _value_of(part, call, batch.plan)
            except Exception as error:
                errors.append(error)
        if errors:  # one of the user's first
            raise min(errors, key=lambda one: isinstance(one, WorkerDiedError) + 2 * isinstance(one, GroupBrokenError))

    def _is_complete(self, batch: _Batch) -> bool:
        return batch.plan is not None and all(part in batch.values for part in self._parts(batch.plan))

    def _repair(self, error: Exception) -> Exception | None:
        """Have dead ranks replaced, after living ones have ended what they run.

        Returns:
            The error to raise, because no rank has died, or the oldest batch that was not completed, which the ranks
            run first, may have caused more deaths than it may.

        Raises:
            SingleControllerError: of another call in flight.
        """
        group, state = self._group, self._group._state
        with state.lock:  # a call has its error just before the group is broken
            if state.closed:
                return error
        for batch in self._running:
            wait([call.outcome for call in batch.calls.values()])
            try:
                self._read(batch)
            except GroupBrokenError:
                pass
            except WorkerDiedError as death:  # more telling than that the group is broken
                error = error if isinstance(error, WorkerDiedError) else death
        lost = next((batch for batch in self._running if not self._is_complete(batch)), None)
        with state.sending:  # after a repair that another thread has begun, and nobody begins another one meanwhile
            # Not the ranks of the error: a future among the batches, or a collect_fn, may have met a death elsewhere.
            dead = sorted({*state.dead, *(rank for rank, alive in enumerate(group.alive()) if not alive)})
            repaired = lost is not None and state.broken is None and state.restarts > lost.restarts  # by somebody else
            if not dead and not repaired:
                return error
            if lost is not None:
                lost.deaths += 1
                if lost.deaths > self._retries:
                    error.add_note(f"batch {lost.number} of group.map() was in flight, with retries={self._retries}")
                    return error
            if state.broken is not None and not state.recovers:  # otherwise the next call has them replaced
                # A further death is found by the next call.
                with contextlib.suppress(WorkerDiedError, GroupBrokenError):
                    group.restart(None if group.collectives else dead)
        return None


def _tell(ended: SimpleQueue[tuple[int, bool]], at: int, outcome: Outcome) -> None:
    """Called back by a call's outcome, which keeps its callbacks: they must not refer to the batch."""
    ended.put((at, outcome.result() is not None))


def _is_whole(part: Part, plan: CallPlan) -> bool:
    return len(part) == len(plan.shard_of) - plan.shard_of.count(None)  # asked for each part: no list of all


def _value_of(part: Part, call: Call, plan: CallPlan | None) -> Any:
    """The value of a call that has ended: of the whole batch, or of one rank."""
    if plan is None or _is_whole(part, plan):
        return call.value()
    if part[0] not in plan.collecting:
        call.check()
        return None
    value = call.value()
    return value[0] if plan.join is Join.LIST else value


def report(progress: bool | Callable[[int], object], name: str, batches: Iterable[Any]) -> Callable[[int], object]:
    """Return what is called with the number of batches that are done."""
    if callable(progress):
        return progress
    if progress:
        with contextlib.suppress(ImportError):
            from tqdm import tqdm  # type: ignore[import-untyped]

            bar = tqdm(desc=name, total=len(batches) if isinstance(batches, Sized) else None, unit="batch")
            return lambda done: bar.update(done - bar.n)
    return lambda done: None
