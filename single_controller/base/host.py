"""WorkerHost: the worker's side of a call. It holds one worker and runs methods on it, in any engine."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dispatch import batch
from dispatch.errors import BatchError, DispatchError, ResultError
from dispatch.modes import Join
from dispatch.move import move
from dispatch.plan import CallPlan, Shard, Slot, merge_arguments
from dispatch.register import MethodSpec, label, method_spec
from single_controller.base.later import LaterPart
from single_controller.base.worker import Neighbours, Place, Standing, Worker, assign

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 1.0
"""How long a task on a worker's event loop may take to end, after it was cancelled."""

MadeOf = tuple[type[Worker], tuple[Any, ...], dict[str, Any]]
"""A worker's class, and the positional and keyword arguments of its constructor."""


class Order(NamedTuple):
    """What a rank is told about a call, beside the arguments.

    Attributes:
        method: name of the method.
        collects: whether the driver wants this rank's answer.
        joins: whether the answers are joined along rows, so that padding must be dropped.
        private: whether the arguments are the method's own memory.
        total: rows of the whole batch, None if nothing was cut along rows on the driver.
        rows: rows of this rank's shard, padding included.
        real: rows without padding.
        device: where the arguments' tensors are wanted; None where they are.
        role: the worker that is meant, where several are in one process.
    """

    method: str
    collects: bool
    joins: bool
    private: bool
    total: int | None = None
    rows: int | None = None
    real: int | None = None
    device: str | None = None
    role: str | None = None

    @classmethod
    def of(cls, spec: MethodSpec, plan: CallPlan, shard: Shard, *, collects: bool) -> Order:
        """The order that a plan's shard goes with."""
        how = spec.registration
        joins, private = plan.join is Join.ROWS, how.inputs == "copy"
        return cls(spec.name, collects, joins, private, plan.rows, shard.rows, shard.real, how.device, spec.role)


@dataclass(slots=True)
class Answer:
    """What a method returned, for the driver.

    Attributes:
        value: the value, without padding.
        rows: its rows, if it is a batch.
        not_rows: why it cannot be cut into rows.
        empty: the shard was nothing but padding.
        began: when the method began, in seconds since the epoch.
        ended: when it had returned.
    """

    value: Any = None
    rows: int | None = None
    not_rows: str | None = None
    empty: bool = False
    began: float = 0.0
    ended: float = 0.0


class WorkerHost:
    """One worker and the loop for its ``async`` methods.

    Args:
        place: where the worker stands.
        cls: the user's class.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.
        neighbours: workers of other roles in this process.
    """

    def __init__(
        self,
        place: Place,
        cls: type[Worker],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        neighbours: Neighbours,
    ) -> None:
        self.place = place
        with assign(place, neighbours):
            self.worker = cls(*args, **kwargs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._closed = False

    @property
    def standing(self) -> Standing:
        """What the worker says of its coordinates."""
        return self.worker._report()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method by name and wait for it, ``async`` or not."""
        self.worker._prepare_thread()
        value = getattr(self.worker, method)(*args, **kwargs)
        return self._finish(value) if inspect.isawaitable(value) else value

    def run(self, order: Order, whole: dict[Slot, Any], shard: dict[Slot, Any]) -> Answer:
        """Carry out an order.

        Raises:
            DispatchError: an argument that was a future cannot be cut as the call needs.
            ResultError: the padding cannot be dropped from the answer.
            Exception: whatever the method raises.
        """
        slots = {**whole, **shard}
        rows, real = self._take_later(order, slots) if slots else (order.rows, order.real)
        args, kwargs = merge_arguments(slots) if slots else ((), {})
        if order.device is not None:
            self.worker._prepare_thread()
            args, kwargs = move((args, kwargs), order.device)
        del slots, whole, shard
        began = time.time()
        value = self.call(order.method, *args, **kwargs)
        ended = time.time()
        if not order.collects:
            return Answer(began=began, ended=ended)
        empty = False
        if order.joins and rows is not None and real is not None and real != rows:
            try:
                value = batch.trim(value, rows, real) if real else None
                empty = real == 0
            except BatchError as error:
                raise ResultError(f"{order.method}(): {error}", method=order.method) from None
        try:
            return Answer(value, None if value is None else batch.length(value), None, empty, began, ended)
        except BatchError as error:
            return Answer(value, None, str(error), empty, began, ended)

    def close(self) -> None:
        """End the event loop and what runs on it, and let the worker clear up, where the process outlives it."""
        with self._loop_lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        if not self._closed:
            self._closed = True
            try:
                self.worker._leave_process()
            except Exception:
                logger.warning("%s could not clear up after itself", type(self.worker).__name__, exc_info=True)

    def _take_later(self, order: Order, slots: dict[Slot, Any]) -> tuple[int | None, int | None]:
        """Replace what was a future by this rank's part of it. Rows of the shard: in all, and without padding."""
        total, rows, real = order.total, order.rows, order.real
        for slot, value in slots.items():
            if not isinstance(value, LaterPart):
                continue
            spec = method_spec(type(self.worker), order.method)
            name = str(slot) if spec is None else spec.parameter(slot)
            where = f"{label(order.role, order.method)}(): argument {name!r}"
            try:
                taken = value.take(private=order.private)
            except DispatchError as error:
                raise DispatchError(f"{where}: {error}", method=order.method, argument=name) from None
            slots[slot] = taken.value
            if taken.total is None:
                continue
            if total is not None and total != taken.total:
                raise DispatchError(
                    f"{where}: the future of {value.answers.method}() has {taken.total} rows, another batch of the "
                    f"same call has {total}; all batches of one call have the same number of rows",
                    method=order.method,
                    argument=name,
                )
            total, rows, real = taken.total, taken.rows, taken.real
        return rows, real

    def _finish(self, awaitable: Any) -> Any:
        """Run a coroutine on the worker's own event loop, where tasks it leaves behind go on between calls."""
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="worker-loop", daemon=True).start()

        async def outcome() -> tuple[Any, BaseException | None]:
            try:
                self.worker._prepare_thread()
                return await awaitable, None
            except BaseException as error:  # carried as a value: the loop would replace a cancellation by its own
                return None, error

        value, error = asyncio.run_coroutine_threadsafe(outcome(), self._loop).result()
        if error is not None:
            raise error
        return value


class Crew:
    """The workers of one process: one, or one for each role.

    Attributes:
        hosts: role -> its host, in the order in which they were made; the role of a single worker is None.
        making: the role whose constructor runs, or ran last.
    """

    def __init__(self) -> None:
        self.hosts: dict[str | None, WorkerHost] = {}
        self.making: str | None = None
        self._workers = Neighbours()

    def make(self, place: Place, roles: Mapping[str | None, MadeOf]) -> None:
        """Make the workers, one after the other.

        Raises:
            Exception: whatever a constructor raises; `making` says whose.
        """
        for role, (cls, args, kwargs) in roles.items():
            self.making = role
            self.hosts[role] = host = WorkerHost(place, cls, args, kwargs, self._workers)
            if role is not None:
                self._workers[role] = host.worker

    def __getitem__(self, role: str | None) -> WorkerHost:
        if role not in self.hosts:
            raise RuntimeError("this worker has not been started")
        return self.hosts[role]

    def close(self) -> None:
        """End what the workers' hosts have started."""
        for host in self.hosts.values():
            host.close()

    def standing(self, role: str | None) -> int:
        """Version of what the worker of a role says of its coordinates; 0 while there is none."""
        return self.hosts[role].standing.version if role in self.hosts else 0


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_SECONDS))
    loop.close()
