"""GroupState: whether a group takes calls, and the running ones. Monitor: the thread that looks at those of all groups.

Two locks of a group matter to whoever sends or waits; docs/internals.md, "Locks", has the order of all. ``sending``
serializes sending, so that every rank gets calls in the same order; `restart` holds it while it waits for constructors.
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
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from single_controller.call.errors import (
    ForkedProcessError,
    GroupBrokenError,
    GroupClosedError,
    StartError,
    WorkerDiedError,
)
from single_controller.call.transport import Death, Transport

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Time between two looks at the calls of a group."""

TRANSPORT_GONE = "the connection to Ray with which it was created was shut down"


class Closing:
    """A context manager that closes itself; base class of everything that has a ``close`` method."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held. A second close does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SentCall(Protocol):
    """What a group's state knows of a call: it is looked at while some rank runs it, and ended with the group.

    Attributes:
        transport: what carries it.
        started: when it was sent, by the monotonic clock.
    """

    transport: Transport
    started: float

    def look(self, now: float, deaths: Mapping[int, str]) -> None:
        """Look for what no result tells: deaths, failed inputs, timeouts."""
        ...

    def abandon(self) -> None:
        """The group is broken or closed: end the call, unless it has an outcome."""
        ...

    def log_late(self, others: int) -> None:
        """Log which ranks are late, and how many later calls wait for them."""
        ...


class GroupState:
    """Whether a group takes calls, and why not. The group, its calls, the monitor and the watchers share it.

    Locks: see the top of this file for ``sending`` and ``lock``.

    Args:
        name: the group's name, for messages.
        error_grace: seconds that the other ranks have to end a call after one raised, before the group is broken.
    """

    def __init__(self, name: str, error_grace: float) -> None:
        self.name = name
        self.error_grace = error_grace
        self.sending = threading.RLock()
        self.lock = threading.RLock()
        self.transport: Transport | None = None  # what runs the workers; None until they were started
        self.broken: str | None = None  # why the group is broken, or None
        self.closed = False  # whether it was closed
        self.advice = "Call restart() to start new workers, or close()"  # what the error of a broken group recommends
        self.dead: tuple[int, ...] = ()  # the ranks whose death broke it
        self.restarting = False  # whether its workers are being restarted
        self.restarts = 0  # number of successful restarts and replacements of ranks
        self.recovers = False  # whether a call first has ranks replaced that have died before, or goes on without them
        self.sent = 0  # number of calls that were sent
        self.next_late_log = 0.0  # when the group may log again which ranks are late, by the monotonic clock
        self.timing_out = False  # whether a thread is about to end a call that has exceeded its timeout
        # Deaths that calls found: number of restarts before, and the error
        self.deaths: list[tuple[int, WorkerDiedError]] = []
        self.last_deaths: dict[int, Death] = {}  # rank -> the last death of a process of this rank, for `GroupStatus`
        # Called when the group breaks, or was restarted or replaced. It runs while locks are held, so it must return at
        # once.
        self.on_change: Callable[[], object] = lambda: None
        # Role -> rank -> version of the last `LayoutReport` that the rank has made
        self.layout_versions: dict[str | None, dict[int, int]] = {}
        self.calls: set[SentCall] = set()  # the calls that some rank is running
        # Those of them whose references were handed out. Whoever has one may learn of a death before the group.
        self.referred: set[SentCall] = set()
        self.watched = False  # whether the monitor looks at the calls
        self.look_failed = False  # whether its last look has raised
        self.pid = os.getpid()  # the process that made the group

    def check_process(self) -> None:
        """Raise in a fork of the process that made the group, before any lock is taken: a thread of that process may
        have held it, and does not exist here. Without threads, a fork has a transport of its own and may use it.

        Raises:
            ForkedProcessError: this is a fork.
        """
        if os.getpid() != self.pid and not (self.transport is not None and self.transport.synchronous):
            raise ForkedProcessError.of(self.name)

    def refusal(self) -> GroupClosedError | GroupBrokenError | None:
        """The error that a call would raise now, or None."""
        if self.closed:
            return GroupClosedError(f"{self.name} is closed; create a new group")
        if self.broken is not None:
            return GroupBrokenError(f"{self.name} is broken: {self.broken}. {self.advice}")
        return None

    def break_(self, reason: str, dead: Sequence[int] = ()) -> None:
        """Take no more calls, and end those that are running."""
        with self.lock:
            self.note_deaths(dict.fromkeys(dead, reason))
            if self.broken is None and not self.closed:
                self.broken, self.dead = reason, tuple(dead)
                self.on_change()
                level = logging.INFO if self.restarting else logging.ERROR  # a requested restart is not an error
                logger.log(level, "%s is broken: %s", self.name, reason)
            self._end_calls()

    def note_deaths(self, deaths: Mapping[int, str]) -> None:
        """Remember when and why ranks died, unless their death in this generation is known already."""
        with self.lock:
            for rank, reason in deaths.items():
                known = self.last_deaths.get(rank)
                if known is None or known.generation != self.restarts:
                    self.last_deaths[rank] = Death(time.time(), reason, self.restarts)

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
        `reopen` when the workers have started. If it raises, the group stays broken. The caller holds ``sending``.

        Raises:
            GroupClosedError: the group was closed.
        """
        self.check_closed()
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
            raise
        finally:
            self.restarting = False

    def reopen(self) -> None:
        """Take calls of the new workers, or end these if another thread has closed the group meanwhile.

        Raises:
            GroupClosedError: the group was closed.
        """
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

    def _end_calls(self) -> None:
        for call in list(self.calls):
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
        """Start the thread.

        Raises:
            StartError: the process has as many threads as it may have. Nobody would notice deaths and timeouts.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="call-monitor", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise StartError(f"the thread that looks for dead workers could not be started: {error}") from error
                self._thread = thread

    def watch(self, state: GroupState) -> None:
        """Look at the calls of a group until none is running."""
        with self._changed:
            self._groups.add(state)
            state.watched = True
            self._changed.notify_all()

    def _drop_idle(self) -> None:
        for state in list(self._groups):
            state.watched = False
            if state.calls:  # after the line before: who adds a call after this look sees that nobody watches
                state.watched = True
            else:
                self._groups.discard(state)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._drop_idle()
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
                    logger.log(level, "%s: its calls could not be looked at", state.name, exc_info=True)
                    state.look_failed = True
                del state  # the thread must not keep a group that nobody has


monitor = Monitor()
