"""What a train group does on the driver after ranks have died: replace them, and have all ranks continue together, with
those of a connected actor or critic. And what a driver leaves for the one that takes a detached group over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from single_controller import RayWorkerGroup, SingleControllerError, WorkerDiedError
from workers.recovery.snapshot_choice import Recovery, choose_recovery
from workers.train.checkpoints import CheckpointError

logger = logging.getLogger(__name__)

TRIES = 3
"""How often ranks are replaced again because another one has died meanwhile."""

START = -2
"""Stands for the last rollout that the workers have trained on, if there is none since they were initialized."""


@dataclass
class Progress:
    """What a group has trained on, and which weights it has sent.

    Attributes:
        trained: id of the last rollout that the workers have trained on, or `START`.
        sent_after: the value of ``trained`` when the weights were sent last; None if unknown.
        failed: whether an update has failed since. Rollout workers may then have other weights, or none.
    """

    trained: int = START
    sent_after: int | None = None
    failed: bool = False

    def has_sent(self, recovery: Recovery) -> bool:
        """Whether the weights that were sent last are those of a snapshot."""
        # Snapshot 0 is taken before the first rollout; but a single rank takes its first one when it grows.
        initial = not recovery.number and (len(recovery.sources) > 1 or self.trained == START)
        return not self.failed and (self.sent_after == recovery.rollout_id or (self.sent_after == START and initial))

    def after(self, recovery: Recovery) -> Progress:
        """Return the progress of ranks that have restored a snapshot. Its ``sent_after`` is None if the rollout workers
        may have newer weights."""
        sent = recovery.rollout_id if self.has_sent(recovery) else self.sent_after
        if self.failed or (sent is not None and sent > recovery.rollout_id):
            sent = None
        return Progress(recovery.rollout_id, sent)

    def restored(self, rollout_id: int, *, as_initialized: bool) -> Progress:
        """Return the progress of workers that were initialized again.

        Args:
            rollout_id: the last one that their weights were trained on; -1 if there is none.
            as_initialized: whether they have the weights that the workers began with.
        """
        same = self.sent_after == rollout_id or (self.sent_after == START and as_initialized)
        return Progress(rollout_id, rollout_id if same and not self.failed else None)


class TrainGroup(Protocol):
    """What `replace_ranks` and `SharedRollout` need of a `RayTrainGroup`.

    Attributes:
        _with_ref: whether the ranks need the reference model's weights; None if they have no model.
        _made: generation of the worker group whose ranks have all got a model, or continued; None if they are to
            continue and have not.
    """

    args: Any
    role: str
    _progress: Progress
    _with_ref: bool | None
    _made: int | None

    @property
    def worker_group(self) -> RayWorkerGroup: ...

    @property
    def world_size(self) -> int: ...

    def ready_workers(self, method: str) -> RayWorkerGroup: ...

    def _replace_dead(self) -> None: ...

    def _continue(self, recovery: Recovery | None) -> list[int]: ...


def replace_ranks(groups: Sequence[TrainGroup], change: Callable[[], object] | None = None) -> list[int] | None:
    """Replace the ranks that have died, and have all ranks continue at the same rollout.

    Args:
        groups: the group, and the critic or actor that trains on the same rollouts, if there is one.
        change: what to do instead of replacing ranks, the first time.

    Returns:
        The rollout id to continue with, by rank of the first group; None if no rank was replaced, or the ranks have no
        model.

    Raises:
        SingleControllerError: see `RayTrainGroup.replace`.
    """
    # Use `_made` instead of the current generations: ranks that a failed attempt has replaced have no model yet.
    generations = [group._made for group in groups]
    for left in reversed(range(TRIES)):
        if change is not None:
            change()
            change = None
        else:
            for group in groups:
                group._replace_dead()
        now = [group.worker_group.generation for group in groups]
        lost = [one for one, before, after in zip(groups, generations, now, strict=True) if before != after]
        if not lost or groups[0]._with_ref is None:
            break
        for one in lost:
            one._made = None  # if this fails, the next `replace` tries it again
        try:
            return _continue_together(groups, lost)
        # Try again only after a death: replacing ranks once more does not help against other errors.
        except WorkerDiedError as error:
            if not left:
                raise
            logger.warning("another rank died while the ranks of %s recovered: %s", lost[0].worker_group.name, error)
    return None


def _continue_together(groups: Sequence[TrainGroup], lost: Collection[TrainGroup]) -> list[int]:
    choices = _choose(groups, lost)
    names = " and ".join(group.worker_group.name for group in groups)
    if choices is None:
        logger.warning(
            "%s: the ranks do not have a complete set of snapshots in their memory. They continue from the last "
            "checkpoint that was saved, or from the beginning if there is none",
            names,
        )
        begins = [group._continue(None) for group in groups]
        if len({begin[0] for begin in begins}) > 1:
            continuing = ", ".join(f"{group.role}: {begin[0]}" for group, begin in zip(groups, begins, strict=True))
            raise CheckpointError(
                f"{names} have no common snapshot, and their checkpoints are of different rollouts; to continue with: "
                f"{continuing}. Save both after the same rollouts, and create them again with ckpt_step"
            )
        return begins[0]
    (rollout_id, _), *_ = choices
    logger.info("%s: the ranks continue after rollout %d, from memory", names, rollout_id)
    begins = [
        [rollout_id + 1] * group.world_size if recovery is None else group._continue(recovery)
        for group, (_, recovery) in zip(groups, choices, strict=True)
    ]
    return begins[0]


def _choose(groups: Sequence[TrainGroup], lost: Collection[TrainGroup]) -> list[tuple[int, Recovery | None]] | None:
    """Choose the newest rollout at which all groups can continue.

    Returns:
        By group, the id of that rollout, and what to restore; None for a group that has just trained on it. None if
        there is no such rollout.
    """
    held = [_ask(group, "peer_snapshots") for group in groups]
    here = [None if group in lost else _undisturbed(group) for group in groups]
    newest: int | None = None
    while True:
        choices: list[tuple[int, Recovery | None]] = []
        for group, versions, rollout_id in zip(groups, held, here, strict=True):
            if rollout_id is not None and (newest is None or rollout_id <= newest):
                choices.append((rollout_id, None))
                continue
            recovery = choose_recovery(versions, with_ref=bool(group._with_ref), newest=newest)
            if recovery is None:
                return None
            choices.append((recovery.rollout_id, recovery))
        if len({rollout_id for rollout_id, _ in choices}) == 1:
            return choices
        # Each iteration goes further back, until all groups agree or a group has no snapshot that old.
        newest = min(rollout_id for rollout_id, _ in choices)


def _undisturbed(group: TrainGroup) -> int | None:
    """Return the id of the rollout that all ranks have trained on last; None if they were sent another one since, which
    may have failed halfway."""
    following = {step for step, _ in _ask(group, "position")}
    last = None if len(following) != 1 or None in following else following.pop() - 1
    return last if group._progress.trained in (last, START) else None


def warn_of_different_rollouts(groups: Sequence[TrainGroup]) -> None:
    """Log a warning if an actor and its critic continue at different rollouts, except in the first ones, in which
    ``num_critic_only_steps`` lets the critic train alone. It may be meant: the critic was trained in another run."""
    at: dict[str, int] = {}
    for group in groups:
        try:  # with the time limit of a wait: that of a call would break the group
            found = group.worker_group.position.remote().result(timeout=60 * group.args.distributed_timeout_minutes)
        except SingleControllerError:
            return
        following = {step for step, _ in found}
        if len(following) != 1 or None in following:
            return
        at[group.role] = following.pop()
    if len({*at.values()}) == 1 or max(at.values()) <= groups[0].args.num_critic_only_steps:
        return
    logger.warning(
        "actor and critic continue at different rollouts (%s). If one of them was restarted, call restart() of the "
        "other one too, which returns to its last checkpoint; or create both again with ckpt_step, from checkpoints of "
        "the same rollout",
        ", ".join(f"{role}: {step}" for role, step in at.items()),
    )


def _ask(group: TrainGroup, method: str) -> Any:
    """Call a method on all ranks, when they have finished the step that they are in."""
    return getattr(group.worker_group, method).options(timeout=60 * group.args.distributed_timeout_minutes)()


# --- another driver ------------------------------------------------------------------------------------------

FIELDS = (
    "args",
    "role",
    "weight_version",
    "_ranks",
    "_share",
    "_resources",
    "_standby",
    "_on_death",
    "_class",
    "_detached",
    "_name_prefix",
    "_with_ref",
    "_saved",
    "last_checkpoint",
    "_asleep",
)
"""The fields of a `RayTrainGroup` that it leaves for the driver that takes its workers over."""


def find_left(name: str, namespace: str | None) -> tuple[RayWorkerGroup, dict[str, Any]]:
    """Take over the workers of a train group.

    Args:
        name: how the workers' names begin.
        namespace: Ray's namespace of the names; by default the driver's own, or any other.

    Returns:
        The workers, and the fields of their train group, its pool among them.

    Raises:
        ValueError: there are no such workers, or they are of no train group, or it was not initialized.
    """
    workers = RayWorkerGroup.attach(name, namespace, own=True)
    fields = workers.takeover_data
    if isinstance(fields, dict) and fields.keys() >= set(FIELDS):
        return workers, {**fields, "pool": workers.resource_pool}
    raise ValueError(
        f"{workers.name} cannot be continued: it is no train group, or async_init() was not called. End its workers "
        "with end_detached(), and create a new group"
    )


def common_position(workers: RayWorkerGroup, timeout: float) -> tuple[int, int] | None:
    """Return the id of the rollout that all workers train on next, and the newest weight version of a worker; None if
    they cannot go on together.

    Args:
        timeout: seconds that they may take to finish the calls that they are in.
    """
    try:
        positions: list[tuple[int | None, int]] = workers.position.options(timeout=timeout)()
    except SingleControllerError as error:
        logger.warning("%s is restarted, because its workers cannot go on: %s", workers.name, error)
        return None
    steps = {step for step, _ in positions}
    step = steps.pop() if len(steps) == 1 else None
    if step is None:
        logger.warning(
            "%s is restarted, because its workers are not all at one step: next_rollout_id is %s, by rank",
            workers.name,
            [step for step, _ in positions],
        )
        return None
    return step, max(version for _, version in positions)
