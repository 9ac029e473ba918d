"""RayWorkerGroup: workers as Ray actors, one per slot of a pool."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Self, Unpack

from ray.actor import ActorHandle

from dispatch.checks import check_seconds
from dispatch.plan import CallPlan
from single_controller.call.colocate import Colocated
from single_controller.call.errors import GroupBrokenError
from single_controller.call.group import ERROR_GRACE_SECONDS, WorkerGroup
from single_controller.call.worker import Worker
from single_controller.ray.attach import find_workers, remove_placement_groups
from single_controller.ray.class_with_args import ProcessSpec, RayClassWithInitArgs
from single_controller.ray.elastic import ElasticGroup
from single_controller.ray.placement.plan import PoolPlan, StandbyPlan, plan_group
from single_controller.ray.placement.pool import RayResourcePool
from single_controller.ray.records.group_records import Registration
from single_controller.ray.records.takeover import Takeover, find_takeover
from single_controller.ray.runtime import nodes
from single_controller.ray.start import (
    SendJoin,
    StartPlan,
    checked_address,
    checked_environment,
    checked_port,
    slot_location,
    start,
)
from single_controller.ray.transport import Rank, RayTransport
from single_controller.ray.verl_options import VerlOptions, check_verl_options

ON_DEATH = ("error", "replace", "shrink")


class RayWorkerGroup(ElasticGroup):
    """Workers of one class in the slots of a resource pool, one Ray actor per rank.

    The constructor returns when all workers' constructors have returned. Ranks are in order of (node, device), compared
    as numbers. Closing the group ends its workers, but not its pool. A start that fails leaves nothing behind.

    Args:
        resource_pool: the pool.
        ray_cls_with_init: the worker class with its constructor's arguments, or several classes per process
            (`colocate`).
        bin_pack: whether each entry of the pool must be on one node. The pool's first group decides.
        name_prefix: prefix of the actors' names. Need not be unique unless the group is detached.
        detached: whether the workers outlive the driver. Their names are then exactly
            ``<name_prefix><class>_<rank>``.
        master_addr: address of the rendezvous; by default that of rank 0's node.
        master_port: port of the rendezvous; by default a free one that rank 0 holds.
        worker_env: environment variables of this group's workers, set before user code runs.
        use_gpu: whether each worker takes its share of the slot's GPU; by default whether the pool has GPUs.
        start_timeout: seconds that the constructors may take, or None.
        error_grace: seconds that the other ranks have to end a call after one raised, before the group is broken.
        collectives: whether ranks use collectives. If not, ``restart(ranks=[3])`` may restart some of them alone.
        standby: how many of the pool's slots, the last ones, have a standby instead of a rank: a process that has
            imported the class and waits for a rank that dies, see `replace`. A pool whose last slots are on a host of
            their own keeps them there.
        on_death: what a call does if a rank has died before: ``"error"`` raises `GroupBrokenError`, ``"replace"`` calls
            `replace` first, and ``"shrink"`` calls `replace` if there are enough standbys, and otherwise `shrink`. The
            call in which the rank died raises `WorkerDiedError` in all cases.
        namespace: Ray's namespace of the actors' names; the driver's own by default.
        verl: options that drivers written for verl pass. They have no effect; a warning says what to use instead.

    Raises:
        PlacementError: the pool can never be placed, or not within its ``placement_timeout``.
        StartError: a constructor raised, or the workers' own Python (``python=`` of the class) cannot run them.
        WorkerDiedError: a worker died before its constructor had ended.
        CallTimeoutError: the constructors took longer than ``start_timeout``.
        GroupClosedError: the pool is closed.
        DispatchError: the class cannot be pickled, or registers a method with a name that the group uses itself.
        TypeError: the arguments of a constructor are missing.
        ValueError: an option has an invalid value, ``worker_nsight_options`` is given, or ``python=`` and Ray's
            runtime_env both choose a Python.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | Colocated,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        master_addr: str | None = None,
        master_port: int | None = None,
        worker_env: Mapping[str, str] | None = None,
        *,
        use_gpu: bool | None = None,
        start_timeout: float | None = None,
        error_grace: float = ERROR_GRACE_SECONDS,
        collectives: bool = True,
        standby: int = 0,
        on_death: Literal["error", "replace", "shrink"] = "error",
        namespace: str | None = None,
        **verl: Unpack[VerlOptions],
    ) -> None:
        check_verl_options(type(self), verl)
        if not isinstance(resource_pool, RayResourcePool):
            raise TypeError(f"resource_pool is a RayResourcePool, got {resource_pool!r}")
        if not isinstance(ray_cls_with_init, (RayClassWithInitArgs, Colocated)):
            raise TypeError(
                "ray_cls_with_init is RayClassWithInitArgs(YourWorker, ...), or colocate({...}) of several, "
                f"got {ray_cls_with_init!r}"
            )
        for option, text in (("name_prefix", name_prefix), ("namespace", namespace)):
            if text is not None and not isinstance(text, str):
                raise ValueError(f"{option} is a string or None, got {text!r}")
        process = ProcessSpec(ray_cls_with_init)
        for made in process.roles.values():
            made.check_arguments()
        if not isinstance(standby, int) or isinstance(standby, bool) or not 0 <= standby < resource_pool.world_size:
            raise ValueError(
                f"standby={standby!r}: expected a number that leaves at least one slot of {resource_pool!r} for a rank"
            )
        if on_death not in ON_DEATH:
            raise ValueError(f"on_death={on_death!r}: expected one of {', '.join(map(repr, ON_DEATH))}")
        self._rendezvous = ("", 0)
        super().__init__(process.classes, f"group {name_prefix or ''}{process.name}", error_grace)
        self._collectives = bool(collectives)
        self._state.recovers = on_death != "error"
        self._on_death: str = on_death
        use_gpu = resource_pool.use_gpu if use_gpu is None else bool(use_gpu)
        if use_gpu and not resource_pool.use_gpu:
            raise ValueError(f"use_gpu=True, but {resource_pool!r} has no GPUs")
        if detached and not resource_pool.detached:
            raise ValueError(
                f"detached=True, but the slots of {resource_pool!r} end with this driver; create the pool with "
                "detached=True too"
            )
        self.resource_pool: RayResourcePool | None = resource_pool
        self._owns = True
        self._owned_placement: tuple[str, ...] = ()
        self._registration: Registration | None = None
        self._takeover_data: Any = None
        self._start_timeout = None if start_timeout is None else check_seconds("start_timeout", start_timeout)
        self._start_plan: StartPlan | None = StartPlan(
            pool=resource_pool,
            process=process,
            bin_pack=bool(bin_pack),
            prefix=name_prefix or "",
            detached=bool(detached),
            master=(checked_address(master_addr), checked_port(master_port)),
            environment={
                "WG_BACKEND": "ray",  # this and the next are for workers written for verl
                "WG_PREFIX": name_prefix or "",
                **checked_environment(worker_env or {}),
            },
            use_gpu=use_gpu,
            name=self.name,
            namespace=namespace,
            standby=standby,
        )
        try:
            self._start(self._start_plan)
        except BaseException:
            self._state.close()
            raise
        self._register()

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[ActorHandle] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | Colocated | None = None,
        *,
        namespace: str | None = None,
        own: bool = False,
    ) -> Self:
        """Attach to running workers, for example to those that another driver started with ``detached=True``.

        Give exactly one of the first three arguments. Closing the group leaves the workers running, and it cannot
        restart them, unless it owns them.

        Args:
            name_prefix: the ``name_prefix`` that they were started with.
            worker_names: their names, in any order; ``worker_names`` of the group that started them.
            worker_handles: their actors, in any order.
            ray_cls_with_init: their class. By default the workers are asked for it. Distinguishes groups with one
                prefix.
            namespace: Ray's namespace of the names; by default the driver's own, or any other if it has no such names.
            own: take the workers over after their driver has ended. The group can then do what that driver's could:
                `close` ends the workers and removes their placement groups, with everything else in those; `restart`
                and `replace` work, also if ranks have died meanwhile. Calls registered with ``replay=True`` that the
                former driver made are not repeated. With ``worker_handles``, it can close alone.

        Raises:
            ValueError: not exactly one of the three is given, no worker has such a name, or ranks are missing.
            WorkerDiedError: a worker is dead, and the group is not taken over.
        """
        process = None if ray_cls_with_init is None else ProcessSpec(ray_cls_with_init)
        if own and worker_handles is None and (name_prefix is None) != (worker_names is None):
            left = find_takeover(name_prefix, worker_names, process.name if process else None, namespace)
            if left is not None:
                return cls._take_over(left)
        found = find_workers(name_prefix, worker_names, worker_handles, process.name if process else None, namespace)
        classes = found.classes() if process is None else process.classes
        stem = found.transport.ranks[0].name.rpartition("_")[0]
        self = cls._attached(classes, f"group {stem} (attached)", found.transport.ranks, found.master)
        self._owned_placement = found.placement_groups if own else ()
        self._owns = own
        return self

    @classmethod
    def attach(cls, name: str, namespace: str | None = None, *, own: bool = False) -> Self:
        """`from_detached` by name: the group's ``name_prefix`` with or without the name of its class.

        Args:
            name: the name of the workers without the number at its end.
            namespace: Ray's namespace of the name.
            own: take the workers over; see `from_detached`.
        """
        return cls.from_detached(name_prefix=name, namespace=namespace, own=own)

    @classmethod
    def _take_over(cls, left: Takeover) -> Self:
        """A group of workers whose driver has ended."""
        plan = left.plan
        self = cls._attached(plan.process.classes, plan.name, (), left.rendezvous)
        self.resource_pool, self._start_plan, self._owns = plan.pool, plan, True
        self._collectives, self._start_timeout, self._state.error_grace, self._on_death = left.settings
        self._state.recovers = self._on_death != "error"
        self._owned_placement, self._takeover_data = left.placement_groups, left.data
        plan.pool.admit(self, plan.bin_pack)
        left.restore(self._state)
        self._register(left.key)
        return self

    @classmethod
    def _attached(
        cls,
        classes: dict[str | None, type[Worker]],
        name: str,
        ranks: Sequence[Rank],
        rendezvous: tuple[str, int],
        error_grace: float = ERROR_GRACE_SECONDS,
    ) -> Self:
        """A group of workers that another driver started."""
        self = cls.__new__(cls)
        WorkerGroup.__init__(self, classes, name, error_grace)
        self.resource_pool = None
        self._start_timeout = None
        self._start_plan = None
        self._owns, self._owned_placement, self._registration, self._takeover_data = False, (), None, None
        self._state.transport, self._rendezvous = RayTransport(ranks), rendezvous
        return self

    def __reduce__(self) -> Any:
        """In another process (a worker, a Ray task) the group is attached to the same workers."""
        if self._state.closed:
            self._state.check()
        classes = {role: table.cls for role, table in self._tables.items()}
        ranks = [Rank(rank.actor, rank.name, rank.location) for rank in self._ray.ranks]
        name = f"{self.name.removesuffix(' (attached)')} (attached)"
        return type(self)._attached, (classes, name, ranks, self._rendezvous, self._state.error_grace)

    # --- for users of Ray --------------------------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle]:
        """The actors by rank. ``group.workers[i].m.remote()`` calls one of them directly."""
        return [rank.actor for rank in self._ray.ranks]

    @property
    def worker_names(self) -> list[str]:
        """The actors' names by rank."""
        return [rank.name for rank in self._ray.ranks]

    @property
    def master_address(self) -> str:
        """Address of the rendezvous."""
        return self._rendezvous[0]

    @property
    def master_port(self) -> int:
        """Port of the rendezvous."""
        return self._rendezvous[1]

    def plan(self) -> PoolPlan:
        """Where every rank runs: node, bundle and device, and what the nodes have. Prints as a table.

        Raises:
            GroupClosedError, GroupBrokenError: the group takes no calls.
        """
        self._check()
        ranks = [(slot_location(rank.location), rank.slot) for rank in self._ray.ranks]
        return plan_group(self.name, ranks, nodes(), self.standbys())

    def standbys(self) -> list[StandbyPlan]:
        """Where the standbys are that live, and what memory they take. Waits for nothing."""
        return [plan for one in self._ray.standbys if (plan := one.plan(self.name)) is not None]

    # --- life cycle ---------------------------------------------------------------------------------------

    @property
    def takeover_data(self) -> Any:
        """A value for the driver that takes this group over, which finds it here. Setting it has no effect on other
        drivers unless the group is detached. It must be picklable, and small: Ray's control store keeps it."""
        return self._takeover_data

    @takeover_data.setter
    def takeover_data(self, value: Any) -> None:
        self._takeover_data = value
        if self._registration is not None and self._start_plan is not None and self._start_plan.detached:
            self._registration.write()

    def hand_over_placement(self) -> tuple[str, ...]:
        """Make closing a group that was taken over leave its placement groups. Returns their ids, in hex."""
        ids, self._owned_placement = self._owned_placement, ()
        return ids

    def _owned_plan(self) -> StartPlan:
        if self._start_plan is None:
            advice = (
                "close it and create a new group" if self._owns else "only the driver that started it can restart it"
            )
            raise GroupBrokenError(f"{self.name} was attached to and cannot be restarted here; {advice}")
        return self._start_plan

    def close(self) -> None:
        """End the workers, unless another driver started them. A second close does nothing."""
        if self._owns:
            super().close()
            if self._owned_placement and self._ray.connected:
                remove_placement_groups(self._owned_placement)
            self._owned_placement = ()
            if self._registration is not None:
                self._registration.write()
        else:
            self._state.close()

    # --- the inside -------------------------------------------------------------------------------------

    def _register(self, key: str | None = None) -> None:
        self._registration = Registration(self._state, weakref.WeakMethod(self._to_take_over), key)
        self._state.on_change = self._registration.write_soon
        self._registration.write_soon()

    def _to_take_over(self) -> bytes | None:
        """What another driver needs to own this group; None unless it is detached."""
        plan = self._start_plan
        if plan is None or not plan.detached:
            return None
        settings = self._collectives, self._start_timeout, self._state.error_grace, self._on_death
        return Takeover.encode(plan, self._ray, self._rendezvous, settings, self._takeover_data)

    def _start(self, plan: StartPlan, *, again: bool = False) -> None:
        counted = not {"num_cpus", "num_gpus"} & set(plan.process.options)
        plan.pool.admit(self, plan.bin_pack, plan.process.additional_resource, counted=counted)
        self._state.transport, self._rendezvous = start(plan, self._wait_started, again, self.generation + again)

    def _check_restart(self, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
        self._owned_plan()
        return super()._check_restart(ranks)

    def _start_workers(self, ranks: tuple[int, ...] | None) -> None:
        plan = self._owned_plan()
        if ranks is None:
            self._ray.kill()
            self._start(plan, again=True)
        else:
            self._fill(ranks, self._start_timeout)

    def _replay(self, ranks: Collection[int] | None) -> None:
        super()._replay(ranks)
        self._ray.fresh = frozenset()

    def _wait_started(self, transport: RayTransport, plan: CallPlan, send: SendJoin) -> None:
        self._wait_for_constructors(transport, plan, send, self._start_timeout)


def attach(name: str, namespace: str | None = None, *, own: bool = False) -> RayWorkerGroup:
    """Attach to workers that another driver started detached. See `RayWorkerGroup.attach`."""
    return RayWorkerGroup.attach(name, namespace, own=own)
