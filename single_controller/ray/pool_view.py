"""Pools that share other pools' slots: slices, splits and merged pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from single_controller.base.pool import ResourcePool
from single_controller.ray.dry_run import Outlook, PoolPlan, foresee, plan_pool, refuse_impossible
from single_controller.ray.order import Seat, Slot, rank_key
from single_controller.ray.packing import Request
from single_controller.ray.placement import Placement
from single_controller.ray.pool import Members, RayResourcePool
from single_controller.ray.runtime import nodes
from single_controller.ray.tenants import Occupant

if TYPE_CHECKING:
    from single_controller.ray.actor import Location

_ALIKE = (
    "use_gpu",
    "accelerator_type",
    "max_colocate_count",
    "resources",
    "detached",
    "num_cpus",
    "num_gpus",
    "memory",
)


class PoolView(RayResourcePool):
    """Slots of other pools, the parents, as a pool of their own. They stay the parents': closing this pool closes its
    groups and frees no slot; closing a parent closes it too. A slot holds ``max_colocate_count`` workers, whichever of
    its pools their groups were made on.

    Args:
        parts: pools, and the numbers of the slots that are taken of each.
        merged: whether the ranks are put in order of (node, device), rather than as listed.
    """

    def __init__(self, parts: Sequence[tuple[RayResourcePool, Sequence[int]]], merged: bool = False) -> None:
        self._parts = [(source, list(numbers)) for source, numbers in parts]
        self._by_user = any(source.ordered_by_user for source, _ in self._parts) or not all(
            numbers == sorted(numbers) for _, numbers in self._parts
        )
        self._sorts = merged and not self._by_user
        self._sorted: Members | None = None
        self._size = sum(len(numbers) for _, numbers in self._parts)
        first = self._parts[0][0]
        for source, _ in self._parts:
            source._check_open()
        ResourcePool.__init__(self, [self._size], first.max_colocate_count)
        self._begin(first.options)
        self._check_once(self.members())

    # --- what the pool is -------------------------------------------------------------------------------

    @property
    def parents(self) -> tuple[RayResourcePool, ...]:
        """The pools whose slots these are."""
        return tuple(source for source, _ in self._parts)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self._size

    @property
    def store(self) -> list[int]:
        """Processes of each entry that has slots here; by the parents' declared order until they are placed."""
        sizes = Counter(seat.slot.entry for seat in self.seats())
        return [sizes[entry] for entry in sorted(sizes)]

    @property
    def name_prefix(self) -> str:
        """The parents' prefixes."""
        return "_".join(dict.fromkeys(parent.name_prefix for parent in self.parents if parent.name_prefix))

    @property
    def placement_timeout(self) -> float:
        """The longest of the parents'."""
        return max(parent.placement_timeout for parent in self.parents)

    @property
    def closed(self) -> bool:
        """Whether this pool or a parent was closed."""
        return self._closed or any(parent.closed for parent in self.parents)

    def plan(self) -> PoolPlan:
        """See `RayResourcePool.plan`."""
        self._check_known()
        cluster = nodes()
        joint = self._joint()
        if joint is not None and foresee(joint, cluster, [dict(node.total) for node in cluster]).state == "impossible":
            return plan_pool(repr(self), [Outlook(joint, "impossible")], None, cluster)
        left = [dict(node.free) for node in cluster]
        outlooks = {root: root.outlook(cluster, left) for root in self.roots()}
        seats_of = {root: outlook.seats for root, outlook in outlooks.items() if outlook.seats is not None}
        seats = None
        if len(seats_of) == len(outlooks):
            members = self._by_place(self._listed(), seats_of) if self._sorts and not self.settled else self.members()
            seats = self._seats_in(members, seats_of)
        return plan_pool(repr(self), list(outlooks.values()), seats, cluster, joint)

    # --- reserving --------------------------------------------------------------------------------------

    def place(self, bin_pack: bool = True, resources: Mapping[str, float] | None = None) -> None:
        """Reserve the parents' slots that are not reserved yet.

        Raises:
            PlacementError: the cluster could never hold them, all the parents' side by side.
            GroupClosedError: this pool or a parent is closed.
        """
        self._check_open()
        joint = self._joint(bin_pack, resources)
        if joint is not None and not all(root.placements() for root in self.roots()):
            refuse_impossible(joint.entries, joint.bundle, joint.strategy, nodes(), repr(self))
        for root in self.roots():
            root.place(bin_pack, resources)

    def settle(self) -> None:
        """Wait until the parents' slots lie somewhere, and fix their order."""
        self.place()
        for root in self.roots():
            root.settle()
        self._check_once(self.members())

    def slots(self) -> list[Slot]:
        """The slots by rank; reserves them if need be, and waits until they are placed. The entries are numbered
        through."""
        self.settle()
        self._check_open()
        for placement in self.placements():
            placement.check_open()
        return [seat.slot for seat in self.seats()]

    def placements(self) -> list[Placement]:
        """What holds the slots."""
        return [placement for root in self.roots() for placement in root.placements()]

    def rank_order(self, slots: Sequence[Slot], locations: Sequence[Location]) -> list[tuple[int, Location]]:
        """The slots stand by rank already."""
        for root in self.roots():
            mine = [(number, rank) for rank, (pool, number) in enumerate(self.members()) if pool is root]
            root.learn([number for number, _ in mine], [locations[rank] for _, rank in mine])
        return list(enumerate(locations))

    # --- what views and plans ask -----------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the order of the parents' slots is known."""
        return all(root.settled for root in self.roots())

    @property
    def reorders(self) -> bool:
        """Whether the numbers of `members` change when the slots are placed."""
        return self._sorts or any(parent.reorders for parent in self.parents)

    @property
    def ordered_by_user(self) -> bool:
        """Whether the order of the slots was given, rather than found."""
        return self._by_user

    def roots(self) -> list[RayResourcePool]:
        """The pools that reserved the slots; those that may have, while a merged parent has no order yet."""
        if any(parent.reorders for parent in self.parents):
            return list(dict.fromkeys(root for parent in self.parents for root in parent.roots()))
        return list(dict.fromkeys(root for root, _ in self._listed()))

    def members(self) -> Members:
        """The slots by rank, each by the pool that reserved it and its number there."""
        if not (self._sorts and self.settled):
            return self._listed()
        if self._sorted is None:
            self._sorted = self._by_place(self._listed(), {root: root.seats() for root in self.roots()})
        return list(self._sorted)

    def seats(self) -> list[Seat]:
        """The slots by rank, and where they lie if that is known; as declared until then. Waits for nothing."""
        return self._seats_in(self.members(), {root: root.seats() for root in self.roots()})

    def admit(
        self,
        group: Occupant,
        bin_pack: bool = True,
        resources: Mapping[str, float] | None = None,
        *,
        counted: bool = True,
    ) -> None:
        """Note a group that is going to have a worker in every slot. See `RayResourcePool.admit`."""
        if any(parent.reorders for parent in self.parents) and not self.settled:
            self.place(bin_pack, resources)  # only then is it known which slots these are
            self.settle()
        members = self.members() if counted else []
        for root in self.roots():
            root.tenants.admit(group, [number for pool, number in members if pool is root], repr(self))
        self._note(group)

    def close(self) -> None:
        """Close the groups made on this pool; the slots stay reserved until the parents are closed."""
        self._closed = True
        self.tenants.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store})"

    # --- the inside -------------------------------------------------------------------------------------

    def _note(self, group: Occupant) -> None:
        """Remember a group, to close it with this pool, and so with every view between here and its roots."""
        self.tenants.admit(group, (), repr(self))
        for parent in self.parents:
            if isinstance(parent, PoolView):
                parent._note(group)

    def _joint(self, bin_pack: bool = True, resources: Mapping[str, float] | None = None) -> Request | None:
        """What the parents ask for as one request; None where it is not of one kind."""
        requests = [root.request(bin_pack, resources) for root in self.roots()]
        first = requests[0]
        if any(other.bundle != first.bundle or other.strategy != first.strategy for other in requests):
            return None
        return Request(tuple(size for request in requests for size in request.sizes), first.bundle, first.strategy)

    def _listed(self) -> Members:
        members: Members = []
        for source, numbers in self._parts:
            of_source = source.members()
            members += [of_source[number] for number in numbers]
        return members

    def _seats_in(self, members: Members, seats_of: Mapping[RayResourcePool, Sequence[Seat]]) -> list[Seat]:
        """The members' seats. Entries are numbered through, in the order of the parts."""
        entries: dict[tuple[RayResourcePool, int], int] = {}
        for root, number in self._listed():
            entries.setdefault((root, seats_of[root][number].slot.entry), len(entries))
        seats = []
        for root, number in members:
            slot, spot = seats_of[root][number]
            seats.append(Seat(Slot(slot.group, slot.bundle, entries[root, slot.entry]), spot))
        return seats

    @staticmethod
    def _by_place(members: Members, seats_of: Mapping[RayResourcePool, Sequence[Seat]]) -> Members:
        """The members by (node, device), those that lie alike in the order given; as they are until all are placed."""
        keyed = []
        for position, (root, number) in enumerate(members):
            spot = seats_of[root][number].spot
            if spot is None:
                return members
            keyed.append((rank_key(Slot(None, position, 0), spot), (root, number)))
        return [member for _, member in sorted(keyed, key=lambda pair: pair[0])]

    def _check_once(self, members: Members) -> None:
        seen = set()
        for root, number in members:
            if (root, number) in seen:
                raise ValueError(
                    f"merge_resource_pool(): the same pool is given twice, or two that share a slot: slot {number} of "
                    f"{root!r}"
                )
            seen.add((root, number))


def merge_resource_pool(*pools: RayResourcePool) -> RayResourcePool:
    """One pool of all the slots of several. It shares their placement groups.

    Its ranks stand in order of (node, device), as in any pool; unless the order of one of the pools was given, by
    bundle indices or a slice like ``[::-1]``: then they stand one pool after the other.

    Args:
        pools: pools of any shape (slices, splits and merged ones too), alike in what a slot reserves.

    Raises:
        ValueError: no pool, the same slot twice, or pools that differ in GPU use, accelerator type, colocation,
            resources or detachment.
        TypeError: something that is no `RayResourcePool`.
        GroupClosedError: one of them is closed.
    """
    if not pools:
        raise ValueError("merge_resource_pool() takes at least one pool")
    for pool in pools:
        if not isinstance(pool, RayResourcePool):
            raise TypeError(f"merge_resource_pool() takes RayResourcePools, got {pool!r}")
    for name in _ALIKE:
        values = [getattr(pool.options, name) for pool in pools]
        if any(value != values[0] for value in values):
            raise ValueError(f"merge_resource_pool(): the pools differ in {name}: {values}")
    return PoolView([(pool, range(pool.world_size)) for pool in pools], merged=True)


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Cut a pool into pools that share its placement groups: the first slots are the first pool's, and so on.

    Args:
        resource_pool: any pool; a split one too.
        split_size: slots of each part, ``[3, 1]``; or one number, the slots of every part: 2 cuts 8 slots into four
            parts, as in verl.

    Raises:
        ValueError: the sizes are not positive integers, or not all slots in sum.
        TypeError: ``resource_pool`` is no `RayResourcePool`.
        GroupClosedError: it is closed.
    """
    if not isinstance(resource_pool, RayResourcePool):
        raise TypeError(f"split_resource_pool() takes a RayResourcePool, got {resource_pool!r}")
    slots = resource_pool.world_size
    sizes = list(split_size) if isinstance(split_size, Sequence) else [split_size]
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ValueError(
            f"split_size is the slots of each part: a positive integer, or a list of them ([3, 1]); got {split_size!r}"
        )
    if not isinstance(split_size, Sequence):
        if slots % sizes[0]:
            raise ValueError(
                f"{resource_pool!r} has {slots} slots: they do not divide into parts of {split_size}; give the sizes "
                f"of the parts, for example {[*sizes * (slots // sizes[0]), slots % sizes[0]]}"
            )
        sizes *= slots // sizes[0]
    if sum(sizes) != slots:
        raise ValueError(f"{resource_pool!r} has {slots} slots; the parts {sizes} have {sum(sizes)}")
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [resource_pool[end - size : end] for size, end in zip(sizes, ends, strict=True)]
