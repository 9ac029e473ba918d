"""Call: one call that was sent, and the state of the group that it belongs to.

`GroupState` is open, broken or closed. A `Call` absorbs the ranks' results as they arrive and decides when it has an
outcome: the first error, a death, a timeout, or all results. Nothing here waits; `monitor` does.

Lock order. A thread may acquire a lock only while it holds locks further up in this list:

1. ``GroupState.sending`` serializes sending, so that every rank gets calls in the same order. It is held while a call
   is planned anew by `restart`, and while `restart` waits for constructors. No thread acquires it while it holds any
   lock below: a call that settles in the monitor's thread must not wait for a thread that is sending.
2. Waiting in `Monitor.forget` until the monitor's thread has looked at a call counts as a lock: that look needs those
   below.
3. ``GroupState.lock`` protects the state and the fields of all its calls. It is held for bookkeeping only, never while
   the transport is asked for anything that may block. Callbacks of `Call.when_settled` run under it: they must be
   short, and must not acquire ``sending``.
4. ``Monitor._changed`` protects the set of watched calls.
5. ``RayTransport._asking``, ``Link.lock`` and ``Session.changed``, under which only ``Connection._sending`` is
   acquired. A Ray task is submitted under the last two, which waits for nothing.
6. Leaves: ``Connection._sending``, ``Arrivals._lock``, ``Hub._starting``, ``Executor._loop_lock``,
   ``BufferPool._lock``, the codec's counter of mapped bytes, ``LocalRank._lock`` and ``LocalResults._lock``.

Outside this list: ``RewardRunner._turn`` comes before all of it, because a reward function may call groups.
The locks of pools (`single_controller.ray.placement`) are leaves; a restart may acquire them while it holds
``sending``.

1, 3 and 4 are reentrant: the garbage collector may finalize futures, and with them calls, while a lock is held.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dispatch.errors import ResultError, SingleControllerError
from dispatch.move import move
from dispatch.plan import CallPlan
from dispatch.register import MethodSpec, label
from single_controller.call.errors import (
    CallTimeoutError,
    ForkedProcessError,
    GroupBrokenError,
    GroupClosedError,
    WorkerDiedError,
    WorkerError,
    hosts_text,
    ranks_text,
)
from single_controller.call.joining import CallResults, InlineResults, join_results
from single_controller.call.result import Failure, RankResult, first_cause
from single_controller.call.stacks import show_stacks
from single_controller.call.stats import CallRecord, CallStats
from single_controller.call.transport import MAX_STACK_SECONDS, Death, Sent, Token, Transport

logger = logging.getLogger(__name__)

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
        recovers: whether a call first has ranks replaced that have died before, or goes on without them.
        sent: number of calls that were sent.
        layout_versions: role -> rank -> version of the last `LayoutReport` that the rank has made.
        deaths: deaths that calls found: number of restarts before, and the error.
        last_deaths: rank -> the last death of a process of this rank, for `GroupStatus`.
        on_change: called when the group breaks, or was restarted or replaced. It runs while locks are held, so it must
            return at once.
        advice: what the error of a broken group recommends.
        calls: the calls that were sent and may not have ended.
        next_late_log: when the group may log again which ranks are late, by the monotonic clock.
        timing_out: whether a thread is about to end a call that has exceeded its timeout.
        referred: running calls whose references were handed out. The holder of a reference may learn of the call's end
            before the group does.
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
        self.recovers = False
        self.sent = 0
        self.next_late_log = 0.0
        self.timing_out = False
        self.deaths: list[tuple[int, WorkerDiedError]] = []
        self.last_deaths: dict[int, Death] = {}
        self.on_change: Callable[[], None] = _nothing
        self.layout_versions: dict[str | None, dict[int, int]] = {}
        self.referred: weakref.WeakSet[Call] = weakref.WeakSet()
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raise in a fork of the process that made the group, before any lock is taken: a thread of that process may
        have held it, and does not exist here. Without threads, a fork has a transport of its own and may use it.

        Raises:
            ForkedProcessError: this is a fork.
        """
        if os.getpid() != self._pid and not (self.transport is not None and self.transport.synchronous):
            raise ForkedProcessError.of(self.name)

    def check(self) -> None:
        """Raise unless the group takes calls.

        Raises:
            GroupClosedError: it was closed.
            GroupBrokenError: it is broken; the message says why.
        """
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

    def break_again(self, reason: str) -> None:
        """Replace the reason: what was to repair the group has failed."""
        with self.lock:
            self.broken = None
            self.break_(reason, self.dead)

    def close(self) -> list[Call]:
        """Take no more calls, and end those that are running; returns them."""
        with self.lock:
            self.closed = True
            return self._end_calls()

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
        """The calls that have not ended, the oldest first. The caller holds ``lock``."""
        return sorted((call for call in self.calls if not call.ended), key=lambda call: call.started)

    def _end_calls(self) -> list[Call]:
        calls, self.calls = list(self.calls), weakref.WeakSet()
        for call in calls:
            call.abandon()
        return calls


def _nothing() -> None:
    pass


class Call:
    """One call that was sent.

    Lock: the state's ``lock`` protects all fields.

    Args:
        state: the state of the group.
        spec: the method.
        plan: which rank got what.
        sent: what the transport returned for it.
        transport: the transport that carries the call; by default the group's.
        timeout: seconds from now until the call is late, or None.
        starting: whether this is the call of the constructors.
        stats: where the group records its calls.
        begun: when the call began, in seconds since the epoch; now by default.
        device: where the tensors of the value are wanted; None leaves them where they are.

    Attributes:
        number: position among the calls that the group sent.
        started: when it was sent, by the monotonic clock.
        check_process: `GroupState.check_process` of the group.
        settled: whether the call has an outcome.
        reported: whether somebody was told of its error.
        error: the error, once settled; None if the call succeeded.
    """

    def __init__(
        self,
        state: GroupState,
        spec: MethodSpec,
        plan: CallPlan,
        sent: Sent,
        *,
        transport: Transport | None = None,
        timeout: float | None = None,
        starting: bool = False,
        stats: CallStats | None = None,
        begun: float | None = None,
        device: str | None = None,
    ) -> None:
        used = transport or state.transport
        if used is None:
            raise RuntimeError(f"{state.name} has no workers yet")
        self.transport: Transport = used
        self.method = spec.name
        self.role = spec.role
        self.label = spec.label
        # Keep only these of the plan: a reference to its arguments would keep the caller's batch alive.
        self.join, self.collect = plan.join, plan.collect
        self._collecting = plan.collecting
        self._deferred = plan.deferred
        self._waiting = sent.waiting
        self._withdrawn = False
        self._device = device
        self._make_source = sent.results
        self._source: CallResults | None = None
        self.reported = False
        self.dropped = False
        self.number = 0
        self.error: Exception | None = None
        self.settled = False
        self.starting = starting
        self._state = state
        self._lock = state.lock
        self.check_process = state.check_process
        self._pending: dict[Token, int] = dict(sent.tokens)
        self._results: dict[int, RankResult] = {}
        self._timeout = timeout
        self.started = time.monotonic()
        self._failed_at: float | None = None
        self._echo = False  # an error waits, because it may be the echo of a death
        self._alive: set[int] = set()  # ranks that were found alive since
        self._callbacks: list[Callable[[], None]] = []  # for when the call has an outcome
        self._on_arrival: list[Callable[[], None]] | None = None  # for when all results are here, once that is asked
        self._arrived = False
        now = time.time()
        self._record = CallRecord(spec.name, now if begun is None else begun, now)
        self._stats = stats
        if stats is not None:
            stats.open(self._record, sent.nbytes)
        with state.lock:
            state.calls.add(self)
            # Another thread may have closed or broken the group after this call's last check.
            if state.closed or (state.broken is not None and not starting):
                self.abandon()

    # --- for the threads that wait --------------------------------------------------------------------------------

    @property
    def late(self) -> list[int]:
        """The ranks whose results have not arrived."""
        with self._lock:
            return sorted(self._pending.values())

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come: no rank is running, or the group has abandoned the call."""
        return self.settled and not self._pending

    @property
    def is_plain(self) -> bool:
        """Whether the value is here, and made of plain data: reading it runs nobody's code."""
        simple = self.error is None and self.collect is None and self._device is None
        return simple and all(map(_is_plain, self._results.values()))

    @property
    def results(self) -> CallResults:
        """Where any process can fetch the results."""
        with self._lock:
            if self._source is None:
                if self._make_source is None:
                    raise RuntimeError(f"{self.label}() was sent without keeping its results")
                self._source = self._make_source()
                if self.error is not None:
                    self._source.fail(self.error)
            return self._source

    def refs(self) -> list[Any]:
        """The transport's references to the results, to be handed out."""
        self.reported = True  # Ray tells whoever has them
        with self._lock:
            if not self.settled:
                self._state.referred.add(self)
        return self.results.refs()

    def drive(self, timeout: float, *, first: bool = False) -> None:
        """Wait up to ``timeout`` seconds for results, absorb those that have arrived, and check deadlines.

        Args:
            timeout: seconds.
            first: whether the call was just sent, so that the transport was connected a moment ago.
        """
        if not (first or self.transport.connected):
            self.transport_lost()
            return
        with self._lock:
            pending = dict(self._pending)
        # Outside the lock: this waits, and the transport may have to fetch a large result from another node.
        arrived = self.transport.collect(pending, timeout)
        if self._echo:
            left = {rank: token for token, rank in pending.items() if token not in arrived and rank not in self._alive}
            for rank, death in self.transport.probe(list(left)[:MAX_PROBED]).items():
                if death is None:
                    self._alive.add(rank)
                else:
                    arrived[left[rank]] = RankResult(rank, died=death)
        with self._lock:
            self._absorb(arrived)
            told, waiting = self._withdrawn, self._waiting
            self._decide(time.monotonic())
            in_vain: list[Token] = []
            if self._withdrawn and not told:
                in_vain = [waiting] if waiting is not None else list(self._pending)
        if in_vain:  # outside the lock: this asks the transport
            self.transport.withdraw(in_vain)

    def _absorb(self, arrived: Mapping[Token, RankResult]) -> None:
        now = time.time()
        for token, result in arrived.items():
            if self._pending.pop(token, None) is None:
                continue  # another thread was faster, or the call was abandoned
            self._results[result.rank] = result
            if (
                result.failure is not None and not result.failure.method
            ):  # made by the transport, which does not know the call
                result.failure.method, result.failure.role = self.method, self.role
            if result.died is None:
                self._state.layout_versions.setdefault(self.role, {})[result.rank] = result.layout_version
            if result.clock is not None:
                self._record.add(result.rank, result.clock, result.nbytes, now)
                if self.transport.synchronous:  # the call ran while it was being sent
                    self._record.dispatched = min(self._record.dispatched, result.clock.received)

    def value(self) -> Any:
        """The call's value, as its mode promises it; only for a settled call.

        Raises:
            SingleControllerError: the call's error.
        """
        if self.error is not None:
            self.reported = True
            # A copy: an exception keeps its traceback, which refers to every caller that has waited, and their batches.
            error = copy.copy(self.error)
            if isinstance(error, WorkerError):
                error.results = self._returned()
            raise error from self.error.__cause__
        begun = time.perf_counter()
        results = [self._results[rank] for rank in self._collecting]
        kept = any(result.kept for result in results)
        source: CallResults | InlineResults = self.results if kept else InlineResults(self.label, results)
        # Small results are here, but whether they came in time must not depend on a race with the shutdown.
        if self._make_source is not None and not self.transport.connected:
            raise GroupBrokenError(f"the results of {self.label}() are lost: {TRANSPORT_GONE}")
        try:
            value = join_results(source, results, self.join)
        except ResultError as error:
            death = self._death_of(error) if kept else None
            raise death or error from error.__cause__
        if self.collect is not None:
            value = self.collect(value)
        if self._device is not None:
            value = move(value, self._device)
        if self._stats is not None:
            self._stats.add_join(self._record, time.perf_counter() - begun)
        return value

    def _death_of(self, error: ResultError) -> WorkerDiedError | None:
        """The death with which a result was lost that was still on its rank; None if the rank lives, or its death was
        known before, or it was replaced."""
        state, rank, end = self._state, error.rank, time.monotonic() + LOST_SECONDS
        while (
            rank is not None and state.broken is None and self.transport is state.transport and not self.transport.ended
        ):
            reason = self.transport.deaths().get(rank)
            if reason is not None and rank not in self.transport.restarted:
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
        with self._lock:
            arrived = {k: self._results[rank] for k, rank in enumerate(self._collecting) if rank in self._results}
        values = {}
        for k, result in arrived.items():
            if result.failure is None and result.died is None and not result.empty:
                with contextlib.suppress(ResultError):  # the error of the call matters more
                    one = self.results.only([k]) if result.kept else InlineResults(self.label, [result])
                    values[result.rank] = one.values([0], private=True)[0]
        return values

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call a short function once the call has an outcome, in any thread, possibly under the state's lock. `discard`
        takes it back."""
        with self._lock:
            if not self.settled:
                self._callbacks.append(callback)
                return
        callback()

    def when_results_arrive(self, callback: Callable[[], None]) -> None:
        """Call a short function, in any thread, once all results have arrived. A thread that then waits for the call
        settles it at once, without the monitor's next look. `discard` takes the function back."""
        if not self.transport.connected:
            self.transport_lost()
            return
        with self._lock:
            arrived, first = self._arrived, self._on_arrival is None
            if not arrived:
                self._on_arrival = [*(self._on_arrival or ()), callback]
            pending = list(self._pending)
        if arrived:
            callback()
        elif first:  # the transport is asked once, however many wait
            weak = weakref.ref(self)  # a rank that never ends must not keep a call that nobody has

            def results_arrived() -> None:
                call = weak()
                if call is not None:
                    call._call_back_on_arrival()

            self.transport.when_arrived(pending, results_arrived)

    def _call_back_on_arrival(self) -> None:
        with self._lock:
            self._arrived = True
            callbacks, self._on_arrival = self._on_arrival or [], []
        for callback in callbacks:
            callback()

    def discard(self, callback: Callable[[], None]) -> None:
        """Forget a callback: nobody waits for it any longer."""
        with self._lock:
            for callbacks in (self._callbacks, self._on_arrival or []):
                if callback in callbacks:
                    callbacks.remove(callback)

    def abandon(self) -> None:
        """The group is broken or closed: end the call, unless it has an outcome."""
        with self._lock:
            dead = [rank for rank in self._pending.values() if rank in self._state.dead]
            if dead and not self._state.closed:
                self._settle(self._death(dead, self._state.broken or ""))
            refusal = self._state.refusal()
            if refusal is not None:
                self._settle(refusal)
            self._pending.clear()

    def transport_lost(self) -> None:
        """The transport is gone, and with it the workers: break the group, which ends this call."""
        self._state.break_(TRANSPORT_GONE)
        self.abandon()

    # --- the outcome ----------------------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        """Settle the call if its outcome is known by now. A death wins over errors, which may be its echoes."""
        failures = [result.failure for result in self._results.values() if result.failure is not None]
        dead = sorted(rank for rank, result in self._results.items() if result.died is not None)
        lost_input = next((future.failed for future in self._deferred if future.failed is not None), None)
        if (failures or lost_input) and self._failed_at is None:
            self._failed_at = now
        if lost_input:
            self._withdrawn = True  # `drive` tells the ranks
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
            self._settle(self._input_error(lost_input))
        elif not self._pending:
            late = self._ranks_over_time() if self.transport.synchronous else []
            if late and not self.settled:
                self._time_out(late)
            else:
                self._settle(None)
        if self._pending:
            self._check_deadlines(now, failures)

    def _input_error(self, error: Exception) -> Exception:
        """The error of this call, whose deferred argument has failed."""
        return error.of_consumer(self.label) if isinstance(error, SingleControllerError) else error

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
            else waited <= self.transport.death_seconds and not self._alive.issuperset(self._pending.values())
        )
        if not self._echo and (first.may_be_echo or not self._pending or waited > OTHERS_FAIL_SECONDS):
            self._settle(first.error(starting=self.starting, failures=failures))

    def _ranks_over_time(self) -> list[int]:
        """A synchronous transport cannot interrupt a call: the ranks that took longer than its timeout."""
        clocks = {rank: result.clock for rank, result in self._results.items()}
        limit = self._timeout
        return sorted(
            rank
            for rank, clock in clocks.items()
            if limit is not None and clock and clock.encoded - clock.received > limit
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
        late = self.late
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

    def _settle(self, error: Exception | None) -> None:
        if self.settled:
            return
        self.error = error
        self.settled = True
        self._state.referred.discard(self)
        if error is not None and self._source is not None:
            self._source.fail(error)
        if self._stats is not None:
            self._record.settled = time.time()
            self._record.failed = None if error is None else type(error).__name__
            self._stats.close(self._record)
        self._deferred, self._waiting = (), None  # a chain of futures would otherwise keep all earlier ones alive
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
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
