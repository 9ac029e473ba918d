"""Which nodes hold which process slots: arithmetic alone, for the dry run and for what can never be placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from single_controller.ray.order import Slot

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

Amounts = Mapping[str, float]

_SEARCH_STEPS = 20_000
_SEARCH_ENTRIES = 200


class GaveUp(Exception):
    """Whole entries may fit side by side or not: finding out takes too long."""


@dataclass(frozen=True)
class Request:
    """What one pool asks Ray for.

    Attributes:
        entries: processes of each entry.
        bundle: what each process slot reserves.
        strategy: Ray's strategy for each placement group.
        across: whether one placement group holds all entries, rather than one each.
    """

    entries: tuple[int, ...]
    bundle: Amounts
    strategy: str
    across: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots of each placement group."""
        return (sum(self.entries),) if self.across else self.entries

    @property
    def together(self) -> int:
        """Slots that must lie on one node, at most."""
        return max(self.sizes) if self.strategy == "STRICT_PACK" else 1

    def slots(self) -> list[Slot]:
        """The slots as declared, entry by entry, before anything is reserved."""
        entries = [(entry, k) for entry, size in enumerate(self.entries) for k in range(size)]
        return [Slot(None, number if self.across else k, entry) for number, (entry, k) in enumerate(entries)]


def room(bundle: Amounts, has: Amounts) -> int:
    """How many slots fit into what a node has."""
    return min((int(has.get(name, 0.0) / amount + 1e-6) for name, amount in bundle.items() if amount > 0), default=0)


def amount_of(resource: str, amount: float) -> str:
    """An amount for people: memory in GiB."""
    return f"{amount / 2**30:.4g} GiB" if resource == "memory" else f"{amount:g}"


def fit(request: Request, nodes: Sequence[Amounts]) -> list[list[int]] | None:
    """Where the slots would go: by placement group, the index of each slot's node. None if they do not all fit.

    Ray puts one placement group after the other where most is left, and so do we; but whole entries are moved around
    until they fit side by side.

    Args:
        request: what is asked.
        nodes: what each node has.

    Raises:
        GaveUp: see there.
    """
    rooms = [room(request.bundle, node) for node in nodes]
    if request.strategy == "STRICT_PACK":
        homes = _whole(request.sizes, rooms)
        return None if homes is None else [[home] * size for home, size in zip(homes, request.sizes, strict=True)]
    chosen: list[list[int]] = [[] for _ in request.sizes]
    for number in largest_first(request.sizes):
        homes = _spread_out(request.sizes[number], request.strategy, rooms)
        if homes is None:
            return None
        for home in homes:
            rooms[home] -= 1
        chosen[number] = homes
    return chosen


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Indices of the sizes, the largest first."""
    return sorted(range(len(sizes)), key=lambda number: -sizes[number])


def take(homes: Sequence[Sequence[int]], bundle: Amounts, nodes: Sequence[dict[str, float]]) -> None:
    """Take off each node what the slots on it reserve."""
    for group in homes:
        for home in group:
            for name, amount in bundle.items():
                nodes[home][name] = nodes[home].get(name, 0.0) - amount


def _emptiest_first(rooms: Sequence[int]) -> list[int]:
    return sorted((node for node, left in enumerate(rooms) if left > 0), key=lambda node: (-rooms[node], node))


def _spread_out(size: int, strategy: str, rooms: Sequence[int]) -> list[int] | None:
    """Nodes of one placement group whose slots may lie apart."""
    if strategy == "STRICT_SPREAD":
        nodes = _emptiest_first(rooms)
        return nodes[:size] if len(nodes) >= size else None
    if sum(rooms) < size:
        return None
    homes: list[int] = []
    left = list(rooms)
    while len(homes) < size:
        nodes = _emptiest_first(left)
        if strategy == "PACK":
            chosen = [nodes[0]] * min(left[nodes[0]], size - len(homes))
        else:  # SPREAD: one on each, then wherever most is left
            chosen = nodes[: size - len(homes)] if not homes else nodes[:1]
        for node in chosen:
            left[node] -= 1
        homes += chosen
    return homes


def _whole(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """A node for each entry. The quick way first: the largest entry where most is left."""
    left = list(rooms)
    homes = [-1] * len(sizes)
    for number in largest_first(sizes):
        node = max(range(len(left)), key=lambda node: (left[node], -node), default=-1)
        if node < 0 or left[node] < sizes[number]:
            break
        left[node] -= sizes[number]
        homes[number] = node
    else:
        return homes
    if sum(sizes) > sum(rooms) or max(sizes) > max(rooms, default=0):
        return None
    if len(sizes) > _SEARCH_ENTRIES:
        raise GaveUp
    return _search(sizes, list(rooms))


def _search(sizes: Sequence[int], left: list[int]) -> list[int] | None:
    """The thorough way: try every node for every entry, nodes with equally much left only once."""
    order = largest_first(sizes)
    homes = [-1] * len(sizes)
    steps = 0

    def settle(position: int) -> bool:
        nonlocal steps
        steps += 1
        if steps > _SEARCH_STEPS:
            raise GaveUp
        if position == len(order):
            return True
        size = sizes[order[position]]
        tried: set[int] = set()
        for node, free in enumerate(left):
            if free < size or free in tried:
                continue
            tried.add(free)
            left[node] -= size
            homes[order[position]] = node
            if settle(position + 1):
                return True
            left[node] += size
        return False

    return homes if settle(0) else None
