"""The in-process transport: all ranks in the driver's own process, with a thread each or one after the other.

Arguments and results are encoded as for Ray. So every reader gets its own value, a value that Ray could not send is
refused, and what the sender changes afterwards reaches nobody.

A rank's call is a `concurrent.futures.Future` of its `RankResult`; only a bug in the library would set an exception.
"""

from __future__ import annotations

import asyncio
import concurrent.futures as cf
import contextlib
import copy
import functools
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from dispatch.errors import DispatchError, ResultError
from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.call.codec import CallMessage, Encoded, add_reference_types, decode_result, encode_call
from single_controller.call.errors import CallTimeoutError, LocalGroupError, WorkerDiedError, start_thread
from single_controller.call.joining import RankResult
from single_controller.call.transport import (
    MAX_STACK_SECONDS,
    Outcome,
    PartlySentError,
    RankProcess,
    Receiver,
    RunningCall,
    Sent,
    Transport,
)
from single_controller.call.worker.executor import Constructor, Executor
from single_controller.call.worker.worker import RankInfo

HOST = f"{socket.gethostname()}, in the driver's process"
"""The host of every rank, for messages."""

Jobs = queue.SimpleQueue[Callable[[], None] | None]
"""The work of a rank's thread; None ends it. Not a `queue.Queue`, whose ``put`` a finalizer must not call."""

Given = cf.Future[Mapping[int, tuple[Encoded | None, Encoded | None]]]
"""Done once it is known what the ranks of a call fetch of its deferred arguments; empty if these will not come."""


class LocalRank:
    """One rank: its workers, and, with ``threads``, its thread. Otherwise its calls run in the caller's thread.

    Threads: one named "local-rank-<n>" runs the calls in the order in which they were sent. `end` ends it, or the
    garbage collection of a group that nobody closed. A running method cannot be interrupted; the thread then ends when
    the method returns. Each concurrent call has a thread "local-rank-<n>-concurrent", which ends with the call. They
    are daemon threads and not those of a ThreadPoolExecutor, because the interpreter joins those at exit: one method
    that hangs would keep the process alive. Lock: ``_lock`` makes "is the rank alive, then queue a job" atomic, so that
    no job is queued behind the end of the thread. It also protects ``_futures``. It is a leaf.
    """

    def __init__(self, rank: int, world_size: int, threads: bool, generation: int) -> None:
        self.rank = rank
        self.died: str | None = None  # why the rank takes no more calls, or None
        self._lock = threading.Lock()
        # Weak, so that a result lives only as long as somebody may read it.
        self._futures: weakref.WeakSet[cf.Future[RankResult]] = weakref.WeakSet()
        rendezvous: socket.socket | None = None
        host, port = "127.0.0.1", 0
        if world_size == 1:
            # Bound and not listening: held for a process group that the only rank of a group may make.
            rendezvous = socket.socket()
            rendezvous.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # On all addresses: torch listens on all of them, which fails if another process is given this port on one.
            rendezvous.bind(("", 0))
            port = rendezvous.getsockname()[1]
        self._info = RankInfo(
            *(rank, world_size, rank, world_size, host, port), one_process=world_size > 1, generation=generation
        )
        # What leaves the executor: SystemExit, which ends the rank, and in the driver's thread the driver's exceptions.
        reraise = {} if threads else {"reraise": _is_for_driver}
        self.executor = Executor(HOST, _fetch, in_process=True, **reraise)  # has its workers
        self._jobs: Jobs | None = queue.SimpleQueue() if threads else None
        # Must not refer to this object, or it would never be collected. Not at exit: nothing is left to clean up then.
        self._finalize = weakref.finalize(self, _release, self._jobs, self.executor, rendezvous)
        self._finalize.atexit = False
        if self._jobs is not None:
            thread = threading.Thread(target=_serve, args=(self._jobs,), name=f"local-rank-{rank}", daemon=True)
            start_thread(thread.start, f"runs the calls of rank {rank}")

    def start(self, constructors: Callable[[], Mapping[str | None, Constructor]]) -> cf.Future[RankResult]:
        """Create the workers. See `Executor.start`."""
        return self.submit(lambda: self.executor.start(self._info, constructors))

    def call(
        self, message: CallMessage, whole: Encoded | None, shard: Encoded | None, given: Given, *, concurrent: bool
    ) -> cf.Future[RankResult]:
        """Run a call. See `Executor.run`; ``concurrent``: whether it may overtake and overlap others."""

        def inputs() -> Sequence[Encoded | None]:
            return given.result().get(self.rank, ())

        return self.submit(lambda: self.executor.run(message, whole, shard, time.time(), inputs), concurrent=concurrent)

    def end(self, reason: str) -> None:
        """Take no more calls. Those that have not ended get the reason as their result."""
        with self._lock:
            self.died = self.died or reason
            futures = list(self._futures)
        # Outside the lock: callbacks of a future run in the thread that sets its result.
        for future in futures:
            _set_result(future, self._lost())
        self._finalize()  # runs `_release` once, however often it is called

    def submit(self, job: Callable[[], RankResult], *, concurrent: bool = False) -> cf.Future[RankResult]:
        future: cf.Future[RankResult] = cf.Future()
        run = functools.partial(self._run, job, future)
        with self._lock:
            # Also without a thread of its own: `end`, called in another thread, settles what this one runs below.
            self._futures.add(future)
            if self.died is None and self._jobs is not None:
                if concurrent:
                    name = f"local-rank-{self.rank}-concurrent"
                    threading.Thread(target=run, name=name, daemon=True).start()
                else:
                    self._jobs.put(run)
                return future
        run()  # outside the lock, because without threads this is the user's method
        return future

    def _run(self, job: Callable[[], RankResult], future: cf.Future[RankResult]) -> None:
        try:
            # A job that was queued before the rank ended must not run after it.
            outcome = self._lost() if self.died is not None else job()
        except SystemExit as error:
            # The thread goes on: it tells the jobs behind this one, until `end`, that the rank is lost.
            self.died = f"it called sys.exit({'' if error.code is None else repr(error.code)})"
            outcome = self._lost()
        _set_result(future, outcome)

    def _lost(self) -> RankResult:
        return RankResult(self.rank, died=self.died)


class LocalTransport(Transport):
    """Carries calls to ranks of this process. Without ``threads`` for each rank, `send` runs them."""

    def __init__(self, ranks: Sequence[LocalRank], threads: bool) -> None:
        self.ranks = tuple(ranks)
        self.world_size = len(self.ranks)
        self.synchronous, self.in_process = not threads, True
        if _object_ref():  # ObjectRefs are arguments here too, if this process uses Ray at all
            add_reference_types(_object_ref())

    def host(self, rank: int) -> str:
        return HOST

    def start(
        self, constructors: Callable[[], Mapping[str | None, Constructor]], ranks: Sequence[int], call: Receiver
    ) -> Sent:
        """Run the constructors on some ranks. See `LocalRank.start`."""
        futures = {rank: self.ranks[rank].start(constructors) for rank in ranks}
        return _sent("__init__", futures, (), {}, call)

    def send(self, spec: MethodSpec, plan: CallPlan, call: Receiver) -> Sent:
        """Send a call. Each distinct shard is encoded once; every rank that reads it decodes it."""
        encoded = encode_call(spec, plan, in_process=True)
        given: Given = cf.Future()
        futures: dict[int, cf.Future[RankResult]] = {}
        nbytes: dict[int, int] = {}
        for rank, message, whole, shard in encoded:
            nbytes[rank] = sum(part.nbytes for part in (whole, shard) if part is not None)
            try:
                concurrent = spec.registration.concurrent
                futures[rank] = self.ranks[rank].call(message, whole, shard, given, concurrent=concurrent)
            except Exception as error:
                if self.synchronous:  # it is for the driver, such as "quit" in a debugger
                    raise
                if futures:  # no further thread can be started
                    given.set_result({})  # otherwise those that have the call would wait for its deferred arguments
                    raise PartlySentError(list(futures), rank) from error
                raise DispatchError(
                    f"{spec.label}() was not sent: it runs in a thread of its own, and none could be started: {error}",
                    method=spec.name,
                ) from error

        def give(plan: CallPlan | None) -> None:
            made = () if plan is None else encode_call(spec, plan, in_process=True)
            with contextlib.suppress(cf.InvalidStateError):  # one of several calls has failed before
                given.set_result({rank: (whole, shard) for rank, _, whole, shard in made})

        return _sent(spec.label, futures, plan.collecting, nbytes, call)._replace(give=give)

    def deaths(self) -> dict[int, str]:
        return {rank.rank: rank.died for rank in self.ranks if rank.died is not None}

    def stacks(self, ranks: Sequence[int], seconds: float = MAX_STACK_SECONDS) -> dict[int, str]:
        return {rank: self.ranks[rank].executor.stacks() for rank in ranks}

    @property
    def processes(self) -> tuple[RankProcess, ...]:
        return (RankProcess(socket.gethostname(), "in the driver's process", os.getpid()),) * self.world_size

    def running(self, ranks: Sequence[int], seconds: float) -> dict[int, tuple[RunningCall, ...] | str]:
        return {rank: self.ranks[rank].executor.running() for rank in ranks}

    def kill(self) -> None:
        """A method that is running in a thread cannot be stopped: the thread ends after it."""
        self.ended = True
        for rank in self.ranks:
            rank.end("its group was closed or restarted")


def _sent(
    label: str,
    futures: Mapping[int, cf.Future[RankResult]],
    collecting: Sequence[int],
    nbytes: Mapping[int, int],
    call: Receiver,
) -> Sent:
    for future in futures.values():
        future.add_done_callback(functools.partial(_tell, weakref.ref(call)))
    return Sent(functools.partial(LocalResults, label, futures, collecting, call.outcome), nbytes)


def _tell(weak: weakref.ref[Receiver], future: cf.Future[RankResult]) -> None:
    call = weak()
    if call is not None:
        call.arrive(future.result()._replace(kept=True))  # `LocalResults` fetches the value


class LocalResults:
    """The results of one call. See `single_controller.call.joining.CallResults`. ``futures`` has all called ranks."""

    def __init__(
        self, label: str, futures: Mapping[int, cf.Future[RankResult]], collecting: Sequence[int], outcome: Outcome
    ) -> None:
        self.label = label
        self.shared = True
        self.futures = futures
        self._collecting = tuple(collecting)
        self._outcome = outcome

    def wait(self, timeout: float | None = None) -> list[RankResult]:
        try:
            failed = self._outcome.result(timeout)
        except TimeoutError:
            late = [rank for rank, future in self.futures.items() if not future.done()]
            raise CallTimeoutError.of_wait(self.label, timeout, late) from None
        if failed is not None:
            raise copy.copy(failed()) from failed().__cause__
        return [self.futures[rank].result() for rank in self._collecting]

    def only(self, which: Sequence[int]) -> LocalResults:
        return LocalResults(self.label, self.futures, [self._collecting[k] for k in which], self._outcome)

    def refs(self) -> list[LocalRef]:
        return [LocalRef(self.label, rank, self.futures[rank]) for rank in self._collecting]

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        ranks = [self._collecting[k] for k in which]
        return [decode_result(self.label, rank, self.futures[rank].result().value, private=private) for rank in ranks]

    def check_sendable(self) -> NoReturn:
        raise LocalGroupError(
            f"the results of {self.label}() are in the driver's process, where a LocalWorkerGroup computed them; pass "
            "future.result() instead of the future"
        )

    __reduce__ = check_sendable


class LocalRef:
    """A reference to the result of one rank, as an ObjectRef is on Ray. As an argument of a method of a group in this
    process it stands for its value."""

    def __init__(self, label: str, rank: int, future: cf.Future[RankResult]) -> None:
        self._label = label
        self._rank = rank
        self._future = future

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it, or raise what the method raised, as ``ray.get`` does. A `CallTimeoutError`
        after ``timeout`` seconds; a `WorkerDiedError` if the rank died."""
        try:
            result = self._future.result(timeout)
        except TimeoutError:
            raise CallTimeoutError.of_wait(self._label, timeout, [self._rank]) from None
        if result.failure is not None:
            cause = result.failure.cause
            if isinstance(cause, Exception):
                raise cause.with_traceback(result.failure.trace)
            raise result.failure.error()
        if result.died is not None:
            raise WorkerDiedError.during(self._label, self._rank, HOST, result.died)
        return decode_result(self._label, self._rank, result.value, private=True)

    def __reduce__(self) -> Any:
        raise LocalGroupError("a LocalRef refers to a result in the driver's process; pass ref.get() instead")

    def __repr__(self) -> str:
        return f"<LocalRef to a result of {self._label}()>"


add_reference_types(LocalResults, LocalRef, in_process=True)


def _serve(jobs: Jobs) -> None:
    # A function without a reference to the rank, which holds no job while it waits: the collection of the rank is what
    # ends a thread that nobody ended.
    while (job := jobs.get()) is not None:
        job()
        del job


def _release(jobs: Jobs | None, executor: Executor, rendezvous: socket.socket | None) -> None:
    # Must not wait for the thread: the garbage collector may run this in any thread, the rank's own included.
    if jobs is not None:
        jobs.put(None)
    executor.close()
    if rendezvous is not None:
        rendezvous.close()


def _set_result(future: cf.Future[RankResult], result: RankResult) -> None:
    """Set a result, unless there is one: `LocalRank.end` may have set it while the method was still running."""
    with contextlib.suppress(cf.InvalidStateError):
        future.set_result(result)


def _is_for_driver(error: BaseException) -> bool:
    """Whether an exception that was raised in the driver's thread is meant for the driver: Ctrl-C, the time limit of a
    test, or "quit" in a debugger."""
    debugger = sys.modules.get("bdb")
    if debugger is not None and isinstance(error, debugger.BdbQuit):
        return True
    return not isinstance(error, (Exception, asyncio.CancelledError))


def _fetch(value: Any) -> Any:
    if isinstance(value, LocalRef):
        return value.get()
    if not isinstance(value, _object_ref()):
        return value
    ray = sys.modules["ray"]
    try:
        return ray.get(value)
    except ray.exceptions.RayTaskError:  # as in `ray.results.fetch`: what the task raised
        raise
    except ray.exceptions.RayError as error:
        raise ResultError(f"the object of {value!r} cannot be fetched: {type(error).__name__}: {error}") from error


def _object_ref() -> Any:
    """Ray's ObjectRef; () in a process that has not imported Ray."""
    return getattr(sys.modules.get("ray"), "ObjectRef", ())
