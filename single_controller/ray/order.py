"""Process slots, where they lie, and the order of the ranks in them: by node, then device, both as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from single_controller.base.errors import PlacementError
from single_controller.ray.devices import device_key
from single_controller.ray.runtime import address_key


@dataclass(frozen=True)
class Slot:
    """Room for one rank.

    Attributes:
        group: the placement group, None while it is not reserved.
        bundle: index of the bundle in it.
        entry: which entry of its pool it belongs to.
    """

    group: PlacementGroup | None
    bundle: int
    entry: int

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Ray's scheduling strategy for what is to run there.

        Raises:
            PlacementError: the slot is not reserved.
        """
        if self.group is None:
            raise PlacementError(f"the slot {self} is not reserved")
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)


class Spot(NamedTuple):
    """A place on a node.

    Attributes:
        address: the node's address.
        hostname: the node's name.
        node_id: Ray's id of the node.
        devices: ids of the devices there, None while they are not known.
    """

    address: str
    hostname: str
    node_id: str
    devices: tuple[str, ...] | None = None


class Seat(NamedTuple):
    """A slot, and where it lies once that is known."""

    slot: Slot
    spot: Spot | None = None


class Found(Protocol):
    """What the order of ranks asks of a place."""

    @property
    def address(self) -> str: ...

    @property
    def node_id(self) -> str: ...

    @property
    def devices(self) -> tuple[str, ...] | None: ...


Where = TypeVar("Where", bound=Found)


def rank_key(slot: Slot, where: Found) -> tuple[Any, ...]:
    """Sorts slots as ranks: by the node's address, the node (several may have one address), the devices, all as
    numbers where they are numbers; then by entry and bundle."""
    return (address_key(where.address), where.node_id, device_key(where.devices or ()), slot.entry, slot.bundle)


def rank_order(slots: Sequence[Slot], places: Sequence[Where]) -> list[tuple[int, Where]]:
    """Which slot holds which rank: by node, then device, both as numbers; without devices by entry, then bundle.

    Args:
        slots: the pool's slots.
        places: where each of them lies.

    Returns:
        By rank: (index of the slot, its place).
    """
    order = sorted(range(len(slots)), key=lambda number: rank_key(slots[number], places[number]))
    return [(number, places[number]) for number in order]


def seated(slots: Sequence[Slot], spots: Sequence[Spot], entries: Sequence[int] | None = None) -> tuple[Seat, ...]:
    """The seats by rank.

    Args:
        slots: the pool's slots.
        spots: where each of them lies.
        entries: sizes of the entries, where they are to be filled in order of rank; None where each slot has its own.
    """
    seats = [Seat(slots[number], spot) for number, spot in rank_order(slots, spots)]
    if entries is not None:
        numbers = [entry for entry, size in enumerate(entries) for _ in range(size)]
        seats = [
            Seat(Slot(seat.slot.group, seat.slot.bundle, entry), seat.spot)
            for seat, entry in zip(seats, numbers, strict=True)
        ]
    return tuple(seats)
