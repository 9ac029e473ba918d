"""RayTrainGroup: the driver's proxy of the ranks that train one model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from single_controller import GroupClosedError, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers.train.environment import train_environment
from workers.train.last_checkpoint import LastCheckpoint
from workers.train.placement import cluster_has_gpus, first_slots, share_of_slot
from workers.train.read_args import TrainArgsError, read_args, role_args
from workers.train.rollout_link import RolloutLink
from workers.train.shared_rollout import ActorCritic
from workers.train.worker import TrainWorker
from workers.train.worker_class import backend_class, checked_class

ROLES = ("actor", "critic")


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
        self._takes_version = _takes_version(self._class)
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
        self.pool = first_slots(pg, self._ranks)
        self._init: tuple[Any, ...] | None = None
        self._rollout: RolloutLink | None = None
        self._saved = LastCheckpoint()
        self._pair: ActorCritic | None = None
        self._asleep = False
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
        options: dict[str, Any] = dict(share_of_slot(self.pool, self._share))
        if environment.process:
            options["runtime_env"] = {"env_vars": environment.process}
        made.update_options(options)
        if self._resources:
            made.set_additional_resource(self._resources)
        self._group = RayWorkerGroup(self.pool, made, name_prefix=f"{self.role}_", worker_env=environment.worker)
        self._group.advise(
            "restart() of the train group makes its workers again and goes on from the last checkpoint that it saved, "
            "or else from the beginning; close() ends it"
        )
        self._made = self._group.workers
        self._asleep = False
        if self._init is None:
            return None
        try:
            begin: list[int] = self._group.init(*self._init_again())
            self._group.set_weight_version(self.weight_version)
            if self._rollout is not None:
                self._rollout.introduce(self._group.set_rollout_manager)
            if self._pair is not None and all(group._alive for group in self._pair.groups):
                self._pair.groups[0].connect(self._pair.groups[1])
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
        if folder is not None and self._saved.exists(self.worker_group, folder):
            args = args.copy()
            args["critic_load" if role == "critic" else "load"] = folder
            args["no_load_optim"], args["ckpt_step"] = False, None  # those were about another run's checkpoint
        return args, role, with_ref

    def release(self) -> None:
        """End the workers, and keep their place, the version of their weights, and where their checkpoints are. A
        checkpoint that is written in the background is waited for."""
        if self._pair is not None:
            self._pair.forget()
        if self._group is None:
            return
        try:
            self._saved.wait(self._group, 60 * self.args.distributed_timeout_minutes, self.role)
        finally:
            self._group.close()

    def restart(self) -> list[int] | None:
        """`release` and `create`: the way on when a worker has died. What was learnt since the last checkpoint is lost.

        Returns:
            See `create`.
        """
        self.release()
        return self.create()

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
        return self._group

    def ready_workers(self, method: str) -> RayWorkerGroup:
        """The group of workers, which have a model.

        Args:
            method: what they are needed for.

        Raises:
            GroupClosedError: see `worker_group`.
            GroupBrokenError: a worker has died; `restart` goes on.
            RuntimeError: `async_init` was not called, or the workers were restarted behind this group's back.
        """
        workers = self.worker_group
        if self._init is None:
            raise RuntimeError(f"{method}(): the {self.role}'s workers have no model yet; call async_init() first")
        if workers.workers != self._made:
            raise RuntimeError(
                f"the {self.role}'s workers are others than this group has made: worker_group.restart() knows nothing "
                "of checkpoints and versions. Call restart() of the train group"
            )
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

        Raises:
            TrainArgsError: the configuration is not right, or not for this number of ranks.
            ModelFilesError: it names no model.
        """
        if role is not None and role != self.role:
            raise ValueError(f"async_init(role={role!r}): this group was made for the role {self.role!r}")
        args = self.args if args is None else read_args(args)
        workers = self.worker_group
        self._class.check_args(role_args(args, self.role), self._ranks, with_ref)
        sent = workers.init.remote(args, self.role, with_ref)
        self.args, self._init = args, (args, self.role, with_ref)
        self._saved, self._asleep = LastCheckpoint(), False
        if self._rollout is not None:
            self._rollout.forget()
        if self._pair is not None:
            self._pair.forget()
        return list(sent.refs)

    def async_train(self, rollout_id: int, rollout_data_ref: Any) -> list[Any]:
        """Have every rank learn from a rollout.

        Args:
            rollout_id: its number, from 0.
            rollout_data_ref: a TensorDict (see `workers.train.rollout_data`), a future of one, a Ray reference to one,
                or a list of such references, one for each dp rank. What the actor and its critic compute of it for both
                is computed once for each ``rollout_id`` and object given here.

        Returns:
            By rank, a reference to the metrics of the whole step.

        Raises:
            RolloutDataError: rows that are in this process are not right; nothing was sent. Where they are not,
                ``ray.get`` raises it.
        """
        workers = self.ready_workers("async_train")
        if self.args.debug_rollout_only:
            return list(workers.train.remote(rollout_id, None).refs)
        if isinstance(rollout_data_ref, (list, tuple)) and len(rollout_data_ref) != workers.dp_size:
            raise TrainArgsError(f"async_train(): {len(rollout_data_ref)} references for {workers.dp_size} dp ranks")
        if hasattr(rollout_data_ref, "keys"):
            self._class.check_rows(self.args, rollout_data_ref)
        pair = self._pair or ActorCritic(self)
        data = pair.rollout(rollout_id, rollout_data_ref).data
        beside = pair.computed(rollout_id, rollout_data_ref)
        return list(workers.train.remote(rollout_id, data, **beside).refs)

    def save_model(self, step: int, force_sync: bool = False) -> str | None:
        """Write a checkpoint, and the Hugging Face export that ``args.save_hf`` asks for.

        Args:
            step: the rollout id after which it is.
            force_sync: return when it is on disk, whatever ``args.async_save`` says.

        Returns:
            Its folder; None if the configuration names none.
        """
        workers = self.ready_workers("save_model")
        with self._saved.failing():
            folder: str | None = workers.save_model(step, force_sync)[0]
        if folder is not None:
            self._saved.begun(folder, background=self.args.async_save and not force_sync)
        return folder

    def wait_for_save(self) -> None:
        """Wait until a checkpoint that is written in the background is on disk; raise what went wrong with it."""
        workers = self.ready_workers("wait_for_save")
        with self._saved.failing():
            workers.wait_for_save()
        self._saved.ended()

    def update_weights(self) -> int:
        """Send the weights to the rollout workers, as the next version.

        Returns:
            The version; with ``debug_rollout_only`` nothing is sent, and it stays.
        """
        workers = self.ready_workers("update_weights")
        if self.args.debug_rollout_only:
            return self.weight_version
        version = self.weight_version + 1
        if self._rollout is not None:
            if self._rollout.outdated:
                self._rollout.introduce(workers.set_rollout_manager)
            self._rollout.expect(version)  # whoever has not got it when it generates next is an error
        workers.update_weights(*((version,) if self._takes_version else ()))
        self.weight_version = version
        return version

    def onload(self) -> int:
        """Take the devices' memory back. Returns the bytes, over all ranks."""
        taken = self.ready_workers("onload").wake_up()
        self._asleep = False
        return sum(taken_here or 0 for taken_here in taken)

    def offload(self) -> int:
        """Give the devices' memory away. Returns the bytes, over all ranks."""
        freed = self.ready_workers("offload").sleep()
        self._asleep = True
        return sum(freed_here or 0 for freed_here in freed)

    def clear_memory(self) -> None:
        """Let go of caches."""
        self.ready_workers("clear_memory").clear_memory()

    def set_rollout_manager(self, manager: Any) -> None:
        """Tell every rank whose rollout workers `update_weights` sends to.

        Args:
            manager: None for nobody; or a `RolloutManager`, a Ray actor of one, or anything with the workers' group as
                its ``group``. One in this process, unless it has a ``refresh`` of its own, has `update_weights` called
                when workers were restarted: all get the weights of now, as the next version.
        """
        workers = self.ready_workers("set_rollout_manager")
        link = RolloutLink(manager, self._refresh)
        link.introduce(workers.set_rollout_manager)
        self._rollout = None if manager is None else link

    def _refresh(self) -> int:
        """`update_weights`, of workers that may sleep while others generate."""
        asleep = self._asleep
        if asleep:
            self.onload()
        try:
            return self.update_weights()
        finally:
            if asleep and not self.worker_group.broken:
                self.offload()

    def get_parallel_config(self) -> dict[str, int]:
        """The sizes of the axes."""
        config: dict[str, int] = self.ready_workers("get_parallel_config").get_parallel_config()[0]
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
        for group in (self, critic_group):
            group.disconnect()
        self._pair = critic_group._pair = ActorCritic(self, critic_group)

    def disconnect(self) -> None:
        """Let an actor and its critic, if there are two, go on without each other."""
        for group in () if self._pair is None else self._pair.groups:
            group._pair = None

    def __repr__(self) -> str:
        state = self._class.__name__ if self._alive else "released"
        return f"<RayTrainGroup of {self._ranks}: {self.role}, {state}>"


def _takes_version(cls: type[TrainWorker]) -> bool:
    try:
        inspect.signature(cls.update_weights).bind(None, 1)
    except TypeError:
        return False
    return True


def _count(name: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name}={number!r}: it is an integer from 1")
    return number
