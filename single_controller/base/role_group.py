"""RoleGroup: one role of a group whose workers share processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from single_controller.base.engine import Engine
from single_controller.base.group import WorkerGroup
from single_controller.base.watcher import OnDeath, Watcher


class RoleGroup(WorkerGroup):
    """One role of a colocated group: ``group.actor``. Its registered methods are those of the role's class.

    Layout, meshes and stats are the role's own. The processes are shared: what a group says of them (``workers``,
    ``alive()``, ``resource_pool``) is the same for every role, and closing or restarting one role closes or restarts
    all.

    Args:
        whole: the colocated group.
        role: one of its roles.
    """

    def __init__(self, whole: WorkerGroup, role: str) -> None:
        self._whole = whole
        self._role = role
        self._tables = whole._tables
        self._state = whole._state
        self._sending = whole._sending
        self._learned = whole._learned

    @property
    def _engine(self) -> Engine:
        return self._whole._engine

    @property
    def name(self) -> str:
        """The group's name with the role's."""
        return f"{self._whole.name}.{self._role}"

    def close(self) -> None:
        """End the processes, which all roles share."""
        self._whole.close()

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        """Restart the processes, which all roles share; see the group's own `restart`."""
        self._whole.restart(ranks)

    def watch(self, on_death: OnDeath | None = None, interval: float = 0.5) -> Watcher:
        """Look after the processes, which all roles share; see the group's own `watch`."""
        return self._whole.watch(on_death, interval)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (hasattr(type(self._whole), name) or name in vars(self._whole)):
            return getattr(self._whole, name)
        return super().__getattr__(name)

    def __reduce__(self) -> Any:
        return RoleGroup, (self._whole, self._role)

    def __repr__(self) -> str:
        return f"<{self._role} of {self._whole!r}>"
