"""RayTrainGroup: the driver-side proxy of the ranks that train one model.

To follow a step: `RayTrainGroup.async_train` checks the rows, puts them into order with `SharedRollout.take`, starts
what the critic or the actor computes for both with `SharedRollout.computed`, and calls ``TrainWorker.train`` on all
ranks. On a rank, `PolicyTrainWorker.train` takes it from there.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Self

import ray
from ray.exceptions import RayError

from dispatch.checks import check_count
from single_controller import (
    Broadcast,
    CallTimeoutError,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    SingleControllerError,
    WorkerDiedError,
    WorkerFuture,
)
from single_controller.call.future import ReferencedFuture, in_event_loop
from single_controller.ray.placement.reservation import remove_placement_groups
from single_controller.ray.results import what_is_lost
from workers.data.balance import Balance, order_of_rows
from workers.data.rollout_data import RolloutDataError, check_rollout_data, rows_of
from workers.hf_files import known_config
from workers.recovery.snapshot_choice import Recovery
from workers.recovery.train_recovery import (
    FIELDS,
    TRIES,
    Progress,
    common_position,
    find_left,
    replace_ranks,
    warn_of_different_rollouts,
)
from workers.train.args import TrainArgsError, read_args, update_seconds
from workers.train.args_checks import ROLES, role_args
from workers.train.checkpoints import UNWRITTEN, CheckpointError, LastCheckpoint
from workers.train.group_links import RolloutLink, SharedRollout, ordered
from workers.train.train_placement import first_slots, share_of_slot, slot_devices, train_environment
from workers.train.train_worker import BACKENDS, TrainWorker, takes_version, worker_class
from workers.weight_sync import SyncReport, WeightSyncError
from workers.weight_sync.sync_protocol import TimeUpError

if TYPE_CHECKING:
    import numpy as np
    import torch

logger = logging.getLogger(__name__)

UPDATE_TRIES = 3
"""How often an update of the weights is tried in which rollout workers die, if they are restarted."""


class RayTrainGroup:
    """The train workers of one role: ``num_nodes * num_gpus_per_node`` ranks.

    The ``async_*`` methods return a future, which ``ray.get`` takes too; the other methods wait. The group is a context
    manager: closing it ends its workers, and frees the pool if the group created it.

    Args:
        args: the configuration, see ARGUMENTS.md. It is checked here.
        num_nodes: number of nodes.
        num_gpus_per_node: ranks per node. Without GPUs in the cluster, ranks take CPU slots.
        pg: the slots to run on: a `RayResourcePool`, or ``(placement_group, reordered_bundle_indices)``, optionally
            with the GPU ids as a third element. The group takes the first slots. None creates a pool.
        num_gpus_per_actor: share of a slot's GPU and CPU that a rank takes; without GPUs, of its CPU.
        role: "actor" or "critic".
        resources: custom resources that each rank takes.
        num_resources_per_node: amount of each custom resource to reserve per node, if the pool is created here; by
            default what the ranks take.
        actor_cls: the worker class, a `TrainWorker`; by default that of ``args.train_backend``.
        standby: how many standbys the group keeps, in slots of their own: see `RayWorkerGroup`. ``pg`` must have room.
        on_death: what `replace` does if more ranks have died than there are standbys: ``"replace"`` starts new
            processes, ``"shrink"`` continues with fewer data-parallel ranks, until `grow` or `restart`. If each replica
            has lost a rank, it starts new processes too.
        detached: whether the workers outlive the driver; see `attach`. A pool that is passed must be detached too.
        name_prefix: distinguishes the workers' names from those of other runs in the cluster.

    Attributes:
        args: the complete configuration.
        role: the role.
        weight_version: version of the weights that the rollout workers have; 0 before the first update.
        last_checkpoint: folder of the checkpoint that this group began to write last; None before.
        next_rollout_id: after `attach`, `create`, `replace` or `grow`, the id of the rollout to train on next.

    Raises:
        TrainArgsError: the configuration is invalid, or the pool is too small.
        TypeError: ``actor_cls`` is not a `TrainWorker` or lacks one of its methods, or ``pg`` has another type.
        ValueError: a number or the role is invalid.
        PlacementError, StartError: as `RayWorkerGroup` raises them.
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
        standby: int = 0,
        on_death: Literal["replace", "shrink"] = "replace",
        detached: bool = False,
        name_prefix: str = "",
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"role={role!r}: expected one of {', '.join(map(repr, ROLES))}")
        self.args, self.role = read_args(args), role
        self.weight_version = 0
        self._ranks = check_count("num_nodes", num_nodes) * check_count("num_gpus_per_node", num_gpus_per_node)
        if not 0 < num_gpus_per_actor <= 1:
            raise ValueError(
                f"num_gpus_per_actor={num_gpus_per_actor!r}: expected a share of a slot, above 0 and at most 1"
            )
        self._share = num_gpus_per_actor
        check_count("standby", standby, 0)
        if on_death not in ("replace", "shrink"):
            raise ValueError(f"on_death={on_death!r}: expected 'replace' or 'shrink'")
        self._standby, self._on_death = standby, on_death
        self._resources = dict(resources or {})
        if num_resources_per_node is not None and not (self._resources and pg is None):
            raise ValueError(
                f"num_resources_per_node={num_resources_per_node!r} applies to a pool that the group creates. Pass "
                "resources= with it, and do not pass pg"
            )
        self._class = worker_class(self.args.train_backend, actor_cls)
        self._owned: RayResourcePool | None = None
        self._closed = False
        if pg is None:
            per_node = {
                name: amount if num_resources_per_node is None else num_resources_per_node / num_gpus_per_node
                for name, amount in self._resources.items()
            }
            devices = slot_devices()
            pg = self._owned = RayResourcePool(
                [num_gpus_per_node] * num_nodes + [standby] * (standby > 0),
                use_gpu=devices["use_gpu"],
                name_prefix=f"{role}_",
                max_colocate_count=math.floor(1 / num_gpus_per_actor + 1e-6),
                resources=devices["resources"] | per_node,
                detached=detached,
            )
        self.pool = first_slots(pg, self._ranks + standby)
        self._detached, self._name_prefix = bool(detached), name_prefix
        self._placement: tuple[str, ...] = ()
        self._with_ref: bool | None = None  # as given to async_init(); None before
        self._saved = LastCheckpoint()
        self.last_checkpoint: str | None = None
        self._asleep = False
        self._start_alone()
        try:
            self.create()
        except BaseException:
            self._end()
            raise

    def _start_alone(self) -> None:
        """Set what a group has no other part of yet: workers, a rollout manager, an actor or a critic."""
        self._rollout: RolloutLink | None = None
        self._pair: SharedRollout[Any] | None = None  # with the connected actor or critic
        self._group: RayWorkerGroup | None = None
        self._progress = Progress()
        self.next_rollout_id: int | None = None
        self._tried = 0  # weight version of an update that has not succeeded; tokens of it may be there
        self._weights_lost = False  # whether rollout workers may have weights of training that is lost

    def _leave(self) -> None:
        """Leave what `attach` needs for the driver that takes the group over."""
        if self._detached and self._group is not None and self._with_ref is not None:
            fields = {name: getattr(self, name) for name in FIELDS}
            self._group.takeover_data = {**fields, "weight_version": max(self.weight_version, self._tried)}

    # --- the workers ------------------------------------------------------------------------------------

    def create(self) -> list[int] | None:
        """Create the workers on the slots that they had before `release`.

        If the group was initialized before, the new workers are initialized from the last checkpoint that this group
        saved, or in the same way as the first time if there is none. They keep the weight version, the rollout manager
        and the critic. A connected group continues at its own rollout, until it is restarted too.

        If the rollout workers have received weights, `update_weights` is called, because these weights may belong to
        training that is lost. If only this update fails, the new workers stay, and you can call `update_weights` again.
        ``next_rollout_id`` is then the rollout to continue with, and the manager refuses tokens of the lost weights.

        Returns:
            By rank, the rollout id to continue with; None if the group was not initialized.

        Raises:
            RuntimeError: the group has workers.
            WorkerError, WeightSyncError: see `update_weights`.
        """
        self._check_open()
        if self._alive:
            raise RuntimeError(f"{self!r} already has workers; call release() first")
        made = RayClassWithInitArgs(self._class)
        made.update_options(share_of_slot(self.pool, self._share))
        if self._resources:
            made.set_additional_resource(self._resources)
        self._group = RayWorkerGroup(
            self.pool,
            made,
            name_prefix=f"{self._name_prefix}{self.role}_",
            detached=self._detached,
            worker_env=train_environment(self.args, self.pool.use_gpu),
            standby=self._standby,
            # After a takeover, that of the former driver, where the next one looks for the workers.
            namespace=None if self._group is None else self._group._owned_plan().namespace,
        )
        self._group.advise(
            "Call RayTrainGroup.restart() to create new workers, which continue from the last checkpoint that the "
            "group saved, or from the beginning if there is none; or close()"
        )
        self._made: int | None = self._group.generation
        self._asleep = False
        begin: list[int] | None = None
        try:
            if self._with_ref is not None:
                # Some rollout workers may have these weights.
                self.weight_version = max(self.weight_version, self._tried)
                self._leave()  # before the workers load, which may take long
                begin = self._init_again()
                if self._rollout is not None:
                    self._rollout.forget()
                    self._rollout.rewind(begin[0])
            if self._pair is not None and all(group._alive for group in self._pair.groups):
                actor, critic = self._pair.groups
                try:
                    actor.connect(critic)
                except SingleControllerError as error:
                    if actor is self or not actor.worker_group.broken:
                        raise
                    # The new critic is not worth losing for that: the restart of the actor connects them.
                    logger.warning("the actor's workers were not connected to the new critic: %s", error)
        except BaseException:
            self._group.close()  # the group is released again, as before the call
            raise
        if begin is None:
            return None
        self.next_rollout_id = begin[0]
        self._leave()
        if self._rollout is not None and self.weight_version:
            self._replace_lost_weights()
        return begin

    def _replace_lost_weights(self) -> None:
        """`update_weights`, because rollout workers may have weights of training that is lost. If that fails, tokens of
        them are refused."""
        self._weights_lost = True  # until an update succeeds: one that the user repeats may fail, too
        try:
            self.update_weights()
        except BaseException:
            if self._rollout is not None:
                with suppress(Exception):
                    self._rollout.expect(max(self.weight_version + 1, self._tried))
            raise

    def _init_again(self) -> list[int]:
        """Initialize the workers from the checkpoint that this group saved last, or else as the first time. They keep
        the weight version."""
        workers = self.worker_group
        args: Any = self.args  # a DictConfig
        folder = role_args(args, self.role).save
        if folder is not None and self._saved.exists(workers, folder):
            args = args.copy()
            args["critic_load" if self.role == "critic" else "load"] = folder
            # These settings are for the checkpoint of another run.
            args["no_load_optim"], args["ckpt_step"] = False, None
        begin: list[int] = workers.init(args, self.role, self._with_ref)
        workers.set_weight_version(self.weight_version)
        self._progress = self._progress.restored(begin[0] - 1, as_initialized=args is self.args)
        return begin

    def release(self) -> None:
        """End the workers. The group keeps its slots, the weight version and the location of its checkpoints. A
        checkpoint that is being written in the background is finished first."""
        if self._pair is not None:
            self._pair.forget()
        if self._group is None:
            return
        # Wait before the workers end, because the checkpoint is written in a thread of a worker.
        try:
            self._saved.wait(self._group, 60 * self.args.distributed_timeout_minutes, self.role)
        finally:
            self._group.close()

    def restart(self) -> list[int] | None:
        """`release`, then `create`. Use it when a worker has died. Training since the last checkpoint is lost, and the
        rollout workers get the weights of the checkpoint.

        Returns:
            See `create`.
        """
        self.release()
        return self.create()

    def replace(self) -> list[int] | None:
        """Replace the ranks that have died, and continue from the latest snapshots in the memory of the ranks, which
        ``args.peer_snapshot_interval`` asks for. The other ranks keep their processes. All ranks return to the same
        rollout, and so do those of a connected actor or critic, whose dead ranks are replaced too. Without a complete
        set of snapshots, all ranks continue from the checkpoint, as after `restart`.

        If the rollout workers have newer weights, or the checkpoint was loaded, `update_weights` is called. If only
        this update fails, the ranks stay: call `update_weights` again, and continue with ``next_rollout_id``. A
        `RolloutStream` of the manager returns the batches from that rollout on again.

        Returns:
            By rank, the rollout id to continue with; None if no rank was replaced, or the group was not initialized.

        Raises:
            CheckpointError: the checkpoints of actor and critic are of different rollouts.
            WorkerError, WeightSyncError: see `update_weights`.
            SingleControllerError: see `RayWorkerGroup.replace`; or the ranks could not continue. Call it again, or
                `restart`.
        """
        return self._continue_after()

    def grow(self, count: int | None = None) -> list[int] | None:
        """Add ranks in slots that have none, such as those that ``on_death="shrink"`` has left empty. All ranks
        continue with the next rollout, from snapshots in memory. A checkpoint that is being written in the background
        is finished first.

        Args:
            count: see `RayWorkerGroup.grow`.

        Returns:
            By rank, the rollout id to continue with; None if there is no room, or the group was not initialized.

        Raises:
            TrainArgsError: ``args.peer_snapshot_interval`` is not set, so there are no snapshots to continue from, or
                another number of ranks cannot restore them, as with Megatron's ``use_distributed_optimizer``.
            RuntimeError: the group is connected to an actor or a critic, which would have another size.
            SingleControllerError: see `RayWorkerGroup.grow`.
        """
        workers = self.worker_group
        if self._pair is not None:
            raise RuntimeError(
                f"grow(): the {self.role}'s group is connected to another one, which has as many ranks; call "
                "disconnect() first, or restart() both"
            )
        if self._saved.writing:  # by threads whose process group would be destroyed
            self.wait_for_save()
        if self._with_ref is not None:
            if not self.args.peer_snapshot_interval:
                raise TrainArgsError(
                    "grow() continues from snapshots in memory: set peer_snapshot_interval. Without them, call "
                    "save_model() and restart(), which starts all ranks"
                )
            if not all(workers.take_peer_snapshot()):
                raise TrainArgsError(
                    "grow() continues from snapshots in memory, which these workers cannot restore on another number "
                    "of ranks (use_distributed_optimizer, for example). Call save_model() and restart(), which starts "
                    "all ranks"
                )
        return self._continue_after(lambda: workers.grow(count))

    def _replace_dead(self) -> None:
        if self._on_death == "shrink" and self._pair is None:
            with suppress(GroupBrokenError):  # each replica has lost a rank; the group is as before
                self.worker_group.replace_or_shrink()
                return
        self.worker_group.replace()

    def _continue_after(self, change: Callable[[], object] | None = None) -> list[int] | None:
        groups = [self]
        if self._pair is not None and self._with_ref is not None:
            groups += [one for one in self._pair.groups if one is not self and one._alive and one._with_ref is not None]
        begin: list[int] | None = None
        for left in reversed(range(TRIES)):
            begin = self._continue_groups(groups, change) or begin
            # Change ranks only in the first attempt: another attempt after a death must not add ranks again.
            change = None
            try:  # last, when all groups are at one rollout: it may fail with the rollout workers
                for group in groups:
                    if group._weights_lost and group._rollout is not None:
                        group._replace_lost_weights()
                break
            except WorkerDiedError as error:
                if not left:
                    raise
                logger.warning("another rank died while the weights were sent: %s", error)
        return begin

    def _continue_groups(
        self, groups: Sequence[RayTrainGroup], change: Callable[[], object] | None
    ) -> list[int] | None:
        """Have the groups continue at the same rollout, and connect them again."""
        generation = self.worker_group.generation
        begin = replace_ranks(groups, change)
        self._leave()
        if begin is not None:
            for group in groups:  # also of one that was there already: it may have died before it got the next batch
                group.next_rollout_id = begin[0]
                if group._rollout is not None:
                    group._rollout.rewind(begin[0])
        # A group without a model may have new ranks too, although it has nothing to continue with.
        if self._pair is not None and (begin is not None or self.worker_group.generation != generation):
            self._pair.forget()
            if all(group._alive and not group.worker_group.broken for group in self._pair.groups):
                self._pair.groups[0].connect(self._pair.groups[1])
        return begin

    def _continue(self, recovery: Recovery | None) -> list[int]:
        """Continue from a snapshot, or else from the checkpoint."""
        self.weight_version = max(self.weight_version, self._tried)  # some rollout workers may have these weights
        workers = self.worker_group
        self._made = None
        self._saved.interrupted(self.role)
        if recovery is None:
            begin = self._init_again()
        else:
            sent = self._progress.has_sent(recovery)
            self._progress = self._progress.after(recovery)
            version = self.weight_version
            begin = workers.recover(self.args, self.role, self._with_ref, recovery, version, sent)
        # From here on, all ranks have the state of one rollout.
        self._made = workers.generation
        self._asleep = False
        self._leave()
        if self._rollout is not None:
            self._rollout.forget()  # the next update tells the workers: a manager that is busy stops no recovery
            # If there was no update yet, rollout workers have no weights of this group that could be lost.
            lost = recovery is None or self._progress.sent_after is None
            self._weights_lost = lost and bool(self.weight_version)
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
        if self._rollout is not None:
            self._rollout.leave()
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
            GroupBrokenError: a worker has died, or `replace` has failed; call `restart`.
            RuntimeError: `async_init` was not called, or the worker group's own ``restart()`` was.
        """
        workers = self.worker_group
        if self._with_ref is None:
            raise RuntimeError(f"{method}(): the {self.role}'s workers have no model yet; call async_init() first")
        if self._made is None:
            raise GroupBrokenError(
                f"{method}(): the {self.role}'s workers do not have the state of one rollout, because replace() has "
                "failed; call it again, or restart()"
            )
        if workers.generation != self._made:
            raise RuntimeError(
                f"the {self.role}'s workers were restarted by worker_group.restart(), which does not restore "
                "checkpoints and weight versions; call restart() of the train group instead"
            )
        return workers

    @property
    def actor_cls(self) -> type[TrainWorker]:
        """The class of the workers."""
        return self._class

    @property
    def with_ref(self) -> bool:
        """Whether `async_init` was asked to keep a reference's weights."""
        return bool(self._with_ref)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ranks if self._group is None or self._group.closed else self._group.world_size

    # --- another driver ---------------------------------------------------------------------------------

    @classmethod
    def attach(
        cls, name_prefix: str = "", role: str = "actor", *, namespace: str | None = None, timeout: float = 600.0
    ) -> Self:
        """Take over a group that was created with ``detached=True``, after its driver has ended. The workers continue
        at their current step, and load nothing. ``next_rollout_id`` is the rollout to train on next.

        If workers have died, they are replaced, and all ranks continue from snapshots in memory; see `replace`. Without
        snapshots, if a worker hangs, or if the workers are not all at the same step, because the driver was killed
        while it sent a call, they are restarted from the last checkpoint that the group saved; see `restart`. If that
        fails, for example because a host is gone, you can call this again, or `end_detached`.

        Call `set_rollout_manager` and, with a critic, `connect` again. If workers were replaced or restarted, call
        `update_weights` too: the rollout workers may have weights of training that is lost, and a new manager accepts
        any version. `close` ends the workers and removes their placement groups, with everything else in those.

        Args:
            name_prefix: as given to the group.
            role: its role.
            namespace: Ray's namespace of the workers' names; by default the driver's own, or any other.
            timeout: seconds that the workers may take to finish the step that they are in.

        Raises:
            ValueError: there is no such group, or `async_init` was not called.
        """
        workers, fields = find_left(f"{name_prefix}{role}_", namespace)
        self = cls.__new__(cls)
        vars(self).update(fields)
        self._owned, self._closed = None, False
        self._placement = workers.hand_over_placement()
        self._start_alone()
        self._group, self._made = workers, workers.generation
        position = common_position(workers, timeout)
        if position is None:
            self.next_rollout_id = self._begin_again()[0]
        else:
            self.next_rollout_id, self.weight_version = position[0], max(self.weight_version, position[1])
            self._progress.trained = position[0] - 1
        return self

    def _begin_again(self) -> list[int]:
        """Call `replace` if there may be snapshots. Without them, or if a worker hangs, restart the workers, in
        the group that was taken over: if that fails, `attach` finds it again."""
        workers = self.worker_group
        try:
            if self.args.peer_snapshot_interval and (begin := self.replace()):
                return begin
        except CallTimeoutError as error:
            logger.warning("%s is restarted, because its workers cannot continue: %s", workers.name, error)
        self._saved.wait(workers, 60 * self.args.distributed_timeout_minutes, self.role)
        workers.restart()
        self._made, self._asleep = workers.generation, False
        begin = self._init_again()
        self._leave()
        return begin

    # --- training ---------------------------------------------------------------------------------------

    def async_init(
        self, args: Any = None, role: str | None = None, with_ref: bool = False
    ) -> ReferencedFuture[list[int]]:
        """Create the model on every rank; see `TrainWorker.init`.

        Args:
            args: replaces the group's configuration; None keeps it.
            role: the group's role, or None.
            with_ref: whether to keep a reference's weights too.

        Returns:
            A future of the first rollout id, by rank. It also is the list of the Ray references to them.

        Raises:
            TrainArgsError: the configuration is invalid, or invalid for this number of ranks.
            ModelFilesError: the configuration names no model.
        """
        if role is not None and role != self.role:
            raise ValueError(f"async_init(role={role!r}): this group has the role {self.role!r}")
        args = self.args if args is None else read_args(args)
        workers = self.worker_group
        made_by = self._class.__module__, self._class.__name__
        own = next((name for name, where in BACKENDS.items() if where == made_by), None)  # None: a class of the user's
        if own not in (None, args.train_backend):
            raise TrainArgsError(
                f"async_init(): train_backend={args.train_backend!r}, but this group's workers are those of {own!r}; "
                "create a new group"
            )
        before = self.args.distributed_timeout_minutes
        if self._with_ref is not None and args.distributed_timeout_minutes != before:
            raise TrainArgsError(
                f"async_init(): distributed_timeout_minutes={args.distributed_timeout_minutes}, but the process group "
                f"of these workers was created with {before}; create a new group"
            )
        self._class.check_args(role_args(args, self.role), self.world_size, with_ref)
        sent = workers.init.remote(args, self.role, with_ref)
        # Set these after the call is sent: if sending fails, the group does not change.
        self.args, self._with_ref, self._made = args, bool(with_ref), workers.generation
        self._saved, self._asleep = LastCheckpoint(), False
        self._progress = Progress()
        if self._rollout is not None:
            self._rollout.timeout = update_seconds(args)
            # Forget what the workers know of the manager, because `init` drops their senders.
            self._rollout.forget()
        if self._pair is not None:
            self._pair.forget()
        self._leave()
        return ReferencedFuture(sent, _wait_for)

    def async_train(self, rollout_id: int, rollout_data_ref: Any) -> ReferencedFuture[list[dict[str, float]]]:
        """Train on a rollout, on every rank.

        Args:
            rollout_id: number of the rollout, from 0.
            rollout_data_ref: a TensorDict (see `workers.data.rollout_data`), a future of one, a Ray reference to one,
                or a list of references, one per dp rank. Or a dict, whose values may be futures of an entry, or of a
                dict of entries, such as what a teacher's group computes: it goes from rank to rank. Pass the same
                object to the actor and to its critic: what both need is then computed once.

        Returns:
            A future of the metrics of the whole step, by rank. It also is the list of the Ray references to them:
            ``ray.get(future)`` gives what ``future.result()`` does.

        Raises:
            TrainArgsError: the configuration does not fit the data; nothing was sent.
            RolloutDataError: rows that are in this process are invalid, or lack an entry that the configuration needs;
                nothing was sent. For rows behind references or futures, the result raises it.
            RuntimeError: in an event loop, a future of `RolloutManager.generate_async` that is not done: await it.
        """
        workers = self.ready_workers("async_train")
        rollout_id = index(rollout_id)  # snapshots and checkpoints write it as JSON, which takes no NumPy number
        if self.args.debug_rollout_only:
            return ReferencedFuture(workers.train.remote(rollout_id, None), _wait_for)
        workers._check()  # if it is broken, nothing changes here
        _check_references("async_train", rollout_data_ref, workers)
        shared = self._pair or SharedRollout(self)  # a group that trains alone keeps no rollout alive
        _check_is_there("async_train", rollout_data_ref)
        rows = rollout_data_ref.result() if isinstance(rollout_data_ref, Future) else rollout_data_ref
        names = rows.keys() if hasattr(rows, "keys") else ()
        future = next((name for name in names if isinstance(rows[name], WorkerFuture)), None)
        if future is not None and self.args.balance_data:
            raise TrainArgsError(
                f"async_train(): balance_data=True moves rows, but not those of the future at {future!r}; set "
                "balance_data=False, or pass future.result()"
            )
        if future is None and not isinstance(rows, (list, tuple, ray.ObjectRef, WorkerFuture)):
            computed = {name for name, *_ in shared.to_compute(rows)}
            if self._with_ref and self.role == "actor":
                computed.add("ref_log_probs")
            self._class.check_rows(role_args(self.args, self.role), rows, self.role, computed)
        shared.take(rollout_id, rollout_data_ref, self.role)
        before = replace(self._progress)
        if self._progress.sent_after == rollout_id:  # it is trained on once more
            self._progress.sent_after = None
        # Set this before the call: if sending fails halfway, some ranks still train on the rollout.
        self._progress.trained = rollout_id
        try:
            sent = workers.train.remote(rollout_id, shared.data, **shared.computed())
        except DispatchError:  # nothing was sent
            self._progress = before
            raise
        return ReferencedFuture(sent, _wait_for)

    def recorded_rows(self, step: int | None = None) -> dict[int, dict[str, np.ndarray]]:
        """Return what the ranks have computed, in `async_train`, for the rows whose entry ``record_rows`` is not
        negative.

        Args:
            step: the rows' entry ``record_step``, or else the id of the rollout. There are only those of the last two
                rollouts; by default those of the last.

        Returns:
            The entry -> by name, one float32 number per real token of the row: ``log_probs`` (``old_log_probs`` where
            the configuration needs them, else before the row's first optimizer step), ``advantages``, and what else the
            configuration needs, of ``ref_log_probs``, ``values`` and ``correction_weights``.
        """
        rows: dict[int, dict[str, np.ndarray]] = {}
        for of_rank in self.ready_workers("recorded_rows").recorded_rows(Broadcast(step)):
            if of_rank is None:
                continue
            ends = of_rank["lengths"].cumsum()
            for number, begin, end in zip(of_rank["numbers"].tolist(), ends - of_rank["lengths"], ends, strict=True):
                rows[number] = {name: column[begin:end] for name, column in of_rank["columns"].items()}
        return rows

    def compute_log_prob(self, rollout_data_ref: Any) -> torch.Tensor:
        """Return the log-probability of each token under the current weights, for an evaluation or as a teacher. With
        ``balance_data``, rows that are in this process are computed in an order that balances the ranks.

        Args:
            rollout_data_ref: as `async_train` takes it. Only ``input_ids`` and the masks are needed.

        Returns:
            (rows, tokens) float32, in nats at ``args.temperature``; 0 at padding, and at the first token of a row.

        Raises:
            WorkerError: the rows are invalid, with a `RolloutDataError` as its cause.
        """
        return self._compute_balanced("compute_log_prob", rollout_data_ref)

    def async_compute_log_prob(self, rollout_data_ref: Any) -> WorkerFuture[torch.Tensor]:
        """`compute_log_prob`, but return a future at once. As an argument of another group, it goes from rank to rank,
        so its rows are computed in the given order. If ``rollout_data_ref`` is a future of
        `RolloutManager.generate_async`, this method first waits for it.

        Raises:
            RuntimeError: see `async_train`.
        """
        _check_is_there("async_compute_log_prob", rollout_data_ref)
        return self._compute("compute_log_prob", rollout_data_ref)

    def compute_values(self, rollout_data_ref: Any) -> torch.Tensor:
        """Return the critic's expected return before each token, (rows, tokens) float32; see `compute_log_prob`."""
        return self._compute_balanced("compute_values", rollout_data_ref)

    def async_compute_values(self, rollout_data_ref: Any) -> WorkerFuture[torch.Tensor]:
        """`compute_values`, but return a future at once; see `async_compute_log_prob`."""
        _check_is_there("async_compute_values", rollout_data_ref)
        return self._compute("compute_values", rollout_data_ref)

    def _compute_balanced(self, method: str, rows: Any) -> torch.Tensor:
        workers, args = self.ready_workers(method), role_args(self.args, self.role)
        rows = rows.result() if isinstance(rows, Future) else rows
        if not args.balance_data or workers.dp_size == 1 or not _are_here(rows):
            return self._compute(method, rows).result()
        # These rows are computed in one pass: optimizer steps play no part.
        how = replace(Balance.of(args, workers.dp_size, known_config(args)), steps=1)
        order = order_of_rows(rows, how)
        found = self._compute(method, rows_of(rows, order)).result()
        return found[sorted(range(len(order)), key=order.__getitem__)]

    def _compute(self, method: str, rollout_data_ref: Any) -> WorkerFuture[torch.Tensor]:
        workers = self.ready_workers(method)
        _check_references(method, rollout_data_ref, workers)
        made: WorkerFuture[torch.Tensor] = getattr(workers, method).remote(ordered(rollout_data_ref, None))
        return made

    def save_model(self, step: int, force_sync: bool = False, *, driver_state: Any = None) -> str | None:
        """Write a checkpoint, and the Hugging Face export that ``args.save_hf`` asks for.

        Args:
            step: id of the last rollout that the model was trained on.
            force_sync: write in the foreground, even with ``args.async_save``.
            driver_state: anything that can be pickled, such as `RolloutStream.state_dict`, to store with it; see
                `load_driver_state`.

        Returns:
            The checkpoint's folder; None if ``args.save`` is not set. A warning is logged if ``args.save_hf`` is not
            set either.
        """
        workers = self.ready_workers("save_model")
        step = index(step)
        # Rank 0 alone fetches the state. A user's class may lack the parameter.
        state: dict[str, Any] = {}
        if driver_state is not None:
            try:
                state["driver_state"] = [ray.put(pickle.dumps(driver_state))]
            except RayError as error:
                raise CheckpointError(f"{UNWRITTEN}: its driver_state {what_is_lost(error)}") from error
        args = role_args(self.args, self.role)
        self._saved.begin(workers, args.save)
        self._leave()  # a driver that takes over after a failure must know what was there before
        background = self.args.async_save and not force_sync
        with self._saved.failing(background=background):
            folder: str | None = workers.save_model(step, force_sync, **state)[0]
        if folder is None and args.save is None and args.save_hf is None and not args.debug_rollout_only:
            logger.warning("save_model(%r) has written nothing: set args.save to a folder for checkpoints", step)
        if folder is not None:
            self.last_checkpoint = folder
            self._saved.begun(background=background)
            self._leave()
        return folder

    def load_driver_state(self) -> Any:
        """Return the ``driver_state`` of the checkpoint that `async_init` or `restart` has loaded. The weight versions
        continue from those of the checkpoint.

        Returns:
            The state; None if there is none, or if the ranks have continued from snapshots since.

        Raises:
            CheckpointError: it cannot be read, or the checkpoint was deleted after it was loaded.
        """
        state, version = self.ready_workers("load_driver_state").load_driver_state()[0]
        self.weight_version = max(self.weight_version, version)
        try:
            return None if state is None else pickle.loads(state)
        except Exception as error:  # a damaged pickle, or a class of the user, may raise any exception
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"the driver_state is damaged, or its classes cannot be imported: {why}") from error

    def wait_for_save(self) -> None:
        """Wait until the checkpoint that is being written in the background is on disk, and raise its error."""
        workers = self.ready_workers("wait_for_save")
        with self._saved.failing():
            workers.wait_for_save()
        self._saved.ended()
        self._leave()

    def update_weights(self, *, verify: Literal["fingerprint", "full", "none"] | None = None) -> int:
        """Send the weights to the rollout workers, as the next version. If the manager has a `RolloutStream` and a
        rollout worker dies in the update, the stream restarts it, and the update is repeated. The number of an update
        that has failed is not used again, unless ``update_weights`` of the workers' class takes no version.

        Args:
            verify: what the rollout workers prove before they take the version, instead of ``update_weights_verify``:
                that their engines hold what the trainer sent, by the digests of what has changed ("fingerprint") or of
                everything ("full").

        Returns:
            The version. With ``debug_rollout_only``, nothing is sent and the version stays. `last_sync` has more.

        Raises:
            WorkerError: the update failed, with a `WeightSyncError` as its cause. Rollout workers that have kept the
                version before are still in use.
            WeightSyncError: the manager did not answer, or its stream did not pause, within the time limit. Nothing was
                sent.
        """
        if verify not in (None, "fingerprint", "full", "none"):
            raise ValueError(f"verify={verify!r}: use 'fingerprint', 'full' or 'none'")
        workers = self.ready_workers("update_weights")
        # Do not reuse the version of a failed update, because some rollout workers may have its weights.
        version = max(self.weight_version, self._tried) + 1
        if self._rollout is not None and takes_version(self._class):
            version = self._rollout.continued(version)
        # Sent again, for example because a rollout worker was started anew, they make no tokens older.
        same = self._progress.sent_after is not None and self._progress.sent_after == self._progress.trained
        for left in reversed(range(UPDATE_TRIES)):
            try:
                self._send(workers, version, verify, same)
                break
            except TimeUpError:  # of the stream: another try would take as long again
                raise
            except SingleControllerError as error:
                if not left or workers.broken or self._rollout is None or not self._rollout.recovers:
                    raise
                logger.warning("repeating an update of the weights in which a rollout worker has died: %s", error)
        return self.weight_version

    def last_sync(self) -> SyncReport | None:
        """Return what the last update took: seconds, bytes of rank 0, the pause of the rollout workers, the fingerprint
        of the weights. None before the first one."""
        report: SyncReport | None = self.ready_workers("last_sync").last_sync()
        return report

    def _send(self, workers: RayWorkerGroup, version: int, verify: str | None, same: bool) -> None:
        with nullcontext() if self._rollout is None else self._rollout.updating(same_weights=same):
            if self.args.debug_rollout_only:
                return
            if self._rollout is not None:
                if self._rollout.outdated:
                    self._rollout.introduce(workers.set_rollout_manager)
                self._rollout.expect(version)  # before the update: from now on, other versions are an error
            numbered = takes_version(self._class)
            if numbered:  # a worker that counts by itself gives the number to the next weights
                self._tried = version
            self._leave()  # before: no other update may have this version
            # Keep this set until the update succeeds: after an interruption, workers may have these weights or none.
            self._progress.failed = True
            try:
                workers.update_weights(
                    *((version,) if numbered else ()), **({} if verify is None else {"verify": verify})
                )
            except Exception:
                if self._rollout is not None and not self._weights_lost:  # those that have kept their version go on
                    with suppress(WeightSyncError):
                        self._rollout.expect(self.weight_version or None)
                raise
            self.weight_version, self._progress.sent_after = version, self._progress.trained
            self._progress.failed = False
            self._tried, self._weights_lost = 0, False

    def onload(self) -> int:
        """Move the workers' state back to device memory. Returns the bytes, summed over all ranks."""
        taken = self.ready_workers("onload").wake_up()
        self._asleep = False
        self._leave()
        return sum(taken_here or 0 for taken_here in taken)

    def offload(self) -> int:
        """Move the workers' state to host memory. Returns the freed device bytes, summed over all ranks."""
        freed = self.ready_workers("offload").sleep()
        self._asleep = True
        self._leave()
        return sum(freed_here or 0 for freed_here in freed)

    def clear_memory(self) -> None:
        """Free caches."""
        self.ready_workers("clear_memory").clear_memory()

    def set_rollout_manager(self, manager: Any) -> None:
        """Set the rollout manager whose workers `update_weights` sends to.

        Args:
            manager: a `RolloutManager`, a Ray actor of one, any object with the workers' group as its ``group``, or
                None. A manager in this process calls `update_weights` when its workers were restarted, unless its
                ``refresh`` is set to something else; all workers then get the current weights, as the next version.

        Raises:
            TrainArgsError: ``routing_replay`` is "R3", and an engine does not record experts.
        """
        workers = self.ready_workers("set_rollout_manager")
        link = RolloutLink(manager, self._refresh, update_seconds(self.args))
        if manager is not None and self.role == "actor" and self.args.routing_replay == "R3":
            link.check_experts()
        before, refresh = self._rollout, getattr(manager, "refresh", None)
        former = getattr(refresh, "__self__", None)
        # The actor from its critic too, whose weights are not those of the rollout workers.
        takes_over = isinstance(former, RayTrainGroup) and former is not self and self.role in ("actor", former.role)
        if takes_over:
            # `introduce` sets `refresh` only if it is None.
            manager.refresh = None
        try:
            link.introduce(workers.set_rollout_manager)
        except BaseException as error:
            if before is None or before.manager is not manager:
                link.leave()
            if before is not None:
                before.forget()  # tell workers that have dropped its manager about it again
            elif isinstance(error, SingleControllerError):  # some ranks may have accepted it, and would send to it
                with suppress(SingleControllerError):
                    workers.set_rollout_manager(None)
            if takes_over:  # the other group still sends to it
                manager.refresh = refresh
            raise
        if before is not None and before.manager is not manager:
            before.leave()
        self._rollout, self._weights_lost = None if manager is None else link, False
        self._progress.sent_after = None  # to others

    def _refresh(self) -> int:
        """`update_weights`, also if the train workers are offloaded while others generate."""
        asleep = self._asleep
        if asleep:
            self.onload()
        try:
            return self.update_weights()
        finally:
            if asleep and not self.worker_group.broken:
                self.offload()

    def get_parallel_config(self) -> dict[str, int]:
        """Return the sizes of the parallel axes."""
        config: dict[str, int] = self.ready_workers("get_parallel_config").get_parallel_config()[0]
        return config

    # --- the critic -------------------------------------------------------------------------------------

    def connect(self, critic_group: RayTrainGroup) -> None:
        """Connect rank i of this group to rank i of the critic. `async_train` then takes values from the critic. If
        they continue at different rollouts, a warning is logged.

        Raises:
            ValueError: the groups differ in size, or are not an actor and a critic.
        """
        if self.world_size != critic_group.world_size:
            raise ValueError(
                f"connect(): the {self.role} group has {self.world_size} ranks, the {critic_group.role} group "
                f"{critic_group.world_size}; rank i of one connects to rank i of the other"
            )
        if (self.role, critic_group.role) != ("actor", "critic"):
            raise ValueError(
                "connect(): expected a group with role='actor' and an argument with role='critic', got "
                f"{self.role!r} and {critic_group.role!r}"
            )
        warn_of_different_rollouts((self, critic_group))
        self.worker_group.connect_actor_critic(critic_group.worker_group.workers)
        # Disconnect after the ranks are connected: if connecting fails, the earlier connections stay.
        for group in (self, critic_group):
            group.disconnect()
        self._pair = critic_group._pair = SharedRollout(self, critic_group)

    def disconnect(self) -> None:
        """Disconnect an actor and its critic. Does nothing if they are not connected."""
        for group in () if self._pair is None else self._pair.groups:
            group._pair = None

    def __repr__(self) -> str:
        state = self._class.__name__ if self._alive else "released"
        return f"<RayTrainGroup of {self.world_size}: {self.role}, {state}>"


def _check_references(method: str, given: Any, workers: RayWorkerGroup) -> None:
    if not isinstance(given, (list, tuple)):
        return
    if others := {type(one).__name__ for one in given if not isinstance(one, ray.ObjectRef)}:
        raise RolloutDataError(
            f"{method}(): rollout_data_ref is a list of {', '.join(sorted(others))}; pass all rows as one TensorDict "
            "or dict of tensors, which is sharded over the dp ranks, or a list of references (ray.put(rows)), one for "
            "each dp rank"
        )
    if len(given) != (dp_size := workers.dp_size):  # read for lists only: it may have to wait for busy ranks
        raise TrainArgsError(
            f"{method}(): rollout_data_ref has {len(given)} references for {dp_size} dp ranks; pass one for each dp "
            "rank"
        )


def _check_is_there(method: str, given: Any) -> None:
    if isinstance(given, Future) and not given.done() and in_event_loop():
        raise RuntimeError(
            f"{method}(): the rollout is not complete, and waiting for it would block the event loop; pass "
            "`await rollout` instead of the future"
        )


def _are_here(rows: Any) -> bool:
    """Whether all entries are in this process, and valid. The ranks say what is wrong with others."""
    if not hasattr(rows, "keys") or getattr(rows, "batch_size", None) == ():
        return False
    try:
        check_rollout_data(rows)
    except RolloutDataError:
        return False
    count, values = len(rows["input_ids"]), [rows[name] for name in rows.keys()]  # noqa: SIM118
    whole = (str, bytes, int, float, type(None))  # as every rank gets them
    return all(
        len(value) == count if isinstance(value, (list, tuple)) else hasattr(value, "shape") or isinstance(value, whole)
        for value in values
    )


def _wait_for(ref: ray.ObjectRef) -> None:
    """Ray logs an error that nobody has fetched as unhandled, also if the user has handled that of another rank; one
    that somebody waits for counts as fetched."""
    ref.future()
