"""What a train group is connected to: the rollout manager that its weights go to (`RolloutLink`), and the actor or the
critic that trains on the same rows (`SharedRollout`)."""

from __future__ import annotations

import concurrent.futures
import logging
import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import ray
from ray.actor import ActorHandle

from single_controller import Broadcast, WorkerFuture
from workers.data.balance import Balance, balanced_rows
from workers.data.rollout_data import entries_of
from workers.hf_files import known_config
from workers.recovery.train_recovery import TrainGroup
from workers.train.args import TrainArgsError
from workers.train.train_worker import Referred
from workers.weight_sync import call_manager, receiver_groups
from workers.weight_sync.sync_protocol import Budget

logger = logging.getLogger(__name__)

G = TypeVar("G", bound=TrainGroup)


class RolloutLink:
    """What a train group tells its manager, and asks it.

    Args:
        manager: see `RayTrainGroup.set_rollout_manager`.
        refresh: a function that sends the current weights to all rollout workers. It becomes the ``refresh`` of a
            manager in this process whose own is None.
        timeout: seconds that each call to a manager that is a Ray actor may take, which may be busy in its constructor
            or in `generate`; and that the manager's stream may take to pause.

    Raises:
        WeightSyncError: by all methods that call a manager: see `call_manager`.
    """

    def __init__(self, manager: Any, refresh: Callable[[], Any], timeout: float) -> None:
        self.manager = manager
        self.timeout = timeout
        self._refresh = refresh
        self._receivers: list[Any] | None = None
        self._is_actor = isinstance(manager, ActorHandle)

    def introduce(self, tell: Callable[[Any], Any]) -> None:
        """Tell the train workers about the manager. ``refresh`` is a function of this process and is not sent along."""
        manager = self.manager
        self.leave()
        try:
            actors = self._actors()  # before, because a worker may join meanwhile: it is told of next time then
            tell(manager)
            self._receivers = actors
        finally:
            if getattr(manager, "refresh", self) is None:
                manager.refresh = self._refresh

    def leave(self) -> None:
        """Have the manager's ``refresh`` no longer call this group, which sends it no weights from now on."""
        if getattr(self.manager, "refresh", None) == self._refresh:
            self.manager.refresh = None

    def check_experts(self) -> None:
        """Check that the rollout workers record experts, for ``routing_replay="R3"``.

        Raises:
            TrainArgsError: one of them has an engine that does not.
        """
        for group in receiver_groups(self.manager, Budget(self.timeout)):
            ask = getattr(group.methods, "records_experts", None)  # receivers of the user's own class have none
            if ask is not None and not all(ask()):
                raise TrainArgsError(
                    "args.routing_replay='R3' needs the experts of the rollout, which an engine of this manager's "
                    "rollout workers does not record; give HFEngine return_routed_experts=True, or use 'R2'"
                )

    def forget(self) -> None:
        """The train workers were replaced, or have dropped the manager: `outdated` is true from now on."""
        self._receivers = None

    @property
    def outdated(self) -> bool:
        """Whether the rollout workers were replaced since the train workers were told."""
        return self._actors() != self._receivers

    @property
    def recovers(self) -> bool:
        """Whether rollout workers have died that the manager's stream restarts, or has restarted since the train
        workers were told."""
        return self._stream is not None and (self.outdated or not all(self.manager.group.alive()))

    def updating(self, *, same_weights: bool) -> AbstractContextManager[None]:
        """Inside, the manager's stream is paused, if it has one in this process.

        Args:
            same_weights: whether the trainer has sent these weights before.

        Raises:
            WeightSyncError: when entered: it was not paused in time.
        """
        stream = self._stream
        if stream is None:
            return nullcontext()
        paused: AbstractContextManager[None] = stream.updating(self.timeout, same_weights=same_weights)
        return paused

    def continued(self, version: int) -> int:
        """The version of the next weights: a higher one if the manager's stream has had later ones of another group."""
        known = None if self._stream is None else self._stream.buffer.version
        return version if known is None or known <= version else int(known) + 1

    def rewind(self, rollout_id: int) -> None:
        """Make the manager's stream, if it has one in this process, return the batch of this number next: the trainer
        has gone back to this rollout."""
        if self._stream is None:
            return
        try:
            self._stream.buffer.rewind(rollout_id)
        except ValueError as error:
            logger.warning("training goes back to rollout %d, but not the samples of the stream: %s", rollout_id, error)

    @property
    def _stream(self) -> Any:
        return None if self._is_actor else getattr(self.manager, "stream", None)

    def expect(self, version: int | None) -> None:
        """Make the manager reject completions of other weight versions; None accepts any."""
        if not self._is_actor:
            self.manager.weight_version = version
        elif hasattr(self.manager, "set_weight_version"):  # optional for an actor of the user's own class
            call_manager(self.manager, "set_weight_version", version, timeout=self.timeout)

    def _actors(self) -> list[Any]:
        if self._is_actor:
            if not hasattr(self.manager, "weight_receivers"):
                return []
            groups = receiver_groups(self.manager, Budget(self.timeout))
            return [worker for group in groups for worker in getattr(group, "workers", ())]
        return list(getattr(getattr(self.manager, "group", None), "workers", ()))


class SharedRollout(Generic[G]):
    """The last rollout that an actor and its critic, or a group that trains alone, were given.

    Both groups train on the same rows in the same order. What one of them computes for both is computed once.

    Args:
        groups: the actor's and the critic's, or the only one. The configuration of the first counts for both.

    Attributes:
        data: what to send to the ranks.
    """

    def __init__(self, *groups: G) -> None:
        self.groups = groups
        self.forget()

    def forget(self) -> None:
        """Drop the last rollout, and what was computed from it."""
        self._rollout_id: int | None = None
        self._given: Any = None
        self.data: Any = None
        self._futures: dict[str, WorkerFuture] = {}
        self._roles: set[str] = set()  # of the groups that were given it

    def take(self, rollout_id: int, given: Any, role: str) -> None:
        """Set `data` for a rollout, unless it is the last one again. If the groups are given two objects for one
        rollout, a warning is logged.

        Args:
            rollout_id: number of the rollout.
            given: what `RayTrainGroup.async_train` was given.
            role: of the group that was given it.
        """
        if self._given is given and self._rollout_id == rollout_id:
            self._roles.add(role)
            return
        if self._rollout_id == rollout_id and role not in self._roles and self.to_compute(given):
            logger.warning(
                "actor and critic were given two objects as data of rollout %s. What they compute for each other is "
                "then computed again, perhaps after the other group has trained on it; pass the same object to both",
                rollout_id,
            )
        how, args = None, self.groups[0].args
        if args.balance_data:
            # Both groups shard the same rows, so the order must suit the dp sizes of both.
            parts = math.lcm(*(group.ready_workers("async_train").dp_size for group in self.groups))
            how = Balance.of(args, parts, known_config(args))
        self.data, self._futures = ordered(given, how), {}
        self._rollout_id, self._given, self._roles = rollout_id, given, {role}

    def computed(self) -> dict[str, Any]:
        """Start what the groups compute for each other. Returns arguments of `TrainWorker.train`: futures, whose rows
        go from rank to rank without the driver."""
        return {name: self._once(method, group) for name, method, group in self.to_compute(self._given)}

    def to_compute(self, given: Any) -> list[tuple[str, str, G]]:
        """Return what the groups compute for each other of given rows: the entry, and the method of which group."""
        args = self.groups[0].args
        # An estimator of the user's own may read what the groups compute, if they are connected.
        own = "." in args.advantage_estimator and len(self.groups) > 1
        if args.advantage_estimator != "gae" and not own:
            return []
        from workers.algorithms.corrections import rejects  # not at the top: it imports torch

        wanted = [("values", "critic", "compute_values")]
        if args.kl_coef or rejects(args):  # the critic leaves out what the actor rejects
            wanted.append(("old_log_probs", "actor", "compute_old_log_prob"))
        if args.kl_coef:
            wanted.append(("ref_log_probs", "actor", "compute_ref_log_prob"))
        has: Collection[str] = entries_of(given) if hasattr(given, "keys") else ()
        return [
            (name, method, group)
            for name, role, method in wanted
            for group in self.groups
            # A user's worker class without such a method may ask the other group's rank itself.
            if group.role == role and name not in has and method in group.ready_workers("async_train").methods
        ]

    def _once(self, method: str, group: G) -> Any:
        """Call a method on the rollout, unless it was called. Returns a future; of data by dp rank, references by dp
        rank."""
        future = self._futures.get(method)
        # Repeat a failed call, because the ranks may have been replaced since.
        if future is None or (future.done() and future.failed is not None):
            future = self._futures[method] = getattr(group.worker_group, method).remote(self.data)
        return list(future.refs) if isinstance(self.data, list) else future


def ordered(given: Any, how: Balance | None) -> Any:
    """Return rollout data as the ranks take it.

    Args:
        given: what `RayTrainGroup.async_train` was given. Rows behind a reference are ordered by each rank that fetches
            them.
        how: to order the rows; None keeps the order.
    """
    if isinstance(given, (list, tuple)):
        return list(given)
    if isinstance(given, concurrent.futures.Future):
        given = given.result()
    if isinstance(given, ray.ObjectRef):
        return Broadcast(Referred(given, how))
    if how is None:
        return given
    return balanced_rows(given.result() if hasattr(given, "result") else given, how)
