"""The records of groups in Ray's control store, from which any process of the cluster learns which groups there are.

A group's driver writes its record when the workers have started, when the group breaks, and after a restart: one small
request, whatever the number of ranks. It removes the record when it closes the group. A driver that is killed leaves
its records behind; `read` removes those whose workers have ended too.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from single_controller.call.call import GroupState
from single_controller.call.status import GroupStatus, rank_statuses
from single_controller.call.transport import MAX_STACK_SECONDS, Death
from single_controller.ray import compat
from single_controller.ray.compat import ActorInfo
from single_controller.ray.rank.actor import Location, running_calls
from single_controller.ray.runtime import session
from single_controller.ray.transport import RayTransport
from single_controller.wire.link import ask_at

logger = logging.getLogger(__name__)

_PREFIX = "group/"
TAKEOVER = "takeover/"
"""Prefix of the key under which a detached group leaves what another driver needs to own it."""


class RankRecord(NamedTuple):
    """One rank.

    Attributes:
        actor: Ray's id of its actor, in hex.
        name: the actor's name.
        location: where it runs.
    """

    actor: str
    name: str
    location: Location


@dataclass(frozen=True)
class GroupRecord:
    """What other processes are told of a group.

    Attributes:
        name: the group's name.
        job: Ray's id of the driver's job, in hex.
        driver: host and pid of the process that has the group, for messages.
        broken: why the group is broken, or None.
        generation: how often it was restarted or replaced.
        deaths: rank -> its last death.
        ranks: by rank.
    """

    name: str
    job: str
    driver: str
    broken: str | None
    generation: int
    deaths: dict[int, Death]
    ranks: tuple[RankRecord, ...]

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
        self, state: GroupState, takeover: weakref.WeakMethod[Callable[[], bytes | None]], key: str | None = None
    ) -> None:
        self._state = weakref.ref(state)  # a write that waits in the background must not keep the workers alive
        self._takeover = takeover
        self._key = key or uuid.uuid4().hex
        self._session = session()
        self._writing = threading.Lock()

    def write_soon(self) -> None:
        """Write the record in the background, so that no start waits for it."""
        threading.Thread(target=self.write, name="group-record", daemon=True).start()

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
                # Before the record: a process that finds the group may take it over at once.
                if takeover is not None and (left := takeover()) is not None:
                    compat.write_record(TAKEOVER + self._key, left)
                compat.write_record(_PREFIX + self._key, pickle.dumps(_record(state, transport)))
        except Exception:
            logger.debug("the record of a group could not be written", exc_info=True)


def _record(state: GroupState, transport: RayTransport) -> GroupRecord:
    name, pid = socket.gethostname(), os.getpid()
    return GroupRecord(
        state.name,
        compat.own_job(),
        f"{name}, pid {pid}",
        state.broken,
        state.restarts,
        dict(state.last_deaths),
        tuple(RankRecord(rank.actor._actor_id.hex(), rank.name, rank.location) for rank in transport.ranks),
    )


class Records(NamedTuple):
    """The records of a cluster's groups, and what Ray says of their processes.

    Attributes:
        groups: key -> record, of each group that has workers, or a driver that has not closed it.
        actors: the actors by id.
        jobs: the jobs whose driver is running.
    """

    groups: dict[str, GroupRecord]
    actors: dict[str, ActorInfo]
    jobs: frozenset[str]


def delete(key: str) -> None:
    """Remove what is known of a group."""
    for prefix in (_PREFIX, TAKEOVER):
        compat.delete_record(prefix + key)


def read() -> Records:
    """All records. Removes those whose workers and driver have ended."""
    found = Records({}, compat.all_actors(), compat.living_jobs())
    for full, value in compat.read_records(_PREFIX).items():
        key = full.removeprefix(_PREFIX)
        try:
            record: GroupRecord = pickle.loads(value)
            known = [found.actors.get(rank.actor) for rank in record.ranks]
        except Exception:
            logger.warning("the record %s cannot be read; another version of this library may have written it", key)
            continue
        if not any(actor is not None and actor.alive for actor in known):
            if record.job not in found.jobs:
                delete(key)
                continue
            if record.broken is None and all(actor is None or actor.ended_on_purpose for actor in known):
                continue  # its driver has dropped it without closing it
        found.groups[key] = record
    return found


def status_of(record: GroupRecord, records: Records, seconds: float = MAX_STACK_SECONDS) -> GroupStatus:
    """The status of a group of another process.

    Args:
        record: its record.
        records: where it is from.
        seconds: how long its ranks may take to answer.
    """
    deaths, living = dict(record.deaths), []
    for number, rank in enumerate(record.ranks):
        actor = records.actors.get(rank.actor)
        if actor is not None and actor.alive:
            living.append(number)
        elif number not in deaths or deaths[number].generation != record.generation:
            at, reason = (0.0, "Ray no longer knows it") if actor is None else (actor.ended, actor.reason)
            deaths[number] = Death(at, reason, record.generation)
    addresses = {rank: record.ranks[rank].location.wire for rank in living}
    answers = ask_at({rank: address for rank, address in addresses.items() if address is not None}, "status", seconds)
    note = f"driver: {record.driver}" + ("" if record.job in records.jobs else ", which has ended")
    return GroupStatus(
        record.name,
        "open" if record.broken is None else "broken",
        record.broken or "",
        record.generation,
        rank_statuses(
            [rank.location.process for rank in record.ranks],
            living,
            {rank: running_calls(answer) for rank, answer in answers.items()},
            deaths,
        ),
        note,
    )
