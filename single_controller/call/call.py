"""Call: one call that was sent, and the state of the group that it belongs to.

`GroupState` is open, broken or closed. The transport tells a `Call` the ranks' results as they arrive, in any thread,
and the call decides when it has an outcome: the first error, a death, a timeout, or all results. What no result tells,
a death or a timeout, the thread of `Monitor` looks for. Whoever wants the value waits for the outcome and does nothing.

The order of the locks is in docs/internals.md, "Locks". Two of them matter here. ``GroupState.sending`` serializes
sending, so that every rank gets calls in the same order; `restart` holds it while it waits for constructors. No
thread acquires it while it holds another lock: a call that settles in the monitor's thread must not wait for a thread
that is sending. ``GroupState.lock`` protects the state and the fields of all its calls. It is held for bookkeeping
only, never while the transport is asked for anything that may block. Callbacks of `Call.outcome` run under it. Both
are reentrant: the garbage collector may finalize futures while a lock is held.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from dispatch.errors import ResultError, SingleControllerError
from dispatch.modes import Join
from dispatch.move import move
from dispatch.plan import CallPlan, join_values
from dispatch.register import MethodSpec, label
from single_controller.call.codec import decode_result
from single_controller.call.errors import (
    CallTimeoutError,
    ForkedProcessError,
    GroupBrokenError,
    GroupClosedError,
    StartError,
    WorkerDiedError,
    WorkerError,
    hosts_text,
    ranks_text,
)
from single_controller.call.joining import CallResults, join_results
from single_controller.call.result import Failure, RankResult, first_cause
from single_controller.call.stacks import show_stacks
from single_controller.call.stats import KEPT_CALLS, CallRecord, CallStats, Clock, RankRecord
from single_controller.call.transport import MAX_STACK_SECONDS, Death, Outcome, Sent, Transport

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Time between two looks at the calls of a group."""

LATE_LOG_SECONDS = 30.0
LOST_SECONDS = 0.5
"""How long the error of a lost result waits for news of its rank's death."""

DEATH_SHOWS_SECONDS = 2.0
"""How long an error that may be an echo of a death waits for that death to be reported, at least. While ranks that have
not ended cannot be reached, it waits for `Transport.death_seconds`."""

MAX_PROBED = 64
"""Ranks that one look probes at once: each probe takes a connection."""

ASK_AFTER_SECONDS = 1.0
"""A wait with at least this limit asks the late ranks where they are before it raises."""

OTHERS_FAIL_SECONDS = 0.1
"""How long an error waits for those of other ranks, so that one error can name all of them."""

TRANSPORT_GONE = "the connection to Ray with which it was created was shut down"


class GroupState:
    """Whether a group takes calls, and why not. The group, its calls, the monitor and the watchers share it.

    Locks: see the top of this file for ``sending`` and ``lock``.

    Args:
        name: the group's name, for messages.
        error_grace: seconds that the other ranks have to end a call after one raised, before the group is broken.

    Attributes:
        transport: what runs the workers; None until they were started.
        broken: why the group is broken, or None.
        closed: whether it was closed.
        dead: the ranks whose death broke it.
        restarting: whether its workers are being restarted.
        restarts: number of successful restarts and replacements of ranks.
        independent: whether no rank waits for another one in collectives.
        recovers: whether a call first has ranks replaced that have died before, or goes on without them.
        sent: number of calls that were sent.
        layout_versions: role -> rank -> version of the last `LayoutReport` that the rank has made.
        deaths: deaths that calls found: number of restarts before, and the error.
        last_deaths: rank -> the last death of a process of this rank, for `GroupStatus`.
        on_change: called when the group breaks, or was restarted or replaced. It runs while locks are held, so it must
            return at once.
        advice: what the error of a broken group recommends.
        calls: the calls that some rank is running.
        watched: whether the monitor looks at them.
        referred: those of them whose references were handed out. Whoever has one may learn of a death before the group.
        look_failed: whether its last look has raised.
        next_late_log: when the group may log again which ranks are late, by the monotonic clock.
        timing_out: whether a thread is about to end a call that has exceeded its timeout.
    """

    def __init__(self, name: str, error_grace: float) -> None:
        self.name = name
        self.error_grace = error_grace
        self.sending = threading.RLock()
        self.lock = threading.RLock()
        self.transport: Transport | None = None
        self.broken: str | None = None
        self.closed = False
        self.advice = "Call restart() to start new workers, or close()"
        self.dead: tuple[int, ...] = ()
        self.restarting = False
        self.restarts = 0
        self.independent = self.recovers = False
        self.sent = 0
        self.next_late_log = 0.0
        self.timing_out = False
        self.deaths: list[tuple[int, WorkerDiedError]] = []
        self.last_deaths: dict[int, Death] = {}
        self.on_change: Callable[[], None] = _nothing
        self.layout_versions: dict[str | None, dict[int, int]] = {}
        self.calls: set[Call] = set()
        self.referred: set[Call] = set()
        self.watched = self.look_failed = False
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raise in a fork of the process that made the group, before any lock is taken: a thread of that process may
        have held it, and does not exist here. Without threads, a fork has a transport of its own and may use it.

        Raises:
            ForkedProcessError: this is a fork.
        """
        if os.getpid() != self._pid and not (self.transport is not None and self.transport.synchronous):
            raise ForkedProcessError.of(self.name)

    def check(self, recover: Callable[[], None] | None = None) -> None:
        """Raise unless the group takes calls. During a restart, wait for its end first.

        Args:
            recover: has ranks replaced that have died before, or goes on without them.

        Raises:
            ForkedProcessError: this is a fork of the process that made the group.
            GroupClosedError: it was closed.
            GroupBrokenError: it is broken; the message says why.
        """
        if os.getpid() != self._pid:
            self.check_process()
        if self.restarting:
            with self.sending:  # reentrant: the thread that restarts passes
                pass
        if not self.closed:
            if self.transport is not None and not self.transport.connected:
                self.break_(TRANSPORT_GONE)
            if self.referred:
                self.look()
            if recover is not None and self.recovers and self.dead:
                recover()
        if self.closed or self.broken is not None:
            error = self.refusal()
            if error is not None:
                raise error

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
            self._end_calls(self.dead if self.independent and not self.restarting else ())

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

    def break_again(self, reason: str) -> None:
        """Replace the reason: what was to repair the group has failed."""
        with self.lock:
            self.broken = None
            self.break_(reason, self.dead)

    def close(self) -> None:
        """Take no more calls, and end those that are running."""
        with self.lock:
            self.closed = True
            self._end_calls()

    def reopen(self) -> bool:
        """Take calls again after a restart, unless the group was closed meanwhile. Returns whether it does."""
        with self.lock:
            if self.closed:
                return False
            self.broken = self.broken or "it was restarted"  # what calls of the old workers are told
            self._end_calls()
            self.broken, self.dead, self.layout_versions = None, (), {}
            return True

    def running(self) -> list[Call]:
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

    def _end_calls(self, dead: Collection[int] = ()) -> None:
        """End all calls; if these ranks have died, on which no other one depends, those that wait for one of them."""
        for call in list(self.calls):
            if not dead or not set(dead).isdisjoint(call.late):
                call.abandon()


def _nothing() -> None:
    pass


class Monitor:
    """The thread that looks at the running calls of all groups, ten times per second. One per process.

    Thread: a daemon thread named "call-monitor". `start` starts it, before the first group exists; it waits while
    nothing is running, and ends with the process.
    Lock: ``_changed`` protects the groups, and wakes the thread. It is a leaf.

    Attributes:
        orphans: calls that must not be dropped: see `GroupState.look`.
    """

    def __init__(self) -> None:
        self.orphans: list[object] = []
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


class Call:
    """One call, from when it is sent until no rank is running it any more.

    Lock: the state's ``lock`` protects all fields.

    Args:
        state: the state of the group.
        spec: the method.
        plan: which rank got what.
        transport: what carries the call.
        timeout: seconds from now until the call is late, or None.
        starting: whether this is the call of the constructors.
        stats: where the group records its calls.
        begun: when the call began, in seconds since the epoch; now by default.
        device: where the tensors of the value are wanted; None leaves them where they are.

    Attributes:
        number: position among the calls that the group sent.
        started: when it was sent, by the monotonic clock.
        outcome: done once the call has an outcome: None, or what returns its error.
        reported: whether somebody was told of its error.
    """

    def __init__(
        self,
        state: GroupState,
        spec: MethodSpec,
        plan: CallPlan,
        transport: Transport,
        *,
        timeout: float | None = None,
        starting: bool = False,
        stats: CallStats | None = None,
        begun: float | None = None,
        device: str | None = None,
    ) -> None:
        self.transport = transport
        self.method, self.role, self.label = spec.name, spec.role, spec.label
        # Keep only these of the plan: a reference to its arguments would keep the caller's batch alive.
        self.join, self.collect, self._collecting, self._deferred = (
            plan.join,
            plan.collect,
            plan.collecting,
            plan.deferred,
        )
        self._pending = {rank for rank, number in enumerate(plan.shard_of) if number is not None}
        self._results: dict[int, RankResult] = {}
        self._source: CallResults | None = None
        self._sent: Sent | None = None
        self._state = state
        self._lock = state.lock
        self.check_process = state.check_process
        self._stats = stats
        self._device = device
        self._timeout = timeout
        self.starting = starting
        self.number = 0
        self.outcome: Outcome = Future()
        self.outcome.set_running_or_notify_cancel()  # nobody who waits for it, such as a task of asyncio, can cancel it
        self.reported = self.dropped = False
        self._failed_at: float | None = None
        self._echo = False  # an error waits, because it may be the echo of a death
        self._alive: set[int] = set()  # ranks that were found alive since
        self._withdrawn = False
        self.started = time.monotonic()
        self._record = CallRecord(spec.name, time.time() if begun is None else begun)
        if stats is not None and stats.recorded:
            self._record.ranks = {rank: RankRecord() for rank in self._pending}

    def sent(self, sent: Sent) -> None:
        """The transport has sent it. Results may have arrived already."""
        state, record, stats = self._state, self._record, self._stats
        with self._lock:
            self._sent, self.started = sent, time.monotonic()
            record.dispatched = record.dispatched or time.time()
            if stats is not None:
                record.sent = sum(sent.nbytes.values())
                stats.calls.append(record)
                for rank, of_rank in record.ranks.items():
                    of_rank.sent = sent.nbytes[rank]
                if stats.recorded or len(stats.calls) >= 2 * KEPT_CALLS:  # not at each call, which would cost it 10 us
                    stats.trim()
            if self._pending or not self.settled:  # all ranks may have failed: the monitor decides
                state.calls.add(self)
                # Another thread may have closed or broken the group after this call's last check.
                if state.closed or (state.broken is not None and not self.starting):
                    self.abandon()
                elif not state.watched:
                    monitor.watch(state)

    # --- for the threads that wait --------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the call has an outcome."""
        return self.outcome.done()

    @property
    def error(self) -> Exception | None:
        """The error of a settled call; None if it succeeded."""
        failed = self.outcome.result() if self.outcome.done() else None
        return None if failed is None else failed()

    @property
    def late(self) -> list[int]:
        """The ranks whose results have not arrived."""
        with self._lock:
            return sorted(self._pending)

    @property
    def results(self) -> CallResults:
        """Where any process can fetch the results."""
        with self._lock:
            if self._source is None:
                if self._sent is None:
                    raise RuntimeError(f"{self.label}() has not been sent")
                self._source = self._sent.results()
            return self._source

    def refs(self) -> list[Any]:
        """The transport's references to the results, to be handed out."""
        self.reported = True  # Ray tells whoever has them
        with self._lock:
            if not self.settled:
                self._state.referred.add(self)
        return self.results.refs()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has an outcome. Arguments and errors as of `value`, without the call's own error."""
        self.check_process()
        with contextlib.suppress(TimeoutError):
            self.outcome.result(timeout)
        if not self.outcome.done():
            raise wait_timed_out(self, timeout or 0.0)

    def value(self, timeout: float | None = None) -> Any:
        """Wait until the call has an outcome, and return its value as its mode promises it.

        Args:
            timeout: seconds to wait; the call continues after that.

        Raises:
            CallTimeoutError: the wait ended before the call did.
            ForkedProcessError: another process sent the call.
            SingleControllerError: the call's error.
        """
        try:
            failed = self.outcome.result(timeout)
        except TimeoutError:
            raise wait_timed_out(self, timeout or 0.0) from None
        if failed is not None:
            self.reported = True
            # A copy: an exception keeps its traceback, which refers to every caller that has waited, and their batches.
            error = copy.copy(failed())
            if isinstance(error, WorkerError):
                error.results = self._returned()
            try:
                raise error from failed().__cause__
            finally:
                del error  # its traceback refers to this frame
        begun = time.perf_counter()
        # Small results are here, but whether they came in time must not depend on a race with the shutdown.
        if not self.transport.connected:
            raise GroupBrokenError(f"the results of {self.label}() are lost: {TRANSPORT_GONE}")
        results = [self._results[rank] for rank in self._collecting]
        if any(result.kept for result in results):
            try:
                value = join_results(self.results, results, self.join)
            except ResultError as lost:
                raise self._death_of(lost) or lost from lost.__cause__
        else:
            values = [
                decode_result(self.label, result.rank, result.value, private=True, shared=False)
                for result in results
                if not (result.empty and self.join is Join.ROWS)
            ]
            value = join_values(self.label, values, self.join)
        if self.collect is not None:
            value = self.collect(value)
        if self._device is not None:
            value = move(value, self._device)
        if not self._record.joined:  # only the first time counts
            self._record.joined = time.perf_counter() - begun
        return value

    @property
    def is_plain(self) -> bool:
        """Whether the value is here, and made of plain data: reading it runs nobody's code."""
        simple = self.error is None and self.collect is None and self._device is None
        return simple and all(map(_is_plain, self._results.values()))

    def _death_of(self, error: ResultError) -> WorkerDiedError | None:
        """The death with which a result was lost that was still on its rank; None if the rank lives, or its death was
        known before, or it was replaced."""
        state, transport, rank, end = self._state, self.transport, error.rank, time.monotonic() + LOST_SECONDS
        while rank is not None and state.broken is None and transport is state.transport and not transport.ended:
            reason = transport.deaths().get(rank)
            if reason is not None and rank not in transport.restarted:
                death = self._death([rank], reason)
                state.deaths.append((state.restarts, death))
                state.break_(str(death), [rank])
                return death
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return None

    def _returned(self) -> dict[int, Any]:
        """rank -> value, of the collecting ranks that have returned one which can be decoded here."""
        if not self.transport.connected:  # fetching a result would start another Ray
            return {}
        with self._lock:
            arrived = {k: self._results[rank] for k, rank in enumerate(self._collecting) if rank in self._results}
        values = {}
        for k, result in arrived.items():
            if result.failure is None and result.died is None and not result.empty:
                with contextlib.suppress(ResultError):  # the error of the call matters more
                    values[result.rank] = (
                        self.results.only([k]).values([0], private=True)[0]
                        if result.kept
                        else decode_result(self.label, result.rank, result.value, private=True)
                    )
        return values

    # --- what the transport and the monitor tell ------------------------------------------------------------------

    def arrive(self, result: RankResult) -> None:
        """See `Receiver`. Results of ranks whose method has returned come from the thread that reads connections."""
        now = time.time()
        with self._lock:
            rank, failure, clock, record = result.rank, result.failure, result.clock, self._record
            if rank not in self._pending:
                return  # it was told dead before, or the call was abandoned
            self._pending.discard(rank)
            self._results[rank] = result
            if failure is not None and not failure.method:  # made by the transport, which does not know the call
                failure.method, failure.role = self.method, self.role
            if result.died is None:
                self._state.layout_versions.setdefault(self.role, {})[rank] = result.layout_version
            if clock is not None:
                received, began, ended, _ = clock
                record.received = max(record.received, received)
                record.opened = max(record.opened, began - received)
                record.ran = max(record.ran, ended - began)
                record.back = max(record.back, now - ended)
                record.returned += result.nbytes
                if self.transport.synchronous:  # the call ran while it was being sent
                    record.dispatched = min(record.dispatched or received, received)
                of_rank = record.ranks.get(rank)
                if of_rank is not None:
                    of_rank.clock, of_rank.returned, of_rank.arrived = Clock(*clock), result.nbytes, now
            if failure is not None or result.died is not None or not self._pending:
                # Whether an argument's call has failed, and the log of an error that nobody reads, are for the monitor:
                # both may make an error of a user's class, whose code must not run in the thread that reads
                # connections.
                ask = self.transport.synchronous
                careful = self.dropped or self._deferred
                if ask or not (careful and any(one.failure is not None for one in self._results.values())):
                    self._decide(time.monotonic(), ask=ask)

    def look(self, now: float, deaths: Mapping[int, str]) -> None:
        """Look for what no result tells: deaths, failed inputs, timeouts. Called by the monitor.

        Args:
            now: by the monotonic clock.
            deaths: rank -> why its process has ended.
        """
        with self._lock:
            suspects = [rank for rank in self._pending if rank not in self._alive] if self._echo else []
        # Outside the lock: this asks the transport.
        known = self.transport.probe(suspects[:MAX_PROBED]) if suspects else {}
        self._alive.update(rank for rank, death in known.items() if death is None)
        for rank, reason in {**deaths, **known}.items():
            if reason is not None:
                self.arrive(RankResult(rank, died=reason))
        with self._lock:
            told = self._withdrawn
            self._decide(now)
            withdraw = self._sent.withdraw if self._sent is not None and self._withdrawn and not told else None
        if withdraw is not None:  # outside the lock too
            withdraw()

    def abandon(self) -> None:
        """The group is broken or closed: end the call, unless it has an outcome."""
        with self._lock:
            dead = [rank for rank in self._pending if rank in self._state.dead]
            if dead and not self._state.closed:
                self._settle(self._death(dead, self._state.broken or ""))
            refusal = self._state.refusal()
            if refusal is not None:
                self._settle(refusal)
            self._pending.clear()
            self._state.calls.discard(self)

    # --- the outcome ----------------------------------------------------------------------------------------------

    def _decide(self, now: float, *, ask: bool = True) -> None:
        """Settle the call if its outcome is known by now. A death wins over errors, which may be its echoes.

        Args:
            now: by the monotonic clock.
            ask: whether to ask if a call has failed whose future is an argument.
        """
        if self._state.closed:  # its ranks were ended, which is no death
            self.abandon()
            return
        failures = [result.failure for result in self._results.values() if result.failure is not None]
        dead = sorted(rank for rank, result in self._results.items() if result.died is not None)
        lost_input = next((error for future in self._deferred if (error := future.failed)), None) if ask else None
        if (failures or lost_input) and self._failed_at is None:
            self._failed_at = now
        if lost_input:
            self._withdrawn = True  # `look` tells the ranks
        if dead:
            error = self._death(dead, self._results[dead[0]].died or "")
            for rank in dead:  # a later look must not report them again
                del self._results[rank]
            self._state.deaths.append((self._state.restarts, error))
            self._settle(error)
            self._state.break_(str(error), dead)
        elif failures and (lost_input is None or not all(failure.alike for failure in failures)):
            self._settle_failure(failures, now)
        elif lost_input and (failures or (self._pending and now - (self._failed_at or now) > DEATH_SHOWS_SECONDS)):
            # Without a failure, wait: the input may have come just before its call exceeded its timeout. Ranks that are
            # busy with an earlier call tell later.
            if isinstance(lost_input, SingleControllerError):
                lost_input = lost_input.of_consumer(self.label)
            self._settle(lost_input)
        elif not self._pending:
            late = self._ranks_over_time() if self.transport.synchronous else []
            if late and not self.settled:
                self._time_out(late)
            else:
                self._settle(None)
        if self._pending:
            self._check_deadlines(now, failures)
        elif self.settled:
            self._state.calls.discard(self)

    def _settle_failure(self, failures: list[Failure], now: float) -> None:
        """Raise the first cause: soon, unless it may be the echo of a death that was not reported yet."""
        if self.settled:
            self._echo = False
            return
        first = first_cause(failures)
        waited = now - (self._failed_at or now)
        self._echo = first.may_be_echo and (
            bool(self._pending)
            if waited <= DEATH_SHOWS_SECONDS
            # By now Ray has reported any death but that of a host that went silently. No rank on such a host responds.
            else waited <= self.transport.death_seconds and not self._alive.issuperset(self._pending)
        )
        if not self._echo and (first.may_be_echo or not self._pending or waited > OTHERS_FAIL_SECONDS):
            name = StartError.__name__ if self.starting else WorkerError.__name__
            # Made when somebody asks: it is of the class of the user's exception too.
            starting = self.starting  # the function must not refer to the call, whose outcome keeps it
            self._settle(functools.cache(lambda: first.error(starting=starting, failures=failures)), name)

    def _ranks_over_time(self) -> list[int]:
        """A synchronous transport cannot interrupt a call: the ranks that took longer than its timeout."""
        clocks = {rank: result.clock for rank, result in self._results.items()}
        limit = self._timeout
        return sorted(
            rank for rank, clock in clocks.items() if limit is not None and clock and clock[-1] - clock[0] > limit
        )

    def _time_out(self, late: list[int], stacks: Mapping[int, str] = MappingProxyType({})) -> None:
        message = (
            f"{self.label}() exceeded its timeout of {self._timeout:g} s; "
            f"{ranks_text(late)} had not finished ({self._hosts(late)})"
        )
        where = f"\n\n{show_stacks(stacks)}" if stacks else ""
        self._settle(CallTimeoutError(message + where, method=self.method, ranks=late, stacks=stacks))
        self._state.break_(message)

    def late_stacks(self, seconds: float = MAX_STACK_SECONDS) -> dict[int, str]:
        """rank -> where it is, of the ranks that have not ended. Takes up to ``seconds``."""
        try:
            stacks = self.transport.stacks(self.late, seconds)
        except Exception:
            logger.debug("%s(): the late ranks could not be asked where they are", self.label, exc_info=True)
            stacks = {}
        return {rank: stacks[rank] for rank in self.late if rank in stacks}  # the others have ended meanwhile

    def _time_out_late(self, *, ask: bool = True) -> None:
        """Neither the lock nor the monitor's thread must wait for the stacks, so this runs in a thread of its own."""
        try:
            stacks = self.late_stacks() if ask else {}
            with self._lock:
                late = self.late
                if late and not self.settled:  # otherwise the last one has ended while they were asked
                    self._time_out(late, stacks)
        finally:
            self._state.timing_out = False

    def _log_late(self, others: int) -> None:
        """In a thread of its own too."""
        stacks, late = self.late_stacks(), self.late
        if late:
            logger.warning(
                "%s: %s() has been running for %.0f s; waiting for %s (%s)%s\n%s",
                self._state.name,
                self.label,
                time.monotonic() - self.started,
                ranks_text(late),
                self._hosts(late),
                f"; later calls that are running: {others}" if others else "",
                show_stacks(stacks),
            )

    def _check_deadlines(self, now: float, failures: list[Failure]) -> None:
        running = now - self.started
        late = sorted(self._pending)
        if not self.settled and self._timeout is not None and running >= self._timeout:
            # One thread per group: the first call that times out breaks it, and ends the others.
            if not self._state.timing_out:
                self._state.timing_out = True
                if not _start_thread(self._time_out_late):
                    self._time_out_late(ask=False)
        elif (
            self.settled
            and self._failed_at is not None
            and now - self._failed_at > self._state.error_grace
            and not all(failure.alike for failure in failures)
        ):
            # The others probably wait for the failed rank in a collective. Only new workers can end that. Ranks whose
            # input failed wait for nobody: those that have not ended are busy with an earlier call.
            raised = sorted(failure.rank for failure in failures if not failure.alike)
            self._state.break_(
                f"{ranks_text(late)} had not finished {self.label}() {self._state.error_grace:g} s after an error on "
                f"{ranks_text(raised)}"
            )
        elif running >= LATE_LOG_SECONDS and now >= self._state.next_late_log:
            # One log per group: most calls wait for the same ranks, behind the oldest call.
            self._state.next_late_log = now + LATE_LOG_SECONDS
            oldest, *others = self._state.running() or [self]
            _start_thread(oldest._log_late, len(others))

    def _death(self, dead: Sequence[int], reason: str) -> WorkerDiedError:
        where = "__init__" if self.starting else self.method
        during = label(self.role, where)
        message = f"{ranks_text(dead)} died during {during}() ({self._hosts(dead)}): {reason}"
        error = WorkerDiedError(message, rank=dead[0], host=self.transport.host(dead[0]), method=where, ranks=dead)
        error.role = self.role
        return error

    def _settle(self, error: Exception | Callable[[], Exception] | None, name: str | None = None) -> None:
        """Give the call its outcome, unless it has one.

        Args:
            error: the error, or what makes it; None if the call has succeeded.
            name: the name of the error's class, where it is made later.
        """
        if self.settled:
            return
        self._record.settled = time.time()
        self._record.failed = name or (None if error is None else type(error).__name__)
        self._state.referred.discard(self)
        self._deferred = ()  # a chain of futures would otherwise keep all earlier ones alive
        self.outcome.set_result((lambda: error) if isinstance(error, Exception) else error)
        if self.dropped:
            self.drop()

    def drop(self) -> None:
        """Nobody has the call's future any longer. An error of a method that nobody was told of is logged."""
        self.dropped = True
        if isinstance(self.error, WorkerError) and not self.reported:
            self.reported = True
            logger.error("Unhandled error of %s(), whose future was dropped: %s", self.label, self.error)

    def _hosts(self, ranks: Sequence[int]) -> str:
        return hosts_text([self.transport.host(rank) for rank in ranks])

    def rank_results(self) -> Mapping[int, RankResult]:
        """The results by rank; only for a call that succeeded."""
        return self._results


def _is_plain(result: RankResult) -> bool:
    if result.value is None:
        return not result.nbytes
    # Pickles call functions and classes by this opcode alone. In data, the byte only costs a thread.
    return not (result.value.buffers or result.value.references) and pickle.STACK_GLOBAL not in result.value.header


def _start_thread(target: Callable[..., None], *args: Any) -> bool:
    """Start a thread "late-ranks", which asks ranks for their stacks and then ends. Returns whether it could be."""
    try:
        threading.Thread(target=target, args=args, name="late-ranks", daemon=True).start()
    except RuntimeError:  # the process has as many threads as it may have
        logger.warning("no thread could be started to ask late ranks where they are", exc_info=True)
        return False
    return True


def wait_timed_out(call: Call, seconds: float) -> CallTimeoutError:
    """The error of a wait that ended before its call did. A short wait does not ask the ranks where they are, which
    might take longer than the wait."""
    stacks = call.late_stacks(min(0.1 * seconds, MAX_STACK_SECONDS)) if seconds >= ASK_AFTER_SECONDS else {}
    late = call.late
    where = f"\n\n{show_stacks(stacks)}" if stacks else ""
    return CallTimeoutError(
        f"{call.label}() has not finished after a wait of {seconds:g} s; still running: {ranks_text(late)}. "
        f"The call continues. Wait again, or set a timeout for the call with .options(timeout=...){where}",
        method=call.method,
        ranks=late,
        call_goes_on=True,
        stacks=stacks,
    )


def wait_and_check(call: Call) -> None:
    """Wait for a call, and raise its error."""
    call.wait()
    if call.error is not None:
        raise call.error
