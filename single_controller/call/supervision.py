"""Supervision: what the ranks of a group do outside of calls. Its status, and deaths while no call is running."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dispatch.checks import check_seconds
from dispatch.tables import aligned
from single_controller.call.errors import WorkerDiedError, hosts_text, ranks_text
from single_controller.call.state import Closing, GroupState
from single_controller.call.transport import MAX_STACK_SECONDS, Death, RankProcess, RunningCall, Transport

logger = logging.getLogger(__name__)

OnDeath = Callable[[WorkerDiedError], object]


def check_ranks(method: str, ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the ranks that a method of a group was given.

    Raises:
        ValueError: they are not distinct ranks of the group.
    """
    chosen = tuple(ranks) if isinstance(ranks, Iterable) else ()
    if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(world_size)):
        raise ValueError(
            f"{method}(ranks={ranks!r}): expected a non-empty list of distinct ranks from 0 to {world_size - 1}"
        )
    return chosen


class Watcher(Closing):
    """What ``group.watch()`` returns.

    Thread: each watcher has a daemon thread named "worker-watcher". It ends when the watcher or the group is closed, or
    when the group is garbage collected. It holds no lock while it calls ``on_death``.

    Args:
        state: the group's state. The watcher keeps only a weak reference to it: the state has the transport, and the
            transport has the handles of the workers, which end when the last reference to them is gone.
        on_death: called in the watcher's thread for each death.
        interval: seconds between two looks.

    Raises:
        ValueError: the interval is not a positive number.
        ForkedProcessError: another process made the group.
    """

    def __init__(self, state: GroupState, on_death: OnDeath | None, interval: float) -> None:
        state.check_process()
        self._state = weakref.ref(state)
        self._on_death = on_death
        self._interval = check_seconds("interval", interval)
        self._ended = threading.Event()
        self._reported: set[tuple[int, int]] = set()  # (number of restarts before, rank)
        self._deaths_seen = len(state.deaths)
        self._thread = threading.Thread(target=self._run, name="worker-watcher", daemon=True)
        self._thread.start()

    @property
    def watching(self) -> bool:
        """Whether the thread is still running."""
        return self._thread.is_alive() and not self._ended.is_set()

    def close(self) -> None:
        """Stop watching. A callback that is running is not interrupted."""
        self._ended.set()
        if threading.current_thread() is not self._thread:  # on_death may close its own watcher
            self._thread.join(timeout=self._interval)

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            state = self._state()
            if state is None or state.closed:
                return
            try:
                for error in self._new_deaths(state):
                    if self._on_death is not None:
                        self._on_death(error)
            except Exception:
                logger.exception("watching %s: a check, or on_death, raised", state.name)
            del state  # this thread must not keep it while it waits

    def _new_deaths(self, state: GroupState) -> list[WorkerDiedError]:
        """Deaths that were not reported yet: those that calls ran into, even if the group was restarted since, and
        those that only the transport knows, which break the group now."""
        found = state.deaths[self._deaths_seen :]
        self._deaths_seen += len(found)
        news = []
        for restarts, error in found:
            if not self._reported.issuperset((restarts, rank) for rank in error.ranks):
                news.append(error)
            self._reported.update((restarts, rank) for rank in error.ranks)
        transport = state.transport
        if transport is not None and transport.connected:
            dead = self._ask(state, transport, state.restarts)
            if dead is not None:
                news.append(dead)
        return news

    def _ask(self, state: GroupState, transport: Transport, restarts: int) -> WorkerDiedError | None:
        deaths = transport.deaths()
        dead = sorted(r for r in deaths if (restarts, r) not in self._reported and r not in transport.restarted)
        # A restart or close() ends workers on purpose. It may have begun after deaths() was asked.
        if not dead or transport.ended or state.restarting or state.closed or state.transport is not transport:
            return None
        self._reported.update((restarts, rank) for rank in dead)
        hosts = hosts_text([transport.host(rank) for rank in dead])
        message = f"{ranks_text(dead)} died ({hosts}): {deaths[dead[0]]}"
        state.break_(message, dead)
        return WorkerDiedError(message, rank=dead[0], host=transport.host(dead[0]), ranks=dead)

    def __repr__(self) -> str:
        return f"<Watcher, {'running' if self.watching else 'ended'}>"


State = Literal["open", "broken", "closed"]


Running = tuple[RunningCall, ...] | str
"""The calls that a rank runs, or why that is unknown."""


@dataclass(frozen=True)
class RankStatus:
    """One rank."""

    rank: int
    process: RankProcess  # where it runs
    alive: bool  # whether its process is running
    # the calls that it runs, the oldest first; () if it is idle or dead, None if it did not say
    running: tuple[RunningCall, ...] | None
    unknown: str = ""  # why it did not say; empty if it did
    # the last death of a process with this rank, of an earlier generation too; None if there was none
    death: Death | None = None

    @property
    def doing(self) -> str:
        """What it runs, in words."""
        if not self.alive:
            return "-"
        if self.running is None:
            return "no answer"
        return ", ".join(f"{call.method}() for {_seconds(call.seconds)}" for call in self.running) or "idle"


@dataclass(frozen=True)
class GroupStatus:
    """A group and its ranks at one moment. Prints as a table.

    Attributes:
        name: the group's name.
        state: ``"open"``: it takes calls. ``"broken"``: it takes none until it is restarted. ``"closed"``: its workers
            were ended.
        reason: why it is broken; empty otherwise.
        generation: how often its workers were restarted or replaced.
        ranks: by rank.
        note: what else is worth knowing, such as that the group's driver has ended.
    """

    name: str
    state: State
    reason: str
    generation: int
    ranks: tuple[RankStatus, ...]
    note: str = ""

    @property
    def last_death(self) -> RankStatus | None:
        """The rank whose process was the last to die; None if none has died."""
        died = [rank for rank in self.ranks if rank.death is not None]
        return max(died, key=lambda rank: rank.death.at if rank.death else 0.0, default=None)

    def __str__(self) -> str:
        alive = sum(rank.alive for rank in self.ranks)
        reason = f": {self.reason}" if self.reason else ""
        rows = [["rank", "host", "pid", "state", "runs", "last death"]]
        for rank in self.ranks:
            host = f"{rank.process.address} ({rank.process.host})"
            death = "-" if rank.death is None else f"{_seconds(max(0.0, time.time() - rank.death.at))} ago"
            state = "alive" if rank.alive else "dead"
            rows.append([str(rank.rank), host, str(rank.process.pid), state, rank.doing, death])
        lines = [f"{self.name} is {self.state}{reason}", *([self.note] if self.note else [])]
        lines.append(f"generation {self.generation}, {alive} of {len(self.ranks)} ranks alive")
        lines += aligned(rows)
        for rank in self.ranks:
            if rank.death is not None:
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rank.death.at))
                lines.append(
                    f"last death of rank {rank.rank}, {at}, generation {rank.death.generation}: {rank.death.reason}"
                )
        lines += [f"rank {rank.rank} did not answer: {rank.unknown}" for rank in self.ranks if rank.unknown]
        return "\n".join(lines)


def group_status(state: GroupState, seconds: float = MAX_STACK_SECONDS) -> GroupStatus:
    """The status of a group of this process. Asks its ranks, for up to ``seconds``, and disturbs none of them."""
    transport = state.transport
    if transport is None:
        raise RuntimeError(f"{state.name} has no workers yet")
    deaths: dict[int, str] = {}
    processes = transport.processes
    gone = state.closed or transport.ended or not transport.connected
    if not gone:
        deaths = {rank: why for rank, why in transport.deaths().items() if rank not in transport.restarted}
        state.note_deaths(deaths)
    living = [] if gone else [rank for rank in range(transport.world_size) if rank not in deaths]
    current: State = "closed" if state.closed else "open" if state.broken is None else "broken"
    reason = "" if current != "broken" else state.broken or ""
    return GroupStatus(
        state.name,
        current,
        reason,
        state.restarts,
        rank_statuses(processes, living, transport.running(living, seconds), state.last_deaths),
    )


def rank_statuses(
    processes: Sequence[RankProcess], living: Sequence[int], running: Mapping[int, Running], deaths: Mapping[int, Death]
) -> tuple[RankStatus, ...]:
    """The status of each rank. ``running`` has the living ranks that were asked, ``deaths`` each rank's last one."""
    statuses = []
    for rank, process in enumerate(processes):
        told = running.get(rank, "unknown: there was no time to ask it") if rank in living else ()
        calls, unknown = (None, told) if isinstance(told, str) else (told, "")
        statuses.append(RankStatus(rank, process, rank in living, calls, unknown, deaths.get(rank)))
    return tuple(statuses)


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
