"""What an actor and its critic learn from together."""

from __future__ import annotations

import concurrent.futures
import math
from typing import TYPE_CHECKING, Any

from single_controller import Broadcast, WorkerFuture
from workers.train.balance import balanced_rows
from workers.train.worker import Referred

if TYPE_CHECKING:
    from workers.train.group import RayTrainGroup


class SharedRollout:
    """Rollout data that a group has been given, and what it has been asked to compute of it.

    Args:
        rollout_id: number of the rollout.
        given: what `RayTrainGroup.async_train` takes.
        parts: how many parts its rows are put into order for, of about as many tokens each; None to leave their order.

    Attributes:
        data: what the ranks are sent.
    """

    def __init__(self, rollout_id: int, given: Any, parts: int | None) -> None:
        self.rollout_id, self.given, self.data = rollout_id, given, _dealt(given, parts)
        self._futures: dict[str, WorkerFuture] = {}

    def once(self, method: str, group: RayTrainGroup) -> Any:
        """A future; of data by dp rank, references by dp rank."""
        future = self._futures.get(method)
        if future is None or (future.done() and future.failed is not None):
            future = self._futures[method] = getattr(group.worker_group, method).remote(self.data)
        return list(future.refs) if isinstance(self.data, list) else future


class ActorCritic:
    """An actor's group and its critic's, or one that is alone: they are given the same rollouts in the same order of
    rows, and what one of them can compute for both it computes once.

    Args:
        groups: the actor's and the critic's, or the one.
    """

    def __init__(self, *groups: RayTrainGroup) -> None:
        self.groups = groups
        self._last: SharedRollout | None = None

    @property
    def _args(self) -> Any:
        """The configuration that counts for both: the actor's."""
        return self.groups[0].args

    def forget(self) -> None:
        """Let go of the last rollout, and of what was computed of it."""
        self._last = None

    def rollout(self, rollout_id: int, given: Any) -> SharedRollout:
        """What the two make of the same data is kept from one to the other, for the last rollout."""
        last = self._last
        if last is None or last.given is not given or last.rollout_id != rollout_id:
            parts = None
            if self._args.balance_data:  # both cut the same rows: an order that suits the two
                parts = math.lcm(*(group.ready_workers("async_train").dp_size for group in self.groups))
            last = self._last = SharedRollout(rollout_id, given, parts)
        return last

    def computed(self, rollout_id: int, given: Any) -> dict[str, Any]:
        """What `TrainWorker.train` is given beside the data: futures, whose rows go from rank to rank."""
        if self._args.advantage_estimator != "gae":
            return {}
        wanted = [("values", "critic", "compute_values")]
        if self._args.kl_coef:
            wanted += [
                ("old_log_probs", "actor", "compute_old_log_prob"),
                ("ref_log_probs", "actor", "compute_ref_log_prob"),
            ]
        has = given.keys() if hasattr(given, "keys") else ()
        return {
            name: self.rollout(rollout_id, given).once(method, group)
            for name, role, method in wanted
            for group in self.groups
            # A worker of the user's own that has no such method may ask its neighbour itself.
            if group.role == role and name not in has and method in group.ready_workers("async_train").methods
        }


def _dealt(given: Any, parts: int | None) -> Any:
    if isinstance(given, (list, tuple)):
        return list(given)
    if isinstance(given, concurrent.futures.Future):
        given = given.result()
    if type(given).__name__ == "ObjectRef":
        return Broadcast(Referred(given, parts))
    if parts is None:
        return given
    data = given.result() if hasattr(given, "result") else given
    return balanced_rows(data, parts)
