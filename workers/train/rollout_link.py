"""RolloutLink: a train group's connection to its rollout manager, an object of this process or a Ray actor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from workers.weight_sync import call_manager, receiver_groups

logger = logging.getLogger(__name__)


class RolloutLink:
    """What a train group tells its manager, and asks it.

    Args:
        manager: see `RayTrainGroup.set_rollout_manager`.
        refresh: a function that sends the current weights to all rollout workers. It becomes the ``refresh`` of a
            manager in this process whose own is None.
        timeout: seconds that each call to a manager that is a Ray actor may take, which may be busy in its constructor
            or in `generate`; and that the manager's stream may take to pause.
    """

    def __init__(self, manager: Any, refresh: Callable[[], Any], timeout: float) -> None:
        self.manager = manager
        self._timeout = timeout
        self._refresh = refresh
        self._receivers: list[Any] | None = None

    def introduce(self, tell: Callable[[Any], Any]) -> None:
        """Tell the train workers about the manager. ``refresh`` is a function of this process and is not sent along.

        Raises:
            WeightSyncError: see `call_manager`.
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
        """The train workers were replaced, or have dropped the manager: `outdated` is true from now on."""
        self._receivers = None

    @property
    def outdated(self) -> bool:
        """Whether the rollout workers were replaced since the train workers were told.

        Raises:
            WeightSyncError: see `call_manager`.
        """
        return self._actors() != self._receivers

    @property
    def recovers(self) -> bool:
        """Whether rollout workers have died that the manager's stream restarts, or has restarted since the train
        workers were told."""
        return self._stream is not None and (self.outdated or not all(self.manager.group.alive()))

    def updating(self) -> AbstractContextManager[None]:
        """Inside, the manager's stream is paused, if it has one in this process.

        Raises:
            WeightSyncError: when entered: it was not paused in time.
        """
        stream = self._stream
        paused: AbstractContextManager[None] = nullcontext() if stream is None else stream.updating(self._timeout)
        return paused

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
        return None if _is_actor(self.manager) else getattr(self.manager, "stream", None)

    def expect(self, version: int | None) -> None:
        """Make the manager reject completions of other weight versions; None accepts any.

        Raises:
            WeightSyncError: see `call_manager`.
        """
        if not _is_actor(self.manager):
            self.manager.weight_version = version
        elif hasattr(self.manager, "set_weight_version"):  # optional for an actor of the user's own class
            call_manager(self.manager, "set_weight_version", version, timeout=self._timeout)

    def _actors(self) -> list[Any]:
        if _is_actor(self.manager):
            if not hasattr(self.manager, "weight_receivers"):
                return []
            groups = receiver_groups(self.manager, self._timeout)
            return [worker for group in groups for worker in getattr(group, "workers", ())]
        return list(getattr(getattr(self.manager, "group", None), "workers", ()))


def _is_actor(manager: Any) -> bool:
    from ray.actor import ActorHandle

    return isinstance(manager, ActorHandle)
