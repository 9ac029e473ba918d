"""Taking over a detached group whose driver has ended: what that driver leaves in Ray's control store."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray.cloudpickle

from single_controller.call.call import GroupState
from single_controller.call.errors import ranks_text
from single_controller.ray import compat
from single_controller.ray.compat import death_of
from single_controller.ray.placement.pool import RayResourcePool
from single_controller.ray.placement.slots import Slot
from single_controller.ray.records import group_records
from single_controller.ray.records.group_records import TAKEOVER, GroupRecord
from single_controller.ray.runtime import ensure_ray
from single_controller.ray.start import StartPlan, standby_of
from single_controller.ray.transport import Rank, RayTransport

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
"""What a group may leave in the control store, which keeps it in memory. Constructor arguments are most of it."""

Settings = tuple[bool, float | None, float, str]
"""Of a group: collectives, start_timeout, error_grace and on_death."""


@dataclass
class Takeover:
    """A detached group that another driver can own.

    Attributes:
        key: of its record.
        record: its record.
        plan: how it is started, on a pool of the slots that it has.
        ranks: its ranks, some of which may have died.
        standbys: actor, name and slot of its standbys.
        rendezvous: address and port.
        settings: the other arguments of the group.
        data: `RayWorkerGroup.takeover_data`.
    """

    key: str
    record: GroupRecord
    plan: StartPlan
    ranks: tuple[Rank, ...]
    standbys: tuple[tuple[Any, str, Slot], ...]
    rendezvous: tuple[str, int]
    settings: Settings
    data: Any

    @staticmethod
    def encode(
        plan: StartPlan, transport: RayTransport, rendezvous: tuple[str, int], settings: Settings, data: Any
    ) -> bytes | None:
        """Encode what a group's driver leaves; None if it cannot be pickled, or is too large."""
        pool = plan.pool
        standbys = tuple((one.actor, one.name, one.slot) for one in transport.standbys)
        values = (
            replace(plan, pool=cast(Any, None)),
            (pool.options, pool.reservations[0].request, pool.slots()),
            transport.ranks,
            standbys,
            rendezvous,
            settings,
            data,
        )
        try:
            encoded: bytes = ray.cloudpickle.dumps(values)
        except Exception:
            logger.warning("%s cannot be restarted by another driver: it cannot be pickled", plan.name, exc_info=True)
            return None
        if len(encoded) > MAX_BYTES:
            size = len(encoded) / 2**20
            logger.warning(
                "%s cannot be restarted by another driver: the arguments of its constructors take %.0f MiB, more than "
                "%d. Pass the path of a file instead",
                plan.name,
                size,
                MAX_BYTES // 2**20,
            )
            return None
        return encoded

    @classmethod
    def decode(cls, key: str, record: GroupRecord, encoded: bytes) -> Takeover:
        """Read what was left."""
        plan, (options, request, slots), ranks, standbys, rendezvous, settings, data = pickle.loads(encoded)
        pool = RayResourcePool.of_slots(options, request, slots)
        return cls(key, record, replace(plan, pool=pool), ranks, standbys, rendezvous, settings, data)

    @property
    def placement_groups(self) -> tuple[str, ...]:
        """Ray's ids of its placement groups, in hex."""
        groups = {slot.placement_group for slot in self.plan.pool.slots()}
        return tuple(sorted(group.id.hex() for group in groups if group is not None))

    def restore(self, state: GroupState) -> None:
        """Bring the state of a new group to that of the former driver's group."""
        # Without connections, which the former driver's processes cannot have opened to this one: `replace` or
        # `restart` opens them.
        transport = RayTransport(self.ranks, self.plan.pool)
        encoded = self.plan.process.encode() if self.standbys else None
        living = [one for one in self.standbys if death_of(one[0]) is None]
        transport.standbys = [standby_of(self.plan, *one, encoded) for one in living]
        state.transport, state.restarts, state.last_deaths = transport, self.record.generation, dict(self.record.deaths)
        deaths = transport.deaths()
        state.note_deaths(deaths)
        if deaths:
            first = min(deaths)
            state.break_(
                f"{ranks_text(sorted(deaths))} died ({transport.host(first)}): {deaths[first]}", sorted(deaths)
            )
        elif self.record.broken is not None:
            state.break_(self.record.broken)


def find_takeover(
    name_prefix: str | None, worker_names: Sequence[str] | None, class_name: str | None, namespace: str | None
) -> Takeover | None:
    """Find the detached group of a name. Arguments as for `RayWorkerGroup.from_detached`.

    Returns:
        The group; None if no group or several match, or its driver has left too little.
    """
    ensure_ray()
    stem = "" if worker_names is None else next(iter(worker_names), "").rpartition("_")[0]
    records = group_records.read()
    found = {}
    for key, record in records.groups.items():
        of_group = record.ranks[0].name.rpartition("_")[0]
        actor = records.actors.get(record.ranks[0].actor)
        if (
            (of_group == stem if name_prefix is None else of_group.startswith(name_prefix))
            and (class_name is None or of_group == f"{name_prefix or ''}{class_name}")
            and (namespace is None or (actor is not None and actor.namespace == namespace))
        ):
            found[key] = record
    exactly = {key: record for key, record in found.items() if name_prefix in record.names}
    if len(found := exactly or found) != 1:
        return None
    ((key, record),) = found.items()
    encoded = compat.read_records(TAKEOVER + key).get(TAKEOVER + key)
    if encoded is None:
        return None
    if record.job in records.jobs:
        logger.warning("taking over %s, although its driver is running (%s)", record.name, record.driver)
    return Takeover.decode(key, record, encoded)
