"""GroupStatus: what a group is doing now, as a value that prints as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dispatch.tables import aligned
from single_controller.call.call import GroupState
from single_controller.call.executor import RunningCall
from single_controller.call.transport import MAX_STACK_SECONDS, Death, RankProcess

State = Literal["open", "broken", "closed"]

Running = tuple[RunningCall, ...] | str
"""The calls that a rank runs, or why that is unknown."""


@dataclass(frozen=True)
class RankStatus:
    """One rank.

    Attributes:
        rank: the rank.
        process: where it runs.
        alive: whether its process is running.
        running: the calls that it runs, the oldest first; () if it is idle or dead, None if it did not say.
        unknown: why it did not say; empty if it did.
        death: the last death of a process with this rank, of an earlier generation too; None if there was none.
    """

    rank: int
    process: RankProcess
    alive: bool
    running: tuple[RunningCall, ...] | None
    unknown: str = ""
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
            death = "-" if rank.death is None else _ago(rank.death.at)
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
    """The status of each rank.

    Args:
        processes: by rank.
        living: the ranks that are alive.
        running: rank -> what it runs, of the living ranks that were asked.
        deaths: rank -> its last death.
    """
    statuses = []
    for rank, process in enumerate(processes):
        if rank not in living:
            statuses.append(RankStatus(rank, process, False, (), "", deaths.get(rank)))
            continue
        told = running.get(rank, "unknown: there was no time to ask it")
        calls, unknown = (None, told) if isinstance(told, str) else (told, "")
        statuses.append(RankStatus(rank, process, True, calls, unknown, deaths.get(rank)))
    return tuple(statuses)


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _ago(at: float) -> str:
    return f"{_seconds(max(0.0, time.time() - at))} ago"
