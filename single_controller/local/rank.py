"""LocalRank: one rank of a group in the driver's process."""

from __future__ import annotations

import asyncio
import copy
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import ray

from single_controller.base.engine import RankLost
from single_controller.base.host import Crew, MadeOf, Order
from single_controller.base.receipt import Failure, Receipt
from single_controller.base.stats import Clock
from single_controller.base.worker import Worker
from single_controller.local.answers import LocalRef
from single_controller.local.collectives import WorkerCode, end_process_group
from single_controller.local.lane import Lane
from single_controller.local.parcel import Parcel
from single_controller.local.place import LocalPlace
from single_controller.local.slip import Slip
from single_controller.ray.carried import pack_answer

Outcome = tuple[Receipt | RankLost, Parcel | None]
Work = Callable[[], Outcome]
Role = Callable[[], str | None]

WHERE = f"{socket.gethostname()}, in the driver's process"
"""The host of every rank here, for messages."""


class LocalRank:
    """One rank: its workers, and, if ranks have threads, its thread.

    Args:
        place: where it stands.
        threads: whether it has a thread; else its calls run in the thread of whoever makes them.
    """

    def __init__(self, place: LocalPlace, threads: bool) -> None:
        self.place = place
        self.died: str | None = None
        self._crew = Crew()
        self._lane = Lane(f"local-rank-{place.rank}") if threads else None
        self._slips: weakref.WeakSet[Slip] = weakref.WeakSet()
        self._ended = False
        self._lock = threading.RLock()
        # A group that is dropped without being closed leaves no thread either.
        weakref.finalize(self, _let_go, self._lane, self._crew, place).atexit = False

    # --- orders ---------------------------------------------------------------------------------------------------

    def start(self, classes: Mapping[str | None, type[Worker]], made: Parcel) -> Slip:
        """Make the workers.

        Args:
            classes: role -> class.
            made: role -> the arguments of its constructor.
        """

        def work() -> Outcome:
            begun = time.time()
            arguments = made.open(private=True)
            roles: dict[str | None, MadeOf] = {role: (cls, *arguments[role]) for role, cls in classes.items()}
            self._crew.make(self.place, roles)
            ended = time.time()
            return Receipt(self.place.rank, clock=Clock(begun, begun, ended, ended)), None

        return self._carry_out(work, "__init__", lambda: self._crew.making)

    def call(self, order: Order, whole: Parcel | None, shard: Parcel | None, *, kept: bool, concurrent: bool) -> Slip:
        """Carry out an order.

        Args:
            order: what to do.
            whole: the arguments that all ranks get.
            shard: those of the rank's shard.
            kept: whether the answer stays with the slip; else it goes with the receipt.
            concurrent: whether the call may overtake and overlap others.
        """

        def work() -> Outcome:
            received = time.time()
            parts = [{} if parcel is None else parcel.open(private=order.private) for parcel in (whole, shard)]
            for part in parts:
                for slot, value in part.items():
                    part[slot] = _value_of(value)
            host = self._crew[order.role]
            answer = host.run(order, *parts)
            value = answer.value
            parcel = None if value is None else Parcel.of(lambda: pack_answer(order.method, value))
            clock = Clock(received, answer.began, answer.ended, time.time())
            receipt = Receipt(
                self.place.rank,
                host.standing.version,
                value=None if kept else parcel,
                rows=answer.rows,
                not_rows=answer.not_rows,
                empty=answer.empty,
                returned=0 if parcel is None else parcel.nbytes,
                clock=clock,
            )
            return receipt, parcel if kept else None

        return self._carry_out(work, order.method, lambda: order.role, concurrent=concurrent)

    def standing(self, role: str | None) -> Slip:
        """What the worker of a role says of its coordinates, in the order of calls."""

        def work() -> Outcome:
            standing = copy.deepcopy(self._crew[role].standing)
            return Receipt(self.place.rank, standing.version, value=standing), None

        return self._carry_out(work, "layout", lambda: role)

    def fail(self, error: BaseException, method: str, role: str | None) -> Slip:
        """What a call would have ended in that does not even begin: the error is not the rank's own."""
        slip = Slip()
        receipt = self._failed(error, method, role)
        if receipt.failure is not None:
            receipt.failure.ours = True
        slip.fill(receipt)
        return slip

    def end(self, reason: str) -> None:
        """Take no more calls. Whoever waits for one hears the reason; a method that runs cannot be stopped."""
        with self._lock:
            self._ended = True
            self.died = self.died or reason
            slips = list(self._slips)
        for slip in slips:
            slip.fill(RankLost(self.died))
        _let_go(self._lane, self._crew, self.place, wait=True)

    # --- the inside -----------------------------------------------------------------------------------------------

    def _carry_out(self, work: Work, method: str, role: Role, *, concurrent: bool = False) -> Slip:
        slip = Slip()

        def job() -> None:
            slip.fill(*self._attempt(work, method, role))

        with self._lock:
            if self._ended:  # in this moment, by another thread of the driver
                slip.fill(RankLost(self.died or ""))
                return slip
            self._slips.add(slip)
            if self._lane is not None:
                (self._lane.beside if concurrent else self._lane.put)(job)
        if self._lane is None:
            job()
        return slip

    def _attempt(self, work: Work, method: str, role: Role) -> Outcome:
        if self.died is not None:
            return RankLost(self.died), None
        try:
            with WorkerCode(self.place):
                return work()
        except SystemExit as error:  # ends a process; here it ends this rank
            self.died = f"it called sys.exit({'' if error.code is None else repr(error.code)})"
            return RankLost(self.died), None
        except BaseException as error:
            if self._lane is None and _is_the_drivers(error):
                raise
            return self._failed(error, method, role()), None

    def _failed(self, error: BaseException, method: str, role: str | None) -> Receipt:
        failure = Failure.of(error, self.place.rank, WHERE, method, error, role)
        return Receipt(self.place.rank, self._crew.standing(role), failure)


def _value_of(value: Any) -> Any:
    """As on Ray: a reference given as an argument is its value."""
    if isinstance(value, LocalRef):
        return value.get()
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


def _is_the_drivers(error: BaseException) -> bool:
    """Whether an exception, raised in the driver's own thread, is meant for the driver: Ctrl-C, the time limit of a
    test, and "quit" in a debugger."""
    debugger = sys.modules.get("bdb")
    if debugger is not None and isinstance(error, debugger.BdbQuit):
        return True
    return not isinstance(error, (Exception, asyncio.CancelledError))


def _let_go(lane: Lane | None, crew: Crew, place: LocalPlace, wait: bool = False) -> None:
    if lane is not None:
        lane.end(wait=wait)
    crew.close()
    end_process_group(place)
    place.close()
