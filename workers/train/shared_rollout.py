"""SharedRollout: the rows that an actor and its critic train on, and what they compute for each other."""

from __future__ import annotations

import concurrent.futures
import math
from typing import Any, Generic, TypeVar

from single_controller import Broadcast, WorkerFuture
from workers.data.balance import balanced_rows
from workers.recovery.replacing import TrainGroup
from workers.train.train_worker import Referred

G = TypeVar("G", bound=TrainGroup)


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

    def take(self, rollout_id: int, given: Any) -> None:
        """Set `data` for a rollout, unless it is the last one again.

        Args:
            rollout_id: number of the rollout.
            given: what `RayTrainGroup.async_train` was given.
        """
        if self._given is given and self._rollout_id == rollout_id:
            return
        parts = None
        if self.groups[0].args.balance_data:
            # Both groups shard the same rows, so the order must suit the dp sizes of both.
            parts = math.lcm(*(group.ready_workers("async_train").dp_size for group in self.groups))
        self.data, self._futures = _ordered(given, parts), {}
        self._rollout_id, self._given = rollout_id, given

    def computed(self) -> dict[str, Any]:
        """Start what the groups compute for each other. Returns arguments of `TrainWorker.train`: futures, whose rows
        go from rank to rank without the driver."""
        args = self.groups[0].args
        if args.advantage_estimator != "gae":
            return {}
        wanted = [("values", "critic", "compute_values")]
        if args.kl_coef:
            wanted += [
                ("old_log_probs", "actor", "compute_old_log_prob"),
                ("ref_log_probs", "actor", "compute_ref_log_prob"),
            ]
        has = self._given.keys() if hasattr(self._given, "keys") else ()
        return {
            name: self._once(method, group)
            for name, role, method in wanted
            for group in self.groups
            # A user's worker class without such a method may ask the other group's rank itself.
            if group.role == role and name not in has and method in group.ready_workers("async_train").methods
        }

    def _once(self, method: str, group: G) -> Any:
        """Call a method on the rollout, unless it was called. Returns a future; of data by dp rank, references by dp
        rank."""
        future = self._futures.get(method)
        if future is None or (future.done() and future.failed is not None):
            future = self._futures[method] = getattr(group.worker_group, method).remote(self.data)
        return list(future.refs) if isinstance(self.data, list) else future


def _ordered(given: Any, parts: int | None) -> Any:
    """Put rows into an order in which ``parts`` equal shards have about as many tokens each. Rows behind a reference
    are ordered by each rank that fetches them."""
    if isinstance(given, (list, tuple)):
        return list(given)
    if isinstance(given, concurrent.futures.Future):
        given = given.result()
    if type(given).__name__ == "ObjectRef":
        return Broadcast(Referred(given, parts))
    if parts is None:
        return given
    return balanced_rows(given.result() if hasattr(given, "result") else given, parts)
