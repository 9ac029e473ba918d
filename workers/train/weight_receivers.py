"""Receivers: the rollout workers that a sender speaks to, as one."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any

import ray
import ray.actor
import ray.cloudpickle
import ray.exceptions

from single_controller import SingleControllerError
from single_controller.base.future import WorkerFuture
from single_controller.base.group import WorkerGroup
from workers.train.weight_buckets import WeightSyncError

Rollout = Any
"""A group of `WeightReceiver`, several of them, or what knows them: see `receiver_groups`."""


class Receivers:
    """Calls to rollout workers.

    Args:
        rollout: see `receiver_groups`; asked again for each update.
        timeout: seconds that one call may take, to them or to their manager.
    """

    def __init__(self, rollout: Rollout, timeout: float) -> None:
        self._rollout = rollout
        self._timeout = timeout
        self._groups: list[WorkerGroup] = []
        self._mended: dict[int, tuple[WorkerGroup, WorkerGroup]] = {}

    def look_up(self) -> None:
        """Find out which groups there are now. A group that somebody else started may take calls again: what broke
        here is this process's copy of it, and whoever started it may have restarted it.

        Raises:
            TypeError: `rollout` is nothing that receives weights.
            WeightSyncError: there is no receiver, or their manager does not say who they are.
        """
        self._groups = [self._usable(group) for group in receiver_groups(self._rollout, self._timeout)]
        if not self._groups:
            raise WeightSyncError("there is no rollout worker to send weights to")

    @property
    def sizes(self) -> list[int]:
        """Ranks of each group."""
        return [group.world_size for group in self._groups]

    def start(self, method: str, *arguments: Any) -> list[WorkerFuture]:
        """Call a method on all receivers, without waiting: a future for each group."""
        return [self._method(group, method).remote(*arguments) for group in self._groups]

    def start_each(self, method: str, *arguments: Sequence[Any]) -> list[WorkerFuture]:
        """The same with arguments of each receiver's own: lists over all of them, in order of group and rank."""
        futures = []
        begin = 0
        for group in self._groups:
            end = begin + group.world_size
            futures.append(self._method(group, method).remote(*[list(one[begin:end]) for one in arguments]))
            begin = end
        return futures

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all receivers and wait: their answers, in order of group and rank.

        Raises:
            SingleControllerError: as a group's methods raise.
        """
        return [answer for future in self.start(method, *arguments) for answer in future.result()]

    def _method(self, group: WorkerGroup, method: str) -> Any:
        return getattr(group.methods, method).options(timeout=self._timeout)

    def _usable(self, group: WorkerGroup) -> WorkerGroup:
        given, current = self._mended.get(id(group), (group, group))
        if given is not group:
            current = group
        if current.broken is not None and getattr(current, "resource_pool", None) is None:
            with contextlib.suppress(TypeError):  # a group in this process stays what it is
                current = pickle.loads(ray.cloudpickle.dumps(current))
            self._mended[id(group)] = (group, current)
        return current


class Neighbour(Receivers):
    """The rollout worker of this very process. It is called directly: the process is at work for the caller, and a call
    through Ray would wait for itself.

    Args:
        worker: the neighbour, a `WeightReceiver`.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__((), 0.0)
        self.worker = worker

    def look_up(self) -> None:
        """Nothing to be found out."""

    @property
    def sizes(self) -> list[int]:
        """One group of one."""
        return [1]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """See `Receivers.call`."""
        return [getattr(self.worker, method)(*arguments)]


def receiver_groups(rollout: Rollout, timeout: float) -> list[WorkerGroup]:
    """The groups that something stands for.

    Args:
        rollout: a group; a list of groups; a function that gives one of these; or a manager: an object whose ``group``
            it is, or a Ray actor whose ``weight_receivers()`` gives it.
        timeout: seconds that such an actor has to answer.

    Raises:
        TypeError: it is none of these.
        WeightSyncError: see `ask_manager`.
    """
    if isinstance(rollout, WorkerGroup):
        return [rollout]
    if isinstance(rollout, (list, tuple)):
        return [group for one in rollout for group in receiver_groups(one, timeout)]
    if isinstance(rollout, ray.actor.ActorHandle):
        return receiver_groups(ask_manager(rollout, "weight_receivers", timeout=timeout), timeout)
    if isinstance(getattr(rollout, "group", None), WorkerGroup):
        return [rollout.group]
    if callable(rollout):
        return receiver_groups(rollout(), timeout)
    raise TypeError(
        "rollout is a group of rollout workers, a list of groups, a function that gives them, or a manager that has "
        f"them as `group`; got {rollout!r}"
    )


def ask_manager(manager: ray.actor.ActorHandle, method: str, *arguments: Any, timeout: float) -> Any:
    """What a manager that is a Ray actor answers.

    Args:
        manager: the actor.
        method: its method's name.
        *arguments: the method's.
        timeout: seconds that it has.

    Raises:
        WeightSyncError: it does not answer in time, or has died.
        Exception: what its method raised.
    """
    try:
        return ray.get(getattr(manager, method).remote(*arguments), timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise WeightSyncError(
            f"the rollout manager {manager!r} has not answered {method}() within {timeout:g} s: it is probably busy in "
            "generate(), in its constructor, or in the very method that called update_weights(). Call that outside of "
            "the manager, and after generate() has ended"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise WeightSyncError(
            f"the rollout manager {manager!r} cannot be asked for {method}(): {str(error).partition(chr(10))[0]} If it "
            "is dead, make it anew, and tell set_rollout_manager()"
        ) from error


def all_results(futures: Sequence[WorkerFuture]) -> None:
    """Wait for calls of which nothing is wanted but that they went well.

    Raises:
        SingleControllerError: what the first of them raised.
    """
    for future in futures:
        future.result()


def first_error(futures: Sequence[WorkerFuture]) -> Exception | None:
    """The error of a call that has failed already, without waiting."""
    for future in futures:
        if future.done():
            error = future.exception()
            if error is not None:
                return error
    return None


def sync_error(what: str, error: BaseException) -> WeightSyncError:
    """Any failure as a `WeightSyncError`, which names its cause."""
    cause = error.__cause__ if isinstance(error.__cause__, WeightSyncError) else error
    kind = "" if isinstance(cause, SingleControllerError) else f"{type(cause).__name__}: "
    made = WeightSyncError(f"{what}: {kind}{str(cause).partition(chr(10))[0]}")
    made.__cause__ = error
    return made
