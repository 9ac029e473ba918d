"""RayResults: the results of one call, by reference, in any process."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import time
import weakref
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
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
)

from dispatch.errors import DispatchError, ResultError
from single_controller.call.codec import Encoded, add_reference_types, decode_result, keep_encoded, use_pickler
from single_controller.call.errors import CallTimeoutError, Failure, ResultLostError, WorkerDiedError
from single_controller.call.joining import RankResult, will_not_come
from single_controller.call.transport import Outcome, Receiver
from single_controller.ray.compat import exit_detail
from single_controller.ray.rank.call_thread import call_cancelled
from single_controller.wire.handshake import Kind
from single_controller.wire.link import Reply

# Here, because drivers and ranks both import this module. Ray has its own copy of cloudpickle. With another one, a
# class of __main__ that a user also sends through Ray itself would arrive as two distinct classes. Ray must see the
# references in a message to count them: reading one that it has not seen may never end.
use_pickler(ray.cloudpickle.CloudPickler)
add_reference_types(ray.ObjectRef, ActorHandle)

DEAD_SECONDS = 1.0
"""How long a value may take to arrive whose rank is known to be dead."""

RESULT = "result"
"""Ray's concurrency group for results of running calls. Each waits in a thread until its call has ended."""

ENDED = "ended"
"""Ray's concurrency group for results that are requested when their call has ended. They must not wait for those of
running calls, which may need them as arguments."""

CANCEL_SECONDS = 0.3
"""How long a rank whose driver has cancelled a call still waits for the error of the call that computes an argument."""

MAX_WAIT_SECONDS = 0.5
"""The longest wait for results before this process looks whether some rank has failed, or the wait is in vain."""


Kept = tuple[RankResult, "list[ray.ObjectRef] | None"]
"""What `RankActor._sc_result` returns: a result, and the reference to its value where the rank keeps that."""


@dataclass(eq=False, slots=True)
class RankReply(Reply):
    """The reply of one rank to one call, on the driver."""

    rank: int  # the rank
    host: str  # its host, for messages
    actor: Any  # its handle
    call: weakref.ref[Receiver]  # the call, which is told the result
    result: RankResult | None = None  # the result, once it has arrived
    kept: Any = None  # Ray's reference to what `RankActor._sc_result` returns, once somebody has asked for it
    fetched: Kept | None = None  # what that task has returned, once it was read
    lost: str = ""  # why its value is lost, if it died with its rank

    def arrive(self) -> None:
        reason = "its reference could not be requested"
        try:
            if self.kind != Kind.REPLY:  # at once, so that what the rank keeps is the driver's to drop
                self.request()
            if self.kind == Kind.BESIDE:
                self.kept.future().add_done_callback(self._take_beside)
                return
        except Exception as error:  # Ray was shut down, for example
            reason = f"{type(error).__name__}: {error}"
        try:
            self._tell(RankResult(*pickle.loads(self.payload)))
        except Exception:  # without any result, whoever waits for the call would do so for ever
            self.lose(f"its reply cannot be read here: {reason}", dead=False)

    def lose(self, reason: str, *, dead: bool) -> None:
        if dead:  # the monitor tells the call. That breaks its group, whose log calls handlers that may wait
            self.result = RankResult(self.rank, died=reason)
        else:
            self._tell(RankResult(self.rank, failure=Failure.lost_contact(self.rank, self.host, reason)))

    def _take_beside(self, done: Future[Kept]) -> None:
        error = done.exception()
        if error is None:
            self._tell(done.result()[0])
        elif isinstance(error, RayError):
            lost = Failure(self.rank, self.host, "", type(error).__name__, what_is_lost(error), lost=True)
            self._tell(RankResult(self.rank, failure=lost))
        else:
            self.lose(f"its reply cannot be read here: {type(error).__name__}: {error}", dead=False)

    def _tell(self, result: RankResult) -> None:
        if result.rank != self.rank:  # the process has no rank yet, or has had another one when the call ran
            result = result._replace(rank=self.rank)
            if result.failure is not None:
                result.failure.rank = self.rank
        self.result = result
        call = self.call()
        if call is not None:
            call.arrive(result)

    def request(self) -> Any:
        """Ray's reference to what the rank keeps of the call; None if it has replied and keeps nothing."""
        with self.link.lock:
            if self.kept is None and (self.kind in (Kind.KEPT, Kind.BESIDE) or self.link.tell(Kind.WANT, self.number)):
                self.kept = self._task("_sc_result").remote(self.link.session, self.number)
            return self.kept

    @property
    def of_dead(self) -> bool:
        """Whether the rank has replied, kept the value, and died."""
        return self.link.dead is not None and self.result is not None and self.result.kept

    def fetch(self) -> Kept:
        """What the rank keeps of a call that has ended; a `RayError` if it is lost."""
        if self.fetched is None:
            self.fetched = ray.get(self.request())
        return self.fetched

    def elsewhere(self) -> Kept | ray.ObjectRef:
        """What stands for this reply in another process."""
        ref = self.request()
        if ref is not None:
            return ref
        if self.kind == Kind.REPLY:  # the thread that reads connections may not have told it yet
            return RankResult(*pickle.loads(self.payload)), None
        lost = Failure.lost_contact(self.rank, self.host, "the connection was closed")
        return self.result or RankResult(self.rank, failure=lost), None

    def value(self) -> ray.ObjectRef:
        """Ray's reference to the value."""
        kept = self.elsewhere()
        return self._task("_sc_value").remote(kept if isinstance(kept, tuple) else [kept])

    def _task(self, name: str) -> Any:
        return getattr(self.actor, name).options(concurrency_group=ENDED if self.kind else RESULT)


class RayResults:
    """The results of a call in any process. Implements `single_controller.call.joining.CallResults`.

    Args:
        label: the call's method, for messages.
        ranks: all called ranks: the collecting ranks in the order of their results, then the others.
        entries: for each of them its `RankReply`, on the driver; elsewhere what the rank keeps, or a reference to that.
        count: number of collecting ranks.
        hosts: the hosts of the ranks, for messages.
        outcome: on the driver, the call's.
    """

    def __init__(
        self,
        label: str,
        ranks: Sequence[int],
        entries: Sequence[RankReply | Kept | ray.ObjectRef],
        count: int,
        hosts: Sequence[str],
        outcome: Outcome | None = None,
    ) -> None:
        self.label = label
        self.shared = True
        self._ranks = ranks
        self._entries = list(entries)
        self._count = count
        self._hosts = hosts
        self._outcome = outcome
        self._refs: list[ray.ObjectRef] | None = None

    def refs(self) -> list[ray.ObjectRef]:
        if self._refs is None:
            replies = [entry for entry in self._entries[: self._count] if isinstance(entry, RankReply)]
            if len(replies) < self._count:
                raise RuntimeError(f"the references to the results of {self.label}() are only on its driver")
            self._refs = [reply.value() for reply in replies]
        return list(self._refs)

    def wait(self, timeout: float | None = None) -> list[RankResult]:
        if self._outcome is not None:
            try:
                failed = self._outcome.result(timeout)
            except TimeoutError:
                told = [k for k, entry in enumerate(self._entries) if isinstance(entry, RankReply) and entry.result]
                raise self._late(told, timeout) from None
            if failed is not None:
                raise copy.copy(failed()) from failed().__cause__
            self._find_lost(range(self._count))  # for those that are made by `only`, which are sent one by one
            return [entry.result for entry in self._entries[: self._count] if entry.result is not None]  # type: ignore
        found: dict[int, RankResult] = {}
        end = None if timeout is None else time.monotonic() + timeout
        pause, cancelled = 0.01, math.inf
        while True:
            left = pause if end is None else max(0.0, min(pause, end - time.monotonic()))
            # Not for long, because after a failure the other ranks may wait in a collective and never end.
            self._look(found, left)
            failure = next((result.failure for result in found.values() if result.failure is not None), None)
            if failure is not None:
                raise failure.error()
            dead = next((k for k, result in found.items() if result.died is not None), None)
            if dead is not None:
                raise self._died(dead, str(found[dead].died))
            if len(found) == len(self._entries):
                return [found[k] for k in range(self._count)]
            cancelled = min(cancelled, time.monotonic() if call_cancelled() else math.inf)
            if time.monotonic() - cancelled > CANCEL_SECONDS:  # the error itself may be on its way
                raise will_not_come(self.label)
            if end is not None and time.monotonic() >= end:
                raise self._late(found, timeout)
            pause = min(2 * pause, MAX_WAIT_SECONDS)

    def _late(self, found: Container[int], timeout: float | None) -> CallTimeoutError:
        late = sorted(rank for k, rank in enumerate(self._ranks) if k not in found)
        return CallTimeoutError.of_wait(self.label, timeout, late)

    def _look(self, found: dict[int, RankResult], seconds: float) -> None:
        """Wait for what is missing, and read what has come."""
        refs = {}
        for k, entry in enumerate(self._entries):
            if isinstance(entry, tuple):
                found[k] = entry[0]
            elif k not in found:
                refs[entry] = k
        if refs:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds, fetch_local=False)
            for ref in ready:
                found[refs[ref]] = self._kept(refs[ref])[0]

    def check_sendable(self) -> None:
        pass

    def only(self, which: Sequence[int]) -> RayResults:
        ranks, hosts = [self._ranks[k] for k in which], [self._hosts[k] for k in which]
        entries = [self._entries[k] for k in which]
        return RayResults(self.label, ranks, entries, len(which), hosts, self._outcome)

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        encoded: dict[int, Encoded | None] = {}
        refs: dict[int, Any] = {}
        self._find_lost(which)
        for k in which:
            result, kept = self._kept(k)
            if result.failure is not None:  # of a value that died with its rank: see `_elsewhere`
                raise result.failure.error()
            if result.kept and kept is not None:
                refs[k] = kept[0]
            else:
                encoded[k] = result.value
        if refs:
            with keep_encoded():
                try:
                    encoded |= zip(refs, ray.get(list(refs.values())), strict=True)
                except RayError:  # asking one by one tells which
                    encoded |= {k: self._get(k, ref) for k, ref in refs.items()}
        label, ranks, shared = self.label, self._ranks, self.shared
        return [decode_result(label, ranks[k], encoded[k], private=private, shared=shared) for k in which]

    def _find_lost(self, which: Iterable[int]) -> None:
        """Note which values died with their ranks. A value that is on this host can be read all the same; for another,
        Ray itself would ask the lost host for 20 seconds. All are waited for at once."""
        refs: dict[Any, RankReply] = {}
        for k in which:
            entry = self._entries[k]
            if isinstance(entry, RankReply) and entry.of_dead and not entry.lost:
                with contextlib.suppress(RayError):  # which is told when the value is read
                    if (kept := entry.fetch()[1]) is not None:
                        refs[kept[0]] = entry
        if refs:
            for ref in ray.wait(list(refs), num_returns=len(refs), timeout=DEAD_SECONDS)[1]:
                refs[ref].lost = f"is lost with its rank, which has died: {refs[ref].link.dead}"

    def _kept(self, k: int) -> Kept:
        """The result of a rank that has ended, and the reference to its value where the rank keeps it."""
        entry = self._entries[k]
        if isinstance(entry, tuple):
            return entry
        if not isinstance(entry, RankReply):
            self._entries[k] = entry = self._get(k, entry)
            return entry
        if entry.result is not None and not entry.result.kept:
            return entry.result, None
        if entry.lost:
            raise self._lost(k, entry.lost)
        try:
            return entry.fetch()
        except RayError as error:
            raise self._lost(k, what_is_lost(error)) from error

    def _get(self, k: int, ref: ray.ObjectRef) -> Any:
        rank, host = self._ranks[k], self._hosts[k]
        try:
            return ray.get(ref)
        except ActorUnavailableError as error:  # the driver that made the call finds out whether the rank is dead
            raise ResultLostError(
                f"the result of {self.label}() on rank {rank}, whose future is an argument here, was lost, because "
                f"the connection to the rank was lost: {one_line(error)}",
                rank=rank,
                host=host,
                method=self.label,
            ) from error
        except RayActorError as error:
            raise self._died(k, one_line(error)) from error
        except RayError as error:
            raise self._lost(k, what_is_lost(error)) from error

    def _died(self, k: int, reason: str) -> WorkerDiedError:
        return WorkerDiedError.during(self.label, self._ranks[k], self._hosts[k], reason)

    def _lost(self, k: int, why: str) -> ResultError:
        rank, host = self._ranks[k], self._hosts[k]
        text = f"the result of rank {rank} of {self.label}() ({host}) {why}"
        return ResultError(text, method=self.label, rank=rank, host=host)

    def _elsewhere(self, k: int) -> Kept | ray.ObjectRef:
        """What stands for an entry in another process: the error, if the value died with its rank. That process does
        not know of the death, and would wait for Ray."""
        entry = self._entries[k]
        if not isinstance(entry, RankReply):
            return entry
        if entry.of_dead:
            try:
                self._kept(k)
            except ResultError as error:
                failure = Failure.of(error, entry.rank, entry.host, self.label, None, in_process=False)
                return RankResult(entry.rank, failure=failure), None
        return entry.elsewhere()

    def __reduce__(self) -> tuple[Any, ...]:
        self._find_lost(range(len(self._entries)))
        entries = [self._elsewhere(k) for k in range(len(self._entries))]
        return RayResults, (self.label, self._ranks, entries, self._count, self._hosts)


# Ranks in the driver's own process see that the driver has given up.
add_reference_types(RayResults, in_process=True)


def fetch(value: Any) -> Any:
    """As in Ray, an ObjectRef given as an argument arrives as its value. Anything else is returned unchanged. A failed
    task raises what Ray raises, a lost object a `ResultError`."""
    if not isinstance(value, ray.ObjectRef):
        return value
    try:
        return ray.get(value)
    except RayTaskError:
        raise
    except RayError as error:
        raise ResultError(f"the object of {value!r} {what_is_lost(error)}") from error


def put(encoded: Encoded) -> ray.ObjectRef:
    """Store encoded arguments in Ray's store; a `DispatchError` if there is no room for them."""
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
        why = (
            "is lost, because the process that owned it has ended: the rank that kept it, or the driver that called it"
        )
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
