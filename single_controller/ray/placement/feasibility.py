"""The feasibility check: what these nodes can never hold, and where slots would be.

The check compares totals. What they rule out is refused at once; everything else is left to Ray, and a pool that Ray
does not place within its timeout raises with the same table, that of `plan`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from single_controller.ray.placement.slots import Slot, assign_ranks, device_kinds
from single_controller.ray.rank.actor import Location
from single_controller.ray.runtime import Node

_EPSILON = 1e-6

Amounts = Mapping[str, float]
"""Resource -> amount; memory in bytes."""


@dataclass(frozen=True)
class Request:
    """What a pool asks Ray for."""

    entries: tuple[int, ...]  # processes of each entry
    bundle: Amounts  # what each slot reserves
    strategy: str  # Ray's strategy for each placement group
    across: bool = False  # whether one placement group holds all entries, rather than one for each

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots of each placement group."""
        return (sum(self.entries),) if self.across else self.entries

    @property
    def largest_first(self) -> list[int]:
        """Indices of the placement groups in the order in which they are created."""
        return sorted(range(len(self.sizes)), key=lambda number: -self.sizes[number])

    def slots(self) -> list[Slot]:
        """The slots entry by entry, before anything is reserved."""
        entries = [(entry, k) for entry, size in enumerate(self.entries) for k in range(size)]
        return [Slot(None, number if self.across else k, entry) for number, (entry, k) in enumerate(entries)]

    def __str__(self) -> str:
        each = ", ".join(f"{format_amount(name, amount)} {name}" for name, amount in self.bundle.items())
        how = "by node" if self.strategy == "STRICT_PACK" and not self.across else self.strategy
        how += " in one placement group" if self.across else ""
        return f"asked: {count_processes(sum(self.entries))}, {list(self.entries)} {how}, each with {each}"


def join_requests(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with those as one that agree in bundle and strategy."""
    joint: list[Request] = []
    for request in requests:
        for index, other in enumerate(joint):
            if (other.bundle, other.strategy) == (request.bundle, request.strategy):
                joint[index] = Request(other.sizes + request.sizes, other.bundle, other.strategy)
                break
        else:
            joint.append(request)
    return joint


# --- the check ------------------------------------------------------------------------------------------------


def slots_that_fit(bundle: Amounts, node: Amounts) -> int:
    """Return how many slots fit into what a node has."""
    return min((_count(name, amount, node.get(name, 0.0)) for name, amount in bundle.items() if amount > 0), default=0)


def _count(name: str, amount: float, has: float) -> int:
    if name != "GPU" or amount >= 1:
        return int(has / amount + _EPSILON)
    # A part of a GPU is on one GPU: two GPUs have room for two slots of 0.6, not for three. Ray does not say where the
    # free parts are; they are assumed to be on as few GPUs as possible.
    whole, part = divmod(has, 1.0)
    return int(whole) * _slots_per_gpu(amount) + int(part / amount + _EPSILON)


def _slots_per_gpu(amount: float) -> int:
    return int(1 / amount + _EPSILON)


def _taken(name: str, amount: float) -> float:
    """What one of several equal slots takes: each an equal part of a GPU, because no other fits into what is left."""
    return 1 / _slots_per_gpu(amount) if name == "GPU" and amount < 1 else amount


def shortage(requests: Sequence[Request], nodes: Sequence[Amounts], *, free: bool = False) -> str:
    """Return in words what the nodes lack to hold several requests side by side; empty if totals do not rule it out.
    Exact for one request with PACK, SPREAD or STRICT_SPREAD. For STRICT_PACK some arrangements that cannot work pass.
    ``free``: whether the amounts are what is free now, for the wording."""
    asked = Counter[str]()
    for request in requests:
        asked.update({name: amount * sum(request.entries) for name, amount in request.bundle.items()})
    short = []
    for name, amount in asked.items():
        there = sum(node.get(name, 0.0) for node in nodes)
        if there >= amount - _EPSILON:
            continue
        if name.startswith("accelerator_type:"):
            short.append(f"nodes whose accelerators are of type {name.partition(':')[2]} ({name})")
            continue
        missing, wanted, has = (format_amount(name, value) for value in (amount - there, amount, there))
        hint = "; use_gpu=False makes CPU-only slots" if name == "GPU" and there == 0 and not free else ""
        short.append(f"{missing} {name} (asked {wanted}, {'free' if free else 'there'} are {has}){hint}")
    return "; ".join(short or filter(None, (_missing_room(request, nodes) for request in join_requests(requests))))


def _missing_room(request: Request, nodes: Sequence[Amounts]) -> str:
    """In words, what nodes whose totals suffice lack because slots and entries do not spread over nodes at will."""
    rooms = [slots_that_fit(request.bundle, node) for node in nodes]
    sizes = sorted(request.sizes, reverse=True)
    if request.strategy == "STRICT_PACK":
        for size in sorted(set(sizes), reverse=True):
            # A node with room for r slots holds at most r // size of the entries that have `size` slots or more.
            entries, able = sum(other >= size for other in sizes), sum(room // size for room in rooms)
            if not able:
                return f"a node for {count_processes(size)}; the largest holds {max(rooms, default=0)}"
            if entries > able:
                return (
                    f"nodes for whole entries: {entries} entries have {count_processes(size)} or more, room for {able}"
                )
    if request.strategy == "STRICT_SPREAD":
        for count in range(1, len(sizes) + 1):
            # Each of `count` placement groups takes at most one slot of a node.
            asked, able = sum(sizes[:count]), sum(min(room, count) for room in rooms)
            if asked > able and count == 1:
                return f"{asked} nodes, one for each process; {able} can hold one"
            if asked > able:
                return f"more nodes: {count} placement groups need a node of their own for each process"
    return "" if sum(rooms) >= sum(sizes) else f"room for {count_processes(sum(sizes) - sum(rooms))}"


# --- forecasts ------------------------------------------------------------------------------------------------


def forecast(request: Request, cluster: Sequence[Node], free: Sequence[dict[str, float]]) -> list[Slot] | None:
    """Return by rank the slots of a request that Ray has not been sent, where they would be; None if it would wait.
    What the request takes is subtracted from ``free``, what each node has left."""
    homes = expected_nodes(request, free)
    if homes is None:
        return None
    locations: dict[tuple[int, int], Location] = {}
    for group in request.largest_first:  # in the order in which Ray gets them
        for number, home in enumerate(homes[group]):
            node = cluster[home]
            devices = _next_devices(request.bundle, node, free[home])
            locations[group, number] = Location(node.address, node.hostname, node.node_id, devices)
            for name, amount in request.bundle.items():
                free[home][name] = free[home].get(name, 0.0) - _taken(name, amount)
    by_slot = [locations[key] for key in sorted(locations)]
    return assign_ranks(request.slots(), by_slot, request.entries if request.across else None)


def _next_devices(bundle: Amounts, node: Node, left: Amounts) -> tuple[str, ...] | None:
    """The devices of the next slot on a node. Ray hands out the GPUs of a node from the first on; once one was in use
    it is unknown which come next, and the devices are None."""
    kinds = device_kinds(bundle)
    total = node.total.get("GPU", 0.0)
    if not kinds:
        return ()
    if kinds != {"GPU"} or node.free.get("GPU") != total:
        return None
    taken = total - left.get("GPU", 0.0)
    end = taken + _taken("GPU", bundle["GPU"])
    return tuple(map(str, range(int(taken + _EPSILON), math.ceil(end - _EPSILON))))


def expected_nodes(request: Request, nodes: Sequence[Amounts], tight: bool = False) -> list[list[int]] | None:
    """Return by placement group the index of the node of each slot, or None if the slots do not fit in that way.

    The largest placement group comes first, on the node with the most room, so that entries are apart. If that leaves
    one without a place, ``tight``: on the node with the least room that holds it.
    """
    rooms = [slots_that_fit(request.bundle, node) for node in nodes]
    chosen: list[list[int]] = [[] for _ in request.sizes]
    for number in request.largest_first:
        homes, size = chosen[number], request.sizes[number]
        least = size if request.strategy == "STRICT_PACK" else 1
        most = 1 if request.strategy.endswith("SPREAD") else size
        order = sorted((node for node, room in enumerate(rooms) if room >= least), key=lambda node: -rooms[node])
        if tight:
            order.reverse()
        enough = len(order) if request.strategy == "STRICT_SPREAD" else sum(rooms[node] for node in order)
        if enough < size:
            return None if tight else expected_nodes(request, nodes, tight=True)
        while len(homes) < size:  # SPREAD may take several rounds
            for node in order:
                take = min(rooms[node], most, size - len(homes))
                homes += [node] * take
                rooms[node] -= take
    return chosen


def format_amount(resource: str, amount: float) -> str:
    """Return an amount as text; memory in GiB."""
    return f"{amount / 2**30:.4g} GiB" if resource == "memory" else f"{amount:g}"


def count_processes(count: int) -> str:
    """Return a number of processes in words."""
    return f"{count} process" if count == 1 else f"{count} processes"
