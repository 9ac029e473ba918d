"""A pool on a placement group that somebody else has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group_table

from single_controller.base.checks import check_seconds
from single_controller.base.errors import GroupClosedError
from single_controller.base.pool import ResourcePool
from single_controller.ray.order import Seat, Slot, rank_order
from single_controller.ray.packing import Request
from single_controller.ray.placement import Placement, wait_reserved
from single_controller.ray.pool import RayResourcePool
from single_controller.ray.pool_options import PoolOptions
from single_controller.ray.runtime import ensure_ray
from single_controller.ray.seating import Seating

_HOW = "from_placement_group() takes a placement group, (pg, bundle_indices) or (pg, bundle_indices, gpu_ids)"


class PlacementGroupPool(RayResourcePool):
    """See `RayResourcePool.from_placement_group`, which makes it.

    Args:
        placement: the placement group, placed.
        entries: slots on each node.
        options: what a slot has.
        seats: the slots by rank, where the user gave their order; None to order them by node and device.
    """

    def __init__(
        self, placement: Placement, entries: Sequence[int], options: PoolOptions, seats: Sequence[Seat] | None
    ) -> None:
        ResourcePool.__init__(self, entries, options.max_colocate_count)
        self._begin(options)
        self._given = seats is not None
        self._seating = Seating(placement, options.placement_timeout, repr(self), seats)

    @property
    def ordered_by_user(self) -> bool:
        """Whether the bundles' indices were given."""
        return self._given


def pool_on(
    given: Any,
    bundle_indices: Sequence[int] | None,
    gpu_ids: Sequence[int | str] | None,
    *,
    use_gpu: bool | None,
    name_prefix: str | None,
    max_colocate_count: int,
    detached: bool,
    placement_timeout: float,
) -> PlacementGroupPool:
    """See `RayResourcePool.from_placement_group`."""
    group, indices, ids = _parts(given, bundle_indices, gpu_ids)
    check_seconds("placement_timeout", placement_timeout)
    ensure_ray()
    table = placement_group_table(group)
    if table.get("state", "REMOVED") == "REMOVED":
        raise GroupClosedError("from_placement_group(): the placement group is removed")
    bundles = [dict(bundle) for bundle in group.bundle_specs]
    numbers = _checked_indices(indices, len(bundles))
    devices = _checked_ids(ids, len(numbers))
    options = _options(
        [bundles[number] for number in numbers],
        use_gpu,
        "" if name_prefix is None else name_prefix,
        max_colocate_count,
        detached,
        placement_timeout,
    )
    request = Request((len(numbers),), options.bundle, table["strategy"])
    what = f"the placement group {table.get('name') or group.id.hex()}"
    waiting = Placement([group], [Slot(group, number, 0) for number in numbers], request, False, what)
    wait_reserved(waiting, placement_timeout, what)
    spots = waiting.spots()
    slots = waiting.slots
    by_user = indices is not None or ids is not None
    order = range(len(slots)) if by_user else [number for number, _ in rank_order(slots, spots)]
    entry_of: dict[str, int] = {}
    for number in order:
        entry_of.setdefault(spots[number].node_id, len(entry_of))
    slots = [Slot(group, slot.bundle, entry_of[spot.node_id]) for slot, spot in zip(slots, spots, strict=True)]
    entries = [sum(slot.entry == entry for slot in slots) for entry in range(len(entry_of))]
    seats = None
    if by_user:
        seats = [
            Seat(slot, spot._replace(devices=known)) for slot, spot, known in zip(slots, spots, devices, strict=True)
        ]
    return PlacementGroupPool(Placement([group], slots, request, False, what), entries, options, seats)


def _parts(given: Any, indices: Any, ids: Any) -> tuple[PlacementGroup, Any, Any]:
    if isinstance(given, Sequence) and not isinstance(given, str):
        if not 2 <= len(given) <= 3 or indices is not None or (ids is not None and len(given) == 3):
            raise ValueError(f"{_HOW}, each part once")
        given, indices, ids = given[0], given[1], (given[2] if len(given) == 3 else ids)
    if not isinstance(given, PlacementGroup):
        raise TypeError(f"{_HOW}, got {given!r}")
    return given, indices, ids


def _checked_indices(indices: Any, count: int) -> list[int]:
    if indices is None:
        return list(range(count))
    numbers = list(indices)
    if not numbers:
        raise ValueError("bundle_indices is empty; leave it out for all bundles")
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
            raise ValueError(f"bundle_indices: the placement group has the bundles 0 to {count - 1}, not {number!r}")
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise ValueError(f"bundle_indices has {twice} more than once; a bundle is one slot, shared by its workers")
    return numbers


def _checked_ids(ids: Any, count: int) -> list[tuple[str, ...] | None]:
    if ids is None:
        return [None] * count
    ids = list(ids)
    if len(ids) != count:
        raise ValueError(f"gpu_ids has {len(ids)} ids for {count} bundles; it has one for each, in the same order")
    for device in ids:
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise ValueError(f"gpu_ids are numbers or strings, got {device!r}")
    return [(str(device),) for device in ids]


def _options(
    bundles: Sequence[Mapping[str, float]],
    use_gpu: bool | None,
    name_prefix: str,
    max_colocate_count: int,
    detached: bool,
    placement_timeout: float,
) -> PoolOptions:
    """What every one of the bundles has, the least where they differ."""
    names = set.intersection(*({name for name, amount in bundle.items() if amount > 0} for bundle in bundles))
    least = {name: min(bundle[name] for bundle in bundles) for name in sorted(names)}
    has_gpu = "GPU" in least
    if use_gpu and not has_gpu:
        raise ValueError("use_gpu=True, but a bundle of the placement group has no GPU")
    gpus = least.pop("GPU", 1)
    return PoolOptions(
        use_gpu=has_gpu if use_gpu is None else bool(use_gpu),
        num_gpus=gpus if use_gpu is not False else 1,
        num_cpus=least.pop("CPU", 0),
        memory=least.pop("memory", 0),
        resources={name: amount for name, amount in least.items() if name != "object_store_memory"},
        name_prefix=name_prefix,
        max_colocate_count=max_colocate_count,
        detached=bool(detached),
        accelerator_type=None,
        strategy=None,
        across_nodes=False,
        placement_timeout=placement_timeout,
    )
