"""RayResourcePool: process slots reserved on Ray's nodes."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from single_controller.base.closing import Closing
from single_controller.base.errors import GroupClosedError, PlacementError
from single_controller.base.pool import ResourcePool
from single_controller.ray.dry_run import Outlook, PoolPlan, foresee, plan_pool
from single_controller.ray.order import Seat, Slot
from single_controller.ray.packing import Request
from single_controller.ray.placement import Placement, reserve
from single_controller.ray.pool_options import PoolOptions
from single_controller.ray.runtime import Node, ensure_ray, nodes, session
from single_controller.ray.seating import Seating
from single_controller.ray.tenants import Occupant, Tenants

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from single_controller.ray.actor import Location

Members = list[tuple["RayResourcePool", int]]
"""Slots, each by the pool that reserved it and the slot's number there, its rank."""


class RayResourcePool(Closing, ResourcePool):
    """Process slots on Ray's nodes, shared by the groups that are made on it.

    Starts a local Ray if none is running. The slots are reserved when the first group is made, or by `place`. A
    CPU-only slot reserves one logical CPU; a GPU slot one GPU and one CPU. Up to ``max_colocate_count`` worker
    processes share a slot, each with its fraction of the slot's CPU, GPU and memory. A pool is a context manager;
    closing it ends what runs in it.

    Slot k is rank k of a group on the whole pool: slots stand by (node, device), both as numbers, once Ray has placed
    them, and in that order as long as the pool lives; before, as declared. ``pool[0:4]``, ``pool[::2]`` and ``pool[3]``
    are pools of those slots, which stay this pool's.

    Args:
        process_on_nodes: processes of each entry, ``[8, 8]``; an entry lies on one node. Entries may differ.
        use_gpu: whether a slot has a GPU.
        name_prefix: prefix of the placement groups' names; need not be unique.
        max_colocate_count: worker processes per slot.
        detached: whether the placement groups outlive the driver.
        accelerator_type: Ray's name of the accelerator that the nodes must have (``"H100"``).
        resources: custom resources of each slot, ``{"disk": 1}``. Of those that are devices (``{"NPU": 1}``) each
            worker takes its fraction too, and is given the device.
        num_cpus: logical CPUs of each slot.
        num_gpus: GPUs of each slot: 0.5 puts two slots on a GPU. A worker sees the GPUs of which it takes a part;
            to see all of a slot with several, it must be alone there (``max_colocate_count=1``).
        memory: bytes of memory of each slot; 0 reserves none. Ray counts them, and does not enforce them.
        strategy: Ray's strategy for each placement group: ``"STRICT_PACK"`` (on one node), ``"PACK"`` (on as few as
            possible), ``"SPREAD"``, ``"STRICT_SPREAD"`` (each slot on another node). By default ``"STRICT_PACK"``, but
            ``"PACK"`` for ``across_nodes=True``, and where the first group says ``bin_pack=False``.
        across_nodes: False makes a placement group for each entry, True a single one for all. Entries then only count:
            the ranks fill them in order.
        placement_timeout: seconds that a group waits for slots that are in use by others.

    Raises:
        ValueError: an argument is not possible.
    """

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
        self._begin(options)
        ensure_ray()

    def _begin(self, options: PoolOptions) -> None:
        """What every pool has, whoever reserved its slots."""
        self.options = options
        self._placing = threading.Lock()
        self._seating: Seating | None = None
        self._closed = False
        self.tenants = Tenants(options.max_colocate_count)

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
        """A pool on a placement group that somebody else has made: a slot in each bundle. Waits until it is placed.

        Closing the pool closes its groups and leaves the placement group. The slots that lie on one node are an entry.

        Args:
            pg: the placement group; or the pair ``(pg, bundle_indices)``, or the triple ``(pg, bundle_indices,
                gpu_ids)``.
            bundle_indices: the bundles, in order of rank, whatever their nodes. By default all of them, by node and
                device as in any pool.
            gpu_ids: the id of each one's GPU, in the same order, where that is known: for `plan`, until a group tells.
            use_gpu: whether workers take their share of the GPU; by default whether every bundle has one.
            name_prefix: a name for messages.
            max_colocate_count: worker processes per bundle; each takes its fraction of what the bundle has.
            detached: whether the placement group outlives this driver, so that a group on it may.
            placement_timeout: seconds to wait, for it to be placed now and for workers later.

        Raises:
            TypeError: ``pg`` is no placement group.
            ValueError: an index is not one of a bundle, or given twice; or ``gpu_ids`` has another length.
            PlacementError: it is not placed within ``placement_timeout``.
            GroupClosedError: it is removed.
        """
        from single_controller.ray.given_group import pool_on

        return pool_on(
            pg,
            bundle_indices,
            gpu_ids,
            use_gpu=use_gpu,
            name_prefix=name_prefix,
            max_colocate_count=max_colocate_count,
            detached=detached,
            placement_timeout=placement_timeout,
        )

    # --- what the pool is -------------------------------------------------------------------------------

    @property
    def use_gpu(self) -> bool:
        """Whether a slot has a GPU."""
        return self.options.use_gpu

    @property
    def name_prefix(self) -> str:
        """Prefix of the placement groups' names."""
        return self.options.name_prefix

    @property
    def detached(self) -> bool:
        """Whether the slots outlive the driver."""
        return self.options.detached

    @property
    def accelerator_type(self) -> str | None:
        """The accelerator that the nodes must have."""
        return self.options.accelerator_type

    @property
    def resources(self) -> dict[str, float]:
        """Custom resources of each slot."""
        return dict(self.options.resources)

    @property
    def placement_timeout(self) -> float:
        """Seconds that a group waits for slots that are in use by others."""
        return self.options.placement_timeout

    @property
    def bundle(self) -> dict[str, float]:
        """What one slot reserves: resource -> amount."""
        return self.options.bundle

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._closed

    def local_world_sizes(self) -> list[int]:
        """By rank, the number of processes of its entry (on its node): ``[2, 1]`` gives 2, 2, 1. The entries stand as
        declared until the pool is placed."""
        homes = [_home(seat) for seat in self.seats()]
        sizes = Counter(homes)
        return [sizes[home] for home in homes]

    def local_ranks(self) -> list[int]:
        """By rank, its rank within its entry (on its node): ``[2, 1]`` gives 0, 1, 0."""
        seen: Counter[Hashable] = Counter()
        ranks = []
        for home in map(_home, self.seats()):
            ranks.append(seen[home])
            seen[home] += 1
        return ranks

    def __len__(self) -> int:
        return self.world_size

    def __getitem__(self, key: int | slice) -> RayResourcePool:
        """The pool of one slot, or of a slice of the slots. It shares this pool's placement groups.

        Raises:
            IndexError: there is no such slot.
            ValueError: the slice has none.
            TypeError: neither a number nor a slice.
        """
        from single_controller.ray.pool_view import PoolView

        numbers = range(self.world_size)
        if isinstance(key, slice):
            chosen = list(numbers[key])
            if not chosen:
                parts = (key.start, key.stop) if key.step is None else (key.start, key.stop, key.step)
                words = ":".join("" if part is None else str(part) for part in parts)
                raise ValueError(f"{self!r} has the slots 0 to {self.world_size - 1}; [{words}] leaves none of them")
        else:
            try:
                chosen = [numbers[operator.index(key)]]
            except IndexError:
                raise IndexError(f"{self!r} has the slots 0 to {self.world_size - 1}, not {key}") from None
            except TypeError:
                raise TypeError(f"a pool takes a number or a slice, pool[0:4], got {key!r}") from None
        return PoolView([(self, chosen)])

    def plan(self) -> PoolPlan:
        """Where every rank is, or would be: node, bundle and device; and what is short. Nothing is started by it.

        Devices are known when a process has been there: of the first group, or of what asks before a slice is used.
        Until then the ranks of one node stand in the order of their entries.

        Raises:
            GroupClosedError: the pool is closed.
        """
        self._check_known()
        cluster = nodes()
        outlook = self.outlook(cluster, [dict(node.free) for node in cluster])
        return plan_pool(repr(self), [outlook], outlook.seats, cluster)

    # --- reserving --------------------------------------------------------------------------------------

    def place(self, bin_pack: bool = True, resources: Mapping[str, float] | None = None) -> None:
        """Reserve the slots, if that was not done yet. Does not wait for them.

        Args:
            bin_pack: whether each entry must lie on one node, where the pool has no ``strategy`` of its own.
            resources: custom resources that a slot must have besides the pool's own.

        Raises:
            PlacementError: the cluster could never hold them, or they are reserved without those resources.
            GroupClosedError: the pool is closed.
        """
        with self._placing:
            self._check_open()
            extra = dict(resources or {})
            if self._seating is None:
                placement = reserve(self.request(bin_pack, extra), self.name_prefix, self.detached, repr(self))
                self._seating = Seating(placement, self.placement_timeout, repr(self))
                if self.detached:
                    placement.keep()
                return
            has = self._seating.placement.bundle
            lacking = {name: amount for name, amount in extra.items() if has.get(name, 0.0) < amount}
            if lacking:
                raise PlacementError(
                    f"the slots of {self!r} are reserved already, with {has}, and lack {lacking}; make the pool "
                    f"with resources={extra}"
                )

    def settle(self) -> None:
        """Wait until the slots lie somewhere, and fix their order.

        Raises:
            PlacementError: they were not placed within ``placement_timeout``, or can never be.
            GroupClosedError: the pool is closed.
        """
        self.place()
        self._reserved().settle()

    def slots(self) -> list[Slot]:
        """The reserved slots, by rank where their order is known, else as declared; reserves them if need be.

        Raises:
            PlacementError: the cluster could never hold them.
            GroupClosedError: the pool is closed.
        """
        self.place()
        return self._reserved().slots()

    def placements(self) -> list[Placement]:
        """What holds the slots: one, unless they are several pools'."""
        return [self._seating.placement] if self._seating is not None else []

    def rank_order(self, slots: Sequence[Slot], locations: Sequence[Location]) -> list[tuple[int, Location]]:
        """Which slot holds which rank. The first group that asks fixes the order.

        Args:
            slots: what `slots` returned.
            locations: where the process in each found itself.

        Returns:
            By rank: (index of the slot, location).
        """
        return self._reserved().rank_order(slots, locations)

    # --- what views and plans ask -----------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the order of the slots is known."""
        return self._seating is not None and self._seating.seats is not None

    @property
    def reorders(self) -> bool:
        """Whether the numbers of `members` change when the slots are placed."""
        return False

    @property
    def ordered_by_user(self) -> bool:
        """Whether the order of the slots was given, rather than found."""
        return False

    def roots(self) -> list[RayResourcePool]:
        """The pools that reserved the slots: this one."""
        return [self]

    def members(self) -> Members:
        """The slots by rank, each by the pool that reserved it and its number there."""
        return [(self, number) for number in range(self.world_size)]

    def seats(self) -> list[Seat]:
        """The slots by rank, and where they lie if that is known; as declared until then. Waits for nothing."""
        if self._seating is None:
            return [Seat(slot) for slot in self.request().slots()]
        return list(self._seating.seats or map(Seat, self._seating.placement.declared))

    def request(self, bin_pack: bool = True, extra: Mapping[str, float] | None = None) -> Request:
        """What Ray is asked for; what it was asked for, once it was.

        Args:
            bin_pack: as for `place`.
            extra: as for `place`.
        """
        if self._seating is not None:
            return self._seating.placement.request
        strategy = self.options.default_strategy(bin_pack)
        bundle = dict(self.bundle)
        for name, amount in (extra or {}).items():
            bundle[name] = max(amount, bundle.get(name, 0.0))
        return Request(tuple(self.store), bundle, strategy, self.options.across_nodes)

    def outlook(self, cluster: Sequence[Node], left: Sequence[dict[str, float]]) -> Outlook:
        """What becomes of the slots.

        Args:
            cluster: the nodes.
            left: what is free on each; what the slots would take is taken off.
        """
        if self._seating is None:
            return foresee(self.request(), cluster, left)
        return self._seating.outlook(cluster, left)

    def learn(self, numbers: Sequence[int], locations: Sequence[Location]) -> None:
        """Note where processes found themselves.

        Args:
            numbers: numbers of their slots.
            locations: where the process in each found itself.
        """
        self._reserved().learn(numbers, locations)

    # --- the groups in it -------------------------------------------------------------------------------

    def admit(
        self,
        group: Occupant,
        bin_pack: bool = True,
        resources: Mapping[str, float] | None = None,
        *,
        counted: bool = True,
    ) -> None:
        """Note a group that is going to have a worker in every slot.

        Args:
            group: the group.
            bin_pack: as for `place`.
            resources: as for `place`.
            counted: whether its workers take the share that ``max_colocate_count`` means, so that they count.

        Raises:
            PlacementError: as many groups as a slot holds are there already.
        """
        self.tenants.admit(group, range(self.world_size) if counted else (), repr(self))

    def close(self) -> None:
        """Free the slots, and close the groups in them. A second close does nothing."""
        with self._placing:
            self._closed = True
            self.tenants.close()
            for placement in self.placements():
                placement.close()

    # --- the inside -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise GroupClosedError(f"{self!r} is closed; make a new pool")

    def _check_known(self) -> None:
        """Raise where there is nothing to plan with."""
        self._check_open()
        for placement in self.placements():
            placement.check_open()
        if session() is None:
            raise GroupClosedError(f"{self!r}: Ray was shut down; make a new pool")

    def _reserved(self) -> Seating:
        self._check_open()
        if self._seating is None:
            raise PlacementError(f"{self!r} is not reserved")
        self._seating.placement.check_open()
        return self._seating


def _home(seat: Seat) -> tuple[int, str]:
    """Ranks of one home count as local to each other: those of one entry, on one node."""
    return (seat.slot.entry, seat.spot.node_id if seat.spot is not None else "")
