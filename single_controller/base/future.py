"""WorkerFuture: the result of a call that may still be running."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Generator
from typing import Any, Generic, TypeVar, cast

from dispatch.batch import Deferred
from dispatch.errors import DispatchError, SingleControllerError
from dispatch.modes import Join
from dispatch.plan import DeferredArgument
from single_controller.base.background import background
from single_controller.base.call import Call
from single_controller.base.errors import CallTimeoutError
from single_controller.base.joining import CallResults, Located, join_results
from single_controller.base.monitor import monitor

R_co = TypeVar("R_co", covariant=True)

BRIEF_SECONDS = 0.01
"""How long a thread waits for the results of a call that is awaited, before it has the engine call back."""

_brief_wait = threading.Lock()
"""Held by the one thread that waits so; it is only ever acquired without waiting. With several calls awaited at once,
the others' callbacks run while that thread waits."""


class WorkerFuture(Deferred, Generic[R_co]):
    """What ``group.m.remote(x)`` returns.

    A future holds references, one per collecting rank, and no data. Pass it to a method of the same or another group:
    each rank then fetches the rows of its own shard, and nothing passes through the driver. A method registered with
    ``materialize_futures=False`` receives the future itself and can wait for it, or pass it to a group of its own.

    Args:
        call: the call, in the process that sent it.
        source: the call's results and how they are joined, in any other process.
    """

    def __init__(self, call: Call | None, source: tuple[CallResults, Join] | None = None) -> None:
        self._call = call
        self._elsewhere = source
        self._value: list[R_co] = []  # a list, because of two threads that join, the first to append must win

    @property
    def label(self) -> str:  # type: ignore[override]
        """The method that computes the result."""
        return self._call.label if self._call is not None else self._source()[0].label

    def result(self, timeout: float | None = None) -> R_co:
        """Wait for the call and return its value. Every call of this method returns the same object.

        Args:
            timeout: seconds to wait. Only the wait ends then; the call continues.

        Raises:
            CallTimeoutError: the wait ended (``call_goes_on`` is True), or the call's own timeout passed.
            SingleControllerError: the call's error.
        """
        if self._call is not None:
            monitor.wait(self._call, timeout)
            if not self._value:
                self._value.append(self._call.value())
        else:
            source, join = self._source()
            results = source.wait(timeout)
            if not self._value:
                self._value.append(join_results(source, results, join))
        return self._value[0]

    def get(self, timeout: float | None = None) -> R_co:
        """`result` under the name that verl's futures use."""
        return self.result(timeout)

    def as_argument(self) -> R_co:
        """This object itself, typed as its value: type checkers then take it as an argument of a typed call."""
        return cast(R_co, self)

    def done(self) -> bool:
        """Whether the call has ended, with or without an error."""
        if self._call is not None:
            return monitor.poll(self._call)
        try:
            self._source()[0].wait(timeout=0.0)
        except CallTimeoutError:
            return False
        except SingleControllerError:
            return True
        return True

    def exception(self, timeout: float | None = None) -> Exception | None:
        """The exception that `result` would raise, or None. Waits like `result`.

        Raises:
            CallTimeoutError: the wait ended before the call did.
        """
        try:
            self.result(timeout)
        except SingleControllerError as error:
            if isinstance(error, CallTimeoutError) and error.call_goes_on:
                raise
            return error.with_traceback(None)  # whose frames would keep the caller's variables alive
        return None

    @property
    def refs(self) -> list[Any]:
        """The engine's references to the results, one per collecting rank; ObjectRefs on Ray."""
        return self._call.refs() if self._call is not None else self._source()[0].refs()

    @property
    def failed(self) -> Exception | None:
        """See `dispatch.batch.Deferred`."""
        return self._call.error if self._call is not None else None

    def wait(self) -> None:
        """Wait until the call has ended, with or without an error."""
        if self._call is not None:
            monitor.wait(self._call)

    def check_argument(self) -> None:
        """See `dispatch.batch.Deferred`."""
        self._source()

    def locate_all(self, argument: DeferredArgument) -> tuple[CallResults, list[Located]]:
        """See `dispatch.batch.Deferred`."""
        source, join = self._source()
        return source, source.locate(join, argument)

    def _source(self) -> tuple[CallResults, Join]:
        if self._elsewhere is not None:
            return self._elsewhere
        call = self._call
        if call is None:
            raise RuntimeError("a future without a call")
        if call.collect is not None:
            raise DispatchError(
                f"the future of {call.label}() cannot be an argument, because the collect_fn of its mode runs on the "
                "driver; pass future.result() instead",
                method=call.method,
            )
        return call.results, call.join

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerFuture, (None, self._source())

    def __await__(self) -> Generator[Any, None, R_co]:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[R_co | None, BaseException | None]] = loop.create_future()
        first = itertools.count().__next__

        def set_outcome(value: R_co | None, error: BaseException | None) -> None:
            if not outcome.done():  # it is cancelled when the task is
                outcome.set_result((value, error))

        def finish() -> None:
            if outcome.cancelled():
                return  # nobody waits any longer; do not join in vain
            value: R_co | None = None
            failed: BaseException | None = None
            try:
                if call is not None:
                    # The results are here, so one request to Ray gets them, unless Ray was shut down meanwhile.
                    monitor.wait(call, just_sent=call.engine.connected)
                value = self.result()
            except BaseException as error:
                failed = error.with_traceback(None)  # that of this thread; it would refer to this function's frame
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(set_outcome, value, failed)

        def start() -> None:  # runs in whichever thread learns first that the call has ended, maybe under locks
            if first() == 0:
                background.run(finish)

        def watch(call: Call) -> None:
            call.when_settled(start)
            call.when_results_arrive(start)
            if outcome.done():  # this may be a thread that registers after the task was cancelled
                call.discard(start)

        def wait_briefly(call: Call) -> None:
            # Most calls end soon. One request to Ray takes less time than a callback for each rank and then a request,
            # and this thread wakes up while the ranks run.
            try:
                with contextlib.suppress(Exception):  # the monitor logs it when it looks at the call
                    call.drive(BRIEF_SECONDS, first=call.engine.connected)
            finally:
                _brief_wait.release()
            if call.settled and first() == 0:
                finish()
            else:
                watch(call)

        call = self._call
        if call is not None:
            call.check_process()
        if call is None:
            # In another process, only a thread can wait. Not one of the loop's executor, nor of `background`: these
            # are few, and every one of them might wait for a call that is still running.
            threading.Thread(target=finish, name="future-wait", daemon=True).start()
        elif not call.engine.synchronous and not call.settled and _brief_wait.acquire(blocking=False):
            background.run(functools.partial(wait_briefly, call))
        else:
            watch(call)
        try:
            value, failed = yield from outcome.__await__()
        finally:
            if call is not None:  # the task may have been cancelled, and the call may run for hours
                call.discard(start)
        if failed is not None:
            try:
                raise failed
            finally:
                del failed, outcome  # they would refer to this frame, and the frame to them
        return cast(R_co, value)

    def __repr__(self) -> str:
        if self._call is None:
            return f"<WorkerFuture of {self.label}()>"
        state = "running" if not self._call.settled else "failed" if self._call.error else "done"
        return f"<WorkerFuture of {self._call.label}(), {state}>"
