"""RayResourcePool: slots for processes on Ray's nodes. A slice of a pool, and several pools merged, are pools too.

Locks: `_occupying` protects which group is in which slot; the slots themselves belong to reservations, which have locks
of their own (see `reservation`). No thread holds one of each at once. No thread is started here.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, Self

from dispatch.checks import check_count, is_count
from single_controller.call.errors import ForkedProcessError, GroupClosedError, PlacementError
from single_controller.call.state import Closing
from single_controller.ray.placement.feasibility import Request
from single_controller.ray.placement.options import PoolOptions
from single_controller.ray.placement.plan import PoolPlan, StandbyPlan, plan_pool, refuse_impossible
from single_controller.ray.placement.reservation import Reservation, external_reservation
from single_controller.ray.placement.slots import Slot
from single_controller.ray.rank.actor import Location
from single_controller.ray.runtime import ensure_ray, forked, nodes, session

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


class Occupant(Protocol):
    """What a pool needs to know of a group of workers in it."""

    @property
    def name(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    def standbys(self) -> list[StandbyPlan]: ...

    def close(self) -> None: ...


Member = tuple[Reservation, int]
"""A slot: the reservation that it is in, and its number there."""

_occupied: weakref.WeakKeyDictionary[Occupant, tuple[RayResourcePool, frozenset[Member]]] = weakref.WeakKeyDictionary()
"""By group, its pool, and the slots of any pool in which its workers count. Weak, so that a group that nobody closed
frees its slots when it is collected: Ray ends its workers then, unless they are detached."""

_occupying = threading.Lock()
"""Protects `_occupied`, and every pool's closed state, so that no group is admitted to a pool that is being
closed. One lock for all pools, because a slice and the pool that it is cut from share slots. Held for bookkeeping only:
no other lock is taken and Ray is not called while it is held."""

_ATTRIBUTES = ("use_gpu", "name_prefix", "max_colocate_count", "detached", "accelerator_type", "placement_timeout")
"""Options that are attributes of the pool too. So is ``resources``, as a dict."""

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
"""Options in which pools must agree to be merged."""


class ResourcePool:
    """Processes per node, as numbers only. A subclass reserves resources for them.

    Args:
        process_on_nodes: processes of each entry, for example ``[8, 8]``. An entry is on one node.
        max_colocate_count: worker processes that may share one slot.

    Raises:
        ValueError: no entry, or a count that is not a positive integer.
    """

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 10) -> None:
        entries = list(process_on_nodes) if isinstance(process_on_nodes, Sequence) else []
        if not entries or not all(map(is_count, entries)):
            raise ValueError(
                f"process_on_nodes is a list of positive integers, one per node ([8, 8]), got {process_on_nodes!r}"
            )
        self._store = [int(entry) for entry in entries]
        self.max_colocate_count = check_count("max_colocate_count", max_colocate_count)

    @property
    def store(self) -> list[int]:
        """Processes of each entry."""
        return list(self._store)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return sum(self._store)

    def local_world_sizes(self) -> list[int]:
        """By rank, the number of processes of its entry (on its node): ``[2, 1]`` gives 2, 2, 1."""
        return [size for _, size in local_ranks(self._homes())]

    def local_ranks(self) -> list[int]:
        """By rank, its rank within its entry (on its node): ``[2, 1]`` gives 0, 1, 0."""
        return [rank for rank, _ in local_ranks(self._homes())]

    def _homes(self) -> Sequence[Hashable]:
        """By rank, what it has in common with the ranks that are local to it: here its entry."""
        return [entry for entry, size in enumerate(self._store) for _ in range(size)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store})"


def local_ranks(homes: Sequence[Hashable]) -> list[tuple[int, int]]:
    """By rank, its rank among those of the same home, and how many these are."""
    sizes, seen = Counter(homes), Counter[Hashable]()
    found = []
    for home in homes:
        found.append((seen[home], sizes[home]))
        seen[home] += 1
    return found


class RayResourcePool(Closing, ResourcePool):
    """Slots for processes on Ray's nodes, shared by the groups that are made on the pool.

    Starts a local Ray if none is running. The slots are reserved when the first group is created, or by `place`. Each
    slot is one bundle of a placement group: a CPU-only slot reserves one logical CPU, a GPU slot one GPU and one CPU.
    Up to ``max_colocate_count`` worker processes share a slot, each with its fraction of the slot's CPU, GPU and
    memory. A pool is a context manager; closing it closes the groups in it.

    Slot k is rank k of a group on the whole pool. Once Ray has placed them, slots are ordered by (node, device),
    compared as numbers, and keep that order as long as the pool lives; before, they are in the order declared.
    ``pool[0:4]``, ``pool[::2]`` and ``pool[3]`` are pools that borrow slots: closing one closes its groups but frees no
    slot, and closing this pool closes them too.

    Args:
        process_on_nodes: processes of each entry, ``[8, 8]``. An entry is on one node. Entries may differ in size.
        use_gpu: whether a slot has a GPU.
        name_prefix: prefix of the placement groups' names; need not be unique.
        max_colocate_count: worker processes per slot.
        detached: whether the placement groups outlive the driver.
        accelerator_type: Ray's name of the accelerator that the nodes must have (``"H100"``).
        resources: custom resources of each slot, ``{"disk": 1}``. Each worker takes its fraction of those that are
            devices (``{"NPU": 1}``).
        num_cpus: logical CPUs of each slot.
        num_gpus: GPUs of each slot: 0.5 puts two slots on a GPU. A worker sees the GPUs of which it takes a part; to
            see all GPUs of a slot with several, it must be alone there (``max_colocate_count=1``).
        memory: bytes of memory of each slot; 0 reserves none. Ray counts them and does not enforce them.
        strategy: Ray's strategy for each placement group. By default ``"STRICT_PACK"`` (on one node), but ``"PACK"``
            for ``across_nodes=True`` and for a first group made with ``bin_pack=False``.
        across_nodes: whether one placement group holds all entries. These are then only sizes: the ranks fill them in
            order.
        placement_timeout: seconds that a group waits for slots that others use.

    Attributes:
        options: all of them, checked.

    Raises:
        ValueError: an argument is not possible.
    """

    use_gpu: bool
    name_prefix: str
    max_colocate_count: int
    detached: bool
    accelerator_type: str | None
    resources: dict[str, float]
    placement_timeout: float

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        resources: Mapping[str, float] | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 1.0,
        memory: float = 0,
        strategy: str | None = None,
        across_nodes: bool = False,
        placement_timeout: float = 120.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        options = PoolOptions(
            use_gpu=bool(use_gpu),
            name_prefix="" if name_prefix is None else name_prefix,
            max_colocate_count=max_colocate_count,
            detached=bool(detached),
            accelerator_type=accelerator_type,
            resources={} if resources is None else resources,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            memory=memory,
            strategy=strategy,
            across_nodes=across_nodes,
            placement_timeout=placement_timeout,
        )
        ensure_ray()
        label = f"{type(self).__name__}({list(process_on_nodes)})"
        self._setup(options, Reservation(options.request(process_on_nodes, True, {}), options, label))

    @classmethod
    def _make(cls, *args: Any, **kwargs: Any) -> Self:
        """A pool by the arguments of `_setup`."""
        pool = cls.__new__(cls)
        pool._setup(*args, **kwargs)
        return pool

    def _setup(
        self,
        options: PoolOptions,
        owned: Reservation | None = None,
        parts: Sequence[tuple[RayResourcePool, Sequence[int]]] = (),
        *,
        order_given: bool = False,
        merged: bool = False,
    ) -> None:
        """Set the fields of a pool that owns a reservation, or borrows slots: those of these numbers of each of these
        pools. Where the user gave an order, a merged pool keeps it; otherwise it is sorted as any pool."""
        self.options = options
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(options, name))
        self.resources = dict(options.resources)
        self._owned, self._parts = owned, parts
        self._order_given: bool = order_given or any(
            pool._order_given or list(numbers) != sorted(numbers) for pool, numbers in parts
        )
        self._sorts = merged and not self._order_given
        self._closed = False  # set under `_occupying`; read without it where a late answer does no harm
        self._check_distinct()

    @classmethod
    def from_placement_group(
        cls,
        pg: PlacementGroup | Sequence[Any],
        bundle_indices: Sequence[int] | None = None,
        gpu_ids: Sequence[int | str] | None = None,
        *,
        use_gpu: bool | None = None,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        placement_timeout: float = 120.0,
    ) -> RayResourcePool:
        """Return a pool on an external placement group, with a slot in each bundle. Waits until it is placed.

        Closing the pool closes its groups and leaves the placement group. The slots on one node are an entry.

        Args:
            pg: the placement group; or the pair ``(pg, bundle_indices)``, or the triple ``(pg, bundle_indices,
                gpu_ids)``.
            bundle_indices: the bundles in order of rank, whatever their nodes. By default all of them, by node and
                device as in any pool.
            gpu_ids: the id of the GPU of each, in the same order, if known. `plan` shows it until a group reports it.
            use_gpu: whether workers take their share of the GPU; by default whether every bundle has one.
            name_prefix: a name for messages.
            max_colocate_count: worker processes per bundle; each takes its fraction of what the bundle has.
            detached: whether the placement group outlives this driver, so that a group on it may.
            placement_timeout: seconds to wait, for it to be placed now and for workers later.

        Raises:
            TypeError: ``pg`` is not a placement group.
            ValueError: an index names no bundle or is given twice, or ``gpu_ids`` has another length.
            PlacementError: it is not placed within ``placement_timeout``.
            GroupClosedError: it is removed.
        """
        reservation = external_reservation(
            pg,
            bundle_indices,
            gpu_ids,
            use_gpu=use_gpu,
            name_prefix="" if name_prefix is None else name_prefix,
            max_colocate_count=max_colocate_count,
            detached=bool(detached),
            placement_timeout=placement_timeout,
        )
        return RayResourcePool._make(reservation.options, reservation, order_given=reservation.assigned)

    @classmethod
    def of_slots(cls, options: PoolOptions, request: Request, slots: Sequence[Slot]) -> RayResourcePool:
        """Return a pool of slots that another driver has reserved, by rank. Closing it closes its groups alone."""
        reservation = Reservation(request, options, f"{cls.__name__}({list(request.entries)})")
        reservation.hold(slots, assigned=True)
        return cls._make(options, reservation, order_given=True)

    # --- what the pool is -------------------------------------------------------------------------------

    @property
    def bundle(self) -> dict[str, float]:
        """What one slot reserves: resource -> amount."""
        return self.options.bundle

    @property
    def closed(self) -> bool:
        """Whether this pool, or one whose slots it borrows, was closed."""
        return self._closed or any(pool.closed for pool, _ in self._parts)

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return len(self._owned.slots) if self._owned is not None else sum(len(numbers) for _, numbers in self._parts)

    @property
    def store(self) -> list[int]:
        """Slots of each entry that has slots here."""
        return [size for _, size in sorted(Counter(slot.entry for slot in self.slots()).items())]

    def _homes(self) -> Sequence[Hashable]:
        return [slot.home for slot in self.slots()]

    def __len__(self) -> int:
        return self.world_size

    def __getitem__(self, key: int | slice) -> RayResourcePool:
        """Return the pool of one slot, or of a slice of the slots. It borrows this pool's slots."""
        numbers = range(self.world_size)
        if isinstance(key, slice):
            chosen: Sequence[int] = numbers[key]
            if not chosen:
                given = [key.start, key.stop] + [key.step] * (key.step is not None)
                words = ":".join("" if part is None else str(part) for part in given)
                raise ValueError(f"{self!r} has the slots 0 to {self.world_size - 1}; [{words}] leaves none of them")
        else:
            try:
                chosen = [numbers[operator.index(key)]]
            except IndexError:
                raise IndexError(f"{self!r} has the slots 0 to {self.world_size - 1}, not {key}") from None
            except TypeError:
                raise TypeError(f"a pool takes a number or a slice, pool[0:4], got {key!r}") from None
        self._check_open()
        return RayResourcePool._make(self.options, None, [(self, chosen)])

    def slots(self) -> list[Slot]:
        """Return the slots: by rank with locations once the ranks are assigned, until then as declared. Waits for
        nothing, and reserves nothing."""
        return self._listed()

    @property
    def reservations(self) -> list[Reservation]:
        """The reservations in which the slots are, owned or borrowed; for a slice of a merged pool those in which they
        may be, depending on where Ray places them."""
        if self._owned is not None:
            return [self._owned]
        return list(dict.fromkeys(reservation for pool, _ in self._parts for reservation in pool.reservations))

    def _listed(self, slots_of: Mapping[Reservation, Sequence[Slot]] | None = None) -> list[Slot]:
        """The slots by rank; see `_placed`. A pool that borrows slots numbers their entries anew, in order of rank."""
        placed = self._placed(slots_of)
        if self._owned is not None:
            return [slot for _, slot in placed]
        entries: dict[tuple[Reservation, int], int] = {}
        return [replace(slot, entry=entries.setdefault((of, slot.entry), len(entries))) for (of, _), slot in placed]

    def _placed(self, slots_of: Mapping[Reservation, Sequence[Slot]] | None = None) -> list[tuple[Member, Slot]]:
        """By rank, where each slot belongs, and the slot: as the reservations have it now, or as ``slots_of`` says."""
        known = slots_of or {reservation: reservation.slots for reservation in self.reservations}
        if self._owned is not None:
            return [((self._owned, number), slot) for number, slot in enumerate(known[self._owned])]
        listed = [(pool._placed(known), numbers) for pool, numbers in self._parts]
        placed = [of_pool[number] for of_pool, numbers in listed for number in numbers]
        if self._sorts and all(slot.order for _, slot in placed):
            placed.sort(key=lambda one: one[1].order)
        return placed

    def _check_distinct(self) -> None:
        seen = set[Hashable]()
        for (reservation, number), slot in self._placed():
            # Compare the bundles if they exist already: several pools may use one external placement group.
            key = (slot.placement_group, slot.bundle) if slot.placement_group is not None else (reservation, number)
            if key in seen:
                raise ValueError(
                    "merge_resource_pool(): the same pool is given twice, or two that share a slot: slot "
                    f"{number} of {reservation.label}"
                )
            seen.add(key)

    def plan(self) -> PoolPlan:
        """Return where every rank is, or would be: node, bundle and device; and what is missing. Starts nothing.
        Devices are known once a process has reported them: the first group's workers, or short tasks before a slice is
        used. Until then the ranks of one node are in the order of their entries.

        Raises:
            GroupClosedError: the pool is closed.
        """
        self._check_open()
        if session() is None:
            raise GroupClosedError(f"{self!r}: Ray was shut down; make a new pool")
        cluster = nodes()
        free = [dict(node.free) for node in cluster]
        waiting, slots_of = [], {}
        for reservation in self.reservations:
            expected = reservation.expected(cluster, free)
            if expected is None:
                waiting.append(reservation.request)
            else:
                slots_of[reservation] = expected
        slots = [] if waiting else self._listed(slots_of)
        with _occupying:
            groups = self._groups()
        # Outside the lock: a group may ask Ray about its standbys.
        standbys = [one for group in groups if not group.closed for one in group.standbys()]
        requests = [reservation.request for reservation in self.reservations]
        return plan_pool(repr(self), requests, waiting, slots, cluster, standbys)

    # --- reserving --------------------------------------------------------------------------------------

    def place(self, bin_pack: bool = True, resources: Mapping[str, float] | None = None) -> None:
        """Reserve the slots, if that was not done yet, with all slots of the pools that they are borrowed from. Does
        not wait for them.

        Args:
            bin_pack: whether each entry must be on one node, where the pool has no ``strategy`` of its own.
            resources: custom resources that a slot must have besides the pool's own.

        Raises:
            PlacementError: the cluster can never hold them, or they are reserved without those resources.
            GroupClosedError: the pool is closed.
        """
        self._check_open()
        resources = dict(resources or {})
        asked = {
            of: of.request if of.reserved else of.options.request(of.request.entries, bin_pack, resources)
            for of in self.reservations
        }
        if not all(reservation.reserved for reservation in asked):
            refuse_impossible(list(asked.values()), nodes(), repr(self))
        for reservation, request in asked.items():
            reservation.reserve(request)
            bundle = reservation.request.bundle
            lacking = {name: amount for name, amount in resources.items() if bundle.get(name, 0.0) < amount}
            if lacking:
                raise PlacementError(
                    f"the slots of {reservation.label} are already reserved with {dict(bundle)}, without {lacking}; "
                    f"create the pool with resources={resources}"
                )

    def wait(self, *, assign_ranks: bool = False) -> None:
        """Wait until Ray has placed the slots. ``assign_ranks`` fixes their order now, by short tasks in them. A pool
        that borrows slots always does that; for others the first group's processes can do it, which is faster.

        Raises:
            PlacementError: Ray did not place them within ``placement_timeout``, or never can.
            GroupClosedError: the pool is closed.
        """
        self.place()
        for reservation in self.reservations:
            reservation.wait()
            if assign_ranks or self._parts:
                reservation.assign()
        self._check_open()  # again: another thread may have closed the pool while this one waited
        self._check_distinct()  # again: the order of a merged pool was not known before

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str | None = None
    ) -> list[PlacementGroup]:
        """`place` and `wait` under the name that verl uses for both; return `pgs`. ``name`` and ``device_name`` have no
        effect: the pool's options say how its placement groups are called, and what a slot reserves."""
        self.place(bin_pack=strategy == "STRICT_PACK")
        self.wait(assign_ranks=True)
        return self.pgs or []

    @property
    def pgs(self) -> list[PlacementGroup] | None:
        """The placement groups of the slots, in order of rank; None until the slots are reserved."""
        groups = dict.fromkeys(slot.placement_group for slot in self.slots())
        return None if None in groups else [group for group in groups if group is not None]

    def assign_ranks(self, slots: Sequence[Slot], locations: Sequence[Location]) -> list[int]:
        """Fix the order of the slots, unless it is fixed, by the locations of the processes in them; note these.
        Returns by rank the index in ``slots``, which is what `slots` returned before the processes were started."""
        if self._owned is not None:  # a pool that borrows slots has waited for their order in `admit`
            self._owned.assign(slots, locations)  # of several groups that start at once, the first one's order stays
        index = {(slot.placement_group, slot.bundle): number for number, slot in enumerate(slots)}
        order = [index[slot.placement_group, slot.bundle] for slot in self.slots()]
        self.note_locations(slots, locations)
        return order

    def note_locations(self, slots: Sequence[Slot], locations: Sequence[Location]) -> None:
        """Note where processes in some of the slots found themselves."""
        found = {(slot.placement_group, slot.bundle): where for slot, where in zip(slots, locations, strict=True)}
        for (reservation, number), slot in self._placed():
            where = found.get((slot.placement_group, slot.bundle))
            if where is not None:
                reservation.update_location(number, where)

    # --- the groups in it -------------------------------------------------------------------------------

    def admit(
        self,
        group: Occupant,
        bin_pack: bool = True,
        resources: Mapping[str, float] | None = None,
        *,
        counted: bool = True,
    ) -> None:
        """Reserve the slots, as `place`, and note a group that is going to have a worker in each. ``counted``: whether
        its workers count for ``max_colocate_count``.

        Raises:
            PlacementError: a slot is full, or the slots can never be placed.
            GroupClosedError: the pool is closed.
        """
        self.place(bin_pack, resources)
        if self._parts:
            self.wait()  # outside the lock, because it may take long: only then is it known which slots these are
        wanted = [member for member, _ in self._placed()] if counted else []
        with _occupying:
            self._check_open()  # again: another thread may have closed the pool while this one waited
            # A group that is closed ends its workers by itself, so its slots are free. A restarted group is its own.
            others = [(o.name, held) for o, (_, held) in _occupied.items() if not o.closed and o is not group]
            for member in wanted:
                there = sorted(name for name, held in others if member in held)
                if len(there) >= self.max_colocate_count:
                    raise PlacementError(
                        f"{self!r} is full: max_colocate_count={self.max_colocate_count} and it already has "
                        f"{', '.join(there)}. Close one of these groups, or create the pool with a "
                        "larger max_colocate_count"
                    )
            # Under the same lock as the check: of two groups at once, only one may take the last place of a slot.
            _occupied[group] = (self, frozenset(wanted))

    def _groups(self) -> list[Occupant]:
        """The groups on this pool and on every pool that borrows its slots. The caller holds `_occupying`."""
        return [group for group, (pool, _) in _occupied.items() if pool._borrows_from(self)]

    def _borrows_from(self, other: RayResourcePool) -> bool:
        return self is other or any(pool._borrows_from(other) for pool, _ in self._parts)

    def close(self) -> None:
        """Close the groups in the pool, and free the slots that it owns. A second close does nothing, and neither does
        one in a fork of the process that made the pool."""
        if forked():
            return
        with _occupying:
            self._closed = True  # from here on no group is admitted, so the list is complete
            groups = self._groups()
        # Outside the lock, because closing a group asks Ray.
        try:
            for group in groups:
                group.close()
        finally:
            if self._owned is not None:
                self._owned.close()

    def _check_open(self) -> None:
        if forked():
            raise ForkedProcessError.of(repr(self))
        if self.closed:
            raise GroupClosedError(f"{self!r} is closed; make a new pool")

    def __reduce__(self) -> Any:
        raise TypeError(
            "a pool cannot be sent to another process. Send a group, which is attached to its workers there, or one of "
            "pool.pgs, for RayResourcePool.from_placement_group()"
        )


def merge_resource_pool(*pools: RayResourcePool) -> RayResourcePool:
    """Return one pool of all the slots of several, of any shape. It borrows their slots.

    Its ranks are ordered by (node, device), as in any pool. If the user gave the order of one of the pools, by bundle
    indices or a slice like ``[::-1]``, the ranks are one pool's after the other's instead.

    Raises:
        ValueError: no pool, the same slot twice, or pools that differ in GPU use, accelerator type, colocation,
            resources or detachment.
        TypeError: an argument is not a `RayResourcePool`.
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
    for pool in pools:
        pool._check_open()
    options = replace(
        pools[0].options,
        name_prefix="_".join(dict.fromkeys(pool.name_prefix for pool in pools if pool.name_prefix)),
        placement_timeout=max(pool.placement_timeout for pool in pools),
    )
    return RayResourcePool._make(options, None, [(pool, range(pool.world_size)) for pool in pools], merged=True)


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Cut a pool into pools that borrow its slots: the first slots are the first pool's, and so on.

    Args:
        resource_pool: any pool, one that was split too.
        split_size: slots of each part, ``[3, 1]``; or one number, the slots of every part: 2 cuts 8 slots into four
            parts, as in verl.

    Raises:
        TypeError, ValueError: it is no pool, or the sizes are not positive integers that add up to all slots.
        GroupClosedError: it is closed.
    """
    if not isinstance(resource_pool, RayResourcePool):
        raise TypeError(f"split_resource_pool() takes a RayResourcePool, got {resource_pool!r}")
    slots = resource_pool.world_size
    sizes = list(split_size) if isinstance(split_size, Sequence) else [split_size]
    if not sizes or not all(map(is_count, sizes)):
        raise ValueError(
            f"split_size is the slots of each part: a positive integer, or a list of them ([3, 1]); got {split_size!r}"
        )
    if not isinstance(split_size, Sequence):
        left = slots % split_size
        sizes *= slots // split_size
        if left:
            raise ValueError(
                f"{resource_pool!r} has {slots} slots, which is not a multiple of {split_size}; pass a list of the "
                f"sizes of the slices, for example {[*sizes, left]}"
            )
    if sum(sizes) != slots:
        raise ValueError(f"{resource_pool!r} has {slots} slots; the parts {sizes} have {sum(sizes)}")
    return [resource_pool[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
