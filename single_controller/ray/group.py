"""RayWorkerGroup: workers as Ray actors, one per slot of a pool.

`replace`, `shrink` and `grow` change which processes are a group's ranks, and end in the same way: those that stay
leave their collectives and process groups, new ones run their constructors, and all join a new rendezvous. Then calls
with ``replay=True`` are repeated on the new ranks, and `Worker.on_membership_change` runs on all. In a group without
collectives, the processes that stay notice nothing but their new numbers.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, Unpack, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from dispatch.checks import check_count, check_seconds
from dispatch.plan import CallPlan
from single_controller.call.call import DEATH_SHOWS_SECONDS, MAX_PROBED, CallOptions
from single_controller.call.codec import decode_result
from single_controller.call.errors import (
    CallTimeoutError,
    GroupBrokenError,
    StartError,
    WorkerDiedError,
    ranks_text,
)
from single_controller.call.future import off_loop
from single_controller.call.group import ERROR_GRACE_SECONDS, WorkerGroup, check_ranks
from single_controller.call.state import ADVICE, POLL_SECONDS, GroupState
from single_controller.call.transport import MAX_STACK_SECONDS
from single_controller.call.worker.worker import Worker
from single_controller.call.worker.worker_class import Colocated
from single_controller.ray.attach import find_workers, placement_groups
from single_controller.ray.class_with_args import ProcessSpec, RayClassWithInitArgs
from single_controller.ray.group_records import GroupRecord, Registration, Takeover, find_takeover
from single_controller.ray.placement.plan import PoolPlan, StandbyPlan, plan_ranks
from single_controller.ray.placement.pool import RayResourcePool
from single_controller.ray.placement.reservation import remove_placement_groups, remove_pools_of, wait_started
from single_controller.ray.replicas import number_to_add, ranks_to_keep
from single_controller.ray.results import one_line
from single_controller.ray.runtime import nodes
from single_controller.ray.start import (
    StartPlan,
    check_python,
    checked_environment,
    checked_master,
    enlist,
    fill,
    given_address,
    join,
    keep,
    living_standbys,
    recruit,
    start,
    vacant_slots,
)
from single_controller.ray.transport import Rank, RayTransport, Standby
from single_controller.verl import MegatronInfo, VerlOptions, check_verl_options

ON_DEATH = ("error", "replace", "shrink")

CHANGE_SECONDS = 300.0
JOIN_SECONDS = 10.0
"""Seconds that idle ranks have at least to take new ones, also if the start of these has used the timeout up."""

TRIES = 3
"""How often ranks are replaced or dropped again because further ones have died meanwhile, and how often a standby is
started again that dies before it is ready."""

logger = logging.getLogger(__name__)


class RayWorkerGroup(WorkerGroup):
    """Workers of one class in the slots of a resource pool, one Ray actor per rank.

    The constructor returns when all workers' constructors have returned. Ranks are in order of (node, device), compared
    as numbers. Closing the group ends its workers, but not its pool. A start that fails leaves nothing behind.

    Args:
        resource_pool: the pool.
        ray_cls_with_init: the worker class with its constructor's arguments, or several per process (`colocate`).
        bin_pack: whether each entry of the pool must be on one node. The pool's first group decides.
        name_prefix: prefix of the actors' names. Need not be unique unless the group is detached.
        detached: whether the workers outlive the driver. Their names are then exactly ``<name_prefix><class>_<rank>``.
        master_addr: address of the rendezvous; by default that of rank 0's node.
        master_port: port of the rendezvous; by default a free one that rank 0 holds.
        worker_env: environment variables of this group's workers, set before user code runs.
        use_gpu: whether each worker takes its share of the slot's GPU; by default whether the pool has GPUs.
        start_timeout: seconds that the constructors may take, or None.
        error_grace: seconds that the other ranks have to end a call after one raised, before the group is broken. With
            ``collectives=False`` it is not.
        collectives: whether ranks use collectives. If not, ``restart(ranks=[3])`` may restart some of them alone.
        standby: how many of the pool's last slots have a standby instead of a rank: a process that has imported the
            class and waits to `replace` a rank. To keep the standbys on a host of their own, use a pool whose last
            slots are there.
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
        TypeError, ValueError: an argument of a constructor is missing, or an option has an invalid value.
    """

    resource_pool: RayResourcePool | None = None
    _rendezvous = ("", 0)
    _start_plan: StartPlan | None = None  # None in a group of workers that another driver started
    _owns = False
    _owned_placement: tuple[str, ...] = ()
    _registration: Registration | None = None
    _takeover_data: Any = None

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
        if check_count("standby", standby, 0) >= resource_pool.world_size:
            raise ValueError(
                f"standby={standby!r}: expected a number that leaves at least one slot of {resource_pool!r} for a rank"
            )
        if on_death not in ON_DEATH:
            raise ValueError(f"on_death={on_death!r}: expected one of {', '.join(map(repr, ON_DEATH))}")
        super().__init__(process.classes, f"group {name_prefix or ''}{process.name}", error_grace)
        self._state.independent = not collectives
        self._state.recovers = on_death != "error"
        use_gpu = resource_pool.use_gpu if use_gpu is None else bool(use_gpu)
        if use_gpu and not resource_pool.use_gpu:
            raise ValueError(f"use_gpu=True, but {resource_pool!r} has no GPUs")
        if detached and not resource_pool.detached:
            raise ValueError(
                f"detached=True, but the slots of {resource_pool!r} end with this driver; create the pool with "
                "detached=True too"
            )
        self.resource_pool, self._owns = resource_pool, True
        self._start_plan = StartPlan(
            pool=resource_pool,
            process=process,
            bin_pack=bool(bin_pack),
            prefix=name_prefix or "",
            detached=bool(detached),
            master=checked_master(master_addr, master_port),
            environment={
                "WG_BACKEND": "ray",  # this and the next are for workers written for verl
                "WG_PREFIX": name_prefix or "",
                **checked_environment(worker_env or {}),
            },
            use_gpu=use_gpu,
            name=self.name,
            namespace=namespace,
            standby=standby,
            collectives=self.collectives,
            start_timeout=None if start_timeout is None else check_seconds("start_timeout", start_timeout),
            error_grace=self._state.error_grace,
            on_death=on_death,
        )
        try:
            self._start(self._start_plan)
            self._state.reopen()  # ends the workers if the pool was closed meanwhile
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
        **verl: Unpack[VerlOptions],
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
            own: take the workers over after their driver has ended: `close` ends them and removes their placement
                groups, with everything else in those, and `restart` and `replace` work, also if ranks have died. Calls
                with ``replay=True`` of the former driver are not repeated. With ``worker_handles``, the group can only
                be closed.
            verl: see the constructor.

        Raises:
            ValueError: not exactly one of the three is given, no worker has such a name, or ranks are missing.
            WorkerDiedError: a worker is dead, and the group is not taken over.
            ResultError: their class, or what their driver has left, cannot be loaded here.
            TypeError: an option is unknown.
        """
        check_verl_options(cls.from_detached, verl)
        process = None if ray_cls_with_init is None else ProcessSpec(ray_cls_with_init)
        class_name = None if process is None else process.name
        if own and worker_handles is None and (name_prefix is None) != (worker_names is None):
            left = find_takeover(name_prefix, worker_names, class_name, namespace)
            if left is not None:
                return cls._take_over(*left)
        first, ranks = find_workers(name_prefix, worker_names, worker_handles, class_name, namespace)
        classes = decode_result("from_detached", 0, first.classes, private=True) if process is None else process.classes
        name, info = f"group {first.name.rpartition('_')[0]} (attached)", first.info
        master, collectives = (info.master_addr, info.master_port), info.members is not None
        self = cls._attached(classes, name, ranks, master, collectives=collectives)
        if own:
            self._owns, self._owned_placement = True, placement_groups(ranks)
            self.advise("Close it and create a new group")
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
    def _take_over(cls, key: str, record: GroupRecord, left: Takeover) -> Self:
        """A group of workers whose driver has ended."""
        plan = left.plan
        self = cls._attached(plan.process.classes, plan.name, (), left.rendezvous, plan.error_grace, plan.collectives)
        self.resource_pool, self._start_plan, self._owns = plan.pool, plan, True
        self._state.recovers = plan.on_death != "error"
        self._owned_placement, self._takeover_data = left.placement_groups, left.data
        self.advise(ADVICE)
        plan.pool.admit(self, plan.bin_pack)
        left.restore(self._state, record)
        self._register(key)
        return self

    @classmethod
    def _attached(
        cls,
        classes: dict[str | None, type[Worker]],
        name: str,
        ranks: Sequence[Rank],
        rendezvous: tuple[str, int],
        error_grace: float = ERROR_GRACE_SECONDS,
        collectives: bool = True,
    ) -> Self:
        """A group of workers that another driver started."""
        self = cls.__new__(cls)
        WorkerGroup.__init__(self, classes, name, error_grace)
        self._state.independent = not collectives
        self._state.transport, self._rendezvous = RayTransport(ranks), rendezvous
        self.advise("Only the driver that started it can restart it. After that, attach to it again or get a new copy")
        return self

    def __reduce__(self) -> Any:
        """In another process (a worker, a Ray task) the group is attached to the same workers."""
        self._state.check_closed()
        classes = {role: one.cls for role, one in self._worker_classes.items()}
        ranks = [Rank(rank.actor, rank.name, rank.location) for rank in self._ray.ranks]
        name = f"{self.name.removesuffix(' (attached)')} (attached)"
        return type(self)._attached, (classes, name, ranks, self._rendezvous, self._state.error_grace, self.collectives)

    # --- for users of Ray ---------------------------------------------------------------------------------------------

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
        ranks = plan_ranks([(rank.location, rank.slot) for rank in self._ray.ranks])
        return PoolPlan(self.name, "placed", ranks, tuple(nodes()), standbys=tuple(self.standbys()))

    def standbys(self) -> list[StandbyPlan]:
        """Where the standbys are that live, and what memory they take. Waits for nothing."""
        transport = cast(RayTransport | None, self._state.transport)  # None while the group starts
        known = [] if transport is None else transport.standbys
        return [plan for one in known if (plan := one.plan(self.name)) is not None]

    # --- life cycle ---------------------------------------------------------------------------------------------------

    @property
    def takeover_data(self) -> Any:
        """A small, picklable value for the driver that takes this detached group over, which finds it here. Ray's
        control store keeps it; in a group that is not detached, it stays in this driver."""
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
            raise GroupBrokenError(
                f"{self.name} is attached to its workers and cannot restart them. {self._state.advice}"
            )
        return self._start_plan

    def close(self) -> None:
        """End the workers, unless another driver started them. A second close does nothing, and neither does one in a
        fork."""
        if os.getpid() != self._state.pid:  # a thread of the parent may have held a lock at the fork
            return
        if self._owns:
            super().close()
            if self._owned_placement and self._ray.connected:
                remove_placement_groups(self._owned_placement)
            self._owned_placement = ()
            if self._registration is not None:
                self._registration.write()
        else:
            self._state.close()

    # --- other ranks --------------------------------------------------------------------------------------------------

    def replace(self, ranks: Sequence[int] | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """Replace the ranks that have died. The others keep their processes and their workers.

        Standbys, or new processes in the same slots, take the place of the dead ranks. Collectives in which other ranks
        wait are aborted, process groups are destroyed, and all ranks get a new rendezvous: another ``master_port``, and
        other local ranks if a standby is on another node. The latest successful calls with ``replay=True`` are repeated
        on the new ranks only, so these methods and constructors must not run collectives. Then
        `Worker.on_membership_change` runs on all ranks. With ``collectives=False``, the other ranks are not
        interrupted; they only drop calls that still wait for a future as an argument.

        Args:
            ranks: living ranks to end and replace too, such as one that hangs.
            timeout: seconds that the ranks may take to leave the calls that they are in, and to start.

        Returns:
            The ranks that were replaced.

        Raises:
            GroupClosedError, GroupBrokenError: the group was closed, or another driver started these workers.
            ValueError: the group has no such ranks.
            CallTimeoutError: a rank computes, or waits for something else than a collective, for longer than
                ``timeout``. The message shows where. Include it in ``ranks``, or call `restart`.
            SingleControllerError: what starting workers, a repeated call or `Worker.on_membership_change` raises. The
                group then stays broken.
        """
        replaced: set[int] = set()

        def prepare(dead: tuple[int, ...]) -> Callable[[float], None]:
            replaced.update(dead)
            return lambda seconds: self._fill(dead, seconds)

        self._without_dead("replace", ranks, timeout, prepare)
        return tuple(sorted(replaced))

    async def areplace(self, ranks: Sequence[int] | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """`replace` for event loops, which it does not block."""
        return await off_loop(lambda: self.replace(ranks, timeout))

    async def ashrink(self, ranks: Sequence[int] | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """`shrink` for event loops, which it does not block."""
        return await off_loop(lambda: self.shrink(ranks, timeout))

    async def agrow(self, count: int | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """`grow` for event loops, which it does not block."""
        return await off_loop(lambda: self.grow(count, timeout))

    def shrink(self, ranks: Sequence[int] | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """Continue without the ranks that have died. The others keep their processes and their workers, and are
        renumbered 0, 1, ... in the same order. Otherwise, this does the same as `replace`.

        Whole data-parallel replicas are dropped (`Worker.dp_replica`): living ranks of a replica that has lost a rank
        are ended too. Workers must register a layout again in `Worker.on_membership_change`. `grow` and `restart` add
        the ranks again.

        Args:
            ranks: living ranks to drop too.
            timeout: seconds that the ranks may take to leave the calls that they are in.

        Returns:
            The ranks that were dropped, by the numbers that they had.

        Raises:
            GroupBrokenError: no complete replica would be left, so the group stays as it is, and broken if ranks have
                died; or another driver started these workers.
            GroupClosedError, ValueError, CallTimeoutError, SingleControllerError: as `replace`.
        """
        numbers, dropped = list(range(self.world_size)), list[int]()  # numbers: by rank, the one that it had
        end = time.monotonic() + check_seconds("timeout", timeout)

        def prepare(dead: tuple[int, ...]) -> Callable[[float], None]:
            living = set(range(self.world_size)) - set(dead) - self._find_dead(end)
            kept = ranks_to_keep(self._state, self._ray, living, end)

            def drop(seconds: float) -> None:
                dropped.extend(set(numbers) - {numbers[rank] for rank in kept})
                numbers[:] = [numbers[rank] for rank in kept]
                self._drop(kept, seconds)

            return drop

        self._without_dead("shrink", ranks, timeout, prepare)
        return tuple(sorted(dropped))

    def grow(self, count: int | None = None, timeout: float = CHANGE_SECONDS) -> tuple[int, ...]:
        """Add ranks in the pool's slots that have none, such as the slots of ranks that `shrink` has dropped. The new
        ranks are numbered after the others. Standbys that have died are started again, in the slots that are left.

        The group continues while the new processes start and run their constructors. Then it waits until the running
        calls have ended, and all ranks join a new rendezvous, as in `replace`. With ``collectives=False``, the ranks
        only get the new number of ranks, and keep their process groups.

        Args:
            count: how many ranks, in whole replicas (`Worker.dp_replica`); by default as many as there is room for.
            timeout: seconds that the ranks may take to end the calls that they are in, and to start.

        Returns:
            The new ranks; () if there is no room.

        Raises:
            GroupClosedError, GroupBrokenError: the group takes no calls, or another driver started these workers.
            ValueError: ``count`` is not a positive multiple of a replica's size.
            PlacementError: there is no room for ``count`` ranks, or a process has not started within ``timeout``.
            CallTimeoutError: the ranks have not ended their calls within ``timeout``. The group is as before.
            SingleControllerError: what starting workers, a repeated call or `Worker.on_membership_change` raises. If
                that is before the ranks have joined, the group is as before, and otherwise broken.
        """
        end = time.monotonic() + check_seconds("timeout", timeout)
        self._check()
        plan = self._owned_plan()
        encoded = plan.process.encode()
        if plan.process.python is not None:
            with suppress(StartError):  # only now, while calls need not wait: on a new host it may take a minute
                check_python(plan, vacant_slots(plan, self._ray))
        with self._state.sending:  # no other thread may choose the same slots
            self._check()
            transport = self._ray
            slots = vacant_slots(plan, transport)
            most = plan.pool.world_size - plan.standby - transport.world_size - len(transport.recruits)
            added = number_to_add(self._state, transport, count, min(len(slots), most), end)
            self._check_replays(added)
            check_python(plan, slots[:added])
            standbys = living_standbys(transport)
            lost = plan.standby - len(standbys)
            if lost > 0 and len(slots) > added:  # before the new ranks, which an error here would leave behind
                transport.standbys = standbys + recruit(plan, transport, slots[added:][-lost:], encoded)
                if self.closed:  # meanwhile, which has not ended these
                    transport.kill()
                self._keep_standbys()
            recruits = recruit(plan, transport, slots[:added], encoded)
            transport.recruits += recruits
        if not recruits:
            return ()
        try:
            wait_started([one.prepared for one in recruits], _left(end), self.name)
            larger = enlist(plan, transport, recruits, self.generation + 1)
            # With a state of their own: a constructor that raises does not break the group.
            apart = GroupState(f"{self.name}, its new ranks", self._state.error_grace)
            wait = partial(self._wait_for_constructors, timeout=_left(end), state=apart)
            join(plan, larger, sorted(larger.fresh - transport.fresh), encoded, wait, self._rendezvous)
            with self._state.sending:
                self._check()
                return self._add(recruits, encoded, end)
        except WorkerDiedError:
            self._state.check_closed()  # which has ended the new processes
            raise
        except RayError as error:
            self._state.check_closed()
            raise StartError(
                f"{self.name}: a process for a new rank could not be started: {one_line(error)}"
            ) from error
        finally:
            with self._state.sending:
                failed = [one for one in recruits if one in self._ray.recruits and self._ray.connected]  # not added
                for one in failed:
                    self._ray.recruits.remove(one)
                    one.end()
            if failed:  # once for all of them, and no call waits: the control store is asked
                remove_pools_of(one.actor for one in failed)

    def replace_or_shrink(self) -> None:
        """What ``on_death="shrink"`` does: `replace` if there are enough standbys for the ranks that have died, and
        otherwise `shrink`."""
        with self._state.sending:
            dead = {*self._state.dead, *self._transport.deaths(), *self._find_dead()}
            if len(living_standbys(self._ray)) >= len(dead):
                self.replace()
            else:
                self.shrink()

    # --- the inside ---------------------------------------------------------------------------------------------------

    def _register(self, key: str | None = None) -> None:
        self._registration = Registration(self._state, weakref.WeakMethod(self._to_take_over), key)
        self._state.on_change = self._registration.write_soon
        self._registration.write_soon()

    def _to_take_over(self) -> Takeover | None:
        """What another driver needs to own this group; None unless it is detached."""
        plan = self._start_plan
        if plan is None or not plan.detached:
            return None
        transport = self._ray
        # Without recruits: the driver that takes the group over ends them, or its `grow` would find no free slot.
        standbys = tuple((one.actor, one.name, one.slot) for one in transport.standbys)
        everyone = range(transport.world_size)
        unstarted = frozenset(everyone).difference(transport.started(everyone))
        return Takeover(plan, transport.ranks, standbys, self._rendezvous, self._takeover_data, unstarted)

    def _start(self, plan: StartPlan, *, again: bool = False) -> None:
        counted = not {"num_cpus", "num_gpus"} & set(plan.process.options)
        plan.pool.admit(self, plan.bin_pack, plan.process.additional_resource, counted=counted)
        if plan.detached and plan.namespace is None:
            # Its ranks stay in one namespace, also if the driver that replaces some has another one.
            plan = self._start_plan = replace(plan, namespace=ray.get_runtime_context().namespace)
        wait = partial(self._wait_for_constructors, timeout=plan.start_timeout)
        try:
            self._state.transport, self._rendezvous = start(plan, wait, again, self.generation + again)
        except WorkerDiedError:
            self._state.check_closed()  # with the pool, which has ended the new processes
            raise
        if again:
            self._ray.fresh = frozenset(range(self.world_size))  # until `_replay` has repeated all calls on them
        else:
            self._start_plan = replace(plan, home=self._ray.ranks[0].location.node_id)

    def _check_restart(self, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
        self._owned_plan()
        return super()._check_restart(ranks)

    def _start_workers(self, ranks: tuple[int, ...] | None) -> None:
        plan = self._owned_plan()
        if ranks is None:
            self._ray.kill()
            self._start(plan, again=True)
        else:
            self._fill(ranks, plan.start_timeout)

    def _replay(self, ranks: Collection[int] | None) -> None:
        # Also on ranks that were filled before, if that failed before they had all calls.
        super()._replay(None if ranks is None else {*ranks, *self._ray.fresh})
        self._ray.fresh = frozenset()

    # --- how the ranks change -----------------------------------------------------------------------------------------

    @property
    def _ray(self) -> RayTransport:
        return cast(RayTransport, self._transport)

    def _recover(self) -> None:
        if self._owned_plan().on_death == "shrink":
            self.replace_or_shrink()
        else:
            self.replace()

    def _without_dead(
        self,
        method: str,
        ranks: Sequence[int] | None,
        timeout: float,
        prepare: Callable[[tuple[int, ...]], Callable[[float], None]],
    ) -> None:
        """Replace or drop the dead ranks, again if further ones die meanwhile.

        Args:
            ranks: living ranks that count as dead.
            prepare: gets the dead ranks, checks whether the group can do without them, and returns a function that
                replaces or drops them within some seconds. If it raises, the group stays as it is.
        """
        end = time.monotonic() + check_seconds("timeout", timeout)
        self._state.check_process()
        with self._state.sending:  # from the first try to the last, so that no other thread sends in between
            self._owned_plan()
            more: Collection[int] = () if ranks is None else check_ranks(method, ranks, self.world_size)
            filled: Collection[int] = ()  # the group still counts them as dead, but they have new processes
            for tries in reversed(range(TRIES)):
                dead = {*more, *(set(self._state.dead) - set(filled)), *self._transport.deaths()}
                if not dead and self.broken is None:
                    dead |= self._find_dead(end)
                if not dead and self.broken is None:
                    return
                change = prepare(tuple(sorted(dead)))
                try:
                    self._change(partial(change, _left(end)), end)
                    return
                except WorkerDiedError as error:
                    if not tries:
                        raise
                    more, filled = error.ranks, self._ray.fresh
                    logger.warning("%s: another rank died in %s(): %s", self.name, method, error)

    def _change(self, change: Callable[[], None], end: float) -> None:
        """Change the ranks; then repeat the logged calls on the new ones, and tell all ranks. The caller holds
        ``sending``."""
        with self._state.restart():
            change()
            self._state.reopen()
            self._replay(self._ray.fresh)
            if self.collectives:
                self._run_in_each_role("_change_membership", _left(end), self.generation + 1)
            self._forget_layouts()  # not before: if another rank dies, calls are repeated again

    def _keep_standbys(self, tries: int = TRIES) -> None:
        """Start standbys again that die before they are ready: Ray may have put one on a host that is gone, of which it
        does not know yet. A thread "standby-again" does that, once Ray has told the death in a thread of its own. It
        ends when it has started the standby."""
        group = weakref.ref(self)  # standbys end with the group, not the other way round

        def when_prepared(standby: Standby, done: Future[Any]) -> None:
            if isinstance(done.exception(), RayActorError):
                threading.Thread(target=again, args=(standby,), name="standby-again", daemon=True).start()

        def again(standby: Standby) -> None:
            this = group()
            if this is None or not this._ray.connected:
                return
            with this._state.sending:
                transport = this._ray
                if this.closed or standby not in transport.standbys:
                    return
                transport.standbys.remove(standby)
                plan = this._owned_plan()
                transport.standbys += recruit(plan, transport, [standby.slot], plan.process.encode())
                if this.closed:  # as in `grow`
                    transport.kill()
            logger.warning("%s: a standby died before it was ready, and is started again", this.name)
            if tries > 1:
                this._keep_standbys(tries - 1)

        for one in self._ray.standbys:
            if not ray.wait([one.prepared], timeout=0)[0]:
                one.prepared.future().add_done_callback(partial(when_prepared, one))

    def _find_dead(self, until: float = math.inf) -> set[int]:
        """The ranks that have died, also those of which Ray does not know yet: an error on another rank, which a death
        has caused, may arrive earlier than the news of the death. Ranks of which nothing is known ``until`` then, by
        the monotonic clock, are not among them."""
        transport, dead = self._transport, set[int]()
        unknown = set(range(self.world_size))
        end = min(until, time.monotonic() + max(DEATH_SHOWS_SECONDS, transport.death_seconds))
        while unknown and time.monotonic() < end:
            known = {**transport.probe(sorted(unknown)[:MAX_PROBED]), **transport.deaths()}
            dead |= {rank for rank, reason in known.items() if reason is not None}
            unknown -= known.keys()
            time.sleep(0.01 if unknown else 0.0)
        return dead

    def _fill(self, chosen: Sequence[int], timeout: float | None) -> None:
        """Put new processes at ranks, and have all join a new rendezvous, or the new ones the old one."""
        plan, before = self._owned_plan(), self._ray
        encoded = plan.process.encode()
        if plan.collectives:  # now, because those that stay must not run the calls that they have while processes start
            before.ask("leave", sorted(set(range(self.world_size)) - set(chosen)), MAX_STACK_SECONDS)
        # Set at once, here and below: whatever fails from here on, the group has these actors.
        self._state.transport = fill(plan, before, chosen, encoded, self.generation + 1)
        self._keep_standbys()
        # Without collectives also ranks that were filled before, if that failed before they had joined.
        self._join(encoded, timeout, chosen=None if plan.collectives else sorted(self._ray.fresh))

    def _drop(self, kept: Sequence[int], timeout: float) -> None:
        """End all ranks but some, and have these join a new rendezvous."""
        plan, before = self._owned_plan(), self._ray
        self._state.transport = keep(plan, before, kept, self.generation + 1)
        self._state.renumber(kept)
        self._join(plan.process.encode(), timeout)

    def _add(self, recruits: Sequence[Standby], encoded: Any, end: float) -> tuple[int, ...]:
        """Make recruits ranks. The caller holds ``sending``."""
        plan, before = self._owned_plan(), self._ray
        present = [one for one in recruits if one in before.recruits]  # a restart meanwhile has ended them
        new = tuple(range(before.world_size, before.world_size + len(present)))
        self._check_replays(len(present))  # again: others may have been logged since

        def add() -> None:
            self._state.transport = enlist(plan, before, present, self.generation + 1)
            self._join(encoded, _left(end))

        # Not with the timeout of a call: if the ranks need longer, only this wait ends, and the group goes on.
        group = self if self._class is not None else self._role_group(self.roles[0])
        reports = group._send(group._any_method("_report"), CallPlan.empty(before.world_size), recorded=False)
        try:
            reports.wait(_left(end))
        except CallTimeoutError as error:
            error.add_note(f"grow() waited for the calls of {ranks_text(error.ranks)} to end; the group is as before")
            raise
        reports.check()
        if plan.collectives:  # a method with concurrent=True may run beside the reports, and use the process groups
            self._wait_for_calls(end)
        end = max(end, time.monotonic() + JOIN_SECONDS)
        if not plan.collectives:
            try:
                add()
                self._replay(new)
            except BaseException as error:  # calls would reach ranks that are not ready
                self._state.break_(f"its growth failed with {type(error).__name__}: {error}".partition("\n")[0])
                raise
            with self._state.lock:
                self._state.restarts += 1
                self._state.on_change()
            return new
        self._change(add, end)
        return new

    def _wait_for_calls(self, end: float) -> None:
        """Wait until no rank runs a call any more, for `grow`. The caller holds ``sending``."""
        end = time.monotonic() + _left(end)
        while running := self._state.running():
            if time.monotonic() > end:
                late = sorted({rank for call in running for rank in call.late})
                said = f"grow() waited for the calls of {ranks_text(late)} to end; the group is as before"
                raise CallTimeoutError(said, ranks=late, call_goes_on=True)
            time.sleep(POLL_SECONDS)
        if (refusal := self._state.refusal()) is not None:
            raise refusal

    def _join(self, encoded: Any, timeout: float | None, chosen: Sequence[int] | None = None) -> None:
        """Have ranks join, by default all, with a new rendezvous if they use collectives."""
        plan, transport = self._owned_plan(), self._ray
        wait = partial(self._wait_for_constructors, timeout=timeout)
        everyone = range(self.world_size) if chosen is None else chosen
        if not self.collectives:
            self._rendezvous = join(plan, transport, everyone, encoded, wait, self._rendezvous, leave=False)
            return
        with transport.leaving(transport.started(everyone)):
            self._rendezvous = join(plan, transport, everyone, encoded, wait, (given_address(plan, transport), None))

    def _run_in_each_role(self, method: str, timeout: float, *args: object) -> None:
        """Call a method of `Worker` on all ranks, for the workers of each role."""
        options = CallOptions(timeout=timeout)
        for role in self._worker_classes:
            group = self if role is None else self._role_group(role)
            spec = group._any_method(method)
            plan = group._plan(spec, args, {}, options)
            group._send(spec, plan, options, recorded=False).check()


def _left(end: float) -> float:
    """Seconds until a moment of the monotonic clock, and a few when it has passed: every step gets a chance."""
    return max(0.1, end - time.monotonic())


class NVMegatronRayWorkerGroup(MegatronInfo, RayWorkerGroup):
    """A `RayWorkerGroup` with the two methods of verl's group of this name."""


attach = RayWorkerGroup.attach
"""Attach to workers that another driver started detached: `RayWorkerGroup.attach`."""
