"""RayResults: the results of one call, by reference, in any process. LocatedResults: what one rank needs of them."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import ray
import ray.cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

from dispatch.batch import Deferred
from dispatch.errors import DispatchError, ResultError, SingleControllerError
from dispatch.modes import Join
from dispatch.plan import DeferredArgument
from single_controller.call.codec import (
    Encoded,
    add_reference_types,
    decoded,
    keep_encoded,
    use_pickler,
)
from single_controller.call.errors import CallTimeoutError, ResultLostError, WorkerDiedError
from single_controller.call.joining import CallResults, Located, locate
from single_controller.call.result import Failure, RankResult
from single_controller.ray.compat import exit_detail
from single_controller.ray.rank.call_thread import call_cancelled
from single_controller.wire.handshake import BESIDE, KEPT, REPLY
from single_controller.wire.link import Reply

# Here, because drivers and ranks both import this module. Ray has its own copy of cloudpickle. With another one, a
# class of __main__ that a user also sends through Ray itself would arrive as two distinct classes. Ray must see the
# references in a message to count them: reading one that it has not seen may never end.
use_pickler(ray.cloudpickle.CloudPickler)
add_reference_types(ray.ObjectRef, ActorHandle)

RESULT = "result"
"""Ray's concurrency group for results, which must not wait for calls."""

CANCEL_SECONDS = 0.3
"""How long a rank whose driver has cancelled a call still waits for the error of the call that computes an argument."""

MAX_WAIT_SECONDS = 0.5
"""The longest wait for results before this process looks whether some rank has failed, or the wait is in vain."""


Kept = tuple[bytes | None, "list[ray.ObjectRef] | None"]
"""What `RankActor._sc_result` returns: the reply, or None if it is in the object too, and a reference to the object."""


class RayResults:
    """The results of a call in any process. Implements `single_controller.call.joining.CallResults`.

    Args:
        label: the call's method, for messages.
        ranks: all called ranks: the collecting ranks in the order of their results, then the others.
        entries: for each of them its `Reply`, on the driver; elsewhere what the rank keeps, or a reference to that.
        count: number of collecting ranks.
        hosts: the hosts of the ranks, for messages.
        tasks: on the driver, what makes Ray's tasks for a reply.
    """

    def __init__(
        self,
        label: str,
        ranks: Sequence[int],
        entries: Sequence[Reply | Kept | ray.ObjectRef],
        count: int,
        hosts: Sequence[str],
        tasks: ReplyTasks | None = None,
    ) -> None:
        self.label = label
        self._ranks = ranks
        self._entries = list(entries)
        self._count = count
        self._hosts = hosts
        self._tasks = tasks
        self._refs: list[ray.ObjectRef] | None = None
        self._failed: Exception | None = None

    def refs(self) -> list[ray.ObjectRef]:
        """See `CallResults.refs`."""
        if self._refs is None:
            if self._tasks is None:
                raise RuntimeError(f"the references to the results of {self.label}() are only on its driver")
            self._refs = [self._tasks.value(entry) for entry in self._entries[: self._count]]
        return list(self._refs)

    def fail(self, error: Exception) -> None:
        """See `CallResults.fail`."""
        self._failed = error

    def wait(self, timeout: float | None = None) -> list[RankResult]:
        """See `CallResults.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        found: dict[int, RankResult] = {}
        pause, cancelled = 0.01, math.inf
        while True:
            left = pause if end is None else max(0.0, min(pause, end - time.monotonic()))
            # Not for long, because after a failure the other ranks may wait in a collective and never end.
            self._look({k for k in range(len(self._entries)) if k not in found}, found, left)
            failed = next((result.failure for result in found.values() if result.failure is not None), None)
            if failed is not None:
                raise failed.error()
            if self._failed is not None:
                raise copy.copy(self._failed) from self._failed.__cause__
            if len(found) == len(self._entries):
                return [found[k] for k in range(self._count)]
            cancelled = min(cancelled, time.monotonic() if call_cancelled() else math.inf)
            if time.monotonic() - cancelled > CANCEL_SECONDS:  # the error itself may be on its way
                raise ResultError(
                    f"{self.label}() has failed on its driver, so its results will not come", method=self.label
                )
            if end is not None and time.monotonic() >= end:
                late = sorted(rank for k, rank in enumerate(self._ranks) if k not in found)
                raise CallTimeoutError(
                    f"{self.label}() has not ended after a wait of {timeout:g} s; ranks {late} are running",
                    method=self.label,
                    ranks=late,
                    call_goes_on=True,
                )
            pause = min(2 * pause, MAX_WAIT_SECONDS)

    def _look(self, missing: set[int], found: dict[int, RankResult], seconds: float) -> None:
        """Wait for what is missing, and read what has come."""
        refs: dict[Any, int] = {}
        for k in sorted(missing):
            entry = self._entries[k]
            if isinstance(entry, Reply):
                if not entry.kind and seconds > 0:
                    entry.arrivals.all.wait(seconds)
                    seconds = 0.0
                if entry.lost is not None:
                    found[k] = RankResult(
                        self._ranks[k], failure=Failure.lost_contact(self._ranks[k], self._hosts[k], entry.lost)
                    )
                elif entry.kind == BESIDE and self._tasks is not None:
                    found[k] = self._result(k, self._tasks.fetch(entry))
                elif entry.kind:
                    found[k] = RankResult.from_message(entry.payload)
            elif isinstance(entry, tuple):
                found[k] = self._result(k, entry)
            else:
                refs[entry] = k
        if refs:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds, fetch_local=False)
            for ref in ready:
                k = refs[ref]
                self._entries[k] = kept = self._get(k, ref)
                found[k] = self._result(k, kept)

    def _get(self, k: int, ref: Any) -> Kept:
        rank, host = self._ranks[k], self._hosts[k]
        try:
            kept: Kept = ray.get(ref)
            return kept
        except ActorUnavailableError as error:  # the driver that made the call finds out whether the rank is dead
            raise ResultLostError(
                f"the result of {self.label}() on rank {rank}, whose future is an argument here, was lost, because "
                f"the connection to the rank was lost: {one_line(error)}",
                rank=rank,
                host=host,
                method=self.label,
            ) from error
        except RayActorError as error:
            raise WorkerDiedError(
                f"rank {rank} died during {self.label}() ({host}): {one_line(error)}",
                rank=rank,
                host=host,
                method=self.label,
                ranks=(rank,),
            ) from error
        except RayError as error:
            raise self._lost(k, error) from error

    def _result(self, k: int, kept: Kept) -> RankResult:
        message, refs = kept
        if message is not None:
            return RankResult.from_message(message)
        try:
            result: RankResult = ray.get(refs or [])[0]
            return result
        except RayError as error:
            raise self._lost(k, error) from error

    def locate(self, join: Join, argument: DeferredArgument) -> list[Located]:
        """See `CallResults.locate`."""
        return locate(self, join, argument)

    def only(self, which: Sequence[int]) -> RayResults:
        """See `CallResults.only`."""
        ranks, hosts = [self._ranks[k] for k in which], [self._hosts[k] for k in which]
        return RayResults(self.label, ranks, [self._entries[k] for k in which], len(which), hosts, self._tasks)

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """See `CallResults.values`.

        Raises:
            ResultError: a result is lost, or cannot be fetched or unpickled.
        """
        encoded: dict[int, Encoded | None] = {}
        refs: dict[int, Any] = {}
        for k in which:
            entry = self._entries[k]
            if isinstance(entry, Reply) and entry.result is not None and not entry.result.kept:
                encoded[k] = entry.result.value
                continue
            kept = self._kept(k)
            result = self._result(k, kept)
            if result.kept and kept[1] is not None:
                refs[k] = kept[1][0]
            else:
                encoded[k] = result.value
        if refs:
            with keep_encoded():
                try:
                    encoded |= zip(refs, ray.get(list(refs.values())), strict=True)
                except RayError:  # asking one by one tells which
                    encoded |= {k: self._fetch(k, ref) for k, ref in refs.items()}
        # Nobody else reads these values on the driver, so even a private one may stay in shared memory.
        alone = self._tasks is not None and private
        return [
            None
            if (value := encoded[k]) is None
            else decoded(
                self.label,
                self._ranks[k],
                value.decode_result if alone else functools.partial(value.decode, private=private),
            )
            for k in which
        ]

    def _kept(self, k: int) -> Kept:
        entry = self._entries[k]
        if isinstance(entry, Reply):
            if entry.kind == REPLY or self._tasks is None:
                return entry.payload, None
            try:
                return self._tasks.fetch(entry)
            except RayError as error:
                raise self._lost(k, error) from error
        if not isinstance(entry, tuple):
            self._entries[k] = entry = self._get(k, entry)
        return entry

    def _fetch(self, k: int, ref: Any) -> Encoded:
        try:
            value: Encoded = ray.get(ref)
            return value
        except RayError as error:
            raise self._lost(k, error) from error

    def _lost(self, k: int, error: RayError) -> ResultError:
        rank, host = self._ranks[k], self._hosts[k]
        text = f"the result of rank {rank} of {self.label}() ({host}) {what_is_lost(error)}"
        return ResultError(text, method=self.label, rank=rank, host=host)

    def __reduce__(self) -> tuple[Any, ...]:
        entries = [
            entry if not isinstance(entry, Reply) or self._tasks is None else self._tasks.entry(entry)
            for entry in self._entries
        ]
        return RayResults, (self.label, self._ranks, entries, self._count, self._hosts)


class ReplyTasks:
    """Makes Ray's tasks that concern a reply, on the driver.

    Args:
        actors: the actors of the ranks.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    def request(self, reply: Reply) -> Any:
        """Ray's reference to what the rank keeps of a call; None if it has replied and keeps nothing."""
        with reply.link.lock:
            if reply.kept is None and (reply.kind in (KEPT, BESIDE) or reply.link.want(reply)):
                reply.kept = self._task(reply, "_sc_result").remote(reply.link.session, reply.number)
            return reply.kept

    def fetch(self, reply: Reply) -> Kept:
        """What the rank keeps of a call that has ended.

        Raises:
            RayError: it is lost.
        """
        if reply.read is None:
            reply.read = ray.get(self.request(reply))
        kept: Any = reply.read
        return kept[0] or reply.payload or None, kept[1]

    def entry(self, reply: Reply) -> Kept | ray.ObjectRef:
        """What another process needs."""
        ref = self.request(reply)
        return (reply.payload, None) if ref is None else ref

    def value(self, reply: Any) -> ray.ObjectRef:
        """Ray's reference to the value."""
        ref = self.request(reply)
        return self._task(reply, "_sc_value").remote((reply.payload, None) if ref is None else [ref])

    def _task(self, reply: Reply, name: str) -> Any:
        return getattr(self._actors[reply.rank], name).options(concurrency_group=RESULT)


# Ranks in the driver's own process see that the driver has given up.
add_reference_types(RayResults, in_process=True)


class LocatedResults(Deferred):
    """What one shard needs of the deferred arguments of a call, as another rank has located it.

    Args:
        label: the method that computes the argument, for messages.
        ref: reference to what `Executor.locate_arguments` returned for the shard.
        key: the parameter.
        rank: the rank that locates.
    """

    def __init__(self, label: str, ref: ray.ObjectRef, key: int | str, rank: int) -> None:
        self.label = label
        self._ref = ref
        self._key = key
        self._rank = rank

    def check_argument(self) -> None:
        """See `dispatch.batch.Deferred`. The future was checked when the call was planned."""

    def locate(self, argument: DeferredArgument) -> tuple[CallResults, Located]:
        """See `dispatch.batch.Deferred`."""
        try:
            found: dict[int | str | None, Any] = ray.get(self._ref)
        except TaskCancelledError as error:
            raise ResultError(
                f"{self.label}() has failed on its driver, so its results will not come", method=self.label
            ) from error
        except RayActorError as error:  # the driver will learn of the death, of which this is an echo
            raise ConnectionResetError(
                f"Connection reset by peer: rank {self._rank}, which locates the deferred arguments for all ranks, "
                f"died: {one_line(error)}"
            ) from error
        except RayError as error:
            raise ResultError(
                f"the place of the results of {self.label}() {what_is_lost(error)}", method=self.label
            ) from error
        located: Any = found[self._key]
        failed = located if isinstance(located, SingleControllerError) else found.get(None)
        if failed is not None:
            raise failed
        source, what = located
        return source, what


def fetch(value: Any) -> Any:
    """As in Ray, an ObjectRef given as an argument arrives as its value. Anything else is returned unchanged.

    Raises:
        RayTaskError: the task that computes it raised. Ray raises it as an instance of the task's own exception too.
        ResultError: the object is lost.
    """
    if not isinstance(value, ray.ObjectRef):
        return value
    try:
        return ray.get(value)
    except RayTaskError:
        raise
    except RayError as error:
        raise ResultError(f"the object of {value!r} {what_is_lost(error)}") from error


def put(encoded: Encoded) -> ray.ObjectRef:
    """Store encoded arguments in Ray's store.

    Raises:
        DispatchError: there is no room for them.
    """
    try:
        return ray.put(encoded)
    except RayError as error:
        raise DispatchError(
            f"{encoded.nbytes:,} bytes of arguments cannot be stored: {type(error).__name__}: {one_line(error)}. "
            "Nothing was sent; free disk space, drop results that you no longer need, or start Ray with a larger "
            "object_store_memory"
        ) from error


def what_is_lost(error: RayError) -> str:
    """The end of a message about an object that cannot be fetched: why, and what to do."""
    if isinstance(error, (OutOfDiskError, ObjectStoreFullError)):
        why = "cannot be stored or fetched, because an object store and the disk that it spills to are full. Free disk "
        why += "space, drop results that you no longer need, or start Ray with a larger object_store_memory"
    elif isinstance(error, OwnerDiedError):
        why = "is lost, because the driver that called the method has ended"
    elif isinstance(error, RayTaskError):
        why = "does not exist, because the task that computes it failed"
    else:
        why = "is lost: it was in the memory of a host that is gone, or that dropped it. Call the method again, after "
        why += "restart() if its group is broken"
    return f"{why} ({type(error).__name__}: {one_line(error)})"


def one_line(error: BaseException) -> str:
    """The content of one of Ray's long messages, in one line."""
    text = " ".join(str(error).split())
    detail = exit_detail(text)
    if detail:
        return detail
    if isinstance(error, RayTaskError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1][:500] if lines else type(error).__name__
    return text[:500] or type(error).__name__
