"""WorkerFuture: the result of a call that may still be running."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

from dispatch.batch import Deferred
from dispatch.errors import DispatchError, SingleControllerError
from dispatch.modes import Join
from dispatch.plan import DeferredArgument
from single_controller.call.call import Call
from single_controller.call.errors import CallTimeoutError
from single_controller.call.joining import CallResults, Located, join_results

R_co = TypeVar("R_co", covariant=True)


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
            self._call.check_process()
            if not self._value:
                self._value.append(self._call.value(timeout))
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
            self._call.check_process()
            return self._call.settled
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
        """The transport's references to the results, one per collecting rank; ObjectRefs on Ray."""
        return self._call.refs() if self._call is not None else self._source()[0].refs()

    @property
    def failed(self) -> Exception | None:
        """See `dispatch.batch.Deferred`."""
        return self._call.error if self._call is not None else None

    def wait(self) -> None:
        """Wait until the call has ended, with or without an error."""
        if self._call is not None:
            self._call.wait()

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
        return self._outcome().__await__()

    async def _outcome(self) -> R_co:
        call = self._call
        if call is None:  # in another process, only a thread can wait
            return await in_thread(self.result)
        call.check_process()
        await asyncio.wrap_future(call.outcome)
        # Fetching, unpickling and joining may take time, in which the event loop goes on.
        return self.result() if call.is_plain else await in_thread(self.result)

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:
            call.drop()

    def __repr__(self) -> str:
        if self._call is None:
            return f"<WorkerFuture of {self.label}()>"
        state = "running" if not self._call.settled else "failed" if self._call.error else "done"
        return f"<WorkerFuture of {self._call.label}(), {state}>"


class UnsentFuture(WorkerFuture[R_co]):
    """The future of a call that another thread sends, because the caller's event loop must not wait until it can be
    sent.

    Args:
        label: the method.
        sent: done when the call was sent, with its future; or could not be, with the error.
    """

    def __init__(self, label: str, sent: Future[WorkerFuture[R_co] | BaseException]) -> None:
        super().__init__(None)
        self._label, self._sent = label, sent

    @property
    def label(self) -> str:  # type: ignore[override]
        return self._label

    @property
    def unsent(self) -> bool:
        """Whether the call has yet to be sent."""
        return not self._sent.done()

    def _future(self, timeout: float | None = None) -> WorkerFuture[R_co]:
        try:
            found = self._sent.result(timeout)
        except TimeoutError:
            raise CallTimeoutError(
                f"{self._label}() has not been sent after a wait of {timeout:g} s: its group is being repaired, or its "
                "ranks are asked for their layout. The call continues; wait again",
                method=self._label,
                call_goes_on=True,
            ) from None
        if isinstance(found, BaseException):
            raise copy.copy(found) from found.__cause__  # a copy, as in `Call.value`
        return found

    def result(self, timeout: float | None = None) -> R_co:
        begun = time.monotonic()
        future = self._future(timeout)
        return future.result(None if timeout is None else max(0.0, timeout - (time.monotonic() - begun)))

    def done(self) -> bool:
        return not self.unsent and (self.failed is not None or self._future().done())

    @property
    def refs(self) -> list[Any]:
        return self._future().refs

    @property
    def failed(self) -> Exception | None:
        found = None if self.unsent else self._sent.result()
        return found.failed if isinstance(found, WorkerFuture) else cast("Exception | None", found)

    def wait(self) -> None:
        found = self._sent.result()
        if isinstance(found, WorkerFuture):
            found.wait()

    def _source(self) -> tuple[CallResults, Join]:
        return self._future()._source()

    async def _outcome(self) -> R_co:
        await asyncio.wrap_future(self._sent)
        return await self._future()

    def __repr__(self) -> str:
        state = "not sent" if self.unsent else "failed" if self.failed else "done" if self.done() else "running"
        return f"<WorkerFuture of {self._label}(), {state}>"


def in_event_loop() -> bool:
    """Whether this thread runs an event loop now, and must not wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def in_thread(function: Callable[[], R_co]) -> asyncio.Future[R_co]:
    """Run a function in a thread "future-wait" of its own: those of the loop's executor are few, and every one of them
    might wait."""
    done: Future[R_co] = Future()
    done.set_running_or_notify_cancel()  # cancelling the task must not make the thread's result an error

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error.with_traceback(None))

    threading.Thread(target=run, name="future-wait", daemon=True).start()
    return asyncio.wrap_future(done)
