"""The records of groups in Ray's control store: any process of the cluster learns from them which groups there are, and
another driver takes a detached one over.

A group's driver writes its record when the workers have started, when the group breaks or grows, and after a restart:
one small request, whatever the number of ranks. It removes the record when it closes the group. A driver that is killed
leaves its records behind; `read` removes those that are of no use any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import ray.cloudpickle
from ray.util.placement_group import placement_group_table

from dispatch.errors import ResultError
from single_controller.call.errors import ranks_text
from single_controller.call.state import GroupState
from single_controller.call.transport import Death
from single_controller.ray import compat
from single_controller.ray.compat import ActorInfo, ask_store, death_of
from single_controller.ray.placement.pool import RayResourcePool
from single_controller.ray.placement.slots import Slot
from single_controller.ray.rank.actor import Location
from single_controller.ray.runtime import ensure_ray, session
from single_controller.ray.start import StartPlan, standby_of
from single_controller.ray.transport import Rank, RayTransport

logger = logging.getLogger(__name__)

_PREFIX = "group/"
_TAKEOVER = "takeover/"
"""Prefix of the key under which a detached group leaves what another driver needs to own it."""

MAX_BYTES = 16 * 2**20
"""What a group may leave in the control store, which keeps it in memory. Constructor arguments are most of it."""


class RankRecord(NamedTuple):
    """One rank: Ray's id of its actor in hex, the actor's name, and where it runs."""

    actor: str
    name: str
    location: Location


@dataclass(frozen=True)
class GroupRecord:
    """What other processes are told of a group."""

    name: str
    job: str  # Ray's id of the driver's job, in hex
    driver: str  # host and pid of the process that has the group, for messages
    broken: str | None  # why the group is broken, or None
    generation: int  # how often it was restarted or replaced
    deaths: dict[int, Death]  # rank -> its last death
    ranks: tuple[RankRecord, ...]  # by rank
    owner: str = ""  # Ray's id of the actor whose process has the group, in hex; empty if that is a driver or a task

    @property
    def names(self) -> tuple[str, ...]:
        """What users may call it: its name, with or without "group", and what its actors' names have in common."""
        return self.name, self.name.removeprefix("group "), self.ranks[0].name.rpartition("_")[0]


class Registration:
    """Keeps the record of one group of this process up to date.

    Lock: ``_writing`` makes writers take turns. Each writes what is true in its turn, so the last one leaves the truth,
    whatever their order. It is held while Ray's control store is asked, and no lock of a group is acquired meanwhile.

    Args:
        state: the state of the group. It may keep the registration, which refers to it weakly: the workers end when the
            last reference to the state is gone.
        takeover: returns what another driver needs to own the group, or None.
        key: the key of the group's record, if it was another driver's group; by default a new one.
    """

    def __init__(
        self, state: GroupState, takeover: weakref.WeakMethod[Callable[[], Takeover | None]], key: str | None = None
    ) -> None:
        self._state = weakref.ref(state)  # a write that waits in the background must not keep the workers alive
        self._takeover = takeover
        self._key = key or uuid.uuid4().hex
        self._session = session()
        self._writing = threading.Lock()

    def write_soon(self) -> None:
        """Write the record in a thread "group-record", which then ends, so that no start waits for it."""
        try:
            threading.Thread(target=self.write, name="group-record", daemon=True).start()
        except RuntimeError:  # the process has as many threads as it may have; the group matters more than its record
            logger.warning("the record of a group could not be written", exc_info=True)

    def write(self) -> None:
        """Write the record, or remove it if the group is closed. A control store that does not respond is ignored."""
        state = self._state()
        transport = None if state is None else state.transport
        try:
            # What is written is read under this lock, so that an older state never replaces a newer one.
            with self._writing:
                # The workers ended with their Ray session, so a session that was started later must not get the record.
                if self._session is None or session() != self._session:
                    return
                if state is None or state.closed or not isinstance(transport, RayTransport):
                    delete(self._key)
                    return
                takeover = self._takeover()
                left = None if takeover is None else takeover()
                # Before the record: a process that finds the group may take it over at once.
                if left is not None and (encoded := left.encode()) is not None:
                    compat.write_record(_TAKEOVER + self._key, encoded)
                elif left is not None:  # what was left before may have other ranks, and older data
                    compat.delete_record(_TAKEOVER + self._key)
                compat.write_record(_PREFIX + self._key, pickle.dumps(_record(state, transport)))
        except Exception:
            logger.debug("the record of a group could not be written", exc_info=True)


def _record(state: GroupState, transport: RayTransport) -> GroupRecord:
    return GroupRecord(
        state.name,
        ray.get_runtime_context().get_job_id(),
        f"{socket.gethostname()}, pid {os.getpid()}",
        state.broken,
        state.restarts,
        dict(state.last_deaths),
        tuple(RankRecord(rank.actor._actor_id.hex(), rank.name, rank.location) for rank in transport.ranks),
        compat.own_actor(),
    )


class Records(NamedTuple):
    """The records of a cluster's groups, and what Ray says of their processes."""

    groups: dict[str, GroupRecord]  # key -> record, of each group that was not closed, if it is of any use
    actors: dict[str, ActorInfo]  # the actors by id
    jobs: frozenset[str]  # the jobs whose driver is running

    def driver_runs(self, record: GroupRecord) -> bool:
        """Whether the process that has a group is running: a driver, or a worker."""
        owner = self.actors.get(record.owner)
        return record.job in self.jobs if owner is None else owner.alive


def delete(key: str) -> None:
    """Remove what is known of a group: its record last, by which `read` would find the rest again."""
    for prefix in (_TAKEOVER, _PREFIX):
        compat.delete_record(prefix + key)


def read() -> Records:
    """All records. Removes those whose workers and driver have ended, unless another driver can restart the group in
    the placement groups that are left."""
    actors, jobs = compat.all_actors(), compat.living_jobs()
    written: dict[str, GroupRecord] = {}
    for full, value in compat.read_records(_PREFIX).items():  # last: a group's record follows its start by a moment
        key = full.removeprefix(_PREFIX)
        try:
            record: GroupRecord = pickle.loads(value)
            written[key] = record
        except Exception:
            logger.warning("the record %s cannot be read; another version of this library may have written it", key)
    if not all(any(rank.actor in actors for rank in record.ranks) for record in written.values()):
        # A group that has started since would seem to have neither workers nor a driver.
        actors, jobs = compat.all_actors(), compat.living_jobs()
    found = Records({}, actors, jobs)
    records = {key: (one, [actors.get(rank.actor) for rank in one.ranks]) for key, one in written.items()}
    # The names of a group whose ranks are dead are in use where it has standbys, or the driver of a detached group was
    # killed while it restarted that; or another group has been started since, which then has a record of its own.
    others = {actor.group for _, known in records.values() for actor in known if actor is not None and actor.alive}
    in_use = {actor.group for actor in found.actors.values() if actor.alive and actor.detached} - others
    for key, (record, known) in records.items():
        if not any(actor is not None and (actor.alive or actor.group in in_use) for actor in known):
            if not found.driver_runs(record):
                left = {one.placement_group for one in known if one and one.detached and one.group not in others}
                tables: dict[str, Any] = ask_store(placement_group_table) if left else {}
                if all(tables.get(number, {}).get("state", "REMOVED") == "REMOVED" for number in left):
                    delete(key)
                    continue
            if record.broken is None and all(actor is None or actor.ended_on_purpose for actor in known):
                continue  # its driver has dropped it without closing it
        found.groups[key] = record
    return found


@dataclass
class Takeover:
    """What the driver of a detached group leaves, so that another driver can own the group."""

    plan: StartPlan  # how it is started, on a pool of the slots that it has
    ranks: tuple[Rank, ...]  # its ranks, some of which may have died
    standbys: tuple[tuple[Any, str, Slot], ...]  # actor, name and slot of its standbys
    rendezvous: tuple[str, int]  # address and port
    data: Any  # `RayWorkerGroup.takeover_data`
    # Its ranks whose constructors may not have run. Drivers with an older version of this library did not leave it.
    unstarted: frozenset[int] = frozenset()

    def encode(self) -> bytes | None:
        """Encode it; None if it cannot be pickled, is too large, or has Ray references."""
        pool, name = self.plan.pool, self.plan.name
        slots = pool.options, pool.reservations[0].request, pool.slots()
        if self.plan.process.refers:  # Ray would pickle them, and never free their objects in this process
            logger.warning(
                "%s cannot be restarted by another driver: the arguments of its constructors contain Ray references, "
                "whose objects end with this driver",
                name,
            )
            return None
        try:
            without_pool = replace(self, plan=replace(self.plan, pool=cast(Any, None)))
            encoded: bytes = ray.cloudpickle.dumps((without_pool, slots))
        except Exception:
            logger.warning("%s cannot be restarted by another driver: it cannot be pickled", name, exc_info=True)
            return None
        if len(encoded) > MAX_BYTES:
            logger.warning(
                "%s cannot be restarted by another driver: the arguments of its constructors take %.0f MiB, more than "
                "%d. Pass the path of a file instead",
                name,
                len(encoded) / 2**20,
                MAX_BYTES // 2**20,
            )
            return None
        return encoded

    @classmethod
    def decode(cls, encoded: bytes) -> Takeover:
        """Read what was left."""
        left, slots = pickle.loads(encoded)
        return replace(left, plan=replace(left.plan, pool=RayResourcePool.of_slots(*slots)))

    @property
    def placement_groups(self) -> tuple[str, ...]:
        """Ray's ids of its placement groups, in hex."""
        groups = {slot.placement_group for slot in self.plan.pool.slots()}
        return tuple(sorted(group.id.hex() for group in groups if group is not None))

    def restore(self, state: GroupState, record: GroupRecord) -> None:
        """Bring the state of a new group to that of the former driver's group, of which this is the record."""
        transport = RayTransport(self.ranks, self.plan.pool)
        encoded = self.plan.process.encode() if self.standbys else None
        living = [one for one in self.standbys if death_of(one[0]) is None]
        self._end_others()
        transport.note_started(set(range(transport.world_size)) - self.unstarted)
        transport.fresh = self.unstarted  # `replace` has them join; without collectives, no others
        transport.standbys = [standby_of(self.plan, *one, encoded) for one in living]
        state.transport = transport
        state.restarts, state.last_deaths = record.generation, dict(record.deaths)
        deaths = transport.deaths()
        state.note_deaths(deaths)
        if deaths:
            first = min(deaths)
            state.break_(
                f"{ranks_text(sorted(deaths))} died ({transport.host(first)}): {deaths[first]}", sorted(deaths)
            )
        elif record.broken is not None:
            state.break_(record.broken)

    def _end_others(self) -> None:
        """End processes of the group that the former driver has not told of, because it was killed while it started
        them. They have names that a restart needs."""
        stem = f"{self.plan.prefix}{self.plan.process.name}"
        known = {one.actor._actor_id.hex() for one in self.ranks} | {one[0]._actor_id.hex() for one in self.standbys}
        for number, one in compat.all_actors().items():
            named = one.group == (self.plan.namespace, stem)
            if named and one.alive and one.detached and number not in known:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    ray.kill(ray.get_actor(one.name, one.namespace), no_restart=True)


def find_takeover(
    name_prefix: str | None, worker_names: Sequence[str] | None, class_name: str | None, namespace: str | None
) -> tuple[str, GroupRecord, Takeover] | None:
    """Find the detached group of a name. Arguments as for `RayWorkerGroup.from_detached`.

    Returns:
        The key of its record, the record, and what its driver has left; None if no group or several match, or the
        driver has left too little.

    Raises:
        ResultError: what it has left cannot be unpickled here.
    """
    ensure_ray()
    stem = "" if worker_names is None else next(iter(worker_names), "").rpartition("_")[0]
    records = read()
    here = ray.get_runtime_context().namespace
    found: dict[str, GroupRecord] = {}
    nearest: dict[str, GroupRecord] = {}  # those in the driver's own namespace
    for key, record in records.groups.items():
        of_group = record.ranks[0].name.rpartition("_")[0]
        actor = records.actors.get(record.ranks[0].actor)
        if (
            (actor is None or actor.detached)  # no other group leaves what another driver needs
            and (of_group == stem if name_prefix is None else of_group.startswith(name_prefix))
            and (class_name is None or name_prefix is None or of_group == name_prefix + class_name)
            and (namespace is None or (actor is not None and actor.namespace == namespace))
        ):
            found[key] = record
            if actor is not None and actor.namespace == here:
                nearest[key] = record
    found = nearest or found
    exactly = {key: record for key, record in found.items() if name_prefix in record.names}
    if len(found := exactly or found) != 1:
        return None
    ((key, record),) = found.items()
    encoded = compat.read_records(_TAKEOVER + key).get(_TAKEOVER + key)
    if encoded is None:
        return None
    if records.driver_runs(record):
        logger.warning("taking over %s, although its driver is running (%s)", record.name, record.driver)
    try:
        return key, record, Takeover.decode(encoded)
    except Exception as error:
        raise ResultError(
            f"{record.name} cannot be taken over, because what its driver has left cannot be unpickled here: "
            f"{type(error).__name__}: {error}. Make its class importable in this process, use the version of this "
            "library that its driver had, or end its workers with end_detached()"
        ) from error
