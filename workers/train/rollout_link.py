"""RolloutLink: a train group's rollout manager, which is an object of this process or a Ray actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.train.weight_receivers import ask_manager, receiver_groups

MANAGER_SECONDS = 600.0
"""How long a manager that is a Ray actor may take to answer; it may be in its constructor, or in `generate`."""


class RolloutLink:
    """What a group tells a manager, and finds out from it.

    Args:
        manager: see `RayTrainGroup.set_rollout_manager`.
        refresh: what brings all rollout workers the weights of now. A manager in this process that has room for it, and
            nothing of its own there, is given it.
    """

    def __init__(self, manager: Any, refresh: Callable[[], Any]) -> None:
        self.manager = manager
        self._refresh = refresh
        self._receivers: list[Any] | None = None

    def introduce(self, tell: Callable[[Any], Any]) -> None:
        """Have the train workers told of the manager. `refresh` stays in this process.

        Raises:
            WeightSyncError: see `ask_manager`.
        """
        manager = self.manager
        if getattr(manager, "refresh", None) == self._refresh:
            manager.refresh = None
        try:
            tell(manager)
            self._receivers = self._actors()
        finally:
            if getattr(manager, "refresh", self) is None:
                manager.refresh = self._refresh

    def forget(self) -> None:
        """The train workers are others, or have forgotten the manager."""
        self._receivers = None

    @property
    def outdated(self) -> bool:
        """Whether the rollout workers are others than when the train workers were told.

        Raises:
            WeightSyncError: see `ask_manager`.
        """
        return self._actors() != self._receivers

    def expect(self, version: int) -> None:
        """Have the manager refuse answers by weights of another version.

        Raises:
            WeightSyncError: see `ask_manager`.
        """
        if not _is_actor(self.manager):
            self.manager.weight_version = version
        elif hasattr(self.manager, "set_weight_version"):  # an actor of another class may not want to know
            ask_manager(self.manager, "set_weight_version", version, timeout=MANAGER_SECONDS)

    def _actors(self) -> list[Any]:
        if _is_actor(self.manager):
            if not hasattr(self.manager, "weight_receivers"):
                return []
            groups = receiver_groups(self.manager, MANAGER_SECONDS)
            return [worker for group in groups for worker in getattr(group, "workers", ())]
        return list(getattr(getattr(self.manager, "group", None), "workers", ()))


def _is_actor(manager: Any) -> bool:
    from ray.actor import ActorHandle

    return isinstance(manager, ActorHandle)
