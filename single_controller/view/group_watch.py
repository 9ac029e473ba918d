"""GroupWatch: looks at the groups of a cluster again and again, from a process that has none of them.

`GroupLook` is one group at one moment: what each rank does, for whom it waits, its stack, and what is wrong.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray

from dispatch.tables import aligned
from single_controller.call.state import Closing, GroupStatus, RankStatus
from single_controller.call.transport import RESULT_OF
from single_controller.ray import inspect_groups
from single_controller.ray.group_records import GroupRecord, read
from single_controller.ray.rank.frames import frames_of
from single_controller.view.rank_waits import Wait, waits
from single_controller.wire.handshake import WireAddress
from single_controller.wire.link import Answer, Link, ask, wait_open

LOOK_SECONDS = 0.4
"""How long the ranks may take to answer in one look. Each command has this limit."""

OPEN_SECONDS = 1.0
"""How long new connections may take before their ranks count as silent: longer than an answer, because there are many
at once, and because the stacks of silent ranks are read from outside."""

DUMP_AGAIN_SECONDS = 3.0
"""The stack of a rank that does not answer is read from outside at most this often, because that stops the process."""

DUMP_SECONDS = 1.0
"""After so long, a look reads no further stacks from outside."""

LATE_SECONDS = 60.0
"""After this time, a rank for which others wait counts as late."""

NO_PROGRESS_SECONDS = 600.0
"""After this time, a call counts as making no progress."""


@dataclass(frozen=True)
class GroupLook:
    """A group at one moment.

    Attributes:
        status: its ranks and what they run.
        waits: rank -> what it waits for, of the ranks that run something.
        stacks: rank -> its Python stack, of the same.
    """

    status: GroupStatus
    waits: Mapping[int, Wait]
    stacks: Mapping[int, str]

    def problems(self, late: float = LATE_SECONDS, no_progress: float = NO_PROGRESS_SECONDS) -> list[str]:
        """Return one line for each problem of the group: it is broken; a rank is dead, does not answer, or has run one
        call for more than ``no_progress`` seconds; or other ranks wait for a rank whose call has run for more than
        ``late`` seconds. If that rank is idle, the longest call of the waiting ranks counts. In a chain of ranks that
        wait for each other, only the last one is late."""
        status, explained = self.status, self._waiting()
        found = [f"{status.name} is broken: {status.reason}"] if status.state == "broken" else []
        runs = {rank.rank: max((call.seconds for call in rank.running or ()), default=0.0) for rank in status.ranks}
        for rank in status.ranks:
            wait = self.waits.get(rank.rank, Wait())
            who = f"rank {rank.rank} of {status.name}"
            seconds = runs[rank.rank]
            # An idle rank has let the others wait for no longer than they have run their calls.
            waited = seconds if rank.running else max((runs[one] for one in wait.awaited), default=0.0)
            if not rank.alive:
                found.append(f"{who} is dead: {'' if rank.death is None else rank.death.reason}")
            elif rank.running is None:
                found.append(f"{who} does not answer{_at(wait)}")
            elif wait.awaited and waited > late and rank.rank not in explained:
                found.append(f"{who} is late: {rank.doing}{_at(wait)}; {wait.awaited_by}")
            elif seconds > no_progress:
                found.append(f"{who} makes no progress: {rank.doing}{_at(wait)}")
        return found

    def _waiting(self) -> set[int]:
        """The ranks that wait, if only through others, for one that does not wait for a rank."""
        ends = [rank for rank, wait in self.waits.items() if not wait.ranks]
        found: set[int] = set()
        while ends:
            wait = self.waits.get(ends.pop(), Wait())
            ends += (new := [rank for rank in wait.awaited if rank not in found])
            found.update(new)
        return found

    def __str__(self) -> str:
        status = self.status
        alive = sum(rank.alive for rank in status.ranks)
        rows = [["rank", "host", "pid", "runs", "waits for"]]
        for rank in status.ranks:
            wait = self.waits.get(rank.rank, Wait())
            doing = rank.doing if rank.alive else "dead"
            rows.append([str(rank.rank), rank.process.host, str(rank.process.pid), doing, str(wait)])
        head = f"{status.name} is {status.state}, generation {status.generation}, {alive} of {len(status.ranks)} alive"
        return "\n".join([head, *([status.note] if status.note else []), *aligned(rows)])

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        status = self.status
        return {
            "name": status.name,
            "state": status.state,
            "reason": status.reason,
            "generation": status.generation,
            "note": status.note,
            "ranks": [self._rank(rank) for rank in status.ranks],
        }

    def _rank(self, rank: RankStatus) -> dict[str, Any]:
        wait = self.waits.get(rank.rank, Wait())
        return {
            "rank": rank.rank,
            "host": rank.process.host,
            "address": rank.process.address,
            "pid": rank.process.pid,
            "alive": rank.alive,
            "running": None if rank.running is None else [call._asdict() for call in rank.running],
            "doing": rank.doing if rank.alive else "dead",
            "waits": wait.what,
            "waits_for": list(wait.ranks),
            "awaited_by": list(wait.awaited),
            "where": wait.where,
            "stack": self.stacks.get(rank.rank),
            "death": None if rank.death is None else rank.death._asdict(),
        }


class GroupWatch(Closing):
    """Looks at groups over connections that it keeps, so that a look each second disturbs the ranks little.

    Not thread-safe. The process is connected to the cluster.

    Args:
        name: a group's name, or its beginning; all groups by default.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._links: dict[WireAddress, Link] = {}
        self._dumps: dict[WireAddress, tuple[float, str]] = {}  # stacks of ranks that do not answer, and since when
        # Tasks that read such stacks on other hosts: when they began, and of which ranks
        self._tasks: dict[Any, tuple[float, list[WireAddress]]] = {}
        self._node: str = ray.get_runtime_context().get_node_id()
        self._here = socket.gethostname()

    def look(self, seconds: float = LOOK_SECONDS) -> list[GroupLook]:
        """Look at the groups now.

        Args:
            seconds: how long ranks may take to answer each command, over connections that are open.

        Raises:
            LookupError: there is no such group.
        """
        records = read()
        groups = inspect_groups.chosen(records, self._name)
        living = [inspect_groups.living_ranks(record, records) for record in groups]
        self._connect({address for addresses in living for address in addresses.values()})
        running = self._ask(living, "status", seconds)
        statuses = [
            replace(inspect_groups.status_from(record, records, answers), name=name)
            for name, record, answers in zip(inspect_groups.distinct_names(groups), groups, running, strict=True)
        ]
        busy = [
            {rank: address for rank, address in addresses.items() if status.ranks[rank].running}
            for status, addresses in zip(statuses, living, strict=True)
        ]
        stacks = self._ask(busy, "stacks", seconds)
        looks = []
        for record, status, addresses, answers in zip(groups, statuses, living, stacks, strict=True):
            shown = {rank: answer.text for rank, answer in answers.items() if answer.ok}
            silent = [rank for rank in addresses if status.ranks[rank].running != () and rank not in shown]
            shown |= self._dumped(record, silent, addresses)
            looks.append(GroupLook(status, waits(status.ranks, shown), shown))
        return _across(looks)

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()
        self._links = {}

    def _connect(self, addresses: set[WireAddress]) -> None:
        for address, link in list(self._links.items()):
            # A rank whose connection was lost gets as long for another one as for the first.
            if address not in addresses or (link.opened.is_set() and not link.connected):
                self._links.pop(address).close()
        self._dumps = {address: dump for address, dump in self._dumps.items() if address in addresses}
        new = [self._links.setdefault(address, Link(address)) for address in addresses - self._links.keys()]
        wait_open(new, OPEN_SECONDS)

    def _ask(self, groups: list[dict[int, WireAddress]], command: str, seconds: float) -> list[dict[int, Answer]]:
        """The answers of each group's ranks, which are all asked at once."""
        links = {address: self._links[address] for addresses in groups for address in addresses.values()}
        answers = ask(links, command, seconds)
        return [{rank: answers[address] for rank, address in addresses.items()} for addresses in groups]

    def _dumped(self, record: GroupRecord, ranks: list[int], addresses: Mapping[int, WireAddress]) -> dict[int, str]:
        """The frames of ranks that do not answer: read here if they run on this host, otherwise by tasks on theirs,
        whose results a later look shows."""
        now = time.monotonic()
        for task, (begun, of_task) in list(self._tasks.items()):
            if ended := bool(ray.wait([task], timeout=0)[0]):
                del self._tasks[task]
            # A late task is kept, and no other is started: it reads one rank after the other, each for up to 20 s.
            if ended or now - begun > inspect_groups.DUMP_SECONDS:
                for number, text in inspect_groups.dumped(task, range(len(of_task))).items():
                    self._dumps[of_task[number]] = now, text
        asked = {address for _, of_task in self._tasks.values() for address in of_task}
        due = [
            rank
            for rank in ranks
            if addresses[rank] not in asked
            and (addresses[rank] not in self._dumps or now - self._dumps[addresses[rank]][0] > DUMP_AGAIN_SECONDS)
        ]
        places = {rank: record.ranks[rank].location for rank in due}
        here = [rank for rank, place in places.items() if (place.node_id, place.hostname) == (self._node, self._here)]
        elsewhere = {rank: addresses[rank] for rank in due if rank not in here}
        for task, on_node in inspect_groups.dump_tasks(record, elsewhere, native=False).items():
            self._tasks[task] = now, [addresses[rank] for rank in on_node]
        # The longest unread first: not all may be read in one look.
        for rank in sorted(here, key=lambda rank: self._dumps.get(addresses[rank], (0.0, ""))[0]):
            if time.monotonic() - now < DUMP_SECONDS:  # the rest in the next look
                self._dumps[addresses[rank]] = now, frames_of(addresses[rank].pid, addresses[rank].frames)
        return {
            rank: self._dumps[addresses[rank]][1] if addresses[rank] in self._dumps else "  its host is being asked"
            for rank in ranks
        }


def _across(looks: list[GroupLook]) -> list[GroupLook]:
    """Say of ranks that wait for another call's result which of the groups runs that call."""
    runs: dict[str, list[str]] = {}
    for look in looks:
        for method in {call.method for rank in look.status.ranks for call in rank.running or ()}:
            runs.setdefault(f"{RESULT_OF}{method}()", []).append(look.status.name)
    found = []
    for look in looks:
        others = {text: [name for name in names if name != look.status.name] for text, names in runs.items()}
        known = {
            rank: wait._replace(what=f"{wait.what} of {' or '.join(names)}")
            if (names := others.get(wait.what.removeprefix("for ")))
            else wait
            for rank, wait in look.waits.items()
        }
        found.append(replace(look, waits=known))
    return found


def _at(wait: Wait) -> str:
    return f", at {wait.where}" if wait.where else ""
