"""The in-process transport: all ranks in the driver's own process, with a thread each or one after the other.

Arguments and results are encoded as for Ray. So every reader gets its own value, a value that Ray could not send is
refused, and what the sender changes afterwards reaches nobody.

A rank's call is a `concurrent.futures.Future`, which is also its token. It holds what `Executor.run` returned;
only a bug in the library would set an exception.
"""

from __future__ import annotations

import asyncio
import concurrent.futures as cf
import contextlib
import copy
import functools
import itertools
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dispatch.errors import ResultError
from dispatch.modes import Join
from dispatch.plan import CallPlan, DeferredArgument
from dispatch.register import MethodSpec
from single_controller.call.codec import (
    CallMessage,
    Encoded,
    add_reference_types,
    call_message,
    decoded,
    encode_arguments,
)
from single_controller.call.errors import CallTimeoutError, LocalGroupError, WorkerDiedError
from single_controller.call.executor import Constructor, Executor, RunningCall
from single_controller.call.future import WorkerFuture
from single_controller.call.joining import Located, locate
from single_controller.call.result import RankResult
from single_controller.call.transport import MAX_STACK_SECONDS, PartlySentError, RankProcess, Sent, Token, Transport
from single_controller.call.worker import RankInfo, Worker

HOST = f"{socket.gethostname()}, in the driver's process"
"""The host of every rank, for messages."""

Outcome = tuple[RankResult, Encoded | BaseException | None]
"""What `Executor.run` returns."""

Jobs = queue.SimpleQueue[Callable[[], None] | None]
"""The work of a rank's thread; None ends it. Not a `queue.Queue`, whose ``put`` a finalizer must not call."""


class LocalRank:
    """One rank: its workers, and, with ``threads``, its thread.

    Threads: one named "local-rank-<n>" runs the calls in the order in which they were sent. `end` ends it, or the
    garbage collection of a group that nobody closed. A running method cannot be interrupted; the thread then ends when
    the method returns. Each concurrent call has a thread "local-rank-<n>-concurrent", which ends with the call. They
    are daemon threads and not those of a ThreadPoolExecutor, because the interpreter joins those at exit: one method
    that hangs would keep the process alive.
    Lock: ``_lock`` makes "is the rank alive, then queue a job" atomic, so that no job is queued behind the end of the
    thread. It also protects ``_futures``. It is a leaf.

    Args:
        rank: 0 .. world_size - 1.
        world_size: number of ranks of the group.
        threads: whether the rank has a thread. Otherwise its calls run in the caller's thread.

    Attributes:
        died: why the rank takes no more calls, or None.
    """

    def __init__(self, rank: int, world_size: int, threads: bool) -> None:
        self.rank = rank
        self.died: str | None = None
        self._lock = threading.Lock()
        # Weak, so that a result lives only as long as somebody may read it.
        self._futures: weakref.WeakSet[cf.Future[Outcome]] = weakref.WeakSet()
        # Bound and not listening: held for a process group that the only rank of a group may make.
        rendezvous = socket.socket()
        rendezvous.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # On all addresses: torch listens on all of them, which fails if another process is given this port on one.
        rendezvous.bind(("", 0))
        host, port = "127.0.0.1", rendezvous.getsockname()[1]
        self._info = RankInfo(rank, world_size, rank, world_size, host, port, one_process=world_size > 1)
        # What leaves the executor: SystemExit, which ends the rank, and in the driver's thread the driver's exceptions.
        reraise = _ends_rank if threads else _is_for_driver
        self._executor = Executor(HOST, _fetch, in_process=True, reraise=reraise)
        self._jobs: Jobs | None = queue.SimpleQueue() if threads else None
        if self._jobs is not None:
            threading.Thread(target=_serve, args=(self._jobs,), name=f"local-rank-{rank}", daemon=True).start()
        # Must not refer to this object, or it would never be collected. Not at exit: nothing is left to clean up then.
        self._finalize = weakref.finalize(self, _release, self._jobs, self._executor, rendezvous)
        self._finalize.atexit = False

    def start(self, classes: Mapping[str | None, type[Worker]], arguments: Encoded) -> cf.Future[Outcome]:
        """Create the workers.

        Args:
            classes: role -> class.
            arguments: role -> (args, kwargs) of its constructor, encoded.
        """

        def constructors() -> dict[str | None, Constructor]:
            given = arguments.decode()
            return {role: (cls, *given[role]) for role, cls in classes.items()}

        return self._submit(lambda: (self._executor.start(self._info, constructors), None))

    def call(
        self, message: CallMessage, whole: Encoded | None, shard: Encoded | None, *, keep: bool, concurrent: bool
    ) -> cf.Future[Outcome]:
        """Run a call. See `Executor.run`.

        Args:
            message: what to run.
            whole: the arguments that all ranks get.
            shard: the arguments of this rank's shard.
            keep: leave the result in the future instead of in the `RankResult`.
            concurrent: whether the call may overtake and overlap others.
        """
        run = self._executor.run
        return self._submit(lambda: run(message, whole, shard, time.time(), keep=keep), concurrent=concurrent)

    def fail(self, error: Exception, spec: MethodSpec) -> cf.Future[Outcome]:
        """The outcome of a call that cannot begin, for a reason outside this rank."""
        result = self._executor.failed(error, spec.name, spec.role)
        if result.failure is not None:
            result.failure.ours = result.failure.alike = True  # raised as it is: this rank's method did not raise it
        return self._submit(lambda: (result, error))

    def stacks(self) -> str:
        """Where its calls are. See `Executor.stacks`."""
        return self._executor.stacks()

    def running(self) -> tuple[RunningCall, ...]:
        """What it runs. See `Executor.running`."""
        return self._executor.running()

    def end(self, reason: str) -> None:
        """Take no more calls. Those that have not ended get the reason as their result."""
        with self._lock:
            self.died = self.died or reason
            futures = list(self._futures)
        # Outside the lock: callbacks of a future run in the thread that sets its result.
        for future in futures:
            _set_result(future, self._lost())
        self._finalize()  # runs `_release` once, however often it is called

    def _submit(self, job: Callable[[], Outcome], *, concurrent: bool = False) -> cf.Future[Outcome]:
        future: cf.Future[Outcome] = cf.Future()
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

    def _run(self, job: Callable[[], Outcome], future: cf.Future[Outcome]) -> None:
        try:
            # A job that was queued before the rank ended must not run after it.
            outcome = self._lost() if self.died is not None else job()
        except SystemExit as error:
            # The thread goes on: it tells the jobs behind this one, until `end`, that the rank is lost.
            self.died = f"it called sys.exit({'' if error.code is None else repr(error.code)})"
            outcome = self._lost()
        _set_result(future, outcome)

    def _lost(self) -> Outcome:
        return RankResult(self.rank, died=self.died), None


class LocalTransport(Transport):
    """Carries calls to ranks of this process.

    Args:
        ranks: the ranks, in order.
        threads: whether each rank has a thread. Otherwise `send` runs the calls.
    """

    def __init__(self, ranks: Sequence[LocalRank], threads: bool) -> None:
        self.ranks = tuple(ranks)
        self.world_size = len(self.ranks)
        self.synchronous = not threads
        if _object_ref():  # ObjectRefs are arguments here too, if this process uses Ray at all
            add_reference_types(_object_ref())

    @property
    def connected(self) -> bool:
        """See `Transport.connected`. This process exists as long as somebody asks."""
        return True

    def host(self, rank: int) -> str:
        """This machine."""
        return HOST

    def start(self, classes: Mapping[str | None, type[Worker]], arguments: Encoded, ranks: Sequence[int]) -> Sent:
        """Run the constructors on some ranks. See `LocalRank.start`."""
        return Sent({self.ranks[rank].start(classes, arguments): rank for rank in ranks})

    def send(self, spec: MethodSpec, plan: CallPlan, *, future: bool) -> Sent:
        """See `Transport.send`. Each distinct shard is encoded once; every rank that reads it decodes it."""
        whole = encode_arguments(spec, plan.whole, in_process=True)
        shards = [encode_arguments(spec, shard.values, in_process=True) for shard in plan.shards]
        failed_input = _failed_input(plan) if self.synchronous else None
        futures: dict[int, cf.Future[Outcome]] = {}
        nbytes: dict[int, int] = {}
        for rank in plan.ranks:
            number = plan.shard_of[rank] or 0
            nbytes[rank] = sum(encoded.nbytes for encoded in (whole, shards[number]) if encoded is not None)
            if failed_input is not None:
                futures[rank] = self.ranks[rank].fail(failed_input, spec)
                continue
            collects = rank in plan.collecting
            try:
                futures[rank] = self.ranks[rank].call(
                    call_message(spec, plan, plan.shards[number], collects=collects),
                    whole,
                    shards[number],
                    keep=future and collects,
                    concurrent=spec.registration.concurrent,
                )
            except Exception as error:
                if futures and not self.synchronous:  # no further thread can be started, for example
                    raise PartlySentError(list(futures), rank) from error
                raise
        results = LocalResults(spec.label, futures, plan.collecting) if future else None
        tokens: dict[Token, int] = {token: rank for rank, token in futures.items()}
        return Sent(tokens, None if results is None else lambda: results, nbytes)

    def collect(self, tokens: Mapping[Token, int], timeout: float) -> dict[Token, RankResult]:
        """See `Transport.collect`."""
        done = cf.wait([token for token in tokens if isinstance(token, cf.Future)], timeout).done
        return {future: future.result()[0] for future in done}

    def when_arrived(self, tokens: Sequence[Token], callback: Callable[[], None]) -> None:
        """See `Transport.when_arrived`."""
        arrived = itertools.count(1).__next__

        def count(_: cf.Future[Outcome]) -> None:
            if arrived() == len(tokens):
                callback()

        for token in tokens:
            if isinstance(token, cf.Future):
                token.add_done_callback(count)

    def deaths(self) -> dict[int, str]:
        """See `Transport.deaths`."""
        return {rank.rank: rank.died for rank in self.ranks if rank.died is not None}

    def stacks(self, ranks: Sequence[int], seconds: float = MAX_STACK_SECONDS) -> dict[int, str]:
        """See `Transport.stacks`."""
        return {rank: self.ranks[rank].stacks() for rank in ranks}

    @property
    def processes(self) -> tuple[RankProcess, ...]:
        """See `Transport.processes`: this process, for each rank."""
        return (RankProcess(socket.gethostname(), "in the driver's process", os.getpid()),) * self.world_size

    def running(self, ranks: Sequence[int], seconds: float) -> dict[int, tuple[RunningCall, ...] | str]:
        """See `Transport.running`."""
        return {rank: self.ranks[rank].running() for rank in ranks}

    def kill(self) -> None:
        """See `Transport.kill`. A method that is running in a thread cannot be stopped: the thread ends after it."""
        self.ended = True
        for rank in self.ranks:
            rank.end("its group was closed or restarted")


class LocalResults:
    """The results of one call. See `single_controller.call.joining.CallResults`.

    Lock: ``_lock`` protects ``_running`` and ``_located``. It is a leaf.

    Args:
        label: the call's method, for messages.
        futures: rank -> future, of all called ranks.
        collecting: the collecting ranks, in order.
    """

    def __init__(self, label: str, futures: Mapping[int, cf.Future[Outcome]], collecting: Sequence[int]) -> None:
        self.label = label
        self.futures = futures
        self._collecting = tuple(collecting)
        # One event for all ranks that wait: each of them looking at each future would cost the square of their number.
        self._ended: cf.Future[RankResult | Exception | None] = cf.Future()
        self._running = len(futures)
        self._lock = threading.RLock()
        self._located: dict[tuple[Join, str, int, str], list[Located]] = {}
        this = weakref.ref(self)  # a future keeps its callbacks, and would keep the results in a cycle
        for future in futures.values():
            future.add_done_callback(functools.partial(_note_end, this))

    def wait(self, timeout: float | None = None) -> list[RankResult]:
        """See `CallResults.wait`."""
        try:
            failed = self._ended.result(timeout)
        except TimeoutError:
            raise self.late([rank for rank, future in self.futures.items() if not future.done()], timeout) from None
        if isinstance(failed, RankResult):
            failed = self.error(failed)
        if failed is not None:
            raise copy.copy(failed) from failed.__cause__
        return [self.futures[rank].result()[0] for rank in self._collecting]

    def fail(self, error: Exception) -> None:
        """See `CallResults.fail`."""
        with contextlib.suppress(cf.InvalidStateError):
            self._ended.set_result(error)

    def note_end(self, result: RankResult) -> None:
        """A rank has ended."""
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last or result.failure is not None or result.died is not None:
            failed = result if result.failure is not None or result.died is not None else None
            with contextlib.suppress(cf.InvalidStateError):  # another rank has failed
                self._ended.set_result(failed)

    def locate(self, join: Join, argument: DeferredArgument) -> list[Located]:
        """See `CallResults.locate`. Remembered for the other ranks."""
        self.wait()
        key = (join, argument.kind, argument.count, argument.uneven)
        with self._lock:
            if key not in self._located:
                self._located[key] = locate(self, join, argument)
            return self._located[key]

    def only(self, which: Sequence[int]) -> LocalResults:
        """See `CallResults.only`."""
        return self

    def refs(self) -> list[LocalRef]:
        """See `CallResults.refs`."""
        return [LocalRef(self, rank) for rank in self._collecting]

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """See `CallResults.values`."""
        return [self.value(self._collecting[k], private) for k in which]

    def value(self, rank: int, private: bool) -> Any:
        """Decode the result of one rank, which has ended."""
        encoded = self.futures[rank].result()[1]
        if not isinstance(encoded, Encoded):
            return None
        return decoded(self.label, rank, functools.partial(encoded.decode, private=private))

    def error(self, result: RankResult) -> Exception | None:
        """The error of one rank, or None."""
        if result.failure is not None:
            return result.failure.error()
        if result.died is None:
            return None
        return WorkerDiedError(
            f"rank {result.rank} died during {self.label}(): {result.died}",
            rank=result.rank,
            host=HOST,
            method=self.label,
            ranks=(result.rank,),
        )

    def late(self, ranks: Sequence[int], timeout: float | None) -> CallTimeoutError:
        """The error of a wait that ended before the call did."""
        return CallTimeoutError(
            f"{self.label}() has not ended after a wait of {timeout:g} s; still running on ranks {list(ranks)}",
            method=self.label,
            ranks=ranks,
            call_goes_on=True,
        )

    def __reduce__(self) -> Any:
        raise LocalGroupError(
            f"the results of {self.label}() are in the driver's process, where a LocalWorkerGroup computed them; pass "
            "future.result() instead of the future"
        )


class LocalRef:
    """A reference to the result of one rank, as an ObjectRef is on Ray. As an argument of a method of a group in this
    process it stands for its value."""

    def __init__(self, results: LocalResults, rank: int) -> None:
        self._results = results
        self._rank = rank

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it.

        Args:
            timeout: seconds to wait.

        Raises:
            CallTimeoutError: the wait ended before the call did.
            WorkerDiedError: the rank died.
            Exception: whatever the method raised, as ``ray.get`` raises it.
        """
        results, rank = self._results, self._rank
        try:
            result, value = results.futures[rank].result(timeout)
        except TimeoutError:
            raise results.late([rank], timeout) from None
        error = value if isinstance(value, Exception) else results.error(result)
        if error is not None:
            raise error
        return results.value(rank, private=True)

    def __reduce__(self) -> Any:
        raise LocalGroupError("a LocalRef refers to a result in the driver's process; pass ref.get() instead")

    def __repr__(self) -> str:
        return f"<LocalRef to a result of {self._results.label}()>"


add_reference_types(LocalResults, LocalRef, in_process=True)


def _serve(jobs: Jobs) -> None:
    # A function without a reference to the rank, which holds no job while it waits: the collection of the rank is what
    # ends a thread that nobody ended.
    while (job := jobs.get()) is not None:
        job()
        del job


def _release(jobs: Jobs | None, executor: Executor, rendezvous: socket.socket) -> None:
    # Must not wait for the thread: the garbage collector may run this in any thread, the rank's own included.
    if jobs is not None:
        jobs.put(None)
    executor.close()
    rendezvous.close()


def _note_end(results: weakref.ref[LocalResults], future: cf.Future[Outcome]) -> None:
    found = results()
    if found is not None:
        found.note_end(future.result()[0])


def _set_result(future: cf.Future[Outcome], outcome: Outcome) -> None:
    """Set a result, unless there is one: `LocalRank.end` may have set it while the method was still running."""
    with contextlib.suppress(cf.InvalidStateError):
        future.set_result(outcome)


def _ends_rank(error: BaseException) -> bool:
    return isinstance(error, SystemExit)


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


def _failed_input(plan: CallPlan) -> Exception | None:
    """Wait for the futures among the arguments; the error of the first that failed.

    Ranks that run in the driver's thread must know it before they begin: they would wait for a result that never comes,
    and nothing could end that wait.
    """
    for deferred in plan.deferred:
        if isinstance(deferred, WorkerFuture):
            deferred.wait()
        if deferred.failed is not None:
            return deferred.failed
    return None
