"""RayTrainGroup: the driver's proxy of the ranks that train one model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from single_controller import (
    CallTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerDiedError,
    WorkerFuture,
)
from workers.train.environment import train_environment
from workers.train.placement import cluster_has_gpus
from workers.train.read_args import TrainArgsError, read_args, role_args
from workers.train.shared_rollout import SharedRollout
from workers.train.worker import TrainWorker
from workers.train.worker_class import backend_class, checked_class

ROLES = ("actor", "critic")

logger = logging.getLogger(__name__)


class RayTrainGroup:
    """Train workers of one role: ``num_nodes * num_gpus_per_node`` ranks.

    The ``async_*`` methods return a Ray reference for each rank's answer, for ``ray.get``; the others wait. A context
    manager: closing the group ends its workers, and frees the place that it made itself.

    Args:
        args: the configuration, see ARGUMENTS.md; checked here.
        num_nodes: nodes.
        num_gpus_per_node: ranks on each. Where the cluster has no GPU they are CPU slots.
        pg: where the ranks live: ``(placement_group, reordered_bundle_indices)``, that with the GPUs' ids as a third,
            or a `RayResourcePool`; the first slots of it are taken. None makes a place.
        num_gpus_per_actor: share of a slot's GPU and CPU (without GPUs: of its CPU) that a rank takes.
        role: "actor" or "critic".
        resources: custom resources that each rank takes.
        num_resources_per_node: of each of them, what is reserved on a node for its ranks together, where the place is
            made here; by default what they take.
        actor_cls: the worker, a `TrainWorker`; by default the one of ``args.train_backend``.

    Attributes:
        args: the configuration, complete.
        role: the role.
        weight_version: of the weights that the rollout workers have; 0 before the first update.

    Raises:
        TrainArgsError: the configuration is not right, or the place is too small.
        TypeError: ``actor_cls`` is no `TrainWorker`, or lacks one of its methods; ``pg`` is none of the three.
        ValueError: a number or a role that makes no sense.
        PlacementError, StartError: as a `RayWorkerGroup` raises them.
    """

    def __init__(
        self,
        args: Any,
        num_nodes: int,
        num_gpus_per_node: int,
        pg: RayResourcePool | Sequence[Any] | None = None,
        num_gpus_per_actor: float = 1,
        role: str = "actor",
        *,
        resources: Mapping[str, float] | None = None,
        num_resources_per_node: float | None = None,
        actor_cls: type[TrainWorker] | None = None,
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"role={role!r}: it is one of {', '.join(map(repr, ROLES))}")
        self.args, self.role = read_args(args), role
        self.weight_version = 0
        self._ranks = _count("num_nodes", num_nodes) * _count("num_gpus_per_node", num_gpus_per_node)
        if not 0 < num_gpus_per_actor <= 1:
            raise ValueError(
                f"num_gpus_per_actor={num_gpus_per_actor!r}: it is a share of a slot, above 0 and at most 1"
            )
        self._share = num_gpus_per_actor
        self._resources = dict(resources or {})
        if num_resources_per_node is not None and not (self._resources and pg is None):
            raise ValueError(
                f"num_resources_per_node={num_resources_per_node!r} is what a node's ranks reserve of `resources` in a "
                "place that is made here; give resources, and no pg"
            )
        self._class = checked_class(actor_cls) if actor_cls is not None else backend_class(self.args.train_backend)
        self._owned: RayResourcePool | None = None
        self._closed = False
        if pg is None:
            per_node = {
                name: amount if num_resources_per_node is None else num_resources_per_node / num_gpus_per_node
                for name, amount in self._resources.items()
            }
            pg = self._owned = RayResourcePool(
                [num_gpus_per_node] * num_nodes,
                use_gpu=cluster_has_gpus(),
                name_prefix=f"{role}_",
                max_colocate_count=math.floor(1 / num_gpus_per_actor + 1e-6),
                resources=per_node,
            )
        self.pool = _first_slots(pg, self._ranks)
        self._init: tuple[Any, ...] | None = None
        self._manager: Any = None
        self._receivers: list[Any] | None = None
        self._critic: RayTrainGroup | None = None
        self._actor: RayTrainGroup | None = None
        self._saved = self._writing = False
        self._seen: SharedRollout | None = None
        self._group: RayWorkerGroup | None = None
        try:
            self.create()
        except BaseException:
            self._end()
            raise

    # --- life -------------------------------------------------------------------------------------------

    def create(self) -> list[int] | None:
        """Make the workers, where they were before `release`. If they had been initialised, they are again: from the
        last checkpoint that this group has saved, or else as the first time; with the same weight version, rollout
        manager and critic.

        Returns:
            By rank, the rollout id to go on with; None if they had not been initialised.
        """
        if self._closed or self.pool.closed:
            raise GroupClosedError(f"the {self.role}'s train group was closed, or its place was; make a new one")
        if self._alive:
            raise RuntimeError(f"{self!r} has its workers; release() ends them first")
        made = RayClassWithInitArgs(self._class)
        environment = train_environment(self.args, self.role, self.pool.use_gpu)
        slot = self.pool.bundle
        options: dict[str, Any] = {"num_cpus": _part(slot.get("CPU", 0), self._share)}
        if self.pool.use_gpu:
            options["num_gpus"] = _part(slot.get("GPU", 0), self._share)
        if environment.process:
            options["runtime_env"] = {"env_vars": environment.process}
        made.update_options(options)
        if self._resources:
            made.set_additional_resource(self._resources)
        self._group = RayWorkerGroup(self.pool, made, name_prefix=f"{self.role}_", worker_env=environment.worker)
        if self._init is None:
            return None
        try:
            begin: list[int] = self._group.init(*self._init_again())
            self._group.set_weight_version(self.weight_version)
            if self._manager is not None:
                self.set_rollout_manager(self._manager)
            actor = self if self._critic is not None else self._actor
            if actor is not None and actor._critic is not None and actor._alive and actor._critic._alive:
                actor.connect(actor._critic)
        except BaseException:
            self._group.close()  # released, as before
            raise
        return begin

    def _init_again(self) -> tuple[Any, ...]:
        """The arguments of `init` that go on from what this group has saved."""
        if self._init is None:
            raise RuntimeError("nothing was initialised")
        args, role, with_ref = self._init
        folder = role_args(args, role).save
        if folder is not None and self._writing:  # the workers ended before they had said that it is on disk
            self._saved = bool(self.worker_group.execute_with_func_generator(_has_checkpoint, folder)[0])
            self._writing = False
        if folder is not None and self._saved:
            args = args.copy()
            args["critic_load" if role == "critic" else "load"] = folder
        return args, role, with_ref

    def release(self) -> None:
        """End the workers, and keep their place, the version of their weights, and where their checkpoints are. A
        checkpoint that is written in the background is waited for."""
        self._seen = self._beginning = None
        try:
            self._finish_writing()
        finally:
            if self._group is not None:
                self._group.close()

    def close(self) -> None:
        """End the workers, and free the place if it was made here. A checkpoint that is written in the background is
        waited for."""
        try:
            self.release()
        finally:
            self._end()

    def _end(self) -> None:
        self._closed = True
        if self._group is not None:
            self._group.close()
        if self._owned is not None:
            self._owned.close()

    def _finish_writing(self) -> None:
        """Wait for a checkpoint; of workers that are lost it is found out when there are new ones."""
        if self._writing and self._alive and self._group is not None and not self._group.broken:
            seconds = 60 * self.args.distributed_timeout_minutes
            try:
                self._group.wait_for_save.options(timeout=seconds or None)()
            except (WorkerDiedError, GroupBrokenError, CallTimeoutError) as error:
                logger.warning("the %s's last checkpoint may not be complete: %s", self.role, error)
                return
            self._saved, self._writing = True, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self._end()

    @property
    def _alive(self) -> bool:
        return self._group is not None and not self._group.closed

    @property
    def worker_group(self) -> RayWorkerGroup:
        """The group of workers, for what is not here: its other methods, stats, trace, watch.

        Raises:
            GroupClosedError: the workers were released, or the group was closed.
        """
        if self._closed or self.pool.closed:
            raise GroupClosedError(f"the {self.role}'s train group was closed, or its place was; make a new one")
        if not self._alive or self._group is None:
            raise GroupClosedError(f"the {self.role}'s train workers are released; create() makes them again")
        if self._beginning is not None and _answered(self._beginning):
            self._beginning = None
        return self._group

    _beginning: WorkerFuture | None = None
    """The call of init() whose end this process may not have looked at, though whoever has its references has."""

    def _ready(self, method: str) -> RayWorkerGroup:
        """The group of workers, which have a model."""
        workers = self.worker_group
        if self._init is None:
            raise RuntimeError(f"{method}(): the {self.role}'s workers have no model yet; call async_init() first")
        return workers

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ranks

    # --- training ---------------------------------------------------------------------------------------

    def async_init(self, args: Any = None, role: str | None = None, with_ref: bool = False) -> list[Any]:
        """Have every rank make its model; see `TrainWorker.init`.

        Args:
            args: another configuration than the group's; None for that.
            role: None for the group's.
            with_ref: whether a reference's weights are kept too.

        Returns:
            By rank, a reference to the rollout id to begin with.
        """
        if args is not None:
            self.args = read_args(args)
        if role is not None and role != self.role:
            raise ValueError(f"async_init(role={role!r}): this group was made for the role {self.role!r}")
        workers = self.worker_group
        self._init = (self.args, self.role, with_ref)
        self._saved = self._writing = False
        self._seen = self._receivers = None
        self._beginning = workers.init.remote(*self._init)
        return _refs(self._beginning)

    def async_train(self, rollout_id: int, rollout_data_ref: Any) -> list[Any]:
        """Have every rank learn from a rollout.

        Args:
            rollout_id: its number, from 0.
            rollout_data_ref: a TensorDict (see `workers.train.rollout_data`), a future of one, a Ray reference to one,
                or a list of such references, one for each dp rank. What the actor and its critic compute of it for both
                is computed once for each ``rollout_id`` and object given here.

        Returns:
            By rank, a reference to the metrics of the whole step.
        """
        workers = self._ready("async_train")
        if self.args.debug_rollout_only:
            return _refs(workers.train.remote(rollout_id, None))
        if isinstance(rollout_data_ref, (list, tuple)) and len(rollout_data_ref) != workers.dp_size:
            raise TrainArgsError(f"async_train(): {len(rollout_data_ref)} references for {workers.dp_size} dp ranks")
        data = self._look(rollout_id, rollout_data_ref).data
        return _refs(workers.train.remote(rollout_id, data, **self._computed(rollout_id, rollout_data_ref)))

    def save_model(self, step: int, force_sync: bool = False) -> str | None:
        """Write a checkpoint, and the Hugging Face export that ``args.save_hf`` asks for.

        Args:
            step: the rollout id after which it is.
            force_sync: return when it is on disk, whatever ``args.async_save`` says.

        Returns:
            Its folder; None if the configuration names none.
        """
        folder: str | None = self._ready("save_model").save_model(step, force_sync)[0]
        if folder is not None:
            self._saved = self._saved or self._writing or force_sync or not self.args.async_save
            self._writing = self.args.async_save and not force_sync
        return folder

    def wait_for_save(self) -> None:
        """Wait until a checkpoint that is written in the background is on disk; raise what went wrong with it."""
        self._ready("wait_for_save").wait_for_save()
        self._saved, self._writing = self._saved or self._writing, False

    def update_weights(self) -> int:
        """Send the weights to the rollout workers, as the next version.

        Returns:
            The version; with ``debug_rollout_only`` nothing is sent, and it stays.
        """
        workers = self._ready("update_weights")
        if self.args.debug_rollout_only:
            return self.weight_version
        version = self.weight_version + 1
        if self._manager is not None:
            if _actors(self._manager) != self._receivers:  # others, since they were restarted; or init() anew
                self.set_rollout_manager(self._manager)
            self._manager.weight_version = version  # whoever has not got it when it generates next is an error
        workers.update_weights(version)
        self.weight_version = version
        return version

    def onload(self) -> int:
        """Take the devices' memory back. Returns the bytes, over all ranks."""
        return sum(self._ready("onload").wake_up())

    def offload(self) -> int:
        """Give the devices' memory away. Returns the bytes, over all ranks."""
        return sum(self._ready("offload").sleep())

    def clear_memory(self) -> None:
        """Let go of caches."""
        self._ready("clear_memory").clear_memory()

    def set_rollout_manager(self, manager: Any) -> None:
        """Tell every rank whose rollout workers `update_weights` sends to. The manager calls it from then on for
        workers that were restarted, unless it has a ``refresh`` of its own."""
        workers = self._ready("set_rollout_manager")
        if getattr(manager, "refresh", None) == self.update_weights:
            manager.refresh = None  # it stays in this process
        workers.set_rollout_manager(manager)
        self._manager, self._receivers = manager, _actors(manager)
        if getattr(manager, "refresh", self) is None:
            manager.refresh = self.update_weights

    def get_parallel_config(self) -> dict[str, int]:
        """The sizes of the axes."""
        config: dict[str, int] = self._ready("get_parallel_config").get_parallel_config()[0]
        return config

    # --- the critic -------------------------------------------------------------------------------------

    def connect(self, critic_group: RayTrainGroup) -> None:
        """Let rank i of this group reach rank i of the critic, and take values from it in `async_train`.

        Raises:
            ValueError: the groups differ in size; or the other one is no critic, or this one is no actor.
        """
        if self.world_size != critic_group.world_size:
            raise ValueError(
                f"connect(): the {self.role} group has {self.world_size} ranks, the {critic_group.role} group "
                f"{critic_group.world_size}; rank i of one is to reach rank i of the other"
            )
        if (self.role, critic_group.role) != ("actor", "critic"):
            raise ValueError(
                "connect(): a group with role='actor' is connected with one with role='critic', not "
                f"{self.role!r} with {critic_group.role!r}"
            )
        self.worker_group.connect_actor_critic(critic_group.worker_group.workers)
        for before in (self._critic, critic_group._actor):
            if before is not None:  # whom one of the two was connected with
                before._actor = before._critic = None
        self._critic, critic_group._actor = critic_group, self
        self._seen = critic_group._seen = None

    def _computed(self, rollout_id: int, given: Any) -> dict[str, Any]:
        """What one of the two groups computes for both: futures, whose rows go from rank to rank."""
        actor = self if self.role == "actor" else self._actor
        critic = self if self.role == "critic" else self._critic
        args = self._leader.args
        if args.advantage_estimator != "gae":
            return {}
        wanted = [("values", critic, "compute_values")]
        if args.kl_coef:
            wanted += [
                ("old_log_probs", actor, "compute_old_log_prob"),
                ("ref_log_probs", actor, "compute_ref_log_prob"),
            ]
        has = given.keys() if hasattr(given, "keys") else ()
        return {
            name: group._look(rollout_id, given).once(method, group)
            for name, group, method in wanted
            # A worker of the user's own that has no such method may ask its neighbour itself.
            if group is not None and name not in has and method in group._ready("async_train").methods
        }

    @property
    def _leader(self) -> RayTrainGroup:
        """Whose configuration counts for an actor and its critic: the actor's."""
        return self if self._actor is None else self._actor

    def _look(self, rollout_id: int, given: Any) -> SharedRollout:
        """Rollout data in the order in which its rows are dealt; the same for this group and its critic's."""
        if self._seen is None or self._seen.given is not given or self._seen.rollout_id != rollout_id:
            parts = self._rows_into() if self._leader.args.balance_data else None
            self._seen = SharedRollout(rollout_id, given, parts)
        return self._seen

    def _rows_into(self) -> int:
        """Parts of about as many tokens: an actor and its critic cut the same rows, so an order that suits the two."""
        groups = [group for group in (self, self._actor, self._critic) if group is not None]
        return math.lcm(*(group._ready("async_train").dp_size for group in groups))

    def __repr__(self) -> str:
        state = self._class.__name__ if self._alive else "released"
        return f"<RayTrainGroup of {self._ranks}: {self.role}, {state}>"


def _first_slots(pg: RayResourcePool | Sequence[Any], ranks: int) -> RayResourcePool:
    if isinstance(pg, (list, tuple)) and len(pg) in (2, 3) and pg[1] is not None:
        if len(pg[1]) < ranks:
            raise TrainArgsError(f"pg has {len(pg[1])} bundle indices for {ranks} ranks")
        pg = (pg[0], *(part if part is None else list(part)[:ranks] for part in pg[1:]))
    if not isinstance(pg, RayResourcePool):
        pg = RayResourcePool.from_placement_group(pg)
    if pg.world_size < ranks:
        raise TrainArgsError(f"{pg!r} has {pg.world_size} slots for {ranks} ranks")
    return pg if pg.world_size == ranks else pg[:ranks]


def _part(amount: float, share: float) -> float:
    """A share of a resource. Ray counts ten-thousandths; rounded down, so that all shares of a slot fit into it."""
    part = amount * share
    return part if part == int(part) else math.floor(part * 10_000 + 1e-6) / 10_000


def _has_checkpoint(worker: Any, folder: str) -> bool:
    from pathlib import Path

    from workers.train.checkpoints import LATEST

    return (Path(folder) / LATEST).exists()


def _count(name: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name}={number!r}: it is an integer from 1")
    return number


def _actors(manager: Any) -> list[Any]:
    """The rollout workers of a manager."""
    return list(getattr(getattr(manager, "group", None), "workers", ()))


def _refs(future: WorkerFuture) -> list[Any]:
    return list(future.refs)


def _answered(future: WorkerFuture) -> bool:
    """Whether all ranks have answered. What they said of where they stand is known from then on: calls that follow are
    cut for it, and not for the sizes before."""
    import ray

    refs = _refs(future)
    if len(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]) < len(refs):
        return False
    future.exception()
    return True
