"""Slip: one rank's receipt, as soon as it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from single_controller.base.engine import RankLost
from single_controller.base.receipt import Receipt
from single_controller.local.parcel import Parcel

_filled = threading.Condition()
"""One for the process: those who wait are a driver's threads, and ranks that need each other's answers."""


class Slip:
    """Stands for the receipt of one call on one rank.

    Attributes:
        outcome: the receipt, or why there is none; None until then.
        answer: what the method returned, where it is wanted.
    """

    def __init__(self) -> None:
        self.outcome: Receipt | RankLost | None = None
        self.answer: Parcel | None = None

    def fill(self, outcome: Receipt | RankLost, answer: Parcel | None = None) -> None:
        """The call has ended. What comes later, after the rank was given up, does not count."""
        with _filled:
            if self.outcome is None:
                self.outcome, self.answer = outcome, answer
                _filled.notify_all()


def wait_until(condition: Callable[[], bool], timeout: float | None = None) -> bool:
    """Wait until slips are filled in such a way that a condition holds; whether it holds."""
    with _filled:
        return _filled.wait_for(condition, timeout)


def all_filled(slips: Sequence[Slip]) -> bool:
    """Whether all of them are."""
    return all(slip.outcome is not None for slip in slips)
