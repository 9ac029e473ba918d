"""Placement: placement groups that hold a pool's process slots, and waiting for them."""

from __future__ import annotations

import logging
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from single_controller.base.errors import GroupClosedError, PlacementError
from single_controller.ray.dry_run import Outlook, foresee, plan_pool, refuse_impossible
from single_controller.ray.order import Slot, Spot
from single_controller.ray.packing import GaveUp, Request, fit, largest_first
from single_controller.ray.runtime import Node, nodes, session

logger = logging.getLogger(__name__)

SAY_SECONDS = 5.0

_POLL_SECONDS = (0.01, 0.2)
"""First and longest pause between two questions whether Ray has placed something."""

_SETTLE_SECONDS = 0.3
"""How long placement groups may take from the first step of their reservation to the second before they are removed."""


class Placement:
    """The placement groups of one pool, and its slots in them. `reserve` makes one.

    Those that it owns are removed when it is closed; also when it is forgotten, unless `keep` was called.

    Args:
        groups: the placement groups.
        slots: the pool's slots in them.
        request: what was asked for.
        owned: whether closing removes the placement groups.
        what: the pool, for messages.

    Attributes:
        request: what was asked for.
        bundle: what one process slot reserves.
        groups: the placement groups.
        declared: the slots, whether or not they are gone.
        closed: whether it was closed.
    """

    def __init__(
        self, groups: Sequence[PlacementGroup], slots: Sequence[Slot], request: Request, owned: bool, what: str
    ) -> None:
        self.request = request
        self.bundle = dict(request.bundle)
        self.groups = tuple(groups)
        self.closed = False
        self.declared = tuple(slots)
        self._owned = owned
        self._what = what
        self._session = session()
        self._removal = weakref.finalize(self, _remove, self.groups if owned else (), self._session)
        self._removal.atexit = False  # at the end of the driver Ray does it

    @property
    def slots(self) -> list[Slot]:
        """The slots, as declared.

        Raises:
            GroupClosedError: they are gone.
        """
        self.check_open()
        return list(self.declared)

    def check_open(self) -> None:
        """Raise if the slots are gone.

        Raises:
            GroupClosedError: they are.
        """
        if self.closed or session() != self._session:
            raise GroupClosedError("the pool is closed: its placement groups are removed; make a new pool")

    def keep(self) -> None:
        """From now on the placement groups outlive this object."""
        self._removal.detach()

    def close(self) -> None:
        """Remove the placement groups, if they are its own; what runs in them ends."""
        if not self.closed:
            self._removal.detach()
            _remove(self.groups if self._owned else (), self._session)
        self.closed = True

    def ready(self) -> bool:
        """Whether Ray has reserved all of it.

        Raises:
            GroupClosedError: a placement group was removed.
        """
        self.check_open()
        states = [placement_group_table(group).get("state", "REMOVED") for group in self.groups]
        if "REMOVED" in states:
            raise GroupClosedError(f"{self._what} is gone: its placement group was removed")
        return all(state == "CREATED" for state in states)

    def spots(self) -> list[Spot]:
        """Where the slots lie, as declared; devices are not known.

        Raises:
            GroupClosedError: the pool is closed.
            PlacementError: Ray has not placed them, or a node died since.
        """
        known = {node["NodeID"]: node for node in ray.nodes()}
        homes = {group: placement_group_table(group).get("bundles_to_node_id", {}) for group in self.groups}
        spots = []
        for slot in self.slots:
            node = known.get(homes[slot.group].get(slot.bundle, "")) if slot.group is not None else None
            if node is None:
                raise PlacementError(f"{self._what}: bundle {slot.bundle} lies on no node any more")
            spots.append(Spot(node["NodeManagerAddress"], node["NodeManagerHostname"], node["NodeID"]))
        return spots

    def outlook(self, cluster: Sequence[Node], left: Sequence[dict[str, float]]) -> Outlook:
        """Whether it is placed, and if not, why. Without seats: those are the pool's to tell."""
        if self.ready():
            return Outlook(self.request, "placed")
        seen = foresee(self.request, cluster, left)
        return seen if seen.state == "impossible" else Outlook(self.request, "waits")

    def explain(self) -> str:
        """What is asked for and what the nodes have: the dry run's text."""
        cluster = nodes()
        outlook = self.outlook(cluster, [dict(node.free) for node in cluster])
        return str(plan_pool(self._what, [outlook], None, cluster))


def reserve(request: Request, name: str, detached: bool, what: str) -> Placement:
    """Ask Ray for the slots; does not wait for them.

    An exception, Ctrl-C included, between one placement group and the next leaves none behind.

    Args:
        request: the slots.
        name: prefix of the placement groups' names.
        detached: whether they outlive the driver.
        what: the pool, for messages.

    Raises:
        PlacementError: the cluster could never hold them.
    """
    cluster = nodes()
    refuse_impossible(request.entries, request.bundle, request.strategy, cluster, what, request.across)
    homes = _homes(request, cluster)
    prefix = f"{name}{uuid.uuid4().hex[:8]}"
    groups: dict[int, PlacementGroup] = {}
    try:
        # The largest first: Ray puts each where most is left, and small ones would take the large ones' room.
        for number in largest_first(request.sizes):
            groups[number] = placement_group(
                [dict(request.bundle) for _ in range(request.sizes[number])],
                strategy=request.strategy,
                name=f"{prefix}_{number}",
                lifetime="detached" if detached else None,
                _soft_target_node_id=homes.get(number),
            )
        slots = [Slot(groups[0 if request.across else slot.entry], slot.bundle, slot.entry) for slot in request.slots()]
        placement = Placement([groups[number] for number in range(len(groups))], slots, request, True, what)
    except BaseException:
        _remove(_made(prefix, len(request.sizes)), session())
        raise
    return placement


def _homes(request: Request, cluster: Sequence[Node]) -> dict[int, str]:
    """A hint for Ray, by placement group: the node on which the dry run puts a whole entry. So the dry run says what
    comes, and entries that only fit in one arrangement find it."""
    if request.strategy != "STRICT_PACK":
        return {}
    try:
        fitted = fit(request, [node.free for node in cluster]) or fit(request, [node.total for node in cluster])
    except GaveUp:
        fitted = None
    return {number: cluster[homes[0]].node_id for number, homes in enumerate(fitted or ())}


def _made(prefix: str, count: int) -> list[PlacementGroup]:
    """The placement groups of that prefix that exist. By name: one may have been made without being returned."""
    found = []
    for number in range(count):
        try:
            found.append(get_placement_group(f"{prefix}_{number}"))
        except ValueError:
            logger.debug("placement group %s_%d had not been made", prefix, number)
    return found


def _remove(groups: Sequence[PlacementGroup], made_in: str | None) -> None:
    end = time.monotonic() + _SETTLE_SECONDS
    for group in groups if session() == made_in else ():
        try:
            _let_it_settle(group, end)
            remove_placement_group(group)
        except Exception:  # Ray is gone, and with it the placement group
            logger.debug("placement group %s could not be removed", group.id, exc_info=True)


def _let_it_settle(group: PlacementGroup, end: float) -> None:
    """Ray reserves in two steps, and what it removes between the two stays reserved for ever (Ray 2.60): a placement
    group that may be there is given time to get on. One that waits for room is not held up for long."""
    while placement_group_table(group).get("state") in ("PENDING", "PREPARED") and time.monotonic() < end:
        time.sleep(_POLL_SECONDS[0])


def wait_placed(refs: Sequence[Any], placements: Sequence[Placement], timeout: float, name: str) -> None:
    """Wait until the processes of a group have answered once; say every few seconds what they wait for.

    Args:
        refs: a reference for each process.
        placements: what holds their slots.
        timeout: seconds.
        name: the group, for messages.

    Raises:
        PlacementError: they were not placed within ``timeout`` seconds.
    """
    refs = list(refs)

    def answered(pause: float) -> int:
        return len(ray.wait(refs, num_returns=len(refs), timeout=pause, fetch_local=False)[1])

    _wait(answered, placements, timeout, name, f"of {len(refs)} workers")


def wait_reserved(placement: Placement, timeout: float, name: str) -> None:
    """Wait until Ray has reserved the slots; say every few seconds what is missing.

    Raises:
        PlacementError: they were not placed within ``timeout`` seconds.
        GroupClosedError: they are gone.
    """

    def reserved(pause: float) -> int:
        end = time.monotonic() + pause
        wait, longest = _POLL_SECONDS
        while not placement.ready():
            if time.monotonic() >= end:
                return 1
            time.sleep(min(wait, max(0.0, end - time.monotonic())))
            wait = min(2 * wait, longest)
        return 0

    _wait(reserved, [placement], timeout, name, "of its placements")


def _wait(
    pending: Callable[[float], int], placements: Sequence[Placement], timeout: float, name: str, counted: str
) -> None:
    start = time.monotonic()
    first = True
    while True:
        left = pending(min(SAY_SECONDS, max(0.0, start + timeout - time.monotonic())))
        if not left:
            return
        waited = time.monotonic() - start
        unplaced = [placement for placement in placements if not placement.ready()]
        if not unplaced:
            if waited >= timeout:
                raise PlacementError(
                    f"{name}: {left} {counted} did not start within {timeout:g} s, although their slots are reserved: "
                    "the slots are full, or the nodes start no processes"
                )
            continue
        table = "\n".join(placement.explain() for placement in unplaced)
        if waited >= timeout:
            raise PlacementError(f"{name} was not placed within {timeout:g} s.\n{table}")
        logger.warning("%s: waiting to be placed for %.0f s (of %g)%s", name, waited, timeout, f"\n{table}" * first)
        first = False
