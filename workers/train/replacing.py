"""What a train group does on the driver after ranks have died: replace them, and have all ranks continue together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from single_controller import RayWorkerGroup, WorkerDiedError
from workers.train.recovery import Recovery, choose_recovery

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
    """

    trained: int = START
    sent_after: int | None = None

    def has_sent(self, recovery: Recovery) -> bool:
        """Whether the weights that were sent last are those of a snapshot."""
        return self.sent_after == recovery.rollout_id or (self.sent_after == START and not recovery.number)


def replace_ranks(
    workers: RayWorkerGroup,
    change: Callable[[], object],
    with_ref: bool | None,
    continue_from: Callable[[Recovery | None], list[int]],
) -> list[int] | None:
    """Replace the ranks that have died, and have all ranks continue.

    Args:
        workers: the group.
        change: replaces ranks, or drops or adds some.
        with_ref: whether the ranks need the reference model's weights; None if they have no model.
        continue_from: has the ranks continue from their snapshots, or otherwise if there is no complete set of them.
            Returns the rollout id to continue with, by rank.

    Returns:
        What ``continue_from`` has returned; None if no rank was replaced, or the ranks have no model.

    Raises:
        SingleControllerError: see `RayWorkerGroup.replace`.
    """
    generation = workers.generation
    for left in reversed(range(TRIES)):
        change()
        if with_ref is None or workers.generation == generation:
            break
        try:
            recovery = choose_recovery(workers.peer_snapshots(), with_ref=with_ref)
            if recovery is None:
                logger.warning(
                    "%s: its ranks do not have a complete set of snapshots in their memory. They continue from the "
                    "last checkpoint that the group saved, or from the beginning if there is none",
                    workers.name,
                )
            else:
                logger.info("%s: its ranks continue after rollout %d, from memory", workers.name, recovery.rollout_id)
            return continue_from(recovery)
        except WorkerDiedError as error:
            if not left:
                raise
            logger.warning("%s: another rank died while its ranks recovered: %s", workers.name, error)
            change = workers.replace
    return None
