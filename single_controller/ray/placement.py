"""Placement: reserving process slots on nodes, and saying why when that cannot be."""

from __future__ import annotations

import logging
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from single_controller.base.errors import GroupClosedError, PlacementError
from single_controller.ray.runtime import Node, nodes, session

logger = logging.getLogger(__name__)

SAY_SECONDS = 5.0


@dataclass(frozen=True)
class Slot:
    """Room for one rank.

    Attributes:
        group: the placement group.
        bundle: index of the bundle in it.
        entry: which entry of its pool it belongs to.
    """

    group: PlacementGroup
    bundle: int
    entry: int


class Placement:
    """The placement groups of one pool, one per entry.

    They are removed when it is closed; also when it is forgotten, unless it is detached.

    Args:
        entries: processes of each entry.
        bundle: what one process slot reserves.
        strategy: Ray's placement strategy for each entry.
        name: prefix of the placement groups' names.
        detached: whether they outlive the driver.
        what: the pool, for messages.

    Attributes:
        bundle: what one process slot reserves.
        closed: whether the placement groups are gone.

    Raises:
        PlacementError: the cluster could never hold them.
    """

    def __init__(
        self,
        entries: Sequence[int],
        bundle: dict[str, float],
        strategy: str,
        name: str,
        detached: bool,
        what: str = "the pool",
    ) -> None:
        self.bundle = bundle
        self._entries = list(entries)
        self._strategy = strategy
        self._used: dict[tuple[PlacementGroup, int], int] = {}
        refuse_impossible(entries, bundle, strategy, nodes(), what)
        unique = uuid.uuid4().hex[:8]
        self._groups = [
            placement_group(
                [dict(bundle) for _ in range(entry)],
                strategy=strategy,
                name=f"{name}{unique}_{number}",
                lifetime="detached" if detached else None,
            )
            for number, entry in enumerate(entries)
        ]
        self.closed = False
        self._session = session()
        if not detached:
            forgotten = weakref.finalize(self, _remove, self._groups, self._session)
            forgotten.atexit = False  # at the end of the driver Ray does it

    @property
    def slots(self) -> list[Slot]:
        """The slots, entry by entry."""
        if self.closed or session() != self._session:
            raise GroupClosedError("the pool is closed: its placement groups are removed; make a new pool")
        return [
            Slot(group, bundle, entry)
            for entry, (group, size) in enumerate(zip(self._groups, self._entries, strict=True))
            for bundle in range(size)
        ]

    def close(self) -> None:
        """Remove the placement groups; what runs in them ends."""
        if not self.closed:
            _remove(self._groups, self._session)
        self.closed = True

    def explain(self) -> str:
        """What is asked for and what the nodes have, as a table."""
        return explain(self._entries, self.bundle, self._strategy, nodes())

    def ready(self) -> bool:
        """Whether Ray has reserved all of it."""
        return all(placement_group_table(group)["state"] == "CREATED" for group in self._groups)


def _remove(groups: list[PlacementGroup], made_in: str | None) -> None:
    for group in groups if session() == made_in else ():
        try:
            remove_placement_group(group)
        except Exception:  # Ray is gone, and with it the placement group
            logger.debug("placement group %s could not be removed", group.id, exc_info=True)


def refuse_impossible(
    entries: Sequence[int],
    bundle: dict[str, float],
    strategy: str,
    cluster: Sequence[Node],
    what: str = "the pool",
) -> None:
    """Raise if these entries cannot lie on the nodes even when nothing else runs there.

    Raises:
        PlacementError: with a table by node.
    """
    room = [_fits(bundle, node.total) for node in cluster]
    largest = max(entries) if strategy == "STRICT_PACK" else 1
    if sum(entries) <= sum(room) and largest <= max(room, default=0):
        packs = strategy != "STRICT_PACK" or _pack_entries(sorted(entries, reverse=True), room)
        if packs:
            return
    raise PlacementError(f"{what} can never be placed here.\n{explain(entries, bundle, strategy, cluster)}")


def explain(entries: Sequence[int], bundle: dict[str, float], strategy: str, cluster: Sequence[Node]) -> str:
    """What is asked for, what each node has and how many processes fit: a table in plain text."""
    each = ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
    asked = (
        f"asked: {_plural(sum(entries), 'process')}, "
        + (f"{list(entries)} by node" if strategy == "STRICT_PACK" else f"{list(entries)}, {strategy}")
        + f", each with {each}"
    )
    resources = list(bundle)
    rows = [["node", *(f"{resource} free/total" for resource in resources), "processes now/at most"]]
    free_room, room = 0, 0
    for node in cluster:
        now, most = _fits(bundle, node.free), _fits(bundle, node.total)
        free_room, room = free_room + now, room + most
        amounts = [f"{node.free.get(r, 0.0):g}/{node.total.get(r, 0.0):g}" for r in resources]
        rows.append([f"{node.address} ({node.hostname})", *amounts, f"{now}/{most}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([asked, *table, f"missing: {_missing(entries, bundle, strategy, cluster, room)}"])


def _missing(
    entries: Sequence[int], bundle: dict[str, float], strategy: str, cluster: Sequence[Node], room: int
) -> str:
    for resource, amount in bundle.items():
        total = sum(node.total.get(resource, 0.0) for node in cluster)
        asked = amount * sum(entries)
        if total < asked and resource.startswith("accelerator_type:"):
            return f"nodes whose accelerators are of type {resource.partition(':')[2]} ({resource})"
        if total < asked:
            hint = "; use_gpu=False makes CPU-only slots" if resource == "GPU" and total == 0 else ""
            return f"{asked - total:g} {resource} (asked {asked:g}, there are {total:g}){hint}"
    most = max((_fits(bundle, node.total) for node in cluster), default=0)
    if strategy == "STRICT_PACK" and max(entries) > most:
        return f"a node for {_plural(max(entries), 'process')}; the largest holds {most}"
    if room < sum(entries):
        return f"room for {_plural(sum(entries) - room, 'process')}"
    if strategy == "STRICT_PACK" and not _pack_entries(
        sorted(entries, reverse=True), [_fits(bundle, node.total) for node in cluster]
    ):
        return "nodes that hold whole entries; the entries do not fit side by side"
    return "nothing, but it is in use now, by other pools of this script or by others"


def _pack_entries(entries: list[int], room: list[int], budget: int = 20_000) -> bool:
    """Whether whole entries, the largest first, fit into the nodes. Gives up, with yes, past its budget."""
    steps = 0

    def fit(position: int) -> bool:
        nonlocal steps
        steps += 1
        if position == len(entries) or steps > budget:
            return True
        tried: set[int] = set()
        for node, left in enumerate(room):
            if left < entries[position] or left in tried:
                continue
            tried.add(left)
            room[node] -= entries[position]
            fits = fit(position + 1)
            room[node] += entries[position]
            if fits:
                return True
        return False

    return fit(0)


def _fits(bundle: dict[str, float], has: dict[str, float]) -> int:
    return min((int(has.get(r, 0.0) / amount + 1e-6) for r, amount in bundle.items() if amount > 0), default=0)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}es"


def wait_placed(refs: Sequence[Any], placements: Sequence[Placement], timeout: float, name: str) -> None:
    """Wait until the actors of a group have answered once; say every few seconds what they wait for.

    Raises:
        PlacementError: they were not placed within ``timeout`` seconds.
    """
    start = time.monotonic()
    refs = list(refs)
    first = True
    while True:
        pause = min(SAY_SECONDS, max(0.0, start + timeout - time.monotonic()))
        _, pending = ray.wait(refs, num_returns=len(refs), timeout=pause, fetch_local=False)
        if not pending:
            return
        waited = time.monotonic() - start
        unplaced = [placement for placement in placements if not placement.ready()]
        if not unplaced:
            if waited >= timeout:
                raise PlacementError(
                    f"{name}: {len(pending)} of {len(refs)} workers did not start within {timeout:g} s, although "
                    "their slots are reserved: the slots are full, or the nodes start no processes"
                )
            continue
        table = "\n".join(placement.explain() for placement in unplaced)
        if waited >= timeout:
            raise PlacementError(f"{name} was not placed within {timeout:g} s.\n{table}")
        logger.warning("%s: waiting to be placed for %.0f s (of %g)%s", name, waited, timeout, f"\n{table}" * first)
        first = False
