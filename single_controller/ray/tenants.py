"""Tenants: which groups are in which slots of a pool."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from typing import Protocol

from single_controller.base.errors import PlacementError


class Occupant(Protocol):
    """What a pool needs to know of a group in it."""

    @property
    def name(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


class Tenants:
    """The groups in a pool's slots, as many as a slot holds. A group that was closed or dropped is none any more.

    Args:
        most: groups that a slot holds.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._slots: weakref.WeakKeyDictionary[Occupant, frozenset[int]] = weakref.WeakKeyDictionary()

    def admit(self, group: Occupant, slots: Collection[int], pool: str) -> None:
        """Note a group, in the slots of these numbers; a group that is there already moves.

        Args:
            group: the group.
            slots: the numbers; none for a group that takes no share of a slot.
            pool: the pool that it is made on, for the message.

        Raises:
            PlacementError: a slot is full.
        """
        with self._lock:
            others = {other: held for other, held in self._slots.items() if not other.closed and other is not group}
            for slot in slots:
                there = sorted(other.name for other, held in others.items() if slot in held)
                if len(there) >= self._most:
                    raise PlacementError(
                        f"{pool} is full: max_colocate_count={self._most} and it holds {', '.join(there)}. Close one, "
                        "or make the pool with a larger max_colocate_count"
                    )
            self._slots[group] = frozenset(slots)

    def close(self) -> None:
        """Close them all."""
        for group in list(self._slots):
            group.close()
