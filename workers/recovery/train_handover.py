"""Taking over a detached train group whose driver has ended: what the driver leaves, and where the workers are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from single_controller import RayWorkerGroup, SingleControllerError

logger = logging.getLogger(__name__)

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
    "_takes_version",
    "_detached",
    "_name_prefix",
    "_with_ref",
    "_saved",
    "_asleep",
)
"""The fields of a `RayTrainGroup` that its successor gets."""


@dataclass(frozen=True)
class Left:
    """What a train group leaves: name -> value of `FIELDS`."""

    fields: dict[str, Any]


def leave(workers: RayWorkerGroup, group: Any, changed: Mapping[str, Any]) -> None:
    """Leave the fields of a train group for the driver that takes its workers over.

    Args:
        workers: its workers.
        group: the train group.
        changed: values that the fields are about to have.
    """
    workers.takeover_data = Left({**{name: getattr(group, name) for name in FIELDS}, **changed})


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
    if isinstance(workers.takeover_data, Left):
        return workers, {**workers.takeover_data.fields, "pool": workers.resource_pool}
    raise ValueError(
        f"{workers.name} cannot be continued: it is no train group, or async_init() was not called. End its workers "
        "with end_detached(), and create a new group"
    )


def common_position(workers: RayWorkerGroup, timeout: float) -> tuple[int, int] | None:
    """Return the id of the rollout that all workers train on next, and the newest weight version of a worker; None if
    they cannot go on together.

    Args:
        workers: the workers.
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
