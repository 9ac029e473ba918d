"""Call: one call that was sent, until no rank is running it any more.

The transport tells a call the ranks' results as they arrive, in any thread, and the call decides when it has an
outcome: the first error, a death, a timeout, or all results. What no result tells, a death or a timeout, the thread of
`Monitor` looks for. Whoever wants the value waits for the outcome and does nothing else.

Threads that meet here: the one that sends (`Call.sent`); the thread "wire", which reads connections (`Call.arrive`);
the monitor's (`Call.look`); a thread "late-ranks", which asks late ranks for their stacks and ends the call, or logs;
and those that wait. ``GroupState.lock`` protects all fields, except that ``dropped`` and ``reported`` are only ever set
to True, also by the garbage collector, and that nothing changes ``rank_results`` once a call has succeeded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dispatch.batch import UNEVEN, Uneven
from dispatch.checks import check_seconds
from dispatch.errors import ResultError, SingleControllerError
from dispatch.move import check_device, move
from dispatch.plan import CallPlan, join_values
from dispatch.register import MethodSpec, label
from single_controller.call.codec import decode_result
from single_controller.call.errors import (
    CallTimeoutError,
    Failure,
    GroupBrokenError,
    StartError,
    WorkerDiedError,
    WorkerError,
    first_cause,
    hosts_text,
    ranks_text,
    show_stacks,
)
from single_controller.call.joining import CallResults, Inputs, RankResult, join_results
from single_controller.call.state import TRANSPORT_GONE, GroupState, monitor
from single_controller.call.stats import KEPT_CALLS, CallRecord, CallStats, Clock, RankRecord
from single_controller.call.transport import MAX_STACK_SECONDS, Outcome, Sent, Transport

logger = logging.getLogger(__name__)

LATE_LOG_SECONDS = 30.0
LOST_SECONDS = 0.5
"""How long the error of a lost result waits for news of its rank's death."""

DEATH_SHOWS_SECONDS = 2.0
"""How long an error that may be an echo of a death waits for that death to be reported, at least. While ranks that have
not ended cannot be reached, it waits for `Transport.death_seconds`."""

MAX_PROBED = 64
"""Ranks that one look probes at once."""

ASK_AFTER_SECONDS = 1.0
"""A wait with at least this limit asks the late ranks where they are before it raises."""

OTHERS_FAIL_SECONDS = 0.1
"""How long an error waits for those of other ranks, so that one error can name all of them."""


@dataclass(frozen=True)
class CallOptions:
    """Options of one call. None leaves what the method declared."""

    timeout: float | None = None  # seconds until the call is late and the group broken
    blocking: bool | None = None  # whether the call waits for its result
    uneven: Uneven | None = None  # what to do with rows that do not divide
    device: str | None = None  # where the tensors of the result are wanted

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_seconds("timeout", self.timeout)
        if self.blocking is not None and not isinstance(self.blocking, bool):
            raise ValueError(f"blocking is True or False, got {self.blocking!r}")
        if self.uneven is not None and self.uneven not in UNEVEN:
            raise ValueError(f"uneven={self.uneven!r}: known are {', '.join(map(repr, UNEVEN))}")
        check_device("device", self.device)


DECLARED = CallOptions()
"""What the method declared."""


class Call:
    """One call, from when it is sent until no rank is running it any more. For its lock, see the top of this file.

    Args:
        state: the state of the group.
        spec: the method.
        plan: which rank got what.
        transport: what carries the call.
        options: its timeout, from now on, and the device of its value.
        starting: whether this is the call of the constructors.
        stats: where the group records its calls.
        begun: when the call began, in seconds since the epoch; now by default.
    """

    def __init__(
        self,
        state: GroupState,
        spec: MethodSpec,
        plan: CallPlan,
        transport: Transport,
        options: CallOptions = DECLARED,
        *,
        starting: bool = False,
        stats: CallStats | None = None,
        begun: float | None = None,
    ) -> None:
        self.transport = transport
        self.method, self.role, self.label = spec.name, spec.role, spec.label
        # Keep only these of the plan: a reference to its arguments would keep the caller's batch alive.
        self.join, self.collect = plan.join, plan.collect
        self._collecting, self._deferred = plan.collecting, plan.deferred
        self._materialize = spec.registration.materialize_futures
        self._pending = {rank for rank, number in enumerate(plan.shard_of) if number is not None}
        self.rank_results: dict[int, RankResult] = {}  # what has arrived
        self._source: CallResults | None = None
        self._sent: Sent  # set by `sent`, before anybody has the call
        self._state = state
        self._lock = state.lock
        self.check_process = state.check_process
        self._stats = stats
        self._timeout, self._device = options.timeout, options.device
        self.starting = starting
        self.number = 0  # position among the calls that the group sent
        self.inputs: Inputs | None = None  # what tells the ranks its deferred arguments, if it has any
        self.outcome: Outcome = Future()  # done once the call has an outcome: None, or what returns its error
        self.outcome.set_running_or_notify_cancel()  # nobody who waits for it, such as a task of asyncio, can cancel it
        self.reported = False  # whether somebody was told of its error
        self.dropped = False  # whether nobody has its future any longer
        self._raised: Callable[[], str] | None = None  # what a method raised, as text
        self._failed_at: float | None = None  # when the first error arrived, by the monotonic clock
        self._echo = False  # an error waits, because it may be the echo of a death
        self._alive: set[int] = set()  # ranks that were found alive since
        self.started = time.monotonic()  # when it was sent, by the monotonic clock
        self._record = CallRecord(spec.name, time.time() if begun is None else begun)
        if stats is not None and stats.recorded:
            self._record.ranks = {rank: RankRecord() for rank in self._pending}

    def sent(self, sent: Sent) -> None:
        """The transport has sent it. The sender's thread, which holds ``sending``. Results may have arrived already."""
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
            if self._pending or not self.outcome.done():  # all ranks may have failed: the monitor decides
                state.calls.add(self)
                # Another thread may have closed or broken the group after this call's last check.
                if (state.closed or (state.broken is not None and not self.starting)) and state.ends(self):
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
        self.check_process()
        with self._lock:
            if self._source is None:
                self._source = self._sent.results()
            return self._source

    def refs(self) -> list[Any]:
        """The transport's references to the results, to be handed out."""
        results = self.results  # before the lock, which may be held for ever in a fork
        self.reported = True  # Ray tells whoever has them
        with self._lock:
            if not self.settled:  # `WorkerGroup._check` then looks for deaths before each call
                self._state.referred.add(self)
        return results.refs()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has an outcome. Arguments and errors as of `value`, without the call's own error."""
        self.check_process()
        try:
            self.outcome.result(timeout)
        except TimeoutError:
            self._late_outcome(timeout or 0.0)

    def check(self) -> None:
        """Wait for the call, and raise its error."""
        self.wait()
        if (error := self.error) is not None:
            raise copy.copy(error) from error.__cause__  # a copy, as in `value`

    def value(self, timeout: float | None = None, *, shared: bool = False) -> Any:
        """Wait until the call has an outcome, and return its value as its mode promises it. ``shared``: whether its
        future may be an argument of other calls, which must not see what the caller writes into the value.

        Raises:
            CallTimeoutError: the call had none after ``timeout`` seconds. It continues.
            ForkedProcessError: another process sent the call.
            SingleControllerError: the call's error.
        """
        try:
            failed = self.outcome.result(timeout)
        except TimeoutError:
            failed = self._late_outcome(timeout or 0.0)
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
        # Without the lock: no rank is pending any more
        results = [self.rank_results[rank] for rank in self._collecting]
        if any(result.kept for result in results):
            self.results.shared = shared
            try:
                value = join_results(self.results, results, self.join)
            except ResultError as lost:
                raise self._death_of(lost) or lost from lost.__cause__
        else:  # the fast path: all values came with their replies
            values = [
                decode_result(self.label, result.rank, result.value, private=True, shared=False)
                for result in results
                if not result.empty
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
        return simple and all(map(_is_plain, self.rank_results.values()))

    def _death_of(self, error: ResultError) -> WorkerDiedError | None:
        """The death with which a result was lost that was still on its rank; None if the rank lives, or its death was
        known before, or it was replaced."""
        state, transport, rank, end = self._state, self.transport, error.rank, time.monotonic() + LOST_SECONDS
        known = None if rank is None else state.last_deaths.get(rank)
        if known is not None and known.generation == state.restarts:
            return None
        while rank is not None and state.broken is None and state.runs(transport):
            reason = transport.deaths().get(rank)
            if reason is not None and rank not in transport.restarted:
                with self._lock:
                    if state.runs(transport):  # still: asking may take long
                        death = self._death([rank], reason)
                        state.deaths.append((state.restarts, death))
                        state.break_(str(death), [rank], reason)
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
            arrived = {
                k: self.rank_results[rank] for k, rank in enumerate(self._collecting) if rank in self.rank_results
            }
        values = {}
        for k, result in arrived.items():
            if result.failure is None and result.died is None and not result.empty:
                with contextlib.suppress(ResultError):  # the error of the call matters more
                    values[result.rank] = (
                        self.results.values([k], private=True)[0]
                        if result.kept
                        else decode_result(self.label, result.rank, result.value, private=True)
                    )
        return values

    # --- what the transport and the monitor tell ------------------------------------------------------------------

    def arrive(self, result: RankResult) -> None:
        # In the thread "wire", which must not wait: no code of users runs here, and the transport is asked nothing.
        now = time.time()
        with self._lock:
            rank, failure, clock, record = result.rank, result.failure, result.clock, self._record
            if rank not in self._pending:
                return  # it was told dead before, or the call was abandoned
            self._pending.discard(rank)
            self.rank_results[rank] = result
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
            # Not for each further error: finding the first cause looks at all of them, and the monitor does so soon.
            first = failure is not None and self._failed_at is None
            if first or result.died is not None or not self._pending:
                # Whether an argument's call has failed, and the log of an error that nobody reads, are for the monitor:
                # the first may make an error of a user's class, the second calls handlers of `logging`. No user's code
                # may run in the thread that reads connections.
                ask = self.transport.synchronous
                careful = self.dropped or self._deferred
                if ask or not (careful and any(one.failure is not None for one in self.rank_results.values())):
                    self._decide(time.monotonic(), ask=ask)

    def look(self, now: float, deaths: Mapping[int, str]) -> None:
        with self._lock:
            suspects = [rank for rank in self._pending if rank not in self._alive] if self._echo else []
        # Outside the lock: this asks the transport.
        known = self.transport.probe(suspects[:MAX_PROBED]) if suspects else {}
        self._alive.update(rank for rank, death in known.items() if death is None)
        for rank, reason in {**deaths, **known}.items():
            if reason is not None:
                self.arrive(RankResult(rank, died=reason))
        with self._lock:
            self._decide(now)

    def abandon(self) -> None:
        with self._lock:
            dead = [rank for rank in self._pending if rank in self._state.dead]
            if dead and not self._state.closed:
                self._settle(self._death(dead, self._state.why))
            refusal = self._state.refusal()
            if refusal is not None:
                self._settle(refusal)
            self._pending.clear()
            self._state.calls.discard(self)
            if self.inputs is not None:  # a rank that waits for them can do nothing else, not even leave a collective
                self.inputs.withdraw()

    # --- the outcome ----------------------------------------------------------------------------------------------

    def _decide(self, now: float, *, ask: bool = True) -> None:
        """Settle the call if its outcome is known by ``now``. A death wins over errors, which may be its echoes.
        ``ask``: whether to look at the calls whose futures are arguments; one of them may have failed.

        The caller holds the lock. It is the thread that tells a result, or the monitor.
        """
        if self._state.closed:  # its ranks were ended, which is no death
            self.abandon()
            return
        failures = [result.failure for result in self.rank_results.values() if result.failure is not None]
        dead = sorted(rank for rank, result in self.rank_results.items() if result.died is not None)
        failed = next((one for one in self._deferred if one.failed is not None), None) if ask else None
        lost_input = None if failed is None else failed.failed
        if (failures or lost_input) and self._failed_at is None:
            self._failed_at = now
        if dead:
            why = self.rank_results[dead[0]].died or ""
            error = self._death(dead, why)
            for rank in dead:  # a later look must not report them again
                del self.rank_results[rank]
            self._state.deaths.append((self._state.restarts, error))
            self._settle(error)
            self._state.break_(str(error), dead, why)
        elif failures and (lost_input is None or not all(failure.alike for failure in failures)):
            self._settle_failure(failures, now)
        elif lost_input and (
            failures or (self._materialize and self._pending and now - (self._failed_at or now) > DEATH_SHOWS_SECONDS)
        ):
            # Without a failure, wait: the input may have come just before its call exceeded its timeout. Ranks that are
            # busy with an earlier call tell later.
            if isinstance(lost_input, SingleControllerError):
                lost_input = lost_input.of_consumer(self.label)
            if failed is not None and isinstance(lost_input, WorkerError) and not self.settled:
                # Otherwise the log would have the error of a future that was dropped, although the caller gets it.
                self._raised = functools.partial(str, lost_input)
                failed.hand_on()
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
            if first.of_method:
                self._raised = functools.partial(first.text, starting=starting, failures=failures)
            self._settle(functools.cache(lambda: first.error(starting=starting, failures=failures)), name)

    def _ranks_over_time(self) -> list[int]:
        """A synchronous transport cannot interrupt a call: the ranks that took longer than its timeout."""
        clocks = {rank: result.clock for rank, result in self.rank_results.items()}
        limit = self._timeout
        return sorted(
            rank for rank, clock in clocks.items() if limit is not None and clock and clock[-1] - clock[0] > limit
        )

    def _time_out(self, late: list[int], stacks: Mapping[int, str] = MappingProxyType({})) -> None:
        """End the call, and break the group: the late ranks are still in the method. The caller holds the lock."""
        message = (
            f"{self.label}() exceeded its timeout of {self._timeout:g} s; "
            f"{ranks_text(late)} had not finished ({self._hosts(late)})"
        )
        where = f"\n\n{show_stacks(stacks)}" if stacks else ""
        self._settle(CallTimeoutError(message + where, method=self.method, ranks=late, stacks=dict(stacks)))
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

    def log_late(self, others: int) -> None:
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

    def _late_outcome(self, seconds: float) -> Callable[[], Exception] | None:
        """Raise the error of a wait that ended before the call did, or return the outcome if there is one by now. A
        short wait does not ask the ranks where they are, which might take longer than the wait."""
        stacks = self.late_stacks(min(0.1 * seconds, MAX_STACK_SECONDS)) if seconds >= ASK_AFTER_SECONDS else {}
        late = self.late
        if self.settled:  # while the ranks were asked
            return self.outcome.result()
        where = f"\n\n{show_stacks(stacks)}" if stacks else ""
        raise CallTimeoutError(
            f"{self.label}() has not finished after a wait of {seconds:g} s; still running: {ranks_text(late)}. "
            f"The call continues. Wait again, or set a timeout for the call with .options(timeout=...){where}",
            method=self.method,
            ranks=late,
            call_goes_on=True,
            stacks=stacks,
        ) from None

    def _check_deadlines(self, now: float, failures: list[Failure]) -> None:
        running = now - self.started
        if not self.settled and self._timeout is not None and running >= self._timeout:
            # One thread per group: the first call that times out breaks it, and ends the others.
            if not self._state.timing_out:
                self._state.timing_out = True
                if not _start_thread(self._time_out_late):
                    self._time_out_late(ask=False)
        elif (
            self.settled
            and self._failed_at is not None
            and (
                now - self._failed_at > self._state.error_grace
                if not self._state.independent
                else self._timeout is not None and running >= self._timeout
            )
            and not all(failure.alike for failure in failures)
        ):
            # The others probably wait for the failed rank in a collective, if they use any. Only new workers can end
            # that. Ranks whose input failed wait for nobody: those that have not ended are busy with an earlier call.
            raised = sorted(failure.rank for failure in failures if not failure.alike)
            self._state.break_(
                f"{ranks_text(self.late)} had not finished {self.label}() {now - self._failed_at:.3g} s after an error "
                f"on {ranks_text(raised)}"
            )
        elif running >= LATE_LOG_SECONDS and now >= self._state.next_late_log:
            # One log per group: most calls wait for the same ranks, behind the oldest call.
            self._state.next_late_log = now + LATE_LOG_SECONDS
            oldest, *others = self._state.running() or [self]
            _start_thread(oldest.log_late, len(others))

    def _death(self, dead: Sequence[int], reason: str) -> WorkerDiedError:
        where = "__init__" if self.starting else self.method
        during = label(self.role, where)
        message = f"{ranks_text(dead)} died during {during}() ({self._hosts(dead)}): {reason}"
        host = self.transport.host(dead[0])
        return WorkerDiedError(message, rank=dead[0], host=host, method=where, ranks=tuple(dead), role=self.role)

    def _settle(self, error: Exception | Callable[[], Exception] | None, name: str | None = None) -> None:
        """Give the call its outcome, unless it has one: an error, what makes one of the class ``name``, or None if the
        call has succeeded. The caller holds the lock, under which callbacks run too."""
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
        """Nobody has the call's future any longer. An error of a method that nobody was told of is logged, as text: the
        garbage collector may run this in any thread, where no error of a user's class may be made."""
        self.dropped = True
        if self._raised is not None and self.settled and not self.reported:
            self.reported = True
            logger.error("Unhandled error of %s(), whose future was dropped: %s", self.label, self._raised())

    def _hosts(self, ranks: Sequence[int]) -> str:
        return hosts_text([self.transport.host(rank) for rank in ranks])


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
