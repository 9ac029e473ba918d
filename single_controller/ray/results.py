"""RayResults: the results of one call, by reference, in any process. LocatedResults: what one rank needs of them."""

from __future__ import annotations

import contextlib
import copy
import functools
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
from single_controller.base.codec import (
    Encoded,
    KeptResult,
    add_reference_types,
    decoded,
    keep_encoded,
    use_pickler,
)
from single_controller.base.errors import CallTimeoutError, ResultLostError, WorkerDiedError
from single_controller.base.joining import CallResults, Located, locate
from single_controller.base.result import RankResult
from single_controller.ray.call_thread import current_job_cancelled
from single_controller.ray.internals import exit_detail

# Here, because drivers and ranks both import this module. Ray has its own copy of cloudpickle. With another one, a
# class of __main__ that a user also sends through Ray itself would arrive as two distinct classes. Ray must see the
# references in a message to count them: reading one that it has not seen may never end.
use_pickler(ray.cloudpickle.CloudPickler)
add_reference_types(ray.ObjectRef, ActorHandle)

MAX_WAIT_SECONDS = 0.5
"""The longest wait for results before this process looks whether some rank has failed, or the wait is in vain."""


class RayResults:
    """References to the `RankResult`s and values of a call. Implements `single_controller.base.joining.CallResults`.

    Args:
        label: the call's method, for messages.
        ranks: all called ranks: the collecting ranks in the order of their results, then the others.
        results: references to their `RankResult`s.
        values: references to the collecting ranks' values.
        hosts: the hosts of the ranks, for messages.
    """

    def __init__(
        self,
        label: str,
        ranks: Sequence[int],
        results: Sequence[ray.ObjectRef],
        values: Sequence[ray.ObjectRef],
        hosts: Sequence[str],
    ) -> None:
        self.label = label
        self._ranks = ranks
        self._results = results
        self._values = values
        self._hosts = hosts
        self._failed: Exception | None = None

    def refs(self) -> list[ray.ObjectRef]:
        """See `CallResults.refs`."""
        return list(self._values)

    def fail(self, error: Exception) -> None:
        """See `CallResults.fail`."""
        self._failed = error

    def mark_reported(self, rank: int) -> None:
        """See `CallResults.mark_reported`. Ray logs an error whose reference is dropped without ray.get."""
        position = self._ranks.index(rank)
        if position < len(self._values):
            with contextlib.suppress(Exception):
                ray.get(self._values[position])

    def wait(self, timeout: float | None = None) -> list[RankResult]:
        """See `CallResults.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        rank_of = dict(zip(self._results, self._ranks, strict=True))
        found: dict[ray.ObjectRef, RankResult] = {}
        pending, pause = list(self._results), 0.01
        while pending:
            left = pause if end is None else max(0.0, min(pause, end - time.monotonic()))
            # All of them, because one request for each would cost the square of their number. Not for long, because
            # after a failure the other ranks may wait in a collective and never end.
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=left, fetch_local=False)
            for ref, result in zip(ready, self._read(ready, rank_of), strict=True):
                if result.failure is not None:
                    raise result.failure.error()
                found[ref] = result
            if self._failed is not None:
                raise copy.copy(self._failed) from self._failed.__cause__
            if pending and is_cancelled():
                raise ResultError(
                    f"{self.label}() has failed on its driver, so its results will not come", method=self.label
                )
            if pending and end is not None and time.monotonic() >= end:
                late = sorted(rank_of[ref] for ref in pending)
                raise CallTimeoutError(
                    f"{self.label}() has not ended after a wait of {timeout:g} s; ranks {late} are running",
                    method=self.label,
                    ranks=late,
                    call_goes_on=True,
                )
            pause = min(2 * pause, MAX_WAIT_SECONDS)
        return [found[ref] for ref in self._results[: len(self._values)]]

    def locate(self, join: Join, argument: DeferredArgument) -> list[Located]:
        """See `CallResults.locate`."""
        return locate(self, join, argument)

    def only(self, which: Sequence[int]) -> RayResults:
        """See `CallResults.only`."""
        ranks, hosts = [self._ranks[k] for k in which], [self._hosts[k] for k in which]
        return RayResults(self.label, ranks, (), [self._values[k] for k in which], hosts)

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """See `CallResults.values`.

        Raises:
            ResultError: a result is lost, or cannot be fetched or unpickled.
        """
        with keep_encoded():
            try:
                kept: list[KeptResult] = ray.get([self._values[k] for k in which])
            except RayError:  # asking one by one tells which
                kept = [self._value(k) for k in which]
        return [
            decoded(self.label, self._ranks[k], functools.partial(encoded.decode, private=private))
            for k, encoded in zip(which, kept, strict=True)
        ]

    def _value(self, k: int) -> KeptResult:
        try:
            value: KeptResult = ray.get(self._values[k])
            return value
        except RayError as error:
            raise self._lost(k, error) from error

    def _lost(self, k: int, error: RayError) -> ResultError:
        rank, host = self._ranks[k], self._hosts[k]
        text = f"the result of rank {rank} of {self.label}() ({host}) {what_is_lost(error)}"
        return ResultError(text, method=self.label, rank=rank, host=host)

    def _read(self, ready: Sequence[ray.ObjectRef], rank_of: dict[ray.ObjectRef, int]) -> list[RankResult]:
        try:
            return [RankResult.from_message(message) for message in ray.get(list(ready))]
        except RayError:  # asking one by one tells which
            return [self._read_one(ref, rank_of[ref]) for ref in ready]

    def _read_one(self, ref: ray.ObjectRef, rank: int) -> RankResult:
        try:
            return RankResult.from_message(ray.get(ref))
        except ActorUnavailableError as error:  # the driver that made the call finds out whether the rank is dead
            raise ResultLostError(
                f"the result of {self.label}() on rank {rank}, whose future is an argument here, was lost, because "
                f"the connection to the rank was lost: {one_line(error)}",
                rank=rank,
                host=self._hosts[self._ranks.index(rank)],
                method=self.label,
            ) from error
        except RayActorError as error:
            host = self._hosts[self._ranks.index(rank)]
            raise WorkerDiedError(
                f"rank {rank} died during {self.label}() ({host}): {one_line(error)}",
                rank=rank,
                host=host,
                method=self.label,
                ranks=(rank,),
            ) from error
        except RayError as error:
            raise self._lost(self._ranks.index(rank), error) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return RayResults, (self.label, self._ranks, self._results, self._values, self._hosts)


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


def is_cancelled() -> bool:
    """Whether the driver has cancelled the task that this thread runs; False in a driver."""
    cancelled = current_job_cancelled()
    if cancelled is not None:
        return cancelled
    try:
        return ray.is_initialized() and bool(ray.get_runtime_context().is_canceled())  # the second would start a Ray
    except Exception:  # in a driver, or in a thread that runs no task
        return False


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
