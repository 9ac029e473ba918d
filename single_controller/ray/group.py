"""RayWorkerGroup: workers as Ray actors, one per slot of a pool."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack

from ray.actor import ActorHandle

from dispatch.plan import CallPlan
from single_controller.base.checks import check_seconds
from single_controller.base.colocate import Colocated
from single_controller.base.engine import Sent
from single_controller.base.errors import GroupBrokenError
from single_controller.base.group import ERROR_GRACE_SECONDS, WorkerGroup
from single_controller.base.methods import suggestion
from single_controller.base.monitor import monitor
from single_controller.base.worker import RANK_ENVIRONMENT, Worker
from single_controller.ray.attach import find_workers, remove_placement_groups
from single_controller.ray.class_with_args import ProcessSpec, RayClassWithInitArgs
from single_controller.ray.engine import Rank, RayEngine
from single_controller.ray.pool import RayResourcePool
from single_controller.ray.pool_plan import PoolPlan, plan_group
from single_controller.ray.runtime import nodes
from single_controller.ray.start import StartPlan, slot_location, start, start_ranks


class VerlOptions(TypedDict, total=False):
    """Options of verl's groups that have no meaning here, and None where they were not given."""

    device_name: str | None
    ray_wait_register_center_timeout: float | None
    profile_steps: Sequence[int] | None
    worker_nsight_options: Mapping[str, Any] | None


_INSTEAD = {
    "device_name": "use_gpu= and resources= of the pool say which devices the workers have",
    "ray_wait_register_center_timeout": "start_timeout= limits the start",
    "profile_steps": "a worker's methods start and stop its profiler",
    "worker_nsight_options": "call ray_cls_with_init.update_options({'runtime_env': {'nsight': {...}}})",
}
"""What to use instead of each of `VerlOptions`."""


class RayWorkerGroup(WorkerGroup):
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
        namespace: str | None = None,
        **verl: Unpack[VerlOptions],
    ) -> None:
        _check_verl_options(type(self), verl)
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
        self._rendezvous = ("", 0)
        super().__init__(process.classes, f"group {name_prefix or ''}{process.name}", error_grace)
        self._collectives = bool(collectives)
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
        self._start_timeout = None if start_timeout is None else check_seconds("start_timeout", start_timeout)
        self._start_plan: StartPlan | None = StartPlan(
            pool=resource_pool,
            process=process,
            bin_pack=bool(bin_pack),
            prefix=name_prefix or "",
            detached=bool(detached),
            master=(_checked_address(master_addr), _checked_port(master_port)),
            environment={
                "WG_BACKEND": "ray",  # this and the next are for workers written for verl
                "WG_PREFIX": name_prefix or "",
                **_checked_environment(worker_env or {}),
            },
            use_gpu=use_gpu,
            name=self.name,
            namespace=namespace,
        )
        try:
            self._start(self._start_plan)
        except BaseException:
            self._state.close()
            raise

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

        Give exactly one of the first three arguments. Closing the group leaves the workers running, unless it owns
        them. It cannot restart them.

        Args:
            name_prefix: the ``name_prefix`` that they were started with.
            worker_names: their names, in any order; ``worker_names`` of the group that started them.
            worker_handles: their actors, in any order.
            ray_cls_with_init: their class. By default the workers are asked for it. Distinguishes groups with one
                prefix.
            namespace: Ray's namespace of the names; by default the driver's own, or any other if it has no such names.
            own: take the workers over after their driver has ended: closing the group ends them and removes their
                placement groups, with everything else in those.

        Raises:
            ValueError: not exactly one of the three is given, no worker has such a name, or ranks are missing.
            WorkerDiedError: a worker is dead.
        """
        process = None if ray_cls_with_init is None else ProcessSpec(ray_cls_with_init)
        found = find_workers(name_prefix, worker_names, worker_handles, process.name if process else None, namespace)
        classes = found.classes() if process is None else process.classes
        stem = found.engine.ranks[0].name.rpartition("_")[0]
        self = cls._attached(classes, f"group {stem} (attached)", found.engine.ranks, found.master)
        self._owned_placement = found.placement_groups if own else ()
        self._owns = own
        return self

    @classmethod
    def attach(cls, name: str, namespace: str | None = None, *, own: bool = False) -> Self:
        """`from_detached` by name: the group's ``name_prefix`` with or without the name of its class.

        Args:
            name: the name of the workers without the number at its end.
            namespace: Ray's namespace of the name.
            own: take the workers over: closing the group ends them.
        """
        return cls.from_detached(name_prefix=name, namespace=namespace, own=own)

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
        self._owns, self._owned_placement = False, ()
        self._state.engine, self._rendezvous = RayEngine(ranks), rendezvous
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
        slots = self.resource_pool.slots() if self.resource_pool is not None else None
        return plan_group(self.name, [slot_location(rank.location) for rank in self._ray.ranks], slots, nodes())

    def close(self) -> None:
        """End the workers, unless another driver started them. A second close does nothing."""
        if self._owns:
            super().close()
            if self._owned_placement and self._ray.connected:
                remove_placement_groups(self._owned_placement)
            self._owned_placement = ()
        else:
            monitor.forget(self._state.close())

    # --- the inside -------------------------------------------------------------------------------------

    @property
    def _ray(self) -> RayEngine:
        engine = self._engine
        if not isinstance(engine, RayEngine):
            raise TypeError(f"{self.name} does not run on Ray")
        return engine

    def _start(self, plan: StartPlan, *, again: bool = False) -> None:
        counted = not {"num_cpus", "num_gpus"} & set(plan.process.options)
        plan.pool.admit(self, plan.bin_pack, plan.process.additional_resource, counted=counted)
        self._state.engine, self._rendezvous = start(plan, self._wait_started, again)

    def _check_restart(self, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
        if self._start_plan is None:
            advice = (
                "close it and create a new group" if self._owns else "only the driver that started it can restart it"
            )
            raise GroupBrokenError(f"{self.name} was attached to and cannot be restarted here; {advice}")
        return super()._check_restart(ranks)

    def _start_workers(self, ranks: tuple[int, ...] | None) -> None:
        if self._start_plan is None:
            return
        if ranks is None:
            self._ray.kill()
            self._start(self._start_plan, again=True)
        else:
            self._state.engine = start_ranks(self._start_plan, self._ray, ranks, self._rendezvous, self._wait_started)

    def _wait_started(self, engine: RayEngine, plan: CallPlan, sent: Sent) -> None:
        self._wait_for_constructors(engine, plan, sent, self._start_timeout)


def _check_verl_options(group: type, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _INSTEAD:
            known = [other for other in inspect.signature(group).parameters if other != "verl"]
            raise TypeError(f"{group.__name__}() got an unexpected keyword argument {name!r}{suggestion(name, known)}")
        if value is None:
            continue
        if name == "worker_nsight_options":
            raise ValueError(f"{name} has no effect here: {_INSTEAD[name]}")
        warnings.warn(f"{name}={value!r} has no effect: {_INSTEAD[name]}", stacklevel=3)


def _checked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(environment, Mapping):
        raise TypeError(f"worker_env is a dict of strings, got {environment!r}")
    for key, value in environment.items():
        if key in RANK_ENVIRONMENT:
            raise ValueError(f"worker_env cannot set {key}: the group sets it for each rank")
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"worker_env maps strings to strings, got {key!r}: {value!r}")
        if not key or "=" in key or "\0" in key + value:
            raise ValueError(f"worker_env: {key!r}: {value!r} is not a valid environment variable")
    return dict(environment)


def _checked_address(address: str | None) -> str | None:
    if address is not None and (not isinstance(address, str) or not address):
        raise ValueError(f"master_addr is a host name or address, got {address!r}")
    return address


def _checked_port(port: int | str | None) -> int | None:
    if port is None:
        return None
    try:
        number = int(port)
    except (TypeError, ValueError):
        number = -1
    if not 0 < number < 65536:
        raise ValueError(f"master_port is a port number from 1 to 65535, got {port!r}")
    return number


def attach(name: str, namespace: str | None = None, *, own: bool = False) -> RayWorkerGroup:
    """Attach to workers that another driver started detached. See `RayWorkerGroup.attach`."""
    return RayWorkerGroup.attach(name, namespace, own=own)
