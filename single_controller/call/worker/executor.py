"""Executor: the worker side of a call, in any transport. It holds the workers of one process and runs their methods."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from dispatch import batch
from dispatch.errors import BatchError, ResultError, SingleControllerError
from dispatch.move import move
from dispatch.plan import Parameter, put_back, reason_of
from dispatch.register import label
from single_controller.call.codec import CallMessage, Encoded, encode, is_reference
from single_controller.call.errors import Failure, GroupBrokenError, shortened
from single_controller.call.joining import Input, RankResult, will_not_come
from single_controller.call.transport import RESULT_OF, RunningCall
from single_controller.call.worker.worker import RankInfo, RoleWorkers, Worker, assign

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 1.0
"""How long a task may take to end after it was cancelled."""

MAX_FRAMES = 20
"""Innermost frames of one stack that are shown."""

OUTERMOST_FRAMES = 6
"""Outermost frames of a longer one that are shown too: the first of them are the worker's method."""

MAX_RANGES = 100
"""Ranges of a process group's ranks that are shown."""

MAX_TASKS = 8
MAX_STACK_TEXT = 4_000
"""Characters of the stacks of one rank."""

Constructor = tuple[type[Worker], tuple[Any, ...], dict[str, Any]]
"""A worker class, and the positional and keyword arguments of its constructor."""


class Executor:
    """The workers of one process: one, or one per role.

    Threads: the transport decides in which thread `run` is called; calls of ``concurrent=True`` methods overlap with it
    in threads of their own. ``async`` methods run on one event loop per process, in a daemon thread named
    "worker-loop". The first such call starts it, `close` ends it. Any thread may ask `running` and `stacks`.
    Lock: ``_loop_lock`` protects ``_loop`` and ``_loop_pid``. It is a leaf: nothing else is acquired while it is held.

    Args:
        host: where the process runs, for messages.
        fetch: replaces an argument that is a transport's reference by its value, and returns any other unchanged.
        in_process: whether driver and workers share the process, so that exceptions need not be encoded, and results
            must be copied out of the worker's memory.
        reraise: which exceptions leave `run` instead of becoming a failed `RankResult`.
    """

    def __init__(
        self,
        host: str,
        fetch: Callable[[Any], Any],
        *,
        in_process: bool = False,
        reraise: Callable[[BaseException], bool] = lambda error: isinstance(error, SystemExit),
    ) -> None:
        self.workers: dict[str | None, Worker] = {}  # by role, in the order of creation; a single worker's is None
        self.info: RankInfo | None = None  # None until `start`
        self._host = host
        self._fetch = fetch
        self._in_process = in_process
        self._reraise = reraise
        self._role_workers = RoleWorkers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_pid = 0  # the process whose thread runs it
        self._loop_lock = threading.Lock()
        self._closed = False
        self.refusing = False  # set by any thread, read when a call begins: a flag needs no lock
        # Changed by the threads that run calls, copied by any other. Each of these operations on a dict is atomic, so
        # there is no lock that a busy method could hold while somebody asks.
        # Role, method, when it began, and the call whose result it waits for, in words
        self._calls: dict[object, tuple[str | None, str, float, str]] = {}

    def start(self, info: RankInfo, roles: Callable[[], Mapping[str | None, Constructor]]) -> RankResult:
        """Create the workers, one after the other. ``roles`` returns role -> constructor; called here, so that a class
        that cannot be loaded is a failed start."""
        self.info = info
        self.refusing = False  # the process may have been told to leave after its constructors failed
        begun = time.time()
        entry = object()
        role: str | None = None
        made: list[Worker] = []  # with the one whose constructor raises
        try:
            for role, (cls, args, kwargs) in roles().items():
                self._calls[entry] = role, "__init__", time.monotonic(), ""
                with assign(info, self._role_workers, made):
                    self.workers[role] = worker = cls(*args, **kwargs)
                if role is not None:
                    self._role_workers[role] = worker
        except BaseException as error:
            self.workers.clear()  # the constructors may run again, in this process
            self._role_workers.clear()
            try:
                if self._reraise(error):
                    raise
                return self.failed(error, "__init__", role)  # before the clean-up, because it has the time of the error
            finally:
                _clean_up(made)
        finally:
            self._calls.pop(entry, None)
        if self._closed:  # meanwhile, by a group that has waited for long enough
            _clean_up(made)
        ended = time.time()
        return RankResult(info.rank, clock=(begun, begun, ended, ended))

    def refuse_calls(self) -> None:
        """Refuse the calls that have not begun, until `rejoin`: the driver has given them up. Any thread may call this,
        while another one runs a method."""
        # First the flag: a call that begins now is refused, and the one that runs sees `_leaving`.
        self.refusing = True
        for worker in list(self.workers.values()):
            worker._leaving = True

    def rejoin(self, info: RankInfo, leave: Callable[[], None] | None) -> RankResult:
        """Give the workers that this process has another rendezvous, and possibly another rank. ``leave`` ends the
        former process groups; None keeps them."""
        begun = time.time()
        try:
            if leave is not None:
                for worker in self.workers.values():
                    worker._leave_process()
                leave()
        except Exception as error:
            return self.failed(error, "on_membership_change", None)
        self.info = info
        for worker in self.workers.values():
            worker._take_rank(info)
            worker._leaving = False
        self.refusing = False
        ended = time.time()
        return RankResult(info.rank, clock=(begun, begun, ended, ended))

    def run(
        self,
        message: CallMessage,
        whole: Encoded | None,
        shard: Encoded | None,
        received: float,
        inputs: Callable[[], Sequence[Encoded | None]],
    ) -> RankResult:
        """Run one call.

        Args:
            message: what to run.
            whole: the arguments that all ranks get.
            shard: those of this rank.
            received: when the rank began with the call, in seconds since the epoch.
            inputs: waits until the driver has told what to fetch of the deferred arguments, and returns that, as
                ``whole`` and ``shard``; nothing if they will not come.
        """
        alike = False  # see `Failure.alike`
        entry, call = object(), (message.role, message.method, time.monotonic())
        self._calls[entry] = *call, ""
        try:
            if self.refusing:
                raise GroupBrokenError("the group is having a rank replaced, and has given this call up")
            if self.info is not None and self.info.members not in (None, message.members):
                # The driver sends to processes that are no ranks any more; collectives would wait for those that are.
                alike = True
                raise GroupBrokenError(
                    "the ranks of the group have changed since this process attached to it or got its copy: attach to "
                    "it again, or get a new copy"
                )
            arguments: dict[Parameter, Any] = {}
            rows, real, referring = message.rows, message.real, False
            for encoded in (whole, shard):
                if encoded is not None:
                    try:
                        arguments.update(encoded.decode(private=message.private))
                    except Exception as error:
                        error.add_note(
                            f"An argument of {label(message.role, message.method)}() cannot be unpickled on this rank, "
                            f"so the method has not begun. Make its class importable for {sys.executable} on the "
                            "rank's host, or pass plain data"
                        )
                        raise
                    referring = referring or bool(encoded.references)
            deferred = {key: value for key, value in arguments.items() if isinstance(value, Input)}
            if referring or deferred:
                alike = True  # until all ranks know that what they wait for has come
                others = ", ".join(f"{value.label}()" for value in deferred.values())
                self._calls[entry] = *call, RESULT_OF + (others or "a Ray task")
                if any(value.unknown for value in deferred.values()):
                    for encoded in inputs():
                        deferred.update({} if encoded is None else encoded.decode())
                    if self.refusing:  # since this call began to wait
                        raise GroupBrokenError("the group is having a rank replaced, and has given this call up")
                for one in deferred.values():
                    if one.unknown:
                        raise will_not_come(one.label).of_consumer(label(message.role, message.method))
                    if one.error is not None:
                        raise one.error
                    if one.located is not None and one.located.total is not None:
                        rows, real = one.located.rows, one.located.real
                arguments.update(deferred)
                alike = False
                self._resolve(message, arguments)
                self._calls[entry] = *call, ""
                del deferred
                put_back(arguments)
            positions = sorted(key for key in arguments if isinstance(key, int))
            args = tuple(arguments[position] for position in positions)
            kwargs = {key: value for key, value in arguments.items() if isinstance(key, str)}
            if message.device is not None:
                self.workers[message.role]._prepare_thread()
                args, kwargs = move((args, kwargs), message.device)
            del arguments  # the method alone decides how long its arguments live
            began = time.time()
            value = self.call(message.role, message.method, args, kwargs)
            ended = time.time()
            empty = False
            if not message.collects:
                value = None
            elif message.joins and rows is not None and real is not None and real != rows:
                empty = real == 0
                try:
                    value = None if empty else batch.trim(value, rows, real)
                except BatchError as error:
                    raise ResultError(f"{message.method}(): {error}", method=message.method) from None
            length = not_rows = encoded = None
            if value is not None:
                try:
                    length = batch.batch_type(value).length(value)
                # A BatchError, or whatever a user's type raises. Only a call that cuts the result needs its rows.
                except Exception as error:
                    # It may name keys of any length, and travels in the frame.
                    not_rows = shortened(reason_of(error))
                try:
                    encoded = encode(value, in_process=self._in_process)
                except Exception as error:
                    raise TypeError(
                        f"the result of {message.method}(), {batch.described(value)}, cannot be pickled: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            # After the method, which may have registered coordinates: the driver then asks for the new layout.
            worker = self.workers[message.role]
            report = worker._layout_report if type(worker)._report is Worker._report else worker._report()
            nbytes, clock = 0 if encoded is None else encoded.nbytes, (received, began, ended, time.time())
            rank = -1 if self.info is None else self.info.rank
            return RankResult(rank, report.version, encoded, length, not_rows, empty, nbytes, clock)
        except BaseException as error:  # a KeyboardInterrupt in the method too: the driver waits for a result
            if self._reraise(error):
                raise
            # All ranks refuse, or none could get the argument: nobody waits for this rank in a collective.
            alike = self.refusing or (alike and isinstance(error, SingleControllerError))
            return self.failed(error, message.method, message.role, alike=alike)
        finally:
            del self._calls[entry]

    def call_directly(self, role: str | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call`, on behalf of a process that has the transport's handle of the rank instead of the group."""
        entry = object()
        self._calls[entry] = role, method, time.monotonic(), ""
        try:
            return self.call(role, method, args, kwargs)
        finally:
            del self._calls[entry]

    def call(self, role: str | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method by name, ``async`` or not, and return its value."""
        worker = self.workers.get(role)
        if worker is None and self.workers:
            known = ", ".join("none" if one is None else one for one in self.workers)
            raise LookupError(
                f"this process has no worker {'without a role' if role is None else f'of the role {role!r}'}; its "
                f"roles: {known}. Attach without ray_cls_with_init, or with the one that the group was created with"
            )
        if worker is None:
            raise RuntimeError("this worker has not been started")
        if type(worker)._prepare_thread is not Worker._prepare_thread:
            worker._prepare_thread()
        value = getattr(worker, method)(*args, **kwargs)
        # A reference is awaitable too, but the caller gets the reference itself, not its value.
        awaits = value is not None and inspect.isawaitable(value) and not is_reference(value)
        return self._await(worker, value) if awaits else value

    def failed(
        self, error: BaseException, method: str, role: str | None, *, alike: bool = False, lost: str | None = None
    ) -> RankResult:
        """The result of a call that raised, or whose result is lost: ``lost`` says why. ``alike``: see `Failure`."""
        rank = -1 if self.info is None else self.info.rank
        failure = Failure.of(error, rank, self._host, method, role, in_process=self._in_process)
        failure.alike = alike
        if lost is not None:
            failure.lost, failure.message = True, lost
        worker, version = self.workers.get(role), 0
        try:
            if worker is not None:
                version = worker._report().version
        except Exception:  # the method may have left what it asks half made. Without a result, the driver would wait
            logger.warning("%s cannot report its layout", type(worker).__name__, exc_info=True)
        return RankResult(rank, version, failure=failure)

    def running(self) -> tuple[RunningCall, ...]:
        """The calls that run now, the oldest first. Any thread may ask."""
        now = time.monotonic()
        calls = list(self._calls.values())  # a dict keeps the order in which the calls began
        return tuple(RunningCall(label(role, method), now - began, waits) for role, method, began, waits in calls)

    def stacks(self) -> str:
        """The Python stack of each thread that runs a call now: the frames inside the innermost of `start`, `run` and
        `call`, and in place of a wait for the event loop those of its tasks.

        Any thread may ask. The other threads are not stopped, and need not cooperate. A thread that waits does not
        change while its stack is read. One that runs may go on, so its stack may mix frames of several moments.
        """
        roots = {function.__code__ for function in (Executor.start, Executor.run, Executor.call)}
        stacks, in_loop = [], False
        for innermost in sys._current_frames().values():
            inside: list[tuple[FrameType, int]] = []
            for frame, line in traceback.walk_stack(innermost):
                if frame.f_code in roots and frame.f_locals.get("self") is self:
                    if any(function.f_code is Executor._await.__code__ for function, _ in inside):
                        in_loop = True
                    else:
                        stacks.append(self._text(inside[::-1] or [(frame, line)]))
                    break
                inside.append((frame, line))
        if in_loop and self._loop is not None:
            tasks = asyncio.all_tasks(self._loop)
            stacks += sorted(f"  task:\n{self._text(list(_frames_of(task)))}" for task in tasks)[:MAX_TASKS]
        return shortened("\n".join(stacks), MAX_STACK_TEXT) or (
            "  no method is running: the rank waits for a call, for the arguments of a call, or for an earlier call"
        )

    def _text(self, frames: Sequence[tuple[FrameType, int]]) -> str:
        """A stack without the middle of a deep one, and the process group in which it waits."""
        left_out = len(frames) - MAX_FRAMES - OUTERMOST_FRAMES
        if left_out > 0:
            shown = [_lines(frames[:OUTERMOST_FRAMES]), f"  ... {left_out} frames ...", _lines(frames[-MAX_FRAMES:])]
        else:
            shown = [_lines(frames)]
        return "\n".join([*shown, *self._process_group(frames)])

    def _process_group(self, frames: Sequence[tuple[FrameType, int]]) -> list[str]:
        """A line with the process group of the torch.distributed function in which a stack waits, and with the ranks
        that take part; none if there is no such function."""
        dist: Any = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return []
        for frame, _ in reversed(frames):
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            # Only of these functions: reading the locals of a frame keeps their values alive until it returns.
            if "torch/distributed/" not in file or not {"group", "pg"} & set(frame.f_code.co_varnames):
                continue
            values = frame.f_locals
            group = values.get("group", values.get("pg"))
            if group is None and file.endswith("/distributed_c10d.py"):
                group = dist.group.WORLD
            if not isinstance(group, dist.ProcessGroup):
                continue
            try:
                ranks = dist.get_process_group_ranks(group)
                name = group.group_name if group.group_desc in ("", "undefined") else group.group_desc
                info, here, world = self.info, dist.get_rank(), dist.get_world_size()
            except (KeyError, ValueError, RuntimeError):  # made without torch.distributed, or being destroyed
                return []
            peer = values.get("dst", values.get("src")) if function in ("send", "recv", "isend", "irecv") else None
            if isinstance(peer, int):
                ranks = [here, peer]
            line = f"  in process group {name!r}"
            # torch.distributed has the ranks of the worker group only if exactly its ranks have initialized it.
            if info is not None and (here, world) == (info.rank, info.world_size) and here in ranks:
                line += f", ranks {text}" if (text := _ranges(sorted(ranks))) else ""
            return [line]
        return []

    def close(self) -> None:
        """End the event loop and the tasks on it, and let the workers clean up if the process lives on."""
        with self._loop_lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)  # `_run_loop` then cancels the tasks, in the loop's own thread
        if not self._closed:
            self._closed = True
            _clean_up(self.workers.values())

    def _resolve(self, message: CallMessage, arguments: dict[Parameter, Any]) -> None:
        """Replace references and deferred arguments by values."""
        for key, value in arguments.items():
            try:
                if isinstance(value, Input) and value.source is not None and value.located is not None:
                    arguments[key] = value.located.fetch(value.source, private=message.private)
                else:
                    arguments[key] = self._fetch(value)
            except SingleControllerError as error:
                raise error.of_consumer(label(message.role, message.method)) from error

    def _await(self, worker: Worker, awaitable: Any) -> Any:
        """Run a coroutine on the process's event loop, where tasks that it starts may continue between calls. The
        thread of the call waits, so that an async method keeps its place in the order."""
        with self._loop_lock:  # another thread may close the executor at any time
            loop = self._loop
            if loop is None or self._loop_pid != os.getpid():  # that thread does not exist in a fork
                loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(loop,), name="worker-loop", daemon=True).start()
                self._loop, self._loop_pid = loop, os.getpid()  # only now: without a thread, it would run nothing

        async def outcome() -> tuple[Any, BaseException | None]:
            try:
                worker._prepare_thread()
                return await awaitable, None
            except BaseException as error:  # returned as a value: asyncio would replace a CancelledError by its own
                return None, error

        running = asyncio.run_coroutine_threadsafe(outcome(), loop)
        try:
            value, error = running.result()
        except BaseException:  # Ctrl-C in the thread of a driver, whose next call must not run beside it
            running.cancel()
            raise
        if error is not None:
            raise error
        return value


def _clean_up(workers: Iterable[Worker]) -> None:
    """Let workers end what they have started in a process that lives on."""
    for worker in list(workers):  # a copy: their constructors may still run, in another thread
        cleanups = [worker._leave_process, *worker._cleanups]
        worker._cleanups.clear()  # once: `start` and `close` may both have the worker
        for cleanup in cleanups:
            try:
                cleanup()
            except Exception:  # the others must still run
                logger.warning("%s failed to clean up", type(worker).__name__, exc_info=True)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
            break
        except (SystemExit, KeyboardInterrupt):
            continue  # a task raised it, and asyncio lets it through; a method that waits for the task gets it too
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_SECONDS))
    loop.close()


def _frames_of(task: asyncio.Task[Any]) -> Iterator[tuple[FrameType, int]]:
    """The frames of a suspended task's coroutine and of those that it awaits, outermost first."""
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _lines(frames: Sequence[tuple[FrameType, int]]) -> str:
    return "".join(traceback.StackSummary.extract(iter(frames)).format()).rstrip()


def _ranges(ranks: Sequence[int]) -> str:
    """Increasing numbers as ranges with steps, such as ``0-3, 8-24:8``; empty if it takes too many of them."""
    found: list[str] = []
    begin = 0
    while begin < len(ranks):
        end = begin + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == ranks[begin + 1] - ranks[begin]:
            end += 1
        step = ranks[begin + 1] - ranks[begin] if end > begin + 1 else 1
        few = end == begin + 1
        found.append(
            f"{ranks[begin]}" if few else f"{ranks[begin]}-{ranks[end - 1]}" + (f":{step}" if step > 1 else "")
        )
        begin = end
    return ", ".join(found) if len(found) <= MAX_RANGES else ""
