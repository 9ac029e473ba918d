"""Futures of calls: of one that is running, of one that a thread sends later, and of what this process computes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import copy
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from dispatch.batch import Deferred
from dispatch.errors import DispatchError, SingleControllerError
from dispatch.modes import Join
from single_controller.call.call import Call
from single_controller.call.codec import MAX_TASK_BYTES
from single_controller.call.errors import CallTimeoutError, ForkedProcessError, StartError, start_thread
from single_controller.call.joining import CallResults, join_results
from single_controller.call.transport import Outcome

logger = logging.getLogger(__name__)

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class WorkerFuture(Deferred, Generic[R_co]):
    """What ``group.m.remote(x)`` returns.

    A future holds references, one per collecting rank, and no data. Pass it to a method of the same or another group:
    each rank then fetches the rows of its own shard, and large results never pass through the driver. A method
    registered with ``materialize_futures=False`` receives the future itself and can wait for it, or pass it to a group
    of its own.

    Args:
        call: the call, in the process that sent it.
        source: the call's results and how they are joined, in any other process.
        sending: for a call that another thread sends, because the caller's event loop must not wait until it can be
            sent: the method, and what is done when it was, with the call, or could not be, with the error.
    """

    def __init__(
        self,
        call: Call | None,
        source: tuple[CallResults, Join] | None = None,
        sending: tuple[str, Future[Call | BaseException]] | None = None,
    ) -> None:
        self._call = call
        self._elsewhere = source
        self._sending = sending
        self._pid = os.getpid()  # a fork does not have the thread that sends the call
        self._told = False  # whether somebody was told of an error of sending
        self._value: list[R_co] = []  # a list, because of two threads that join, the first to append must win

    @property
    def label(self) -> str:  # type: ignore[override]
        """The method that computes the result."""
        if self._sending is not None:
            return self._sending[0]
        return self._call.label if self._call is not None else self.source()[0].label

    @property
    def unsent(self) -> bool:
        """Whether the call has yet to be sent."""
        return self._sending is not None and not self._sending[1].done()

    def _check_unsent(self) -> None:
        """Raise in a fork if the call has yet to be sent: nobody will do so there."""
        if self.unsent and os.getpid() != self._pid:
            raise ForkedProcessError.of(f"the future of {self.label}()")

    def _sent(self, timeout: float | None = None) -> Call | None:
        """The call, in the process that sent it. It is waited for until it was."""
        if self._sending is not None and self._call is None:
            label, sending = self._sending
            self._check_unsent()
            try:
                found = sending.result(timeout)
            except TimeoutError:
                raise CallTimeoutError(
                    f"{label}() has not been sent after a wait of {timeout:g} s: its group is being repaired, or its "
                    "ranks are asked for their layout. The call continues; wait again",
                    method=label,
                    call_goes_on=True,
                ) from None
            self._told = True
            if isinstance(found, SingleControllerError):
                raise copy.copy(found) from found.__cause__  # a copy, as in `Call.value`
            if isinstance(found, BaseException):
                raise found.with_traceback(None)  # one of the user's, which may not be copied
            self._call = found
        return self._call

    def result(self, timeout: float | None = None) -> R_co:
        """Wait for the call and return its value. Every call of this method returns the same object.

        Args:
            timeout: seconds to wait. Only the wait ends then; the call continues.

        Raises:
            CallTimeoutError: the wait ended (``call_goes_on`` is True), or the call's own timeout passed.
            SingleControllerError: the call's error.
            TypeError: the timeout is no number.
        """
        if not isinstance(timeout, (int, float, type(None))):
            raise TypeError(f"result(): timeout={timeout!r:.80}; pass a number of seconds, or None")
        if self._call is None and self._sending is not None:
            begun = time.monotonic()
            self._sent(timeout)
            timeout = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        if self._call is not None:
            self._call.check_process()
            if not self._value:
                self._value.append(self._call.value(timeout, shared=True))
        else:
            source, join = self.source()
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
        if self.unsent:
            return False
        if self._sending is not None and self.failed is not None:
            return True
        call = self._sent()
        if call is not None:
            call.check_process()
            return call.settled
        try:
            self.source()[0].wait(timeout=0.0)
        except CallTimeoutError as error:
            return not error.call_goes_on  # otherwise it is the error of the call
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
        except Exception as error:
            if isinstance(error, SingleControllerError):
                of_wait = isinstance(error, CallTimeoutError) and error.call_goes_on
            else:  # a timeout that is none, or what the call's own functions raised
                of_wait = not isinstance(timeout, (int, float, type(None))) or not self.done()
            if of_wait:
                raise
            return error.with_traceback(None)  # whose frames would keep the caller's variables alive
        return None

    @property
    def refs(self) -> list[Any]:
        """The transport's references to the results, one per collecting rank; ObjectRefs on Ray."""
        call = self._sent()
        return call.refs() if call is not None else self.source()[0].refs()

    @property
    def failed(self) -> Exception | None:
        found = None if self.unsent else self.wait_sent()
        return found.error if isinstance(found, Call) else cast("Exception | None", found)

    def wait_sent(self) -> Call | BaseException | None:
        """Wait until it was sent, or could not be."""
        self._check_unsent()
        return self._call if self._sending is None else self._sending[1].result()

    def wait(self) -> None:
        """Wait until the call has ended, with or without an error."""
        found = self.wait_sent()
        if isinstance(found, Call):
            found.wait()
        elif found is None:  # a call of another process
            with contextlib.suppress(SingleControllerError):  # whoever then reads the results is told
                self.source()[0].wait()

    def hand_on(self) -> None:
        call = self.wait_sent()
        if isinstance(call, Call):
            call.reported = True

    @property
    def ended(self) -> bool:
        return self._call is not None and self._call.settled

    def when_ended(self, tell: Callable[[bool], object]) -> None:
        call = self._sent()
        if call is None:
            source = self.source()[0]

            def wait() -> None:
                try:
                    source.wait()
                except Exception:  # whoever then reads the results is told
                    logger.debug("%s(), a call of another process, has failed", source.label, exc_info=True)
                tell(False)

            try:
                in_own_thread(wait)
            except StartError:  # the process has as many threads as it may have. Nobody waits for the call then
                tell(True)
            return
        results = call.rank_results  # not the call, whose outcome keeps the function

        def settled(outcome: Outcome) -> None:
            failed, ended = outcome.result() is not None, results.values()
            # The thread that settles a call must not wait: for a store that is full (several such calls may be the
            # arguments of one), a value whose rank has died, or the module of an exception, which is imported.
            if failed or any(one.kept for one in ended) or sum(one.nbytes for one in ended) > MAX_TASK_BYTES // 8:
                with contextlib.suppress(StartError):  # the process has as many threads as it may have
                    in_own_thread(lambda: tell(failed))
                    return
            tell(failed)

        call.outcome.add_done_callback(settled)

    def source(self) -> tuple[CallResults, Join]:
        if self._elsewhere is not None:
            return self._elsewhere
        call = self._sent()
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
        return WorkerFuture, (None, self.source())

    if not TYPE_CHECKING:  # type checkers refuse future[0] and len(future) themselves

        def __getitem__(self, *_):  # Python also iterates with it
            raise TypeError(f"{self.label}() has returned a future, not its value; use .result() or `await`")

        __len__ = __getitem__

        def __bool__(self):
            return True

    def __await__(self) -> Generator[Any, None, R_co]:
        return self._outcome().__await__()

    async def _outcome(self) -> R_co:
        if self._sending is not None:
            self._check_unsent()
            await asyncio.wrap_future(self._sending[1])
        call = self._sent()
        if call is None:  # in another process, only a thread can wait
            return await off_loop(self.result)
        call.check_process()
        await asyncio.wrap_future(call.outcome)
        # Fetching, unpickling and joining may take time, in which the event loop goes on.
        return self.result() if call.is_plain else await off_loop(self.result)

    def __del__(self) -> None:
        call, sending = getattr(self, "_call", None), getattr(self, "_sending", None)
        if call is not None:
            call.drop()
        elif sending is not None:
            sending[1].add_done_callback(functools.partial(_drop, sending[0], self._told))

    def __repr__(self) -> str:
        if self.unsent:
            return f"<WorkerFuture of {self.label}(), not sent>"
        call = self.wait_sent()
        if call is None:
            return f"<WorkerFuture of {self.label}()>"
        # Not done(), which raises in a fork
        state = "failed" if self.failed else "done" if isinstance(call, Call) and call.settled else "running"
        return f"<WorkerFuture of {self.label}(), {state}>"


def _drop(label: str, told: bool, sending: Future[Call | BaseException]) -> None:
    """A call was sent, or could not be, whose future nobody has any longer."""
    found = sending.result()
    if not isinstance(found, BaseException):
        found.drop()
    elif not told:
        logger.error("%s(), whose future was dropped, was not sent: %s: %s", label, type(found).__name__, found)


def in_event_loop() -> bool:
    """Whether this thread runs an event loop now, and must not wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def off_loop(function: Callable[[], R_co]) -> asyncio.Future[R_co]:
    """Run a function in a thread of its own: those of the loop's executor are few, and every one of them might wait."""
    return asyncio.wrap_future(in_own_thread(function))


def in_own_thread(function: Callable[[], R]) -> Future[R]:
    """Run a function in a thread "future-wait", which then ends, in the caller's context. A `StartError` if it cannot
    be started."""
    done: Future[R] = Future()
    done.set_running_or_notify_cancel()  # cancelling the task must not make the thread's result an error

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error.with_traceback(None))

    context = contextvars.copy_context()  # in which a rank finds the call for which the thread waits
    thread = threading.Thread(target=context.run, args=(run,), name="future-wait", daemon=True)
    start_thread(thread.start, "waits in the place of an event loop")
    return done


class ReferencedFuture(list[Any], WorkerFuture[R_co]):
    """A future that is also the list of its references, so that ``ray.get(future)`` takes it. They are made when they
    are first needed.

    Args:
        future: the future of the call, which this one replaces.
        made: called with each reference once they are made.
    """

    def __init__(self, future: WorkerFuture[R_co], made: Callable[[Any], object]) -> None:
        list.__init__(self)
        self._made = made
        WorkerFuture.__init__(self, future._call, future._elsewhere, future._sending)
        future._call = future._sending = None  # whoever drops it has not dropped this one

    def _filled(self) -> list[Any]:
        if not list.__len__(self):
            refs = self.refs
            list.__setitem__(self, slice(None), refs)  # not `extend`: another thread may do the same
            for ref in refs:
                self._made(ref)
        return self

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return WorkerFuture.__getitem__(self)  # type: ignore[misc]
        return list.__getitem__(self._filled(), index)

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self]

    if not TYPE_CHECKING:
        __iadd__ = __add__  # another list: this one stays that of its call

    # By identity, as for every future: asyncio.gather() has them as keys.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]
    __reduce__ = WorkerFuture.__reduce__
    __repr__ = WorkerFuture.__repr__


def _filled_first(name: str) -> Callable[..., Any]:
    """Return a method of list that has the references made first; by itself, it would find an empty list."""
    method = getattr(list, name)
    return lambda future, *args: method(future._filled(), *args)


for _name in (
    *("__contains__", "__delitem__", "__iter__", "__len__", "__mul__", "__reversed__", "__rmul__", "__setitem__"),
    *("append", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse"),
):
    setattr(ReferencedFuture, _name, _filled_first(_name))


class ComputedFuture(Future[R], WorkerFuture[R]):
    """A future of what a thread of this process computes. As an argument it is its value: the call waits for it before
    it is sent, also with ``.remote()``.

    Args:
        label: what computes it, for messages.
        put: makes a reference of the value, for `refs`.
    """

    computed_here = True
    label = ""

    def __init__(self, label: str, put: Callable[[Any], Any] | None = None) -> None:
        Future.__init__(self)
        WorkerFuture.__init__(self, None)
        self.label, self._put, self._refs = label, put, list[Any]()

    def result(self, timeout: float | None = None) -> R:
        try:
            return Future.result(self, timeout)
        except TimeoutError:
            if self.done():  # it is the error of the computation, or it has ended just now
                return Future.result(self)
            raise CallTimeoutError.of_wait(self.label, timeout) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:  # type: ignore[override]
        try:
            return Future.exception(self, timeout)
        except TimeoutError:
            raise CallTimeoutError.of_wait(self.label, timeout) from None

    @property
    def refs(self) -> list[Any]:
        """One reference to the value, which is waited for."""
        if self._put is None:
            raise DispatchError(f"the future of {self.label}() has no references; pass future.result()")
        if not self._refs:
            self._refs = [self._put(self.result())]
        return self._refs

    @property
    def failed(self) -> Exception | None:
        error = Future.exception(self) if self.done() and not self.cancelled() else None
        return error if isinstance(error, Exception) else None

    def wait(self) -> None:
        concurrent.futures.wait([self])

    def when_ended(self, tell: Callable[[bool], object]) -> None:
        self.add_done_callback(lambda _: tell(self.cancelled() or self.failed is not None))

    async def _outcome(self) -> R:
        return await asyncio.wrap_future(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _computed, (self.label, self.result())

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self.failed else "done"
        return f"<ComputedFuture of {self.label}(), {state}>"


def _computed(label: str, value: Any) -> ComputedFuture[Any]:
    """Unpickle a `ComputedFuture`."""
    future: ComputedFuture[Any] = ComputedFuture(label)
    future.set_result(value)
    return future
