"""GroupState: whether a group takes calls, and what its ranks do. Monitor, Watcher: the threads that look for deaths.

Two locks of a group matter to threads that send or wait; docs/internals.md, "Locks", has the order of all. ``sending``
serializes sending, so that every rank gets calls in the same order; a restart holds it while it waits for constructors.
No thread acquires it while it holds another lock: a call that settles in the monitor's thread must not wait for a
thread that is sending. ``lock`` protects the state and the fields of all calls of the group. It is held for bookkeeping
only, never while the transport is asked for anything that may block. Callbacks of `Call.outcome` run under it. Both are
reentrant: the garbage collector may finalize futures while a lock is held.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from dispatch.checks import check_seconds
from dispatch.tables import aligned
from single_controller.call.errors import (
    ForkedProcessError,
    GroupBrokenError,
    GroupClosedError,
    WorkerDiedError,
    hosts_text,
    ranks_text,
    start_thread,
)
from single_controller.call.transport import MAX_STACK_SECONDS, Death, RankProcess, RunningCall, Transport

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Time between two looks at the calls of a group."""

ADVICE = "Call restart() to start new workers, or close()"

TRANSPORT_GONE = "the connection to Ray with which it was created was shut down"


class Closing:
    """A context manager that closes itself; base class of everything that has a ``close`` method."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held. A second close does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


OnDeath = Callable[[WorkerDiedError], object]

State = Literal["open", "broken", "closed"]

Running = tuple[RunningCall, ...] | str
"""The calls that a rank runs, or why that is unknown."""


class SentCall(Protocol):
    """What a group's state knows of a call: it is looked at while some rank runs it, and ended with the group."""

    transport: Transport  # what carries it
    started: float  # when it was sent, by the monotonic clock

    @property
    def late(self) -> list[int]:
        """The ranks whose results have not arrived."""

    def look(self, now: float, deaths: Mapping[int, str]) -> None:
        """Look for what no result tells: deaths, failed inputs, timeouts."""

    def abandon(self) -> None:
        """The group is broken or closed: end the call, unless it has an outcome."""

    def log_late(self, others: int) -> None:
        """Log which ranks are late, and how many later calls wait for them."""


class GroupState:
    """Whether a group takes calls, and why not. The group, its calls, the monitor and the watchers share it.

    Locks: see the top of this file for ``sending`` and ``lock``. For the arguments, see `WorkerGroup`.
    """

    def __init__(self, name: str, error_grace: float) -> None:
        self.name = name
        self.error_grace = error_grace
        self.sending = threading.RLock()
        self.lock = threading.RLock()
        self.transport: Transport | None = None  # what runs the workers; None until they were started
        self.broken: str | None = None  # why the group is broken, or None
        self.closed = False  # whether it was closed
        self.advice = ADVICE  # what the error of a broken group recommends
        self.dead: tuple[int, ...] = ()  # the ranks whose death broke it
        self.why = ""  # why they died; `broken` says what the group was doing too
        self.restarting = False  # whether its workers are being restarted
        self.restarts = 0  # number of successful restarts and replacements of ranks
        self.independent = False  # whether no rank waits for another one in collectives
        self.recovers = False  # whether a call first has ranks replaced that have died before, or goes on without them
        self.sent = 0  # number of calls that were sent
        self.next_late_log = 0.0  # when the group may log again which ranks are late, by the monotonic clock
        self.timing_out = False  # whether a thread is about to end a call that has exceeded its timeout
        # Deaths that calls found: number of restarts before, and the error
        self.deaths: list[tuple[int, WorkerDiedError]] = []
        self.last_deaths: dict[int, Death] = {}  # rank -> the last death of a process of this rank, for `GroupStatus`
        self.died = 0  # number of deaths, also of ranks that the group goes on without
        # Called when the group breaks, or was restarted or replaced. Must return at once: locks are held.
        self.on_change: Callable[[], object] = lambda: None
        # Role -> rank -> version of the last `LayoutReport` that the rank has made
        self.layout_versions: dict[str | None, dict[int, int]] = {}
        self.calls: set[SentCall] = set()  # the calls that some rank is running
        # Those of them whose references were handed out. Whoever has one may learn of a death before the group.
        self.referred: set[SentCall] = set()
        # What sends the calls of event loops that have to wait for a repair of the group, in their order
        self.unsent: deque[Callable[[], None]] = deque()
        self.watched = False  # whether the monitor looks at the calls
        self.look_failed = False  # whether its last look has raised
        self.pid = os.getpid()  # the process that made the group

    def check_process(self) -> None:
        """Raise a `ForkedProcessError` in a fork of the process that made the group, before any lock is taken: a thread
        of that process may have held it, and does not exist here. Without threads, a fork has its own transport."""
        if os.getpid() != self.pid and not (self.transport is not None and self.transport.synchronous):
            raise ForkedProcessError.of(self.name)

    def refusal(self) -> GroupClosedError | GroupBrokenError | None:
        """The error that a call would raise now, or None."""
        if self.closed:
            return GroupClosedError(f"{self.name} is closed; create a new group")
        if self.broken is not None:
            return GroupBrokenError(f"{self.name} is broken: {self.broken}. {self.advice}")
        return None

    def break_(self, reason: str, dead: Sequence[int] = (), why: str | None = None) -> None:
        """Take no more calls, and end those that are running.

        Args:
            reason: for the errors of later calls.
            dead: the ranks whose death is the reason.
            why: why they died, for the errors of the calls that are running; by default ``reason``.
        """
        with self.lock:
            self.note_deaths(dict.fromkeys(dead, reason))
            try:
                if self.broken is None and not self.closed:
                    self.broken, self.dead, self.why = reason, tuple(dead), reason if why is None else why
                    self.on_change()
                    level = logging.INFO if self.restarting else logging.ERROR  # a requested restart is not an error
                    text = "%s is broken: %s"
                    if self.recovers and self.dead:
                        text = "%s: %s; the next call first has the group recover, as on_death says"
                    with contextlib.suppress(Exception):  # a handler of the log may raise
                        logger.log(level, text, self.name, reason)
            finally:  # Ctrl-C may come while it writes
                self._end_calls()

    def runs(self, transport: Transport) -> bool:
        """Whether a transport has the group's workers, and no restart or close() is ending them on purpose."""
        return transport is self.transport and not (transport.ended or self.restarting)

    def note_deaths(self, deaths: Mapping[int, str]) -> None:
        """Remember when and why ranks died, unless their death in this generation is known already."""
        with self.lock:
            for rank, reason in deaths.items():
                known = self.last_deaths.get(rank)
                if known is None or known.generation != self.restarts:
                    self.last_deaths[rank] = Death(time.time(), reason, self.restarts)
                    self.died += 1

    def find_deaths(self, transport: Transport) -> dict[int, str]:
        """rank -> why its process has ended. Remembers those that nobody meant to end."""
        deaths = transport.deaths()
        # What a restart ends, it has noted before: so this is read after the question.
        if not transport.ended:
            self.note_deaths({rank: why for rank, why in deaths.items() if rank not in transport.restarted})
        return deaths

    def renumber(self, kept: Sequence[int]) -> None:
        """Note that only these ranks are left, as 0, 1, ..."""
        with self.lock:
            self.dead = ()
            known = self.last_deaths
            self.last_deaths = {rank: known[before] for rank, before in enumerate(kept) if before in known}

    def close(self) -> None:
        """Take no more calls, and end those that are running."""
        with self.lock:
            self.closed = True
            self._end_calls()

    @contextlib.contextmanager
    def restart(self) -> Iterator[None]:
        """Inside, the group gets other workers. Its running calls end, and calls of other threads wait. The body calls
        `reopen` when the workers have started. If it raises, the group stays broken. The caller holds ``sending``."""
        self.check_closed()
        with self.lock:  # at once, or a watcher would break the new group for the deaths of the old one
            self.restarting = True
            self.break_("it is being restarted")
        try:
            yield
            self.restarts += 1
            self.on_change()
        except BaseException as error:
            with self.lock:
                self.broken = None
                first_line = str(error).partition("\n")[0]
                self.break_(f"its restart failed with {type(error).__name__}: {first_line}", self.dead)
            if self.closed and self.transport is not None:  # `close` may have ended the workers of before alone
                self.transport.kill()
            raise
        finally:
            self.restarting = False

    def reopen(self) -> None:
        """Take calls of the new workers, or end these and raise if another thread has closed the group meanwhile."""
        with self.lock:
            if not self.closed:
                self.broken = self.broken or "it was restarted"  # what calls of the old workers are told
                self._end_calls()
                self.broken, self.dead, self.layout_versions = None, (), {}
                return
        if self.transport is not None:  # outside the lock: the transport may wait
            self.transport.kill()
        self.check_closed()

    def check_closed(self) -> None:
        """Raise a `GroupClosedError` if the group was closed."""
        if self.closed and (refusal := self.refusal()) is not None:
            raise refusal

    def status(self, seconds: float = MAX_STACK_SECONDS) -> GroupStatus:
        """What the group is doing. Asks its ranks, for up to ``seconds``, and disturbs none of them."""
        transport = self.transport
        if transport is None:
            raise RuntimeError(f"{self.name} has no workers yet")
        processes = transport.processes
        gone = self.closed or transport.ended or not transport.connected
        deaths = {} if gone else self.find_deaths(transport)
        living = [] if gone else [rank for rank in range(transport.world_size) if rank not in deaths]
        current: State = "closed" if self.closed else "open" if self.broken is None else "broken"
        reason = "" if current != "broken" else self.broken or ""
        return GroupStatus(
            self.name,
            current,
            reason,
            self.restarts,
            rank_statuses(processes, living, transport.running(living, seconds), self.last_deaths),
        )

    def running(self) -> list[SentCall]:
        """The calls that some rank is running, the oldest first."""
        with self.lock:
            return sorted(self.calls, key=lambda call: call.started)

    def look(self) -> None:
        """Look for deaths, timeouts and failed inputs. Called by the monitor."""
        deaths: dict[int, dict[int, str]] = {}
        for call in self.running():
            transport = call.transport
            if not transport.connected:  # Ray was shut down, and asking it would start another one
                self.break_(TRANSPORT_GONE)
                call.abandon()
                monitor.orphans.append(call)  # Ray crashes if one thread drops references while another shuts it down
                continue
            if id(transport) not in deaths:
                deaths[id(transport)] = transport.deaths()
            call.look(time.monotonic(), deaths[id(transport)])

    def ends(self, call: SentCall) -> bool:
        """Whether a call ends with the group that is broken or closed: not, if dead ranks have broken it, on which no
        other one depends, and the call waits for none of them."""
        apart = self.dead and self.independent and not (self.restarting or self.closed)
        return not apart or not set(self.dead).isdisjoint(call.late)

    def _end_calls(self) -> None:
        for call in list(self.calls):
            if self.ends(call):
                call.abandon()


class Monitor:
    """The thread that looks at the running calls of all groups, ten times per second. One per process.

    Thread: a daemon thread named "call-monitor". `start` starts it, before the first group exists; it waits while
    nothing is running, and ends with the process.
    Lock: ``_changed`` protects the groups, and wakes the thread. It is a leaf.
    """

    def __init__(self) -> None:
        self.orphans: list[object] = []  # calls that must not be dropped: see `GroupState.look`
        self._reset()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._groups: set[GroupState] = set()
        self._thread: threading.Thread | None = None

    def _leave_to_parent(self) -> None:
        # A fork has neither the thread nor the calls of its parent. They are kept, because dropping Ray's references
        # needs Ray.
        self.orphans += self._groups
        self._reset()

    def start(self) -> None:
        """Start the thread; a `StartError` if it cannot be: nobody would notice deaths and timeouts."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="call-monitor", daemon=True)
                start_thread(thread.start, "looks for dead workers")
                self._thread = thread

    def watch(self, state: GroupState) -> None:
        """Look at the calls of a group until none is running."""
        with self._changed:
            self._groups.add(state)
            state.watched = True
            self._changed.notify_all()

    def _drop_idle(self) -> None:
        with self._changed:
            groups = list(self._groups)
            for state in groups:
                state.watched = False
                if state.calls:  # after the line before: who adds a call after this look sees that nobody watches
                    state.watched = True
                else:
                    self._groups.discard(state)
        # ``groups`` ends here, without the lock: dropping the last reference to a group may ask Ray, which takes long.

    def _run(self) -> None:
        while True:
            self._drop_idle()
            with self._changed:
                while not self._groups:
                    self._changed.wait()
                groups = list(self._groups)
            time.sleep(POLL_SECONDS)
            while groups:
                state = groups.pop()
                try:
                    state.look()
                    state.look_failed = False
                except Exception:  # too many open files, for example: the next round looks again
                    level = logging.DEBUG if state.look_failed else logging.WARNING
                    with contextlib.suppress(Exception):  # a handler of the log may raise, too
                        logger.log(level, "%s: its calls could not be looked at", state.name, exc_info=True)
                    state.look_failed = True
                del state  # the thread must not keep a group that nobody has


monitor = Monitor()


class Watcher(Closing):
    """What ``group.watch()`` returns.

    Thread: each watcher has a daemon thread named "worker-watcher". It ends when the watcher or the group is closed, or
    when the group is garbage collected. It holds no lock while it calls ``on_death``.

    It keeps the group's state weakly, which has the handles of the workers: these end when the last reference to them
    is gone. For the arguments and errors, see `WorkerGroup.watch`.
    """

    def __init__(self, state: GroupState, on_death: OnDeath | None, interval: float) -> None:
        state.check_process()
        if on_death is not None and not callable(on_death):
            raise TypeError(f"watch(): on_death is {on_death!r:.80}; pass a function of the WorkerDiedError, or None")
        self._state = weakref.ref(state)
        self._on_death = on_death
        self._interval = check_seconds("interval", interval)
        self._ended = threading.Event()
        self._reported: set[tuple[int, int]] = set()  # (number of restarts before, rank)
        self._deaths_seen = len(state.deaths)
        self._thread = threading.Thread(target=self._run, name="worker-watcher", daemon=True)
        start_thread(self._thread.start, "looks for dead workers")

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
            deaths: list[WorkerDiedError] = []
            try:
                deaths = self._new_deaths(state)
            except Exception:
                logger.exception("watching %s: a check raised", state.name)
            for error in deaths:
                try:
                    if self._on_death is not None:
                        self._on_death(error)
                except Exception:  # there may be further deaths to tell
                    logger.exception("watching %s: on_death raised", state.name)
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
        with state.lock:
            if not dead or state.closed or not state.runs(transport):  # since it was asked
                return None
            self._reported.update((restarts, rank) for rank in dead)
            hosts = hosts_text([transport.host(rank) for rank in dead])
            message = f"{ranks_text(dead)} died ({hosts}): {deaths[dead[0]]}"
            state.break_(message, dead, deaths[dead[0]])
        return WorkerDiedError(message, rank=dead[0], host=transport.host(dead[0]), ranks=dead)

    def __repr__(self) -> str:
        return f"<Watcher, {'running' if self.watching else 'ended'}>"


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


def rank_statuses(
    processes: Sequence[RankProcess],
    living: Collection[int],
    running: Mapping[int, Running],
    deaths: Mapping[int, Death],
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
