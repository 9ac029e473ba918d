"""A reservation on an external placement group, one that the user has created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group_table

from dispatch.checks import is_count
from single_controller.call.errors import GroupClosedError
from single_controller.ray.placement.feasibility import Request
from single_controller.ray.placement.options import PoolOptions
from single_controller.ray.placement.reservation import Reservation, node_locations
from single_controller.ray.placement.slots import Slot
from single_controller.ray.runtime import address_key, ensure_ray

_HOW = "from_placement_group() takes a placement group, (pg, bundle_indices) or (pg, bundle_indices, gpu_ids)"


def external_reservation(
    given: Any,
    bundle_indices: Sequence[int] | None,
    gpu_ids: Sequence[int | str] | None,
    *,
    use_gpu: bool | None,
    **options: Any,
) -> Reservation:
    """Return a reservation on an external placement group, placed. See `RayResourcePool.from_placement_group`.

    Its ranks are assigned already if the user gave their order.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        if not 2 <= len(given) <= 3 or bundle_indices is not None or (gpu_ids is not None and len(given) == 3):
            raise ValueError(f"{_HOW}, each part once")
        given, bundle_indices, gpu_ids = given[0], given[1], (given[2] if len(given) == 3 else gpu_ids)
    if not isinstance(given, PlacementGroup):
        raise TypeError(f"{_HOW}, got {given!r}")
    ensure_ray()
    table = placement_group_table(given)
    if table.get("state", "REMOVED") == "REMOVED":
        raise GroupClosedError("from_placement_group(): the placement group is removed")
    numbers = _checked_indices(bundle_indices, given.bundle_count)
    devices = _checked_ids(gpu_ids, len(numbers))
    pool_options = _options([given.bundle_specs[number] for number in numbers], use_gpu, **options)
    label = f"the placement group {table.get('name') or given.id.hex()}"
    slots = [Slot(given, number, 0) for number in numbers]
    reservation = Reservation(Request((len(numbers),), pool_options.bundle, table["strategy"]), pool_options, label)
    reservation.hold(slots)
    reservation.wait()
    where = [found._replace(devices=ids) for found, ids in zip(node_locations(slots, label), devices, strict=True)]
    order_given = bundle_indices is not None or gpu_ids is not None
    # The slots on one node are an entry; entries are numbered in order of rank.
    by_rank = where if order_given else sorted(where, key=lambda found: (address_key(found.address), found.node_id))
    entry_of = {node_id: entry for entry, node_id in enumerate(dict.fromkeys(found.node_id for found in by_rank))}
    slots = [
        replace(slot, entry=entry_of[found.node_id], location=found if order_given else None)
        for slot, found in zip(slots, where, strict=True)
    ]
    reservation.hold(slots, assigned=order_given)
    return reservation


def _checked_indices(indices: Sequence[int] | None, count: int) -> list[int]:
    numbers = list(range(count) if indices is None else indices)
    if not numbers:
        raise ValueError("bundle_indices is empty; leave it out for all bundles")
    for number in numbers:
        if not is_count(number, 0) or number >= count:
            raise ValueError(f"bundle_indices: the placement group has the bundles 0 to {count - 1}, not {number!r}")
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise ValueError(f"bundle_indices has {twice} more than once; a bundle is one slot, shared by its workers")
    return numbers


def _checked_ids(ids: Sequence[int | str] | None, count: int) -> list[tuple[str, ...] | None]:
    if ids is None:
        return [None] * count
    if len(ids) != count:
        raise ValueError(f"gpu_ids has {len(ids)} ids for {count} bundles; it has one for each, in the same order")
    for device in ids:
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise ValueError(f"gpu_ids are numbers or strings, got {device!r}")
    return [(str(device),) for device in ids]


def _options(bundles: Sequence[Mapping[str, float]], use_gpu: bool | None, **options: Any) -> PoolOptions:
    """What every one of the bundles has; the least where they differ."""
    names = set.intersection(*({name for name, amount in bundle.items() if amount > 0} for bundle in bundles))
    least = {name: min(bundle[name] for bundle in bundles) for name in sorted(names - {"object_store_memory"})}
    if use_gpu and "GPU" not in least:
        raise ValueError("use_gpu=True, but a bundle of the placement group has no GPU")
    use_gpu = "GPU" in least if use_gpu is None else bool(use_gpu)
    gpus = least.pop("GPU", 1)
    return PoolOptions(
        use_gpu=use_gpu,
        num_gpus=gpus if use_gpu else 1,
        num_cpus=least.pop("CPU", 0),
        memory=least.pop("memory", 0),
        resources=least,
        accelerator_type=None,
        strategy=None,
        across_nodes=False,
        **options,
    )
