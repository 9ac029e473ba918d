"""RayWorkerGroup: workers as Ray actors, one per slot of a pool."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dispatch.plan import CallPlan
from dispatch.register import method_spec
from single_controller.base.call import Call
from single_controller.base.engine import Sent
from single_controller.base.group import ERROR_GRACE_SECONDS, WorkerGroup
from single_controller.base.monitor import monitor
from single_controller.base.pool import ClassWithInitArgs
from single_controller.base.worker import RANK_ENVIRONMENT
from single_controller.ray.actor import Location, StartOrder, actor_class
from single_controller.ray.answers import RayAnswers
from single_controller.ray.engine import Rank, RayEngine
from single_controller.ray.placement import Slot, wait_placed
from single_controller.ray.pool import RayResourcePool
from single_controller.ray.runtime import address_key
from single_controller.ray.transport import pack

logger = logging.getLogger(__name__)

_BEFORE_START = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "RAY_")
"""Variables that count only if they exist before the process starts: those need a runtime_env."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its constructor's arguments, with options for the actors.

    Args:
        cls: a subclass of `Worker`, plain or under ``@ray.remote``.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.

    Raises:
        TypeError: ``cls`` is no subclass of `Worker`, or the arguments do not fit its constructor.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        options: dict[str, Any] = {}
        if isinstance(cls, ActorClass):
            declared = getattr(cls, "_default_options", None) or {}
            # The pool decides how much of a CPU and a GPU a worker has.
            options = {key: value for key, value in declared.items() if key not in ("num_cpus", "num_gpus")}
            cls = cast(Any, cls).__ray_metadata__.modified_class.__ray_actor_class__
        super().__init__(cls, *args, **kwargs)
        self._options = options
        self._additional_resource: dict[str, float] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Ray's actor options, besides those that the group sets."""
        return dict(self._options)

    @property
    def additional_resource(self) -> dict[str, float]:
        """Custom resources of each worker."""
        return dict(self._additional_resource)

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set Ray's actor options (``{"num_cpus": 0.5}``). They win over the group's own.

        Raises:
            ValueError: Ray has no such option, or the group needs it for itself.
        """
        held = {"name", "scheduling_strategy", "placement_group", "lifetime", "max_concurrency"} & set(options)
        if held:
            raise ValueError(f"update_options(): the group sets {sorted(held)} itself")
        ray.remote(_Probe).options(**options)  # Ray's own check of names and values
        self._options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Set custom resources that each worker takes (``{"disk": 1}``).

        Raises:
            ValueError: an amount that is no positive number.
        """
        for name, amount in additional_resource.items():
            if not isinstance(name, str) or not isinstance(amount, (int, float)) or amount <= 0:
                raise ValueError(f"set_additional_resource(): {name!r}: {amount!r} is no positive amount")
        self._additional_resource = dict(additional_resource)


class _Probe:
    pass


class RayWorkerGroup(WorkerGroup):
    """Workers of one class on the slots of a pool. Made when every constructor has ended.

    Ranks stand in order of (node, device), compared as numbers. Closing the group ends its workers; its pool
    stays. A start that fails leaves nothing behind.

    Args:
        resource_pool: where the workers live.
        ray_cls_with_init: what they are.
        bin_pack: whether each entry of the pool must lie on one node; counts for the pool's first group.
        name_prefix: prefix of the actors' names; need not be unique unless the group is detached.
        detached: whether the workers outlive the driver. Their names are then exactly
            ``<name_prefix><class>_<rank>``.
        master_addr: address for the rendezvous, instead of that of rank 0's node.
        master_port: port for the rendezvous, instead of one that rank 0 finds and holds.
        worker_env: environment variables of this group's workers, set before user code runs.
        use_gpu: whether each worker takes its share of the slot's GPU; by default whether the pool has GPUs.
        start_timeout: seconds that the constructors may take, or None.
        error_grace: seconds that the other ranks have to end a call after one raised in it; the group is broken
            then.

    Raises:
        PlacementError: the pool can never be placed, or not within its ``placement_timeout``.
        StartError: a constructor raised.
        WorkerDiedError: a worker died before its constructor had ended.
        CallTimeoutError: the constructors took longer than ``start_timeout``.
        GroupClosedError: the pool is closed.
        DispatchError: the class cannot be pickled, or registers a method whose name the group needs.
        ValueError: an option that is not possible.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
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
    ) -> None:
        if not isinstance(resource_pool, RayResourcePool):
            raise TypeError(f"resource_pool is a RayResourcePool, got {resource_pool!r}")
        if not isinstance(ray_cls_with_init, RayClassWithInitArgs):
            raise TypeError(f"ray_cls_with_init is RayClassWithInitArgs(YourWorker, ...), got {ray_cls_with_init!r}")
        if (master_addr is None) != (master_port is None) and master_addr is not None:
            logger.debug("master_addr is given without master_port: rank 0 finds a port")
        if name_prefix is not None and not isinstance(name_prefix, str):
            raise ValueError(f"name_prefix is a string or None, got {name_prefix!r}")
        cls = ray_cls_with_init.cls
        super().__init__(cls, f"group {name_prefix or ''}{cls.__name__}", error_grace)
        self.resource_pool = resource_pool
        self._made = ray_cls_with_init
        self._bin_pack = bin_pack
        self._name_prefix = name_prefix or ""
        self._detached = detached
        self._master = (_checked_address(master_addr), _checked_port(master_port))
        self._environment = _checked_environment(worker_env or {})
        self._use_gpu = resource_pool.use_gpu if use_gpu is None else use_gpu
        if self._use_gpu and not resource_pool.use_gpu:
            raise ValueError(f"use_gpu=True, but {resource_pool!r} has no GPUs")
        self._start_timeout = start_timeout
        self._master_found: tuple[str, int] | None = None
        try:
            self._start()
        except BaseException:
            self._state.close()
            raise

    # --- what Ray users expect --------------------------------------------------------------------------

    @property
    def workers(self) -> list[ActorHandle]:
        """The actors, by rank; ``group.workers[i].m.remote()`` calls one of them directly."""
        return [rank.actor for rank in self._ray.ranks]

    @property
    def worker_names(self) -> list[str]:
        """The actors' names, by rank."""
        return [rank.name for rank in self._ray.ranks]

    @property
    def master_address(self) -> str:
        """Address of the rendezvous."""
        return self._rendezvous[0]

    @property
    def master_port(self) -> int:
        """Port of the rendezvous."""
        return self._rendezvous[1]

    def restart(self) -> None:
        """End the workers and make new ones on the same pool, with the same constructor arguments.

        Raises:
            GroupClosedError: the group was closed.
            PlacementError, StartError, WorkerDiedError: as when the group was made.
        """
        with self._sending:
            if self._state.closed:
                self._state.check()
            self._state.break_("it is being restarted")
            self._ray.kill()
            self._layout = None
            try:
                self._start()
            except BaseException as error:
                self._state.broken = f"its restart failed: {error}"
                raise
            self._state.reopen()

    # --- the start --------------------------------------------------------------------------------------

    @property
    def _ray(self) -> RayEngine:
        engine = self._engine
        if not isinstance(engine, RayEngine):
            raise TypeError(f"{self.name} does not run on Ray")
        return engine

    @property
    def _rendezvous(self) -> tuple[str, int]:
        if self._master_found is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._master_found

    def _start(self) -> None:
        """Place, order, start: no step waits for one rank after the other. Rolled back if it fails."""
        made = pack_class(self._made)
        pool = self.resource_pool
        if not {"num_cpus", "num_gpus"} & set(self._made.options):
            pool.admit(self)
        pool.place(self._bin_pack, self._made.additional_resource)
        slots = pool.slots()
        actors: list[ActorHandle] = []
        try:
            unique = "" if self._detached else f"_{uuid.uuid4().hex[:8]}"
            prefix = f"{self._name_prefix}{self._worker_class.__name__}{unique}_"
            for number, slot in enumerate(slots):
                actors.append(self._actor(slot, f"{prefix}{number}"))
            located = [actor._sc_locate.remote() for actor in actors]
            wait_placed(located, pool.placements(), pool.placement_timeout, self.name)
            order = rank_order(slots, _locations(located, self.name))
            ranks = [Rank(actors[place], f"{prefix}{place}", location) for place, location in order]
            self._running = RayEngine(ranks)
            self._run_constructors(ranks, [slots[place].entry for place, _ in order], made)
        except BaseException:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            raise

    def _actor(self, slot: Slot, name: str) -> ActorHandle:
        share = 1.0 / self.resource_pool.max_colocate_count
        options: dict[str, Any] = {
            "num_cpus": share,
            "num_gpus": share if self._use_gpu else 0,
            "resources": self._made.additional_resource or None,
            "max_restarts": 0,
            **self._made.options,
        }
        early = {key: value for key, value in self._environment.items() if key.startswith(_BEFORE_START)}
        if early:
            runtime = dict(options.get("runtime_env") or {})
            options["runtime_env"] = {**runtime, "env_vars": {**runtime.get("env_vars", {}), **early}}
        methods = tuple(
            name
            for name in dir(self._worker_class)
            if not name.startswith("_") and method_spec(self._worker_class, name) is not None
        )
        concurrent = any(spec.registration.concurrent for spec in self._specs.values())
        cls = actor_class(self._worker_class.__name__, methods, concurrent)
        strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
        lifetime = "detached" if self._detached else None
        configured = cls.options(name=name, lifetime=lifetime, scheduling_strategy=strategy, **options)
        actor: ActorHandle = configured.remote()
        return actor

    def _run_constructors(self, ranks: Sequence[Rank], entries: Sequence[int], made: Any) -> None:
        """Send every rank its start message; rank 0's address goes along as a reference, so nobody waits for it."""
        master = ranks[0].actor._sc_rendezvous.remote(*self._master)
        local_sizes = {entry: entries.count(entry) for entry in set(entries)}
        seen: dict[int, int] = {}
        refs = {}
        for number, (rank, entry) in enumerate(zip(ranks, entries, strict=True)):
            local = seen.get(entry, 0)
            seen[entry] = local + 1
            order = StartOrder(number, len(ranks), local, local_sizes[entry], self._environment)
            refs[rank.actor._sc_start.remote(order, made, master)] = number
        sent = Sent(refs, RayAnswers("__init__", list(refs), None, len(refs)))
        plan = CallPlan.empty(len(ranks))
        call = Call(self._state, self._engine, "__init__", plan, sent, self._start_timeout, starting=True)
        monitor.wait(call)
        if call.error is not None:
            raise call.error
        self._master_found = ray.get(master)


def rank_order(slots: Sequence[Slot], locations: Sequence[Location]) -> list[tuple[int, Location]]:
    """Which slot holds which rank: by node, then entry, then device, all as numbers, then bundle.

    Args:
        slots: the pool's slots.
        locations: where the actor in each found itself.

    Returns:
        By rank: (index of the slot, location).
    """

    def key(place: int) -> tuple[Any, ...]:
        location, slot = locations[place], slots[place]
        devices = tuple((0, int(d), "") if d.isdigit() else (1, 0, d) for d in location.devices)
        return (address_key(location.address), slot.entry, devices, slot.bundle)

    return [(place, locations[place]) for place in sorted(range(len(slots)), key=key)]


def pack_class(made: RayClassWithInitArgs) -> Any:
    """The class and its constructor's arguments, packed for the workers.

    Raises:
        DispatchError: they cannot be pickled.
    """
    from dispatch.errors import DispatchError

    try:
        packet = pack((made.cls, made.args, made.kwargs))
    except Exception as error:
        raise DispatchError(
            f"{made.cls.__name__} or its constructor's arguments cannot be pickled to be sent: "
            f"{type(error).__name__}: {error}",
            method="__init__",
        ) from error
    return packet if packet.inline else ray.put(packet)


def _locations(refs: Sequence[Any], name: str) -> list[Location]:
    from ray.exceptions import RayError

    from single_controller.base.errors import WorkerDiedError
    from single_controller.ray.answers import one_line

    try:
        locations: list[Location] = ray.get(list(refs))
        return locations
    except RayError as error:
        raise WorkerDiedError(f"{name}: a worker died before it was started: {one_line(error)}") from error


def _checked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    for key, value in environment.items():
        if key in RANK_ENVIRONMENT:
            raise ValueError(f"worker_env cannot set {key}: the group sets it for each rank")
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"worker_env maps strings to strings, got {key!r}: {value!r}")
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
