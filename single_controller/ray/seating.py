"""Seating: the reserved slots of a pool, where they lie, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from single_controller.ray.accelerators import device_kinds, devices_in
from single_controller.ray.dry_run import Outlook
from single_controller.ray.order import Seat, Slot, Spot, seated
from single_controller.ray.placement import Placement, wait_reserved
from single_controller.ray.runtime import Node

if TYPE_CHECKING:
    from single_controller.ray.actor import Location


class Seating:
    """The slots of one placement. Their order is found once, when Ray has placed them, and stays: by node and device.

    Args:
        placement: what holds the slots.
        timeout: seconds that they may take to be placed.
        what: the pool, for messages.
        seats: the slots by rank, where the order was given.

    Attributes:
        placement: as given.
        seats: the slots by rank, and where they lie; None until that is known.
    """

    def __init__(self, placement: Placement, timeout: float, what: str, seats: Sequence[Seat] | None = None) -> None:
        self.placement = placement
        self.seats: tuple[Seat, ...] | None = None if seats is None else tuple(seats)
        self._timeout = timeout
        self._what = what
        self._kinds = device_kinds(placement.bundle)
        self._settling = threading.RLock()

    def settle(self) -> None:
        """Wait until the slots lie somewhere, and fix their order. Asks short tasks in them for the devices.

        Raises:
            PlacementError: they were not placed in time.
            GroupClosedError: they are gone.
        """
        with self._settling:
            if self.seats is None:
                wait_reserved(self.placement, self._timeout, self._what)
                self.seats = self._seated(self._with_devices(self.placement.slots, self.placement.spots()))

    def slots(self) -> list[Slot]:
        """The slots, by rank where their order is known, else as declared.

        Raises:
            GroupClosedError: they are gone.
        """
        declared = self.placement.slots
        return declared if self.seats is None else [seat.slot for seat in self.seats]

    def rank_order(self, slots: Sequence[Slot], locations: Sequence[Location]) -> list[tuple[int, Location]]:
        """Which slot holds which rank. Who asks first fixes the order.

        Args:
            slots: what `slots` returned.
            locations: where the process in each found itself.

        Returns:
            By rank: (index of the slot, location).
        """
        found = {(slot.group, slot.bundle): number for number, slot in enumerate(slots)}
        with self._settling:
            if self.seats is None:
                spots = [Spot(where.address, where.hostname, where.node_id, where.devices) for where in locations]
                if self._kinds and not all(spot.devices for spot in spots):
                    spots = self._with_devices(slots, spots)  # these processes take no share of the devices
                self.seats = self._seated(spots)
            order = [found[seat.slot.group, seat.slot.bundle] for seat in self.seats]
            self.learn(range(len(order)), [locations[number] for number in order])
        return [(number, locations[number]) for number in order]

    def learn(self, ranks: Sequence[int], locations: Sequence[Location]) -> None:
        """Note where processes found themselves: that is newer than what was known. A node may have died since.

        Args:
            ranks: which of the seats they have.
            locations: where each found itself.
        """
        with self._settling:
            seats = list(self.seats or ())
            for rank, where in zip(ranks, locations, strict=True):
                known = seats[rank].spot
                devices = where.devices or (known.devices if known is not None else None)
                spot = Spot(where.address, where.hostname, where.node_id, devices)
                seats[rank] = seats[rank]._replace(spot=spot)
            self.seats = tuple(seats)

    def outlook(self, cluster: Sequence[Node], left: Sequence[dict[str, float]]) -> Outlook:
        """See `RayResourcePool.outlook`."""
        outlook = self.placement.outlook(cluster, left)
        if outlook.state != "placed":
            return outlook
        seats = self.seats
        if seats is None:
            unknown = None if self._kinds else ()
            seats = self._seated([spot._replace(devices=unknown) for spot in self.placement.spots()])
        return Outlook(outlook.request, "placed", seats)

    def _seated(self, spots: Sequence[Spot]) -> tuple[Seat, ...]:
        """The seats by rank, for spots in the declared order."""
        request = self.placement.request
        return seated(self.placement.slots, spots, request.entries if request.across else None)

    def _with_devices(self, slots: Sequence[Slot], spots: Sequence[Spot]) -> list[Spot]:
        if not self._kinds:
            return [spot._replace(devices=()) for spot in spots]
        devices = devices_in(slots, self._kinds, self._timeout, self._what)
        return [spot._replace(devices=ids) for spot, ids in zip(spots, devices, strict=True)]
