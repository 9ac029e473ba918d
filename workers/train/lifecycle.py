"""TrainGroupLife: the part of `RayTrainGroup` that creates, ends and replaces workers, and has them continue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

from single_controller import GroupClosedError, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from single_controller.ray.attach import remove_placement_groups
from workers.data.shared_rollout import SharedRollout
from workers.recovery.replacing import Progress, replace_ranks
from workers.recovery.snapshot_choice import Recovery
from workers.recovery.train_handover import leave
from workers.train.args import TrainArgsError
from workers.train.args_checks import role_args
from workers.train.checkpoints import LastCheckpoint
from workers.train.environment import train_environment
from workers.train.role_placement import share_of_slot
from workers.train.rollout_link import RolloutLink
from workers.train.train_worker import TrainWorker


class TrainGroupLife(ABC):
    """See the module's docstring; `RayTrainGroup` sets the fields."""

    args: Any
    role: str
    weight_version: int
    pool: RayResourcePool
    _class: type[TrainWorker]
    _ranks: int
    _share: float
    _resources: dict[str, float]
    _standby: int
    _on_death: str
    _detached: bool
    _name_prefix: str
    _owned: RayResourcePool | None
    _placement: tuple[str, ...]
    _with_ref: bool | None
    _saved: LastCheckpoint
    _asleep: bool
    _closed: bool
    _made: list[Any]

    @abstractmethod
    def update_weights(self) -> int:
        """Send the weights to the rollout workers, as the next version."""

    @abstractmethod
    def connect(self, critic_group: Any) -> None:
        """Connect this group to the critic's."""

    def _start_alone(self) -> None:
        """Set what a group has no other part of yet: workers, a rollout manager, an actor or a critic."""
        self._rollout: RolloutLink | None = None
        self._pair: SharedRollout[Any] | None = None  # with the connected actor or critic
        self._group: RayWorkerGroup | None = None
        self._progress = Progress()
        self.next_rollout_id: int | None = None

    def _leave(self, **changed: Any) -> None:
        """Leave what `attach` needs for the driver that takes the group over."""
        if self._detached and self._group is not None:
            leave(self._group, self, changed)

    def create(self) -> list[int] | None:
        """Create the workers on the slots that they had before `release`.

        If the group was initialized before, the new workers are too: from the last checkpoint that this group saved, or
        else as the first time. They keep the weight version, the rollout manager and the critic.

        Returns:
            By rank, the rollout id to continue with; None if the group was not initialized.
        """
        self._check_open()
        if self._alive:
            raise RuntimeError(f"{self!r} already has workers; call release() first")
        made = RayClassWithInitArgs(self._class)
        environment = train_environment(self.args, self.pool.use_gpu)
        options: dict[str, Any] = dict(share_of_slot(self.pool, self._share))
        if environment.process:
            options["runtime_env"] = {"env_vars": environment.process}
        made.update_options(options)
        if self._resources:
            made.set_additional_resource(self._resources)
        self._group = RayWorkerGroup(
            self.pool,
            made,
            name_prefix=f"{self._name_prefix}{self.role}_",
            detached=self._detached,
            worker_env=environment.worker,
            standby=self._standby,
        )
        self._group.advise(
            "Call RayTrainGroup.restart() to create new workers, which continue from the last checkpoint that the "
            "group saved, or from the beginning if there is none; or close()"
        )
        self._made = self._group.workers
        self._asleep, self._progress = False, Progress()
        if self._with_ref is None:
            return None
        try:
            begin: list[int] = self._group.init(self._args_to_continue(), self.role, self._with_ref)
            self._group.set_weight_version(self.weight_version)
            if self._rollout is not None:
                self._rollout.introduce(self._group.set_rollout_manager)
                self._rollout.rewind(begin[0])
            if self._pair is not None and all(group._alive for group in self._pair.groups):
                self._pair.groups[0].connect(self._pair.groups[1])
        except BaseException:
            self._group.close()  # the group is released again, as before the call
            raise
        self._leave()
        return begin

    def _args_to_continue(self) -> Any:
        """Return the configuration with which new workers continue from the checkpoint that this group saved last."""
        folder = role_args(self.args, self.role).save
        if folder is None or not self._saved.exists(self.worker_group, folder):
            return self.args
        args = self.args.copy()
        args["critic_load" if self.role == "critic" else "load"] = folder
        # These settings are for the checkpoint of another run.
        args["no_load_optim"], args["ckpt_step"] = False, None
        return args

    def release(self) -> None:
        """End the workers. The group keeps its slots, the weight version and the location of its checkpoints. A
        checkpoint that is being written in the background is finished first."""
        if self._pair is not None:
            self._pair.forget()
        if self._group is None:
            return
        try:
            self._saved.wait(self._group, 60 * self.args.distributed_timeout_minutes, self.role)
        finally:
            self._group.close()

    def restart(self) -> list[int] | None:
        """`release`, then `create`. Use it when a worker has died. Training since the last checkpoint is lost.

        Returns:
            See `create`.
        """
        self.release()
        return self.create()

    def replace(self) -> list[int] | None:
        """Replace the ranks that have died, and continue from the latest snapshots in the memory of the ranks, which
        ``args.peer_snapshot_interval`` asks for. The other ranks keep their processes. All ranks return to the same
        rollout, and so do those of a connected actor or critic, whose dead ranks are replaced too. Without a complete
        set of snapshots, all continue from the checkpoint, as after `restart`.

        If the rollout workers have newer weights, or the checkpoint was loaded, `update_weights` is called. A
        `RolloutStream` of the manager returns the batches from that rollout on once more.

        Returns:
            By rank, the rollout id to continue with; None if no rank was replaced, or the group was not initialized.

        Raises:
            CheckpointError: the checkpoints of actor and critic are of different rollouts.
            SingleControllerError: see `RayWorkerGroup.replace`. The group is broken; call `restart`.
        """
        return self._continue_after()

    def grow(self, count: int | None = None) -> list[int] | None:
        """Add ranks in slots that have none, such as those that ``on_death="shrink"`` has left empty. All ranks
        continue with the next rollout, from snapshots in memory.

        Args:
            count: see `RayWorkerGroup.grow`.

        Returns:
            By rank, the rollout id to continue with; None if there is no room, or the group was not initialized.

        Raises:
            TrainArgsError: ``args.peer_snapshot_interval`` is not set, so there are no snapshots to continue from.
            RuntimeError: the group is connected to an actor or a critic, which would have another size.
            SingleControllerError: see `RayWorkerGroup.grow`.
        """
        workers = self.worker_group
        if self._pair is not None:
            raise RuntimeError(
                f"grow(): the {self.role}'s group is connected to another one, which has as many ranks; call "
                "disconnect() first, or restart() both"
            )
        if self._with_ref is not None:
            if not self.args.peer_snapshot_interval:
                raise TrainArgsError(
                    "grow() continues from snapshots in memory: set peer_snapshot_interval. Without them, call "
                    "save_model() and restart(), which starts all ranks"
                )
            workers.take_peer_snapshot()
        return self._continue_after(lambda: workers.grow(count))

    def _replace_dead(self) -> None:
        if self._on_death == "shrink" and self._pair is None:
            self.worker_group.replace_or_shrink()
        else:
            self.worker_group.replace()

    def _continue_after(self, change: Callable[[], object] | None = None) -> list[int] | None:
        groups = [self]
        if self._pair is not None and self._with_ref is not None:
            groups += [one for one in self._pair.groups if one is not self and one._alive and one._with_ref is not None]
        begin = replace_ranks(groups, change)
        self._made = self.worker_group.workers
        self._leave()
        if begin is not None and self._pair is not None:
            self._pair.forget()
            if len(groups) == 2:
                self._pair.groups[0].connect(self._pair.groups[1])
        return begin

    def _continue(self, recovery: Recovery | None) -> list[int]:
        """Continue from a snapshot, or else from the checkpoint."""
        if self.weight_version and self._progress.sent_after is None:
            self.weight_version += 1  # an update has failed: some rollout workers may have these weights
        workers, version = self.worker_group, self.weight_version
        self._made = workers.workers
        self._saved.interrupted(self.role)
        begin: list[int]
        if recovery is None:
            self._progress = Progress()
            begin = workers.init(self._args_to_continue(), self.role, self._with_ref)
            workers.set_weight_version(version)
        else:
            sent = self._progress.has_sent(recovery)
            self._progress = self._progress.after(recovery)
            begin = workers.recover(self.args, self.role, self._with_ref, recovery, version, sent)
        self._asleep, self._progress.trained = False, begin[0] - 1
        self._leave()
        if self._rollout is not None:
            self._rollout.introduce(workers.set_rollout_manager)
            self._rollout.rewind(begin[0])
            if self.weight_version and self._progress.sent_after is None:
                self.update_weights()
        return begin

    def close(self) -> None:
        """End the workers, and free the pool if the group created it. A checkpoint that is being written in the
        background is finished first."""
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
        remove_placement_groups(self._placement)
        self._placement = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self._end()

    def _check_open(self) -> None:
        if self._closed or self.pool.closed:
            raise GroupClosedError(f"the {self.role}'s train group or its pool was closed; create a new group")

    @property
    def _alive(self) -> bool:
        return self._group is not None and not self._group.closed

    @property
    def worker_group(self) -> RayWorkerGroup:
        """The worker group, for its other methods, stats, trace and watch.

        Raises:
            GroupClosedError: the workers were released, or the group was closed.
        """
        self._check_open()
        if self._group is None or self._group.closed:
            raise GroupClosedError(f"the {self.role}'s train workers were released; call create() to start them again")
        return self._group

    def ready_workers(self, method: str) -> RayWorkerGroup:
        """Return the worker group if its workers have a model.

        Args:
            method: name of the method that needs them, for messages.

        Raises:
            GroupClosedError: see `worker_group`.
            GroupBrokenError: a worker has died; call `restart`.
            RuntimeError: `async_init` was not called, or the worker group's own ``restart()`` was.
        """
        workers = self.worker_group
        if self._with_ref is None:
            raise RuntimeError(f"{method}(): the {self.role}'s workers have no model yet; call async_init() first")
        if workers.workers != self._made:
            raise RuntimeError(
                f"the {self.role}'s workers were restarted by worker_group.restart(), which does not restore "
                "checkpoints and weight versions; call restart() of the train group instead"
            )
        return workers

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ranks if self._group is None or self._group.closed else self._group.world_size
