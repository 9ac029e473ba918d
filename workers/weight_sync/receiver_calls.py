"""Calls from train ranks to rollout workers: which groups there are, and how they are reached."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.actor
import ray.cloudpickle
import ray.exceptions

from dispatch.batch import Broadcast
from single_controller import SingleControllerError
from single_controller.call.future import WorkerFuture
from single_controller.call.group import WorkerGroup
from workers.weight_sync.sync_protocol import UPDATE_SECONDS, Budget, ReceiverClass, WeightSyncError

Rollout = Any
"""A group of `WeightReceiver`, a list of groups, or an object that knows them: see `receiver_groups`."""

ABANDON_SECONDS = 60.0
"""How long a receiver may take to hear that an update was abandoned."""


class Receivers:
    """Calls all rollout workers.

    Args:
        rollout: see `receiver_groups`; looked up again for each update.
        neighbour: the `WeightReceiver` in this process, instead of groups. It is called directly: this process is busy
            with the caller's method, so a call through Ray would deadlock.
    """

    def __init__(self, rollout: Rollout, neighbour: Any = None) -> None:
        self._rollout = rollout
        self._budget = Budget(UPDATE_SECONDS)
        self.neighbour = neighbour
        self._given: list[WorkerGroup] = []  # the groups, as they were looked up
        self._groups: list[WorkerGroup] = []  # what is called for each of them: see `_usable`
        self._copies: dict[WorkerGroup, WorkerGroup] = {}  # of groups that were broken

    def look_up(self, budget: Budget) -> None:
        """Find the current groups. ``budget``: the time for this and for all calls until it is called again. A
        `TypeError` if ``rollout`` cannot receive weights, and a `WeightSyncError` if there is no receiver, or the
        manager did not respond."""
        self._budget = budget
        if self.neighbour is not None:
            return
        self._given = receiver_groups(self._rollout, budget)
        self._copies = {group: self._copies[group] for group in self._given if group in self._copies}
        self._groups = [self._usable(group) for group in self._given]
        if not self._groups:
            raise WeightSyncError("there is no rollout worker to send weights to")

    @property
    def synchronous(self) -> bool:
        """Whether a call of a group runs in the caller's thread, which then can do nothing for the receiver."""
        return any(group._transport.synchronous for group in self._groups)

    def start(self, method: str, *arguments: Any) -> list[WorkerFuture]:
        """Call a method on all receivers without waiting. Returns one future per group.

        Raises:
            WeightSyncError: there is no time left.
            SingleControllerError: the update has begun, and a group is broken now.
        """
        left = self._budget.left()
        if method in ("receive_weights", "finish_weights"):
            self._check_whole()
        return [getattr(group.methods, method).options(timeout=left).remote(*arguments) for group in self._groups]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all receivers, and return the results in order of group and rank. Raises as a group does."""
        if self.neighbour is not None:
            return [getattr(self.neighbour, method)(*arguments)]
        return [result for future in self.start(method, *arguments) for result in future.result()]

    def abandon(self, key: str, why: str) -> None:
        """Tell all receivers that an update has failed, without waiting: some of them may be why."""
        for given in self._given:
            with contextlib.suppress(SingleControllerError):  # it learns of it when the next update begins
                group = self._usable(given)  # what has failed may have broken the one that was called
                if group.broken is None:  # or the call would first replace ranks, if on_death says so
                    group.methods.abandon_weights.options(timeout=ABANDON_SECONDS).remote(key, why)
        if self.neighbour is not None:
            self.neighbour.abandon_weights(key, why)

    def start_payloads(
        self, key: str, classes: Sequence[ReceiverClass], payloads: Mapping[int, Any]
    ) -> list[WorkerFuture]:
        """Send the members of each class its payload, without waiting. A payload is stored once for each group whose
        members are all of its class, and otherwise for each member.

        Args:
            key: of the update.
            classes: of the receivers.
            payloads: by class; a class without one gets nothing.

        Raises:
            WeightSyncError: workers were added since the update began.
            SingleControllerError: a group is broken.
        """
        self._check_whole()
        class_of = {member: index for index, one in enumerate(classes) for member in one.members}
        left = self._budget.left()
        futures, first = [], 0
        for group in self._groups:
            size = group.world_size  # other threads may add ranks
            if first + size > len(class_of):
                raise WeightSyncError(
                    f"workers were added to the {len(class_of)} rollout workers with which the update began. Call "
                    "update_weights() again"
                )
            of_ranks = [class_of[first + rank] for rank in range(size)]
            first += size
            methods = group.methods
            if len(set(of_ranks)) == 1:
                if of_ranks[0] in payloads:
                    payload = payloads[of_ranks[0]]
                    futures.append(methods.receive_payload.options(timeout=left).remote(key, payload))
            elif any(index in payloads for index in of_ranks):
                each = [payloads.get(index) for index in of_ranks]
                futures.append(methods.receive_payload_each.options(timeout=left).remote(Broadcast(key), each))
        return futures

    def _check_whole(self) -> None:
        """Raise if a group is broken in an update: a call might first replace ranks, which know nothing of it."""
        for group in self._groups:
            if group.broken is not None and (refusal := group._state.refusal()) is not None:
                raise refusal

    def _usable(self, group: WorkerGroup) -> WorkerGroup:
        """Replace a broken attached group by a fresh copy. "Broken" is this process's state of the group; the process
        that started the group may have restarted its workers since."""
        current = self._copies.get(group, group)
        if current.broken is not None and getattr(current, "resource_pool", None) is None:
            with contextlib.suppress(TypeError):  # an in-process group does not pickle, and stays as it is
                current = pickle.loads(ray.cloudpickle.dumps(current))
            self._copies[group] = current
        return current


def receiver_groups(rollout: Rollout, budget: Budget) -> list[WorkerGroup]:
    """Resolve ``rollout`` to worker groups.

    Args:
        rollout: a group; a list of groups; a function that returns one of these; or a manager: an object with
            ``group``, or a Ray actor with ``weight_receivers()``.
        budget: the time that all such actors together have to respond.

    Raises:
        TypeError: it is none of these.
        WeightSyncError: see `call_manager`.
    """
    if isinstance(rollout, WorkerGroup):
        return [rollout]
    if isinstance(rollout, (list, tuple)):
        return [group for one in rollout for group in receiver_groups(one, budget)]
    if isinstance(rollout, ray.actor.ActorHandle):
        return receiver_groups(call_manager(rollout, "weight_receivers", timeout=budget.left()), budget)
    if isinstance(getattr(rollout, "group", None), WorkerGroup):
        return [rollout.group]
    if callable(rollout):
        return receiver_groups(rollout(), budget)
    raise _no_receivers(rollout)


def check_rollout(rollout: Rollout) -> None:
    """Raise a `TypeError` if `receiver_groups` would, as far as that is known without asking anybody."""
    if isinstance(rollout, (list, tuple)):
        for one in rollout:
            check_rollout(one)
    elif not (
        isinstance(rollout, (WorkerGroup, ray.actor.ActorHandle)) or hasattr(rollout, "group") or callable(rollout)
    ):
        raise _no_receivers(rollout)


def _no_receivers(rollout: Rollout) -> TypeError:
    return TypeError(
        "rollout must be a group of rollout workers, a list of groups, a function that returns them, or a manager with "
        f"a `group`; got {rollout!r}"
    )


def call_manager(manager: ray.actor.ActorHandle, method: str, *arguments: Any, timeout: float) -> Any:
    """Call a method of a manager that is a Ray actor, and return its result or raise its error; a `WeightSyncError` if
    it did not respond within ``timeout`` seconds, or has died."""
    try:
        return ray.get(getattr(manager, method).remote(*arguments), timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise WeightSyncError(
            f"the rollout manager {manager!r} did not answer {method}() within {timeout:g} s. It is probably busy in "
            "generate(), in its constructor, or in the method that called update_weights(). Call update_weights() "
            "outside the manager, after generate() has returned"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise WeightSyncError(
            f"{method}() of the rollout manager {manager!r} failed: {str(error).partition(chr(10))[0]} If the "
            "manager has died, create a new one and pass it to set_rollout_manager()"
        ) from error
