"""SharedRollout: a rollout that an actor and its critic learn from, and what one of them computes for both."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

from single_controller import Broadcast, WorkerFuture
from workers.train.balance import balanced_order
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
        if method not in self._futures:
            self._futures[method] = getattr(group.worker_group, method).remote(self.data)
        future = self._futures[method]
        return list(future.refs) if isinstance(self.data, list) else future


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
    return data[balanced_order(data["attention_mask"].bool().sum(1).tolist(), parts)]
