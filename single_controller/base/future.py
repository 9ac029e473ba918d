"""WorkerFuture: the result of a call that somebody may wait for later, or hand on."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from dispatch.batch import LaterBatch
from dispatch.errors import DispatchError, SingleControllerError
from dispatch.modes import Join
from single_controller.base.call import Call
from single_controller.base.errors import CallTimeoutError
from single_controller.base.later import Answers, LaterPart
from single_controller.base.monitor import monitor


class _HandedOn(LaterBatch):
    """A future as an argument: what each rank of the consuming group is told about it."""

    @property
    def failed(self) -> Exception | None:
        """See `dispatch.batch.LaterBatch`."""
        return None

    def later_rows(self, shard: int, shards: int, uneven: str) -> LaterPart:
        """See `dispatch.batch.LaterBatch`."""
        return LaterPart(*self._source(), "rows", shard, shards, uneven)

    def later_item(self, item: int, items: int) -> LaterPart:
        """See `dispatch.batch.LaterBatch`."""
        return LaterPart(*self._source(), "item", item, items)

    def later_whole(self) -> LaterPart:
        """See `dispatch.batch.LaterBatch`."""
        return LaterPart(*self._source(), "whole")

    def _source(self) -> tuple[Answers, Join]:
        """Where the answers are, and what they make together."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return (PassedFuture, self._source())


class WorkerFuture(_HandedOn):
    """What ``group.m.remote(x)`` returns.

    It holds references, one per collecting rank, not data. Given to another group's method (or the same one's)
    it is cut without passing through the driver. `result` waits for it; ``await`` does too.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._value: tuple[Any] | None = None

    def result(self, timeout: float | None = None) -> Any:
        """The call's value, as its mode promises it. The same object each time.

        Args:
            timeout: seconds to wait at the most. Only the wait ends then: the call goes on.

        Raises:
            CallTimeoutError: the wait ended (``call_goes_on`` is True), or the call's own timeout passed.
            SingleControllerError: the call's error.
        """
        monitor.wait(self._call, timeout)
        if self._value is None:
            self._value = (self._call.result(),)
        return self._value[0]

    def get(self, timeout: float | None = None) -> Any:
        """`result` under the name that verl's futures have."""
        return self.result(timeout)

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return monitor.poll(self._call)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """What `result` would raise, or None; waits like it.

        Raises:
            CallTimeoutError: the wait ended before the call did.
        """
        try:
            self.result(timeout)
        except CallTimeoutError as error:
            if error.call_goes_on:
                raise
            return error
        except SingleControllerError as error:
            return error
        return None

    @property
    def refs(self) -> list[Any]:
        """The engine's references to the answers, one per collecting rank (ObjectRefs, on Ray)."""
        return self._call.refs()

    @property
    def failed(self) -> Exception | None:
        """See `dispatch.batch.LaterBatch`."""
        return self._call.error

    def _source(self) -> tuple[Answers, Join]:
        if self._call.collect is not None:
            raise DispatchError(
                f"the future of {self._call.label}() ends in a collect function of its mode, which runs on the "
                "driver: pass future.result() instead",
                method=self._call.method,
            )
        return self._call.answers, self._call.join

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        settled = loop.create_future()

        def tell() -> None:
            if not settled.done():
                settled.set_result(None)

        def call_loop() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell)

        self._call.when_settled(call_loop)
        monitor.poll(self._call)
        yield from settled.__await__()
        return self.result()

    def __repr__(self) -> str:
        state = "under way" if not self._call.settled else "failed" if self._call.error else "done"
        return f"<WorkerFuture of {self._call.label}(), {state}>"


class PassedFuture(_HandedOn):
    """A `WorkerFuture` as another process has it: a worker whose method keeps futures as they are.

    It can be waited for, and handed on to a group that this process drives.
    """

    def __init__(self, answers: Answers, join: Join) -> None:
        self._answers = answers
        self._join = join

    def result(self, timeout: float | None = None) -> Any:
        """The call's value, as its mode promises it.

        Args:
            timeout: seconds to wait at the most. Only the wait ends then.

        Raises:
            CallTimeoutError: the wait ended before the call did.
            SingleControllerError: the call's error.
        """
        self._answers.receipts(timeout)
        return self.later_whole().take(private=True).value

    def get(self, timeout: float | None = None) -> Any:
        """`result` under the name that verl's futures have."""
        return self.result(timeout)

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        try:
            self._answers.receipts(timeout=0.0)
        except CallTimeoutError:
            return False
        except SingleControllerError:
            return True
        return True

    @property
    def refs(self) -> list[Any]:
        """The engine's references to the answers."""
        return self._answers.refs()

    def _source(self) -> tuple[Answers, Join]:
        return self._answers, self._join

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()
