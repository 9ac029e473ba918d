"""The dry run: which node, bundle and device every rank has or would get, and what is short. Nothing is started by it.

The plan's text is a table; the errors of pools that cannot be placed carry the same text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from single_controller.base.errors import PlacementError
from single_controller.ray import dry_run_drawing
from single_controller.ray.accelerators import device_kinds
from single_controller.ray.order import Found, Seat, Slot, Spot, seated
from single_controller.ray.packing import GaveUp, Request, amount_of, fit, largest_first, room, take
from single_controller.ray.runtime import Node

State = Literal["placed", "fits", "waits", "impossible"]

_WORST_FIRST: tuple[State, ...] = ("impossible", "waits", "fits", "placed")

_HEADLINE: dict[State, str] = {
    "placed": "{} is placed.",
    "fits": "{} can be placed now. Nothing is reserved yet: the ranks stand where they would, by what is free.",
    "waits": "{} has to wait to be placed: the nodes could hold it, but not beside what is in use.",
    "impossible": "{} can never be placed here.",
}

_RAYS_INSIDE = re.compile(r"node:|object_store_memory$|.*_group_([0-9]+_)?[0-9a-f]{16,}$")
"""Resources that no user asks for: those of single nodes, and those of reserved bundles."""


@dataclass(frozen=True)
class RankPlan:
    """Where one rank is, or would be.

    Attributes:
        rank: the rank.
        node_id: Ray's id of the node.
        address: the node's address.
        hostname: the node's name.
        entry: number of the pool's entry that it belongs to; None for a worker that was attached to.
        bundle: index of the bundle in its placement group; None likewise.
        devices: ids of its devices; () without any, None where they cannot be known before a process is there. Of a
            slot that is not reserved yet they are those that Ray gives next on a node whose GPUs are all free.
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
        """The ids of its devices as text, ``"3"``; None without any, or where they cannot be known."""
        return ",".join(self.devices) if self.devices else None


@dataclass(frozen=True)
class NodePlan:
    """What one node has.

    Attributes:
        node_id: Ray's id of it.
        address: its address.
        hostname: its name.
        free: resource -> amount that nothing has reserved; memory in bytes.
        total: resource -> amount.
        now: process slots of this pool that what is free would hold; None for a group's plan.
        most: slots that the whole node would hold; None likewise.
        lacks: resource -> what the largest entry (or a slot, where an entry may lie on several nodes) lacks there.
    """

    node_id: str
    address: str
    hostname: str
    free: Mapping[str, float]
    total: Mapping[str, float]
    now: int | None
    most: int | None
    lacks: Mapping[str, float]


@dataclass(frozen=True)
class PoolPlan:
    """Where the ranks of a pool or a group are, or would be. Prints as a table; a notebook draws it.

    Attributes:
        what: the pool or group.
        state: ``"placed"``: the slots are reserved, and the ranks stand where they are. ``"fits"``: they stand where
            they would, by what is free now; somebody else may be quicker. ``"waits"``: what it needs is in use.
            ``"impossible"``: these nodes could not hold it if nothing else ran there.
        ranks: by rank; () for a pool that waits or is impossible.
        nodes: the living nodes, by address.
        asked: what is asked for, in words.
        missing: what is missing, in words.
    """

    what: str
    state: State
    ranks: tuple[RankPlan, ...]
    nodes: tuple[NodePlan, ...]
    asked: str
    missing: str

    @property
    def headline(self) -> str:
        """The state, in words."""
        return _HEADLINE[self.state].format(self.what)

    def __str__(self) -> str:
        return dry_run_drawing.table(self)

    def _repr_svg_(self) -> str | None:
        """What a notebook shows."""
        return dry_run_drawing.picture(self)


@dataclass(frozen=True)
class Outlook:
    """What becomes of the slots of one pool that has placement groups of its own.

    Attributes:
        request: what it asks for.
        state: see `PoolPlan`.
        seats: by rank; None while nobody can tell.
    """

    request: Request
    state: State
    seats: tuple[Seat, ...] | None = None


def foresee(request: Request, cluster: Sequence[Node], left: Sequence[dict[str, float]]) -> Outlook:
    """What would become of a request. Ray decides by the sum of what each node has free, and so does this: fractions of
    several GPUs that add up to one are taken for a free GPU.

    Args:
        request: what is asked for.
        cluster: the nodes.
        left: what is free on each; what the request would take is taken off.
    """
    try:
        if fit(request, [node.total for node in cluster]) is None:
            return Outlook(request, "impossible")
        homes = fit(request, left)
    except GaveUp:
        homes = None
    if homes is None:
        return Outlook(request, "waits")
    devices = _next_devices(request, cluster, left, homes)
    take(homes, request.bundle, left)
    flat = [cluster[home] for group in homes for home in group]
    spots = [Spot(node.address, node.hostname, node.node_id, mine) for node, mine in zip(flat, devices, strict=True)]
    return Outlook(request, "fits", seated(request.slots(), spots, request.entries if request.across else None))


def _next_devices(
    request: Request, cluster: Sequence[Node], left: Sequence[Mapping[str, float]], homes: Sequence[Sequence[int]]
) -> list[tuple[str, ...] | None]:
    """The devices that each slot would get, as declared. Ray hands out a node's GPUs from the first on, placement group
    by placement group; of a node where some are in use, nobody can tell which.

    Args:
        request: what is asked for.
        cluster: the nodes.
        left: what is free on each when the request comes.
        homes: by placement group, the index of each slot's node.
    """
    kinds = device_kinds(request.bundle)
    if not kinds:
        return [()] * sum(request.sizes)
    amount = request.bundle.get("GPU", 0.0)
    found: list[list[tuple[str, ...] | None]] = [[None] * len(nodes) for nodes in homes]
    given = [node.total.get("GPU", 0.0) - has.get("GPU", 0.0) for node, has in zip(cluster, left, strict=True)]
    for group in largest_first(request.sizes):
        for slot, home in enumerate(homes[group]):
            node = cluster[home]
            if set(kinds) == {"GPU"} and node.free.get("GPU") == node.total.get("GPU"):
                first, last = int(given[home] + 1e-6), math.ceil(given[home] + amount - 1e-6)
                found[group][slot] = tuple(map(str, range(first, last)))
            given[home] += amount
    return [devices for group in found for devices in group]


def plan_pool(
    what: str,
    outlooks: Sequence[Outlook],
    seats: Sequence[Seat] | None,
    cluster: Sequence[Node],
    joint: Request | None = None,
) -> PoolPlan:
    """The plan of a pool.

    Args:
        what: the pool, in words.
        outlooks: those of the pools whose slots it has.
        seats: its own slots by rank, None while nobody can tell.
        cluster: the nodes.
        joint: what those pools ask for as one request, if it is of one kind.
    """
    state = min((outlook.state for outlook in outlooks), key=_WORST_FIRST.index)
    short = [outlook for outlook in outlooks if outlook.state == state]
    missing = "nothing" if state in ("fits", "placed") else "; ".join(_missing(o, cluster) for o in short)
    ranks = [
        RankPlan(rank, s.spot.node_id, s.spot.address, s.spot.hostname, s.slot.entry, s.slot.bundle, s.spot.devices)
        for rank, s in enumerate(seats or ())
        if s.spot is not None
    ]
    asked = "\n".join(map(_asked, [joint] if joint else [outlook.request for outlook in outlooks]))
    nodes = tuple(_node(node, short[0]) for node in cluster)
    return PoolPlan(what, state, tuple(ranks) if state in ("fits", "placed") else (), nodes, asked, missing)


def plan_of_ranks(
    what: str, places: Sequence[Found], seats: Sequence[Seat] | None, cluster: Sequence[Node]
) -> PoolPlan:
    """The plan of a group that runs.

    Args:
        what: the group, in words.
        places: where each rank found itself, with ``hostname``.
        seats: the slots of its pool by rank, if that is known.
        cluster: the nodes.
    """
    slots: Sequence[Slot | None] = [seat.slot for seat in seats] if seats else [None] * len(places)
    ranks = tuple(
        RankPlan(
            rank,
            place.node_id,
            place.address,
            getattr(place, "hostname", ""),
            slot.entry if slot else None,
            slot.bundle if slot else None,
            place.devices,
        )
        for rank, (place, slot) in enumerate(zip(places, slots, strict=True))
    )
    nodes = tuple(_node(node, None) for node in cluster)
    return PoolPlan(what, "placed", ranks, nodes, f"runs: {_plural(len(ranks), 'process')}", "nothing")


def refuse_impossible(
    entries: Sequence[int],
    bundle: Mapping[str, float],
    strategy: str,
    cluster: Sequence[Node],
    what: str = "the pool",
    across: bool = False,
) -> None:
    """Raise if these entries cannot lie on the nodes even when nothing else runs there.

    Raises:
        PlacementError: with a table by node.
    """
    request = Request(tuple(entries), bundle, strategy, across)
    outlook = foresee(request, cluster, [dict(node.total) for node in cluster])
    if outlook.state == "impossible":
        raise PlacementError(str(plan_pool(what, [outlook], None, cluster)))


def _node(node: Node, outlook: Outlook | None) -> NodePlan:
    asked = () if outlook is None else outlook.request.bundle
    total = {
        name: amount
        for name, amount in node.total.items()
        if name in asked or not (_RAYS_INSIDE.match(name) or name.startswith("accelerator_type:"))
    }
    free = {name: node.free.get(name, 0.0) for name in total}
    now = most = None
    lacks: dict[str, float] = {}
    if outlook is not None:
        request = outlook.request
        now, most = room(request.bundle, node.free), room(request.bundle, node.total)
        total |= {name: 0.0 for name in request.bundle if name not in total}
        free |= {name: 0.0 for name in request.bundle if name not in free}
        has = {"impossible": total, "waits": free}.get(outlook.state)
        if has is not None:
            wanted = {name: amount * request.together for name, amount in request.bundle.items()}
            lacks = {name: amount - has[name] for name, amount in wanted.items() if amount > has[name] + 1e-9}
    return NodePlan(node.node_id, node.address, node.hostname, free, total, now, most, lacks)


def _asked(request: Request) -> str:
    each = ", ".join(f"{amount_of(name, amount)} {name}" for name, amount in request.bundle.items())
    how = "by node" if request.strategy == "STRICT_PACK" and not request.across else request.strategy
    how += " in one placement group" if request.across else ""
    return f"asked: {_plural(sum(request.entries), 'process')}, {list(request.entries)} {how}, each with {each}"


def _missing(outlook: Outlook, cluster: Sequence[Node]) -> str:
    request = outlook.request
    count = sum(request.entries)
    if outlook.state == "waits":
        short = _short(request, [node.free for node in cluster], "free are")
        words = ": " + "; ".join(short) if short else ""
        return f"nothing, but it is in use now, by other pools of this script or by others{words}"
    short = _short(request, [node.total for node in cluster], "there are")
    if short:
        return "; ".join(short)
    rooms = [room(request.bundle, node.total) for node in cluster]
    most = max(rooms, default=0)
    if request.together > most:
        return f"a node for {_plural(request.together, 'process')}; the largest holds {most}"
    if request.strategy == "STRICT_SPREAD" and max(request.sizes) > sum(map(bool, rooms)):
        apart, able = max(request.sizes), sum(map(bool, rooms))
        return f"{apart} nodes, one for each process; {able} can hold one"
    if sum(rooms) < count:
        return f"room for {_plural(count - sum(rooms), 'process')}"
    return "nodes that hold whole entries; the entries do not fit side by side"


def _short(request: Request, nodes: Sequence[Mapping[str, float]], has: str) -> list[str]:
    """The resources of which there is not enough in all."""
    short = []
    for name, amount in request.bundle.items():
        total = sum(node.get(name, 0.0) for node in nodes)
        asked = amount * sum(request.entries)
        if total >= asked - 1e-9:
            continue
        if name.startswith("accelerator_type:"):
            short.append(f"nodes whose accelerators are of type {name.partition(':')[2]} ({name})")
            continue
        hint = "; use_gpu=False makes CPU-only slots" if name == "GPU" and has == "there are" and total == 0 else ""
        missing, wanted, there = (amount_of(name, x) for x in (asked - total, asked, total))
        short.append(f"{missing} {name} (asked {wanted}, {has} {there}){hint}")
    return short


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}es"
