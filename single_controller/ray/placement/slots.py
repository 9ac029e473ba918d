"""Slots of a resource pool; their devices; and the assignment of ranks to them: by node, then by device, as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from single_controller.call.errors import PlacementError
from single_controller.ray.compat import accelerator_names
from single_controller.ray.rank.actor import Location
from single_controller.ray.rank.devices import device_key, own_devices
from single_controller.ray.runtime import address_key

_LEAST = 0.0001
"""The smallest amount of a resource that a task can take."""


@dataclass(frozen=True)
class Slot:
    """One bundle of a placement group. Each group of workers on the pool has one rank in it."""

    placement_group: PlacementGroup | None  # the placement group; None while nothing is reserved
    bundle: int  # index of the bundle in it
    entry: int  # number of the pool's entry (of ``process_on_nodes``) that the slot belongs to
    location: Location | None = None  # where the bundle is; None until Ray has placed it and the ranks are assigned
    # Sort key of the location that the ranks were assigned by; () before. It stays if Ray moves the bundle.
    order: tuple[Any, ...] = ()

    @property
    def home(self) -> tuple[int, str]:
        """Ranks with the same home count as local to each other: the same entry, on the same node."""
        return (self.entry, self.location.node_id if self.location is not None else "")

    def scheduling_strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return Ray's scheduling strategy for an actor or task in this slot, which must be reserved."""
        if self.placement_group is None:
            raise PlacementError(f"the slot {self} is not reserved")
        return PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=self.bundle)


def assign_ranks(
    slots: Sequence[Slot], locations: Sequence[Location], fill_entries: Sequence[int] | None = None
) -> list[Slot]:
    """Return the slots in order of rank, each with its location: by node and device, then by entry and bundle. If ranks
    fill the entries in order, ``fill_entries`` has their sizes; otherwise each slot keeps its entry."""
    located = []
    for slot, where in zip(slots, locations, strict=True):
        # Addresses and devices compare as numbers: 10.0.0.2 before 10.0.0.10. Several nodes may share an address.
        order = (address_key(where.address), where.node_id, device_key(where.devices or ()))
        located.append(replace(slot, location=where, order=order))
    ranked = sorted(located, key=lambda slot: (slot.order, slot.entry, slot.bundle))
    if fill_entries is None:
        return ranked
    entries = [entry for entry, size in enumerate(fill_entries) for _ in range(size)]
    return [replace(slot, entry=entry) for slot, entry in zip(ranked, entries, strict=True)]


def device_kinds(bundle: Iterable[str]) -> frozenset[str]:
    """Return those of a slot's resources whose units are devices."""
    return frozenset(bundle) & {"GPU", *accelerator_names()}


def devices_in(
    slots: Sequence[Slot], bundle: Iterable[str], timeout: float, name: str
) -> Sequence[tuple[str, ...] | None]:
    """Return the devices of each reserved slot, as reported by short tasks in them that take next to nothing: ids, ()
    for slots without devices, None where Ray gives no part of such a device (of a TPU). A `PlacementError` if a task
    had not run within ``timeout`` seconds."""
    each = dict.fromkeys(device_kinds(bundle), _LEAST)
    if not each:
        return [()] * len(slots)
    try:
        ask = ray.remote(num_cpus=0, num_gpus=each.pop("GPU", 0), resources=each, max_retries=0)(own_devices)
    except ValueError:
        return [None] * len(slots)
    asked = [ask.options(scheduling_strategy=slot.scheduling_strategy()).remote() for slot in slots]
    try:
        devices: list[tuple[str, ...] | None] = ray.get(asked, timeout=timeout)
    except GetTimeoutError:
        for task in asked:
            ray.cancel(task)
        raise PlacementError(
            f"{name}: its slots did not report their devices within {timeout:g} s. Check "
            "whether other actors use up the slots, and whether the nodes can start processes"
        ) from None
    except RayError as error:
        raise PlacementError(f"{name}: a slot did not report its devices: {type(error).__name__}: {error}") from error
    return devices
