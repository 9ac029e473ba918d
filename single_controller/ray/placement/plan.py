"""Plans of pools and groups: where every rank is or would be, what each node has, and what is missing, as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dispatch.tables import aligned
from single_controller.call.errors import PlacementError
from single_controller.ray.placement.feasibility import (
    Amounts,
    Forecast,
    Request,
    State,
    count_processes,
    format_amount,
    join_requests,
    shortage,
    slots_that_fit,
)
from single_controller.ray.placement.slots import Slot, SlotLocation
from single_controller.ray.runtime import Node

_HEADLINE: dict[State, str] = {  # the worst state first
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
        node_id: Ray's id of the node.
        address: the node's address.
        hostname: the node's name.
        entry: number of the pool's entry; None for a worker of a group that was attached to.
        bundle: index of the bundle in its placement group; None likewise.
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
    """Where one standby of a group is, and what it costs besides its slot.

    Attributes:
        group: the group's name.
        address: the node's address; "?" while the process starts.
        hostname: the node's name; likewise.
        entry: number of the pool's entry.
        bundle: index of the bundle in its placement group.
        memory: the process's resident memory in bytes when it was ready; None while it starts.
    """

    group: str
    address: str
    hostname: str
    entry: int
    bundle: int
    memory: int | None


@dataclass(frozen=True)
class NodePlan(Node):
    """What one node has: a `Node` without Ray's internal resources.

    Attributes:
        now: slots of this pool that fit into what is free; None in a group's plan.
        most: slots that fit into the whole node; None likewise.
        lacks: resource -> what the largest entry (a slot, if an entry may span nodes) lacks on this node.
    """

    now: int | None = None
    most: int | None = None
    lacks: Amounts = field(default_factory=dict)


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
        asked: what is asked for, in words.
        missing: what is missing, in words.
        standbys: the standbys of the group, or of the pool's groups.
    """

    what: str
    state: State
    ranks: tuple[RankPlan, ...]
    nodes: tuple[NodePlan, ...]
    asked: str
    missing: str
    standbys: tuple[StandbyPlan, ...] = ()

    @property
    def headline(self) -> str:
        """The state, in words."""
        return _HEADLINE[self.state].format(self.what)

    def __str__(self) -> str:
        lines = [self.headline, self.asked, *self._node_table()]
        if self.state != "placed":
            lines.append(f"missing: {self.missing}")
        return "\n".join([*lines, *self._rank_table(), *self._standby_table()])

    def _node_table(self) -> list[str]:
        names = {name for node in self.nodes for name in node.total}
        resources = [name for name in _COLUMNS if name in names] + sorted(names - set(_COLUMNS))
        rows = []
        for node in self.nodes:
            row = {"node": f"{node.address} ({node.hostname})"}
            for name in resources:
                free, total = (format_amount(name, has.get(name, 0.0)) for has in (node.free, node.total))
                row[f"{name} free/total"] = f"{free.removesuffix(' GiB')}/{total}"
            if node.now is not None:
                row["processes now/at most"] = f"{node.now}/{node.most}"
            if any(other.lacks for other in self.nodes):
                lacks = (f"{format_amount(name, amount)} {name}" for name, amount in node.lacks.items())
                row["lacks"] = ", ".join(lacks) or "-"
            rows.append(row)
        return _table(rows)

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
    forecasts: Sequence[Forecast],
    slots: Sequence[Slot] | None,
    cluster: Sequence[Node],
    standbys: Sequence[StandbyPlan] = (),
) -> PoolPlan:
    """Return the plan of a pool.

    Args:
        what: the pool, in words.
        forecasts: of the reservations that its slots are in.
        slots: its own slots by rank, with locations; None where they cannot be told.
        cluster: the nodes.
        standbys: of the pool's groups.
    """
    state = min((each.state for each in forecasts), key=list(_HEADLINE).index)
    worst = [each.request for each in forecasts if each.state == state]
    missing = "nothing"
    if state == "impossible":
        missing = "; ".join(shortage(request, [node.total for node in cluster]) for request in worst)
    elif state == "waits" and all(n.free.get(name) == n.total.get(name) for n in cluster for name in worst[0].bundle):
        missing = "an arrangement in which whole entries fit side by side: smaller entries, or across_nodes=True"
    elif state == "waits":
        words = "; ".join(filter(None, (shortage(one, [n.free for n in cluster], free=True) for one in worst)))
        missing = "nothing, but it is in use now, by other pools of this script or by others" + (words and f": {words}")
    joint = join_requests([each.request for each in forecasts])
    asked = "\n".join(map(str, [joint] if joint and len(forecasts) > 1 else [each.request for each in forecasts]))
    shown = slots or () if state in ("fits", "placed") else ()
    ranks = tuple(_rank_plan(rank, slot.location, slot) for rank, slot in enumerate(shown) if slot.location is not None)
    nodes = tuple(_node_plan(node, worst[0], state) for node in cluster)
    return PoolPlan(what, state, ranks, nodes, asked, missing, tuple(standbys))


def refuse_impossible(request: Request, cluster: Sequence[Node], what: str) -> None:
    """Raise if the nodes cannot hold a request even when nothing else runs there.

    Raises:
        PlacementError: with a table of the nodes.
    """
    if shortage(request, [node.total for node in cluster]):
        raise PlacementError(str(plan_pool(what, [Forecast(request, "impossible")], None, cluster)))


def plan_group(
    what: str,
    ranks: Sequence[tuple[SlotLocation, Slot | None]],
    cluster: Sequence[Node],
    standbys: Sequence[StandbyPlan] = (),
) -> PoolPlan:
    """Return the plan of a group that runs: the location and the slot of each rank, None for the slots of a group that
    was attached to."""
    plans = tuple(_rank_plan(rank, where, slot) for rank, (where, slot) in enumerate(ranks))
    asked = f"runs: {count_processes(len(plans))}"
    return PoolPlan(what, "placed", plans, tuple(map(_node_plan, cluster)), asked, "nothing", tuple(standbys))


def _rank_plan(rank: int, where: SlotLocation, slot: Slot | None) -> RankPlan:
    entry, bundle = (None, None) if slot is None else (slot.entry, slot.bundle)
    return RankPlan(rank, where.node_id, where.address, where.hostname, entry, bundle, where.devices)


def _node_plan(node: Node, request: Request | None = None, state: State = "placed") -> NodePlan:
    bundle: Amounts = {} if request is None else request.bundle
    total = {name: has for name, has in node.total.items() if name in bundle or not _INTERNAL_RESOURCES.match(name)}
    total |= {name: 0.0 for name in bundle if name not in total}
    free = {name: node.free.get(name, 0.0) for name in total}
    if request is None:
        return NodePlan(node.node_id, node.address, node.hostname, total, free)
    together = max(request.sizes) if request.strategy == "STRICT_PACK" else 1
    has = {"impossible": total, "waits": free}.get(state, {})
    lacks = {name: bundle[name] * together - amount for name, amount in has.items() if name in bundle}
    lacks = {name: amount for name, amount in lacks.items() if amount > 1e-6}
    now, most = slots_that_fit(bundle, node.free), slots_that_fit(bundle, node.total)
    return NodePlan(node.node_id, node.address, node.hostname, total, free, now, most, lacks)
