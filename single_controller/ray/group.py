"""RayWorkerGroup: workers as Ray actors, one per slot of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from ray.actor import ActorHandle

from dispatch.plan import CallPlan
from single_controller.base.call import Call
from single_controller.base.checks import check_seconds
from single_controller.base.engine import Sent
from single_controller.base.errors import GroupBrokenError
from single_controller.base.group import ERROR_GRACE_SECONDS, WorkerGroup
from single_controller.base.monitor import monitor
from single_controller.base.worker import RANK_ENVIRONMENT
from single_controller.ray.attach import find_workers
from single_controller.ray.class_with_args import RayClassWithInitArgs
from single_controller.ray.dry_run import PoolPlan, plan_of_ranks
from single_controller.ray.engine import RayEngine
from single_controller.ray.pool import RayResourcePool
from single_controller.ray.runtime import nodes
from single_controller.ray.start import StartPlan, start


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
        if name_prefix is not None and not isinstance(name_prefix, str):
            raise ValueError(f"name_prefix is a string or None, got {name_prefix!r}")
        cls = ray_cls_with_init.cls
        self._rendezvous = ("", 0)
        super().__init__(cls, f"group {name_prefix or ''}{cls.__name__}", error_grace)
        use_gpu = resource_pool.use_gpu if use_gpu is None else bool(use_gpu)
        if use_gpu and not resource_pool.use_gpu:
            raise ValueError(f"use_gpu=True, but {resource_pool!r} has no GPUs")
        if detached and not resource_pool.detached:
            raise ValueError(
                f"detached=True, but the slots of {resource_pool!r} end with this driver; make the pool with "
                "detached=True too"
            )
        self.resource_pool: RayResourcePool | None = resource_pool
        self._start_timeout = None if start_timeout is None else check_seconds("start_timeout", start_timeout)
        self._start_plan: StartPlan | None = StartPlan(
            pool=resource_pool,
            made=ray_cls_with_init,
            bin_pack=bool(bin_pack),
            prefix=name_prefix or "",
            detached=bool(detached),
            master=(_checked_address(master_addr), _checked_port(master_port)),
            environment=_checked_environment(worker_env or {}),
            use_gpu=use_gpu,
            name=self.name,
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
        ray_cls_with_init: RayClassWithInitArgs | None = None,
    ) -> Self:
        """A group of workers that run already, started by another driver with ``detached=True``, say.

        Exactly one of the first three says which workers. The group does not own them: closing it leaves them,
        and it cannot restart them.

        Args:
            name_prefix: the ``name_prefix`` that they were started with.
            worker_names: their names, ``worker_names`` of the group that started them; in any order.
            worker_handles: their actors, in any order.
            ray_cls_with_init: their class; by default they are asked for it. It tells groups of one prefix apart.

        Raises:
            ValueError: none or several of the three are given, no worker has such a name, or ranks are missing.
            WorkerDiedError: one of them does not live.
        """
        known = None if ray_cls_with_init is None else ray_cls_with_init.cls
        found = find_workers(name_prefix, worker_names, worker_handles, known)
        worker_class = known or found.cls
        self = cls.__new__(cls)
        WorkerGroup.__init__(self, worker_class, f"group {name_prefix or ''}{worker_class.__name__} (attached)")
        self.resource_pool = None
        self._start_timeout = None
        self._start_plan = None
        self._running, self._rendezvous = found.engine, found.master
        return self

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

    def plan(self) -> PoolPlan:
        """Where every rank runs: node, bundle and device; and what the nodes have. Prints as a table.

        Raises:
            GroupClosedError, GroupBrokenError: the group takes no more calls.
        """
        self._check()
        seats = self.resource_pool.seats() if self.resource_pool is not None else None
        return plan_of_ranks(self.name, [rank.location for rank in self._ray.ranks], seats, nodes())

    def close(self) -> None:
        """End the workers; only forget them if another driver started them. A second close does nothing."""
        if self._start_plan is not None:
            super().close()
        else:
            monitor.forget(self._state.close())

    def restart(self) -> None:
        """End the workers and make new ones on the same pool, with the same constructor arguments.

        Raises:
            GroupClosedError: the group was closed.
            GroupBrokenError: another driver started these workers, so they cannot be restarted here.
            PlacementError, StartError, WorkerDiedError: as when the group was made; it stays broken then.
        """
        with self._sending:
            if self._state.closed:
                self._state.check()
            if self._start_plan is None:
                raise GroupBrokenError(f"{self.name} was attached to; whoever started its workers can restart them")
            self._state.break_("it is being restarted")
            self._ray.kill()
            self._layout = None
            try:
                self._start(self._start_plan)
            except BaseException as error:
                first_line = str(error).partition("\n")[0]
                self._state.broken = f"its restart failed with {type(error).__name__}: {first_line}"
                raise
            with self._state.lock:
                if not self._state.closed:
                    self._state.reopen()
                    return
            self._ray.kill()  # somebody closed the group in the meantime
            self._state.check()

    # --- the inside -------------------------------------------------------------------------------------

    @property
    def _ray(self) -> RayEngine:
        engine = self._engine
        if not isinstance(engine, RayEngine):
            raise TypeError(f"{self.name} does not run on Ray")
        return engine

    def _start(self, plan: StartPlan) -> None:
        counted = not {"num_cpus", "num_gpus"} & set(plan.made.options)
        plan.pool.admit(self, plan.bin_pack, plan.made.additional_resource, counted=counted)
        self._running, self._rendezvous = start(plan, self._run_constructors)

    def _run_constructors(self, engine: RayEngine, plan: CallPlan, sent: Sent) -> None:
        call = Call(self._state, engine, "__init__", plan, sent, self._start_timeout, starting=True)
        monitor.wait(call)
        if call.error is not None:
            raise call.error


def _checked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(environment, Mapping):
        raise TypeError(f"worker_env is a dict of strings, got {environment!r}")
    for key, value in environment.items():
        if key in RANK_ENVIRONMENT:
            raise ValueError(f"worker_env cannot set {key}: the group sets it for each rank")
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"worker_env maps strings to strings, got {key!r}: {value!r}")
        if not key or "=" in key or "\0" in key + value:
            raise ValueError(f"worker_env: {key!r}: {value!r} cannot be an environment variable")
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
