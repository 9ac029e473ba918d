"""Call: one call under way, and the state of the group it belongs to.

`GroupState` is open, broken or closed. A `Call` takes in receipts as they come and decides when it has an
outcome: the first error, a death, a timeout, or all answers. Nothing here waits; `monitor` does.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dispatch.move import move
from dispatch.plan import CallPlan
from dispatch.register import label
from single_controller.base.engine import Engine, RankLost, Sent, Token
from single_controller.base.errors import (
    CallTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    WorkerDiedError,
)
from single_controller.base.later import Answers, ReadAnswers, join_answers
from single_controller.base.receipt import Failure, Receipt
from single_controller.base.stats import Accounts, CallRecord, RankRecord

if TYPE_CHECKING:
    from single_controller.base.restart import Replay

logger = logging.getLogger(__name__)

LATE_LOG_SECONDS = 30.0
DEATH_SHOWS_SECONDS = 2.0
"""How long an error that looks like the echo of a death waits for that death to be seen."""


ENGINE_GONE = "the engine that ran its workers was shut down"


class GroupState:
    """Whether a group takes calls, and why not. Shared by the group, its calls and the monitor.

    Args:
        name: the group's name, for messages.
        error_grace: seconds that the other ranks have to end after an error on one, before the group is broken.

    Attributes:
        broken: why the group is broken, or None.
        closed: whether it was closed.
        dead: the ranks whose death broke it.
        restarting: whether its workers are being ended and made anew.
        restarts: how often that went well.
        sent: number of calls that were sent.
        standings: role -> rank -> version of what the worker last said of its coordinates; the role of a group of one
            class is None.
        deaths: what calls found out: how many restarts there had been, and the error.
        replays: (role, method) -> the latest successful call of a ``replay=True`` method.
        way_on: what an error of the broken group advises.
        referred: calls under way whose answers' references were handed out: whoever has these may know of the call's
            end before the group does.
    """

    def __init__(self, name: str, error_grace: float) -> None:
        self.name = name
        self.error_grace = error_grace
        self.lock = threading.RLock()
        self.broken: str | None = None
        self.closed = False
        self.way_on = "restart() begins anew, close() ends it"
        self.dead: tuple[int, ...] = ()
        self.restarting = False
        self.restarts = 0
        self.sent = 0
        self.deaths: list[tuple[int, WorkerDiedError]] = []
        self.standings: dict[str | None, dict[int, int]] = {}
        self.replays: dict[tuple[str | None, str], Replay] = {}
        self.referred: weakref.WeakSet[Call] = weakref.WeakSet()
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()

    def check(self) -> None:
        """Raise unless the group takes calls.

        Raises:
            GroupClosedError: it was closed.
            GroupBrokenError: it is broken; the message says why.
        """
        error = self.refusal()
        if error is not None:
            raise error

    def refusal(self) -> GroupClosedError | GroupBrokenError | None:
        """The error that a call raises now, or None."""
        if self.closed:
            return GroupClosedError(f"{self.name} is closed; make a new group")
        if self.broken is not None:
            return GroupBrokenError(f"{self.name} is broken: {self.broken}. {self.way_on}")
        return None

    def add(self, call: Call) -> None:
        """Remember a call that is under way."""
        with self.lock:
            self._calls.add(call)
            if self.closed or (self.broken is not None and not call.starting):
                call.abandon()

    def break_(self, reason: str, dead: Sequence[int] = ()) -> None:
        """Take no more calls, and end those under way."""
        with self.lock:
            if self.broken is None and not self.closed:
                self.broken, self.dead = reason, tuple(dead)
                level = logging.INFO if self.restarting else logging.ERROR  # a restart that was asked for is no error
                logger.log(level, "%s is broken: %s", self.name, reason)
            self._end_calls()

    def close(self) -> list[Call]:
        """Take no more calls, and end those under way; they are returned."""
        with self.lock:
            self.closed = True
            self.replays.clear()  # with the arguments that they hold
            return self._end_calls()

    def break_again(self, reason: str) -> None:
        """Broken for another reason than before: what was to mend it went wrong."""
        with self.lock:
            self.broken = None
            self.break_(reason, self.dead)

    def remember(self, call: Call, replay: Replay) -> None:
        """A call of a ``replay=True`` method has an outcome. Which call is the later one, its number says: outcomes are
        noticed in any order."""
        with self.lock:
            kept = self.replays.get(replay.key)
            if call.error is None and not self.closed and (kept is None or kept.number < replay.number):
                self.replays[replay.key] = replay

    def reopen(self) -> None:
        """Take calls again, after a restart."""
        with self.lock:
            self.broken = self.broken or "it was restarted"
            self._end_calls()
            self.broken, self.dead, self.standings = None, (), {}

    def _end_calls(self) -> list[Call]:
        calls, self._calls = list(self._calls), weakref.WeakSet()
        for call in calls:
            call.abandon()
        return calls


class Call:
    """One call on its way.

    Args:
        state: of the group.
        engine: that carries the call.
        method: name of the method.
        plan: who gets what.
        sent: what the engine gave for it.
        timeout: seconds from now until the call is late, or None.
        starting: this is the call of the constructors.
        accounts: where the group keeps what its calls cost.
        begun: when the call began, in seconds since the epoch; now by default.
        device: where the tensors of the result are wanted; None where they are.
        role: the worker that is called, where several are in a process.

    Attributes:
        number: of the call, among those that its group sent.
    """

    def __init__(
        self,
        state: GroupState,
        engine: Engine,
        method: str,
        plan: CallPlan,
        sent: Sent,
        timeout: float | None = None,
        *,
        starting: bool = False,
        accounts: Accounts | None = None,
        begun: float | None = None,
        device: str | None = None,
        role: str | None = None,
    ) -> None:
        self.engine = engine
        self.number = 0
        self.method = method
        self.role = role
        self.label = label(role, method)
        # Of the plan only this is kept: the arguments are on their way, and nobody here shall hold them longer.
        self.join, self.collect = plan.join, plan.collect
        self._order = plan.answers
        self._later = plan.later
        self._device = device
        self._answers = sent.answers
        self._told = False
        self.error: Exception | None = None
        self.settled = False
        self._state = state
        self._pending: dict[Token, int] = dict(sent.receipts)
        self._receipts: dict[int, Receipt] = {}
        self._lost: dict[int, str] = {}
        self._lock = state.lock
        self._timeout = timeout
        self.starting = starting
        self._started = time.monotonic()
        self._next_log = self._started + LATE_LOG_SECONDS
        self._failed_at: float | None = None
        self._callbacks: list[Callable[[], None]] = []
        sent_at = time.time()
        ranks = {rank: RankRecord(sent.nbytes.get(rank, 0)) for rank in sent.receipts.values()}
        self._record = CallRecord(method, sent_at if begun is None else begun, sent_at, ranks=ranks)
        self._accounts = accounts
        if accounts is not None:
            accounts.open(self._record)
        state.add(self)

    # --- for whoever waits -----------------------------------------------------------------------------

    @property
    def pending(self) -> list[Token]:
        """Receipts that have not come."""
        with self._lock:
            return list(self._pending)

    @property
    def late(self) -> list[int]:
        """Ranks that have not ended."""
        with self._lock:
            return sorted(self._pending.values())

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come: no rank is under way, or nobody may ask for it any more."""
        return self.settled and not self._pending

    @property
    def answers(self) -> Answers:
        """Where anybody can ask for the answers; for a call that keeps them."""
        if self._answers is None:
            raise RuntimeError(f"{self.label}() was sent without keeping its answers")
        return self._answers

    def refs(self) -> list[Any]:
        """The engine's references to the answers, to be handed out."""
        with self._lock:
            if not self.settled:
                self._state.referred.add(self)
        return self.answers.refs()

    def absorb_soon(self, seconds: float) -> None:
        """Take in all receipts, if they come within so many seconds."""
        tokens = self.pending
        outcomes = self.engine.read_soon(tokens, seconds)
        if outcomes is not None:
            self.absorb(tokens, outcomes)

    def absorb(self, tokens: Sequence[Token], outcomes: Sequence[Receipt | RankLost] | None = None) -> None:
        """Take in receipts that have come, then look at the clock."""
        if tokens:
            outcomes = self.engine.read(tokens) if outcomes is None else outcomes
            now = time.time()
            with self._lock:
                for token, outcome in zip(tokens, outcomes, strict=True):
                    rank = self._pending.pop(token, None)
                    if rank is None:
                        continue
                    if isinstance(outcome, RankLost) and outcome.died:
                        self._lost[rank] = outcome.reason
                    elif isinstance(outcome, RankLost):
                        host = self.engine.host(rank)
                        kind, why = outcome.kind, outcome.reason
                        failure = Failure(rank, host, self.method, kind, why, "", time.time(), role=self.role)
                        self._receipts[rank] = Receipt(rank, failure=failure)
                    else:
                        self._receipts[rank] = outcome
                        self._state.standings.setdefault(self.role, {})[rank] = outcome.standing
                        part = self._record.ranks[rank]
                        part.clock, part.returned, part.answered = outcome.clock, outcome.returned, now
                        if self.engine.in_turn and outcome.clock is not None:  # the call ran while it was being sent
                            self._record.dispatched = min(self._record.dispatched, outcome.clock.received)
            if self._told:
                self._tell(outcome for outcome in outcomes if isinstance(outcome, Receipt))
        with self._lock:
            self._decide(time.monotonic())

    def _tell(self, receipts: Iterable[Receipt]) -> None:
        """The error was raised: what its ranks say of it is not news any more."""
        if self._answers is not None and self.engine.connected:
            for receipt in list(receipts):
                if receipt.failure is not None:
                    self._answers.failed_on(receipt.rank)

    def result(self) -> Any:
        """The call's value, as its mode promises it; for a settled call.

        Raises:
            SingleControllerError: the call's error.
        """
        if self.error is not None:
            self._told = True
            self._tell(self._receipts.values())
            raise self.error
        begun = time.perf_counter()
        receipts = [self._receipts[rank] for rank in self._order]
        answers: Answers | ReadAnswers
        if self._answers is not None:
            if not self.engine.connected:
                raise GroupBrokenError(f"the answers of {self.label}() are lost: {ENGINE_GONE}")
            answers = self._answers
        else:
            answers = ReadAnswers(self.label, self._order, [receipt.value for receipt in receipts], self.engine.unpack)
        value = join_answers(answers, receipts, self.join)
        if self.collect is not None:
            value = self.collect(value)
        if self._device is not None:
            value = move(value, self._device)
        if self._accounts is not None:
            self._accounts.add_join(self._record, time.perf_counter() - begun)
        return value

    def receipts(self) -> dict[int, Receipt]:
        """Receipts by rank; for a settled call without error."""
        return self._receipts

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

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Have a short function called, in whichever thread, once the call has an outcome."""
        with self._lock:
            if not self.settled:
                self._callbacks.append(callback)
                return
        callback()

    @property
    def awaited(self) -> bool:
        """Whether somebody waits to be called."""
        return bool(self._callbacks)

    def orphan(self) -> None:
        """The engine is gone, and with it the workers: close the group, which ends this call."""
        self._state.break_(ENGINE_GONE)
        self.abandon()

    # --- the outcome -----------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        failures = [receipt.failure for receipt in self._receipts.values() if receipt.failure is not None]
        lost_input = next((later.failed for later in self._later if later.failed is not None), None)
        if (failures or lost_input) and self._failed_at is None:
            self._failed_at = now
        if self._lost:
            dead = sorted(self._lost)
            reason = self._lost[dead[0]]
            self._lost.clear()
            error = self._death(dead, reason)
            self._state.deaths.append((self._state.restarts, error))
            self._settle(error)
            self._state.break_(str(error), dead)
        elif failures:
            self._settle_failure(failures, now)
        elif not self._pending:
            self._settle_whole()
        elif lost_input and now - (self._failed_at or now) > DEATH_SHOWS_SECONDS:
            self._settle(lost_input)  # a future that never comes: the ranks that wait for it cannot know
        if self._pending:
            self._look_at_clock(now, failures)

    def _settle_failure(self, failures: list[Failure], now: float) -> None:
        """Raise the first cause: at once, unless it may be the echo of a death that has not shown yet."""
        if self.settled:
            return
        first = min(failures, key=lambda failure: (failure.may_be_echo, failure.when))
        waited = now - (self._failed_at or now)
        if not (first.may_be_echo and self._pending) or waited > DEATH_SHOWS_SECONDS:
            self._settle(first.error(self.engine.open_cause(first.cause), starting=self.starting))

    def _settle_whole(self) -> None:
        """All ranks have answered: in time, unless they ran where nobody could tell them that the time was over."""
        late: list[int] = []
        if self.engine.in_turn and self._timeout is not None:
            clocks = {rank: receipt.clock for rank, receipt in self._receipts.items()}
            late = [rank for rank, clock in clocks.items() if clock and clock.packed - clock.received > self._timeout]
        if late and not self.settled:
            self._time_out(sorted(late))
        else:
            self._settle(None)

    def _time_out(self, late: list[int]) -> None:
        message = (
            f"{self.label}() passed its timeout of {self._timeout:g} s; "
            f"{_ranks(late)} had not ended ({self._hosts(late)})"
        )
        self._settle(CallTimeoutError(message, method=self.method, ranks=late))
        self._state.break_(message)

    def _look_at_clock(self, now: float, failures: list[Failure]) -> None:
        running = now - self._started
        late = self.late
        if not self.settled and self._timeout is not None and running >= self._timeout:
            self._time_out(late)
        elif self.settled and self._failed_at is not None and now - self._failed_at > self._state.error_grace:
            self._state.break_(
                f"{_ranks(late)} had not ended {self.label}() {self._state.error_grace:g} s after an error"
                + (f" on {_ranks(sorted(failure.rank for failure in failures))}" if failures else " of its input")
            )
        elif now >= self._next_log:
            self._next_log = now + LATE_LOG_SECONDS
            logger.warning(
                "%s: %s() has run for %.0f s; waiting for %s (%s)",
                self._state.name,
                self.label,
                running,
                _ranks(late),
                self._hosts(late),
            )

    def _death(self, dead: Sequence[int], reason: str) -> WorkerDiedError:
        where = "__init__" if self.starting else self.method
        during = label(self.role, where)
        message = f"{_ranks(dead)} died during {during}() ({self._hosts(dead)}): {reason}"
        error = WorkerDiedError(message, rank=dead[0], host=self.engine.host(dead[0]), method=where, ranks=dead)
        error.role = self.role
        return error

    def _settle(self, error: Exception | None) -> None:
        if self.settled:
            return
        self.error = error
        self.settled = True
        self._state.referred.discard(self)
        if self._accounts is not None:
            self._record.settled = time.time()
            self._record.failed = None if error is None else type(error).__name__
            self._accounts.close(self._record)
        self._later = ()  # or a chain of futures would keep all that came before
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _hosts(self, ranks: Sequence[int]) -> str:
        hosts = list(dict.fromkeys(self.engine.host(rank) for rank in ranks))
        return "; ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def timed_out(call: Call, seconds: float) -> CallTimeoutError:
    """The error of a wait that ended before its call did."""
    late = call.late
    return CallTimeoutError(
        f"{call.label}() has not ended after a wait of {seconds:g} s; {_ranks(late)} are under way. "
        "The call goes on: wait again, or give the call itself a timeout with .options(timeout=...)",
        method=call.method,
        ranks=late,
        call_goes_on=True,
    )
