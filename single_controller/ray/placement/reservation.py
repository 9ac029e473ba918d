"""Reservation: the placement groups behind a pool's slots, waiting for them, and assigning ranks to the slots.

Each reservation has two locks; neither is taken while the other is held.

- ``_reserving`` protects the creation and removal of the placement groups. It is held while Ray is asked for them
  (milliseconds each), never while waiting for them: closing a pool does not wait for a start, and ends one that waits.
- ``_assigning`` protects the assignment of ranks, so that groups that start at once agree on one order. It is held
  while short tasks report the devices, up to the placement timeout.

No thread is started here.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import PlacementGroupID
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from dispatch.checks import is_count
from single_controller.call.errors import ControlStoreError, GroupClosedError, PlacementError
from single_controller.ray.compat import ask_store, worker_pools
from single_controller.ray.placement.feasibility import Request, expected_nodes, forecast
from single_controller.ray.placement.options import PoolOptions
from single_controller.ray.placement.plan import plan_pool
from single_controller.ray.placement.slots import Slot, assign_ranks, device_kinds, devices_in
from single_controller.ray.rank.actor import Location
from single_controller.ray.runtime import Node, address_key, ensure_ray, nodes, session

logger = logging.getLogger(__name__)

SAY_SECONDS = 5.0
"""Seconds between two log messages that a pool waits."""

_POLL_SECONDS = (0.01, 0.2)
"""First and longest pause between two questions whether Ray has placed something."""

_SETTLE_SECONDS = 0.3
"""How long placement groups may take from the first step of their reservation to the second before they are removed."""


class Reservation:
    """The slots of one pool, or of one external placement group.

    The pool that made it owns it; slices and merged pools borrow it. Placement groups that were created here are
    removed when the reservation is closed, and when it is garbage collected unless they are detached.

    Attributes:
        request: what Ray is going to be asked for; once ``reserved``, what it was asked for.
        options: of the pool.
        label: the pool, for messages.
    """

    def __init__(self, request: Request, options: PoolOptions, label: str) -> None:
        self.request, self.options, self.label = request, options, label
        self.slots = request.slots()  # as declared until the ranks are ``assigned``, then by rank with locations
        self.reserved = self.assigned = False
        self._closed = False
        self._removal: Callable[[], object] | None = None
        self._session: str | None = None
        self._reserving = threading.Lock()
        self._assigning = threading.Lock()

    def hold(self, slots: Sequence[Slot], *, assigned: bool = False) -> None:
        """Hold slots in placement groups, created here or by somebody else; by rank if they are ``assigned``."""
        self._session = session()
        self.slots, self.reserved, self.assigned = list(slots), True, assigned

    def reserve(self, request: Request) -> None:
        """Ask Ray for the placement groups, once; do not wait for them. An exception in the middle, Ctrl-C included,
        leaves none behind."""
        with self._reserving:
            self.check_open()
            if not self.reserved:
                self._create(request)

    def _create(self, request: Request) -> None:
        remove_pools_of(())
        cluster = nodes()
        homes = None
        if request.strategy == "STRICT_PACK":
            # A hint for Ray, so that entries that fit side by side do so, and the plan shows what comes.
            homes = expected_nodes(request, [node.free for node in cluster])
            homes = homes or expected_nodes(request, [node.total for node in cluster])
        prefix = f"{self.options.name_prefix}{uuid.uuid4().hex[:8]}"
        groups: dict[int, PlacementGroup] = {}
        try:
            # The largest first: Ray puts each where most is left, and small ones would take the room of large ones.
            for number in request.largest_first:
                groups[number] = placement_group(
                    [dict(request.bundle) for _ in range(request.sizes[number])],
                    strategy=request.strategy,
                    name=f"{prefix}_{number}",
                    lifetime="detached" if self.options.detached else None,
                    _soft_target_node_id=cluster[homes[number][0]].node_id if homes else None,
                )
            slots = [
                replace(slot, placement_group=groups[0 if request.across else slot.entry]) for slot in request.slots()
            ]
            created = list(groups.values()), session()
            if self.options.detached:
                self._removal = partial(_remove, *created)
            else:
                self._removal = removal = weakref.finalize(self, _remove, *created)
                removal.atexit = False  # when the driver ends, Ray removes them
            self.request = request
            self.hold(slots)
        except BaseException:
            # By name: one may have been created without being returned.
            _remove(_find(f"{prefix}_{number}" for number in range(len(request.sizes))), session())
            raise

    def close(self) -> None:
        """Remove the placement groups that were created here; what runs in them ends. A second close does nothing."""
        with self._reserving:  # waits for a creation that is under way, so that nothing is created after this
            self._closed = True
            if self._removal is not None:
                self._removal()
                self._removal = None

    def check_open(self) -> None:
        """Raise a GroupClosedError if the slots are gone."""
        if self._closed or (self.reserved and session() != self._session):
            raise GroupClosedError("the pool is closed: its placement groups are removed; make a new pool")

    # --- waiting ------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until Ray has placed every bundle; log every few seconds what is missing. Raises as
        `RayResourcePool.wait` does."""
        begin = time.monotonic()
        timeout = self.options.placement_timeout
        pause, longest = _POLL_SECONDS
        said = 0
        pending: Iterable[PlacementGroup] = self._groups()
        while pending := self._pending(pending):
            waited = time.monotonic() - begin
            if waited >= timeout:
                raise PlacementError(
                    f"{self.label} was not placed within {timeout:g} s.\n{self._explain(pending.values())}"
                )
            if waited >= SAY_SECONDS * (said + 1):
                said += 1
                remove_pools_of(())
                table = f"\n{self._explain(pending.values())}" if said == 1 else ""
                logger.warning("%s: waiting to be placed for %.0f s (of %g)%s", self.label, waited, timeout, table)
            time.sleep(min(pause, timeout - waited))
            pause = min(2 * pause, longest)

    def _groups(self) -> Iterable[PlacementGroup]:
        return dict.fromkeys(slot.placement_group for slot in self.slots if slot.placement_group is not None)

    def _pending(self, groups: Iterable[PlacementGroup]) -> dict[PlacementGroup, dict[str, Any]]:
        """Those that Ray has not placed, each with what Ray says of it."""
        self.check_open()
        tables = {group: ask_store(placement_group_table, group) for group in groups}
        if any(table.get("state", "REMOVED") == "REMOVED" for table in tables.values()):
            raise GroupClosedError(f"{self.label} is gone: its placement group was removed")
        return {group: table for group, table in tables.items() if table["state"] != "CREATED"}

    def _explain(self, pending: Iterable[dict[str, Any]]) -> str:
        """The plan, and what Ray says of each placement group that it has not placed."""
        states = Counter(f"{table['state']}, {table['stats']['scheduling_state']}" for table in pending)
        said = "; ".join(f"{state} ({count} of its placement groups)" for state, count in states.items())
        return f"{plan_pool(self.label, [self.request], [self.request], (), nodes())}\nRay says: {said}"

    # --- rank assignment ----------------------------------------------------------------------------------

    def assign(self, slots: Sequence[Slot] = (), found: Sequence[Location] = ()) -> None:
        """Assign the ranks, unless that was done: by where processes in all ``slots`` found themselves, if any run.
        Devices that no process has reported are asked of short tasks. A `PlacementError` if a bundle is on no node any
        more."""
        with self._assigning:  # of groups that start at once, the first fixes the order, and the others wait for it
            if self.assigned:
                return
            slots, found = (slots, found) if slots else (self.slots, node_locations(self.slots, self.label))
            if not all(where.devices for where in found):  # the processes take no share of devices, or none runs yet
                devices = devices_in(slots, self.request.bundle, self.options.placement_timeout, self.label)
                found = [where._replace(devices=ids) for where, ids in zip(found, devices, strict=True)]
            self.slots, self.assigned = self._ranked(slots, found), True

    def update_location(self, number: int, found: Location) -> None:
        """Note where a process in a slot found itself: when a node dies, Ray places its bundles elsewhere."""
        with self._assigning:
            known = self.slots[number]
            devices = found.devices or (known.location.devices if known.location is not None else None)
            # Without the process: the slot outlives it.
            self.slots[number] = replace(known, location=found._replace(devices=devices, pid=0, wire=None))

    def _ranked(self, slots: Sequence[Slot], locations: Sequence[Location]) -> list[Slot]:
        return assign_ranks(slots, locations, self.request.entries if self.request.across else None)

    def expected(self, cluster: Sequence[Node], free: Sequence[dict[str, float]]) -> Sequence[Slot] | None:
        """Return the slots by rank, where they are or would be; None if they wait. Arguments as for `forecast`."""
        self.check_open()
        if not self.reserved:
            return forecast(self.request, cluster, free)
        if self._pending(self._groups()):
            return None
        if self.assigned:
            return self.slots
        devices = None if device_kinds(self.request.bundle) else ()
        found = node_locations(self.slots, self.label)
        return self._ranked(self.slots, [where._replace(devices=devices) for where in found])


def node_locations(slots: Sequence[Slot], label: str) -> list[Location]:
    """Return the node of each reserved slot, without devices; a `PlacementError` if one has none. A node
    may have died: Ray then looks for another one."""
    locations = []
    for slot, location in zip(slots, known_locations(slots), strict=True):
        if location is None:
            raise PlacementError(f"{label}: bundle {slot.bundle} is not on any node")
        locations.append(location)
    return locations


def known_locations(slots: Sequence[Slot]) -> list[Location | None]:
    """Return the node of each slot, without devices; None for a slot that has none."""
    known = {node["NodeID"]: node for node in ask_store(ray.nodes)}
    groups = {slot.placement_group for slot in slots if slot.placement_group is not None}
    homes = {group: ask_store(placement_group_table, group).get("bundles_to_node_id", {}) for group in groups}
    found = [
        known.get(homes[slot.placement_group].get(slot.bundle, "")) if slot.placement_group else None for slot in slots
    ]
    return [
        None if node is None else Location(node["NodeManagerAddress"], node["NodeManagerHostname"], node["NodeID"])
        for node in found
    ]


def wait_started(refs: Sequence[ray.ObjectRef], timeout: float, name: str) -> None:
    """Wait until the processes of a group have answered once, each with one of the ``refs``; a `PlacementError` if they
    did not start within ``timeout`` seconds."""
    _, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout, fetch_local=False)
    if late:
        raise PlacementError(
            f"{name}: {len(late)} of {len(refs)} workers did not start within {timeout:g} s, although their slots are "
            "reserved. Check whether other actors use up the slots, and whether the nodes can start processes"
        )


def _find(names: Iterable[str]) -> list[PlacementGroup]:
    """The placement groups of those names that exist."""
    found = []
    for name in names:
        try:
            found.append(ask_store(get_placement_group, name))
        except ValueError:
            logger.debug("placement group %s had not been created", name)
    return found


def _remove(groups: Sequence[PlacementGroup], made_in: str | None) -> None:
    end = time.monotonic() + _SETTLE_SECONDS
    for group in groups if made_in is not None and session() == made_in else ():
        try:
            # Ray reserves in two steps, and what it removes between the two stays reserved for ever (Ray 2.60). A
            # placement group in between gets time to arrive; one that waits for room delays this only briefly.
            try:
                while time.monotonic() < end and ask_store(placement_group_table, group).get("state") in (
                    "PENDING",
                    "PREPARED",
                ):
                    time.sleep(_POLL_SECONDS[0])
            except ControlStoreError as error:  # by now it is after ``end``: the others are not asked about
                logger.warning("removing placement group %s without knowing its state: %s", group.id.hex(), error)
            remove_placement_group(group)
        except Exception:  # Ray has been shut down, and the placement group with it
            logger.debug("placement group %s could not be removed", group.id, exc_info=True)


def remove_placement_groups(ids: Iterable[str]) -> None:
    """Remove placement groups by their ids in hex. Everything in them ends."""
    _remove([PlacementGroup(PlacementGroupID(bytes.fromhex(number))) for number in ids], session())


def remove_pools_of(actors: Iterable[ActorHandle]) -> None:
    """Remove the placement groups of pools that workers have made and that nobody can close any more: those of
    ``actors``, which were just ended, and of workers of this job that died earlier."""
    try:
        remove_placement_groups(worker_pools({actor._actor_id.hex() for actor in actors}))
    except Exception:  # what called this must go on: the control store does not respond, for example
        logger.warning("the placement groups of ended workers could not be removed", exc_info=True)


# --- external placement groups ---------------------------------------------------------------------------


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
    table = ask_store(placement_group_table, given)
    if table.get("state", "REMOVED") == "REMOVED":
        raise GroupClosedError("from_placement_group(): the placement group is removed")
    numbers = _checked_indices(bundle_indices, ask_store(lambda: given.bundle_count))
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
        **options,
    )
