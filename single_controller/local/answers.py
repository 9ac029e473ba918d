"""LocalAnswers: the answers of one call, for whoever has its future. LocalRef: one of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from single_controller.base.engine import RankLost
from single_controller.base.errors import CallTimeoutError, WorkerDiedError
from single_controller.base.later import unpacked
from single_controller.base.receipt import Failure, Receipt
from single_controller.local.parcel import StaysHere
from single_controller.local.slip import Slip, all_filled, wait_until


class LocalAnswers(StaysHere):
    """The slips of a call.

    Args:
        method: name of the method that answers.
        slips: rank -> slip, of all called ranks.
        collecting: the ranks whose answers count, in order.
    """

    def __init__(self, method: str, slips: dict[int, Slip], collecting: Sequence[int]) -> None:
        self.method = method
        self._slips = slips
        self._collecting = tuple(collecting)
        self.stays_because = (
            f"the answers of {method}() are in the driver's process, where a LocalWorkerGroup made them; pass "
            "future.result() instead of the future"
        )

    def failed_on(self, rank: int) -> None:
        """See `single_controller.base.later.Answers`: nobody else is told anyway."""

    def refs(self) -> list[LocalRef]:
        """What stands for each answer, in order."""
        return [LocalRef(self, k) for k in range(len(self._collecting))]

    def receipts(self, timeout: float | None = None) -> list[Receipt]:
        """See `single_controller.base.later.Answers`."""
        slips = list(self._slips.values())
        if not wait_until(lambda: self._bad() is not None or all_filled(slips), timeout):
            late = sorted(rank for rank, slip in self._slips.items() if slip.outcome is None)
            raise CallTimeoutError(
                f"{self.method}() has not ended after a wait of {timeout:g} s; ranks {late} are under way",
                method=self.method,
                ranks=late,
                call_goes_on=True,
            )
        bad = self._bad()
        if bad is not None:
            raise _error_of(self.method, *bad)
        outcomes = [self._slips[rank].outcome for rank in self._collecting]
        return [outcome for outcome in outcomes if isinstance(outcome, Receipt)]

    def values(self, which: Sequence[int], *, private: bool) -> list[Any]:
        """Some of the answers."""
        values = []
        for k in which:
            rank = self._collecting[k]
            parcel = self._slips[rank].answer
            opened = None if parcel is None else functools.partial(parcel.open, private=private)
            values.append(None if opened is None else unpacked(self.method, rank, opened))
        return values

    def value(self, k: int, timeout: float | None) -> Any:
        """One answer, as soon as its own rank has ended; what that rank raised, if it did."""
        rank = self._collecting[k]
        slip = self._slips[rank]
        if not wait_until(lambda: slip.outcome is not None, timeout):
            raise CallTimeoutError(
                f"{self.method}() has not ended on rank {rank} after a wait of {timeout:g} s",
                method=self.method,
                ranks=(rank,),
                call_goes_on=True,
            )
        outcome = slip.outcome
        if isinstance(outcome, RankLost):
            raise _error_of(self.method, rank, outcome)
        if outcome is not None and outcome.failure is not None:
            cause = outcome.failure.cause
            raise cause if isinstance(cause, Exception) else outcome.failure.error(cause)
        return self.values([k], private=True)[0]

    def _bad(self) -> tuple[int, RankLost | Failure] | None:
        """A rank that was lost or has failed, if there is one."""
        for rank, slip in self._slips.items():
            if isinstance(slip.outcome, RankLost):
                return rank, slip.outcome
            if slip.outcome is not None and slip.outcome.failure is not None:
                return rank, slip.outcome.failure
        return None


class LocalRef(StaysHere):
    """Stands for one rank's answer, as an ObjectRef does on Ray. Given to a method of a group in this process, it is
    its value."""

    stays_because = "a LocalRef stands for an answer in the driver's process; pass ref.get() instead"

    def __init__(self, answers: LocalAnswers, which: int) -> None:
        self._answers = answers
        self._which = which

    def get(self, timeout: float | None = None) -> Any:
        """The answer.

        Args:
            timeout: seconds to wait at the most.

        Raises:
            CallTimeoutError: the wait ended before the call did.
            WorkerDiedError: the rank died.
            Exception: whatever the method raised, as ``ray.get`` raises it.
        """
        return self._answers.value(self._which, timeout)

    def __repr__(self) -> str:
        return f"<LocalRef to an answer of {self._answers.method}()>"


def _error_of(method: str, rank: int, lost: RankLost | Failure) -> Exception:
    if isinstance(lost, Failure):
        return lost.error(lost.cause)
    return WorkerDiedError(
        f"rank {rank} died during {method}(), whose future is an argument here: {lost.reason}",
        rank=rank,
        method=method,
        ranks=(rank,),
    )
