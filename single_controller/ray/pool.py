"""RayResourcePool: process slots reserved on Ray's nodes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from single_controller.base.checks import check_amounts, check_seconds
from single_controller.base.closing import Closing
from single_controller.base.errors import GroupClosedError, PlacementError
from single_controller.base.pool import ResourcePool
from single_controller.ray.placement import Placement, Slot
from single_controller.ray.runtime import ensure_ray


class Occupant(Protocol):
    """What a pool needs to know of a group in it."""

    @property
    def name(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


class RayResourcePool(Closing, ResourcePool):
    """Process slots on Ray's nodes, shared by the groups that are made on it.

    Starts a local Ray if none is running. The slots are reserved when the first group is made, or by `place`. A
    CPU-only slot reserves one logical CPU; a GPU slot one GPU and one CPU. Up to ``max_colocate_count`` worker
    processes share a slot, each with its fraction. A pool is a context manager; closing it ends what runs in it.

    Args:
        process_on_nodes: processes of each entry, ``[8, 8]``; an entry lies on one node. Entries may differ.
        use_gpu: whether a slot has a GPU.
        name_prefix: prefix of the placement groups' names; need not be unique.
        max_colocate_count: worker processes per slot.
        detached: whether the placement groups outlive the driver.
        accelerator_type: Ray's name of the accelerator that the nodes must have (``"H100"``).
        resources: custom resources of each slot, ``{"disk": 1}``.
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
        placement_timeout: float = 120.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        if name_prefix is not None and not isinstance(name_prefix, str):
            raise ValueError(f"name_prefix is a string or None, got {name_prefix!r}")
        if accelerator_type is not None and not isinstance(accelerator_type, str):
            raise ValueError(f"accelerator_type is a string or None, got {accelerator_type!r}")
        self.use_gpu = bool(use_gpu)
        self.name_prefix = name_prefix or ""
        self.detached = bool(detached)
        self.accelerator_type = accelerator_type
        self.resources = check_amounts("resources", resources or {})
        self.placement_timeout = check_seconds("placement_timeout", placement_timeout)
        self._placing = threading.Lock()
        self._placement: Placement | None = None
        self._closed = False
        self._groups: weakref.WeakSet[Occupant] = weakref.WeakSet()
        ensure_ray()

    @property
    def bundle(self) -> dict[str, float]:
        """What one slot reserves: resource -> amount."""
        reserved: dict[str, float] = {"CPU": 1, **({"GPU": 1} if self.use_gpu else {}), **self.resources}
        if self.accelerator_type is not None:
            reserved[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return reserved

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._closed

    def place(self, bin_pack: bool = True, resources: Mapping[str, float] | None = None) -> None:
        """Reserve the slots, if that was not done yet. Does not wait for them.

        Args:
            bin_pack: whether each entry must lie on one node.
            resources: custom resources that a slot must have besides the pool's own.

        Raises:
            PlacementError: the cluster could never hold them, or they are reserved without those resources.
            GroupClosedError: the pool is closed.
        """
        with self._placing:
            self._check_open()
            extra = dict(resources or {})
            if self._placement is None:
                bundle = {**self.bundle, **extra}
                strategy = "STRICT_PACK" if bin_pack else "PACK"
                self._placement = Placement(
                    self._store, bundle, strategy, self.name_prefix, self.detached, what=repr(self)
                )
                return
            has = self._placement.bundle
            lacking = {name: amount for name, amount in extra.items() if has.get(name, 0.0) < amount}
            if lacking:
                raise PlacementError(
                    f"the slots of {self!r} are reserved already, with {has}, and lack {lacking}; make the pool "
                    f"with resources={extra}"
                )

    def slots(self) -> list[Slot]:
        """The reserved slots, entry by entry; reserves them if need be.

        Raises:
            PlacementError: the cluster could never hold them.
            GroupClosedError: the pool is closed.
        """
        self.place()
        return [slot for placement in self.placements() for slot in placement.slots]

    def placements(self) -> list[Placement]:
        """What holds the slots: one, unless this pool was merged."""
        return [self._placement] if self._placement is not None else []

    def admit(self, group: Occupant) -> None:
        """Note a group that is going to have a worker in every slot.

        Raises:
            PlacementError: as many groups as a slot holds are there already.
        """
        with self._placing:
            inside = [other.name for other in self._groups if not other.closed and other is not group]
            if len(inside) >= self.max_colocate_count:
                raise PlacementError(
                    f"{self!r} is full: max_colocate_count={self.max_colocate_count} and it holds "
                    f"{', '.join(sorted(inside))}. Close one, or make the pool with a larger max_colocate_count"
                )
            self._groups.add(group)

    def close(self) -> None:
        """Free the slots, and close the groups in them. A second close does nothing."""
        with self._placing:
            self._closed = True
            for group in list(self._groups):
                group.close()
            for placement in self.placements():
                placement.close()

    def _check_open(self) -> None:
        if self._closed:
            raise GroupClosedError(f"{self!r} is closed; make a new pool")


class MergedResourcePool(RayResourcePool):
    """The slots of several pools as one. They stay the parents': closing this pool frees none.

    Args:
        parents: the pools, in order.

    Raises:
        ValueError: the pools do not go together.
    """

    def __init__(self, parents: Sequence[RayResourcePool]) -> None:
        first = parents[0]
        for name in ("use_gpu", "accelerator_type", "max_colocate_count", "resources", "detached"):
            values = [getattr(parent, name) for parent in parents]
            if any(value != values[0] for value in values):
                raise ValueError(f"merge_resource_pool(): the pools differ in {name}: {values}")
        super().__init__(
            [entry for parent in parents for entry in parent.store],
            use_gpu=first.use_gpu,
            name_prefix="_".join(parent.name_prefix for parent in parents if parent.name_prefix),
            max_colocate_count=first.max_colocate_count,
            detached=first.detached,
            accelerator_type=first.accelerator_type,
            resources=first.resources,
            placement_timeout=max(parent.placement_timeout for parent in parents),
        )
        self.parents = tuple(parents)

    def place(self, bin_pack: bool = True, resources: Mapping[str, float] | None = None) -> None:
        """Reserve the parents' slots that are not reserved yet."""
        self._check_open()
        for parent in self.parents:
            parent.place(bin_pack, resources)

    def slots(self) -> list[Slot]:
        """The parents' slots; the entries are numbered through."""
        self.place()
        slots = []
        offset = 0
        for parent in self.parents:
            slots += [Slot(slot.group, slot.bundle, slot.entry + offset) for slot in parent.slots()]
            offset += len(parent.store)
        return slots

    def placements(self) -> list[Placement]:
        """What holds the slots: the parents' placements."""
        return [placement for parent in self.parents for placement in parent.placements()]

    def admit(self, group: Occupant) -> None:
        """Note a group in every parent."""
        for parent in self.parents:
            parent.admit(group)
        self._groups.add(group)

    def close(self) -> None:
        """Close the groups made on this pool; the slots stay reserved until the parents are closed."""
        self._closed = True
        for group in list(self._groups):
            group.close()


def merge_resource_pool(*pools: RayResourcePool) -> RayResourcePool:
    """One pool of all the slots of several, in order. It shares their placement groups.

    Args:
        pools: pools alike in everything but their sizes and names.

    Raises:
        ValueError: no pool, the same one twice, or pools that differ in GPU use, accelerator type, colocation,
            resources or detachment.
        TypeError: something that is no `RayResourcePool`.
    """
    if not pools:
        raise ValueError("merge_resource_pool() takes at least one pool")
    for pool in pools:
        if not isinstance(pool, RayResourcePool):
            raise TypeError(f"merge_resource_pool() takes RayResourcePools, got {pool!r}")
    parents = [
        parent for pool in pools for parent in (pool.parents if isinstance(pool, MergedResourcePool) else (pool,))
    ]
    if len(set(map(id, parents))) != len(parents):
        raise ValueError("merge_resource_pool(): the same pool is given twice")
    return MergedResourcePool(parents)
