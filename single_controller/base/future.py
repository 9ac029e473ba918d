"""WorkerFuture: the result of a call that somebody may wait for later, or hand on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Generator
from typing import Any

from dispatch.batch import LaterBatch
from single_controller.base.call import Call
from single_controller.base.later import LaterPart
from single_controller.base.monitor import monitor


class WorkerFuture(LaterBatch):
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
        """The call's error, or None; waits like `result`."""
        monitor.wait(self._call, timeout)
        return self._call.error

    @property
    def refs(self) -> list[Any]:
        """The engine's references to the answers, one per collecting rank (ObjectRefs, on Ray)."""
        return self._call.answers.refs()

    @property
    def failed(self) -> Exception | None:
        """See `dispatch.batch.LaterBatch`."""
        return self._call.error

    def later_rows(self, shard: int, shards: int, uneven: str) -> LaterPart:
        """See `dispatch.batch.LaterBatch`."""
        return LaterPart(self._call.answers, self._call.plan.join, "rows", shard, shards, uneven)

    def later_item(self, item: int, items: int) -> LaterPart:
        """See `dispatch.batch.LaterBatch`."""
        return LaterPart(self._call.answers, self._call.plan.join, "item", item, items)

    def later_whole(self) -> LaterPart:
        """See `dispatch.batch.LaterBatch`."""
        return LaterPart(self._call.answers, self._call.plan.join, "whole")

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(None, functools.partial(self.result)).__await__()

    def __reduce__(self) -> tuple[Any, ...]:
        return (PassedFuture, (self.later_whole(),))

    def __repr__(self) -> str:
        state = "under way" if not self._call.settled else "failed" if self._call.error else "done"
        return f"<WorkerFuture of {self._call.method}(), {state}>"


class PassedFuture:
    """A `WorkerFuture` as another process has it: a worker whose method keeps futures as they are."""

    def __init__(self, whole: LaterPart) -> None:
        self._whole = whole

    def result(self) -> Any:
        """The call's value; waits for it.

        Raises:
            SingleControllerError: the call's error.
        """
        return self._whole.take(private=True).value

    get = result

    @property
    def refs(self) -> list[Any]:
        """The engine's references to the answers."""
        return self._whole.answers.refs()

    def __reduce__(self) -> tuple[Any, ...]:
        return (PassedFuture, (self._whole,))
