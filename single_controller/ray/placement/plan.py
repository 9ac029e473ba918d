"""Plans of pools and groups: where every rank is or would be, what each node has, and what is missing, as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dispatch.tables import aligned
from single_controller.call.errors import PlacementError
from single_controller.ray.placement.feasibility import (
    Request,
    count_processes,
    format_amount,
    join_requests,
    shortage,
    slots_that_fit,
)
from single_controller.ray.placement.slots import Slot
from single_controller.ray.rank.actor import Location
from single_controller.ray.runtime import Node

State = Literal["placed", "fits", "waits", "impossible"]

_HEADLINE: dict[State, str] = {
    "impossible": "{} can never be placed here.",
    "waits": "{} has to wait to be placed.",
    "fits": "{} can be placed now. Nothing is reserved yet: the ranks are shown where they would be.",
    "placed": "{} is placed.",
}

_INTERNAL_RESOURCES = re.compile(r"node:|object_store_memory$|.*_group_([0-9]+_)?[0-9a-f]{16,}$|accelerator_type:")
"""Resources that the table leaves out unless they are asked for: those of single nodes and of reserved bundles."""

_COLUMNS = ("CPU", "GPU", "memory")


@dataclass(frozen=True)
class RankPlan:
    """Where one rank is, or would be.

    Attributes:
        rank: the rank.
        node_id, address, hostname: of the node.
        entry, bundle: number of the pool's entry, and of the bundle in its placement group; None for a worker of a
            group that was attached to.
        devices: ids of its devices; () without any, None if they are unknown until a process runs there. For a slot
            that is not reserved yet: those that Ray hands out next on a node whose GPUs are all free.
    """

    rank: int
    node_id: str
    address: str
    hostname: str
    entry: int | None
    bundle: int | None
    devices: tuple[str, ...] | None

    @property
    def device(self) -> str | None:
        """The ids of its devices as text, ``"3"``; None without any, or if they are unknown."""
        return ",".join(self.devices) if self.devices else None


@dataclass(frozen=True)
class StandbyPlan:
    """Where one standby of a group is, and what it costs besides its slot."""

    group: str  # the group's name
    address: str  # of the node; "?" while the process starts
    hostname: str  # likewise
    entry: int  # as in `RankPlan`
    bundle: int
    memory: int | None  # the process's resident memory in bytes when it was ready; None while it starts


@dataclass(frozen=True)
class PoolPlan:
    """Where the ranks of a pool or a group are, or would be. Prints as a table.

    Attributes:
        what: the pool or group.
        state: ``"placed"``: the slots are reserved, and the ranks are shown where they are. ``"fits"``: the ranks are
            shown where they would be, by what is free now; another reservation may come first. ``"waits"``: what the
            pool needs is in use. ``"impossible"``: the nodes cannot hold it even if nothing else runs there.
        ranks: by rank; () for a pool that waits or is impossible.
        nodes: the living nodes, by address.
        requests: what Ray is or would be asked for; () for a group.
        missing: what is missing, in words.
        standbys: the standbys of the group, or of the pool's groups.
    """

    what: str
    state: State
    ranks: tuple[RankPlan, ...]
    nodes: tuple[Node, ...]
    requests: tuple[Request, ...] = ()
    missing: str = "nothing"
    standbys: tuple[StandbyPlan, ...] = ()

    @property
    def asked(self) -> str:
        """What is asked for, in words."""
        return "\n".join(map(str, self.requests)) or f"runs: {count_processes(len(self.ranks))}"

    def __str__(self) -> str:
        lines = [_HEADLINE[self.state].format(self.what), self.asked, *self._node_table()]
        if self.state != "placed":
            lines.append(f"missing: {self.missing}")
        return "\n".join([*lines, *self._rank_table(), *self._standby_table()])

    def _node_table(self) -> list[str]:
        request = self.requests[0] if self.requests else Request((), {}, "PACK")
        names = {name for node in self.nodes for name in node.total if not _INTERNAL_RESOURCES.match(name)}
        names |= set(request.bundle)
        resources = [name for name in _COLUMNS if name in names] + sorted(names - set(_COLUMNS))
        lacking = [self._lacks(node, request) for node in self.nodes]
        rows = []
        for node, lacks in zip(self.nodes, lacking, strict=True):
            row = {"node": f"{node.address} ({node.hostname})"}
            for name in resources:
                free, total = (format_amount(name, has.get(name, 0.0)) for has in (node.free, node.total))
                row[f"{name} free/total"] = f"{free.removesuffix(' GiB')}/{total}"
            if self.requests:
                now, most = (slots_that_fit(request.bundle, has) for has in (node.free, node.total))
                row["processes now/at most"] = f"{now}/{most}"
            if any(lacking):
                row["lacks"] = lacks or "-"
            rows.append(row)
        return _table(rows)

    def _lacks(self, node: Node, request: Request) -> str:
        """What the largest entry (a slot, if an entry may span nodes) lacks on a node, in words."""
        if self.state in ("fits", "placed"):
            return ""
        has = node.total if self.state == "impossible" else node.free
        together = max(request.sizes) if request.strategy == "STRICT_PACK" else 1
        lacks = {name: amount * together - has.get(name, 0.0) for name, amount in request.bundle.items()}
        return ", ".join(f"{format_amount(name, amount)} {name}" for name, amount in lacks.items() if amount > 1e-6)

    def _rank_table(self) -> list[str]:
        rows = []
        for rank in self.ranks:
            expected = "~" if self.state == "fits" and rank.devices else ""
            device = "?" if rank.devices is None else f"{expected}{rank.device or '-'}"
            rows.append({"rank": rank.rank, **_where(rank), "device": device})
        return _table(rows)

    def _standby_table(self) -> list[str]:
        rows = []
        for one in self.standbys:
            memory = "starting" if one.memory is None else f"{one.memory / 2**20:.0f} MiB"
            rows.append({"standby of": one.group, **_where(one), "memory": memory})
        return _table(rows)


def _table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    return aligned([list(rows[0]), *(list(map(str, row.values())) for row in rows)]) if rows else []


def _where(one: RankPlan | StandbyPlan) -> dict[str, object]:
    entry, bundle = ("-" if number is None else number for number in (one.entry, one.bundle))
    return {"node": f"{one.address} ({one.hostname})", "entry": entry, "bundle": bundle}


def plan_pool(
    what: str,
    requests: Sequence[Request],
    waiting: Sequence[Request],
    slots: Sequence[Slot],
    cluster: Sequence[Node],
    standbys: Sequence[StandbyPlan] = (),
) -> PoolPlan:
    """Return the plan of a pool: ``requests`` are those of the reservations that its slots are in, ``waiting`` those
    for which there is no room now, and ``slots`` its own by rank, with locations; () if any request is waiting."""
    state: State = "fits" if any(slot.placement_group is None for slot in slots) else "placed"
    missing = "nothing"
    if waiting:
        state, missing = "impossible", shortage(requests, [node.total for node in cluster])
        if not missing:
            lacking = shortage(waiting, [node.free for node in cluster], free=True)
            in_use = f"nothing, but it is in use now, by other pools of this script or by others: {lacking}"
            apart = "an arrangement in which whole entries fit side by side: smaller entries, or across_nodes=True"
            state, missing = "waits", in_use if lacking else apart
    located = [(slot.location, slot) for slot in slots if slot.location is not None]
    asked = tuple(join_requests(requests))
    return PoolPlan(what, state, plan_ranks(located), tuple(cluster), asked, missing, tuple(standbys))


def refuse_impossible(requests: Sequence[Request], cluster: Sequence[Node], what: str) -> None:
    """Raise a `PlacementError` with a table of the nodes if these cannot hold several requests side by side, even when
    nothing else runs there."""
    if shortage(requests, [node.total for node in cluster]):
        raise PlacementError(str(plan_pool(what, requests, requests, (), cluster)))


def plan_ranks(located: Sequence[tuple[Location, Slot | None]]) -> tuple[RankPlan, ...]:
    """Return the plans of ranks, by the location and the slot of each."""
    ranks = []
    for rank, (where, slot) in enumerate(located):
        entry, bundle = (None, None) if slot is None else (slot.entry, slot.bundle)
        ranks.append(RankPlan(rank, where.node_id, where.address, where.hostname, entry, bundle, where.devices))
    return tuple(ranks)
