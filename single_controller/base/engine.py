"""Engine: what a group needs from whatever runs its workers.

A group binds and plans calls, keeps deadlines and joins answers; the engine starts workers, carries plans to
them and receipts back. Nothing above this interface knows what an actor is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.base.later import Answers
from single_controller.base.receipt import Receipt

Token = Hashable
"""Stands for one rank's receipt that has not been read yet."""


@dataclass(frozen=True)
class RankLost:
    """Read instead of a receipt.

    Attributes:
        reason: why there is none, in one line.
        died: whether the rank's process has ended; if not, only this call went wrong.
        kind: the type of the engine's error.
    """

    reason: str
    died: bool = True
    kind: str = ""


@dataclass(frozen=True)
class Sent:
    """A call that is on its way.

    Attributes:
        receipts: token -> rank, for every called rank.
        answers: where the collecting ranks' answers can be asked for; None when they come with the receipts.
        nbytes: rank -> bytes of arguments that it was given, for `stats`.
    """

    receipts: dict[Token, int]
    answers: Answers | None = None
    nbytes: dict[int, int] = field(default_factory=dict)


class Engine(ABC):
    """One group's workers. All methods may be called from several threads, `send` by one at a time.

    Attributes:
        ended: whether `kill` was called: their end is no news.
        given_up: ranks that were ended to be restarted; theirs is none either.
    """

    ended = False
    given_up: frozenset[int] = frozenset()

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether what runs the workers can still be asked at all; False once it was shut down."""

    @property
    def in_turn(self) -> bool:
        """Whether `send` itself runs the call, rank after rank, in its caller's thread. Nothing interrupts it then; a
        call's timeout is compared with what each rank took, afterwards."""
        return False

    @abstractmethod
    def host(self, rank: int) -> str:
        """The host that a rank runs on, for messages."""

    @abstractmethod
    def send(self, spec: MethodSpec, plan: CallPlan, *, future: bool) -> Sent:
        """Carry a plan to its ranks, without waiting.

        Args:
            spec: the method.
            plan: who gets what.
            future: keep the answers where they are made, until somebody asks; else they come with the receipts.

        Raises:
            DispatchError: an argument cannot be carried. No rank has seen the call then.
        """

    @abstractmethod
    def ask_standings(self, role: str | None) -> Sent:
        """Ask every rank's worker of a role (None: the one there is) for its `Standing`, in the order of calls; the
        receipts' values are the standings."""

    @abstractmethod
    def wait(self, tokens: Sequence[Token], timeout: float) -> list[Token]:
        """Wait until all receipts are there or ``timeout`` seconds have passed; those that are there."""

    @abstractmethod
    def read(self, tokens: Sequence[Token]) -> list[Receipt | RankLost]:
        """Receipts that `wait` has reported."""

    def read_soon(self, tokens: Sequence[Token], timeout: float) -> list[Receipt | RankLost] | None:
        """All receipts, if they are there within ``timeout`` seconds; None if not, or if a rank is lost. For an engine
        that can do this faster than by `wait` and `read`."""
        return None

    @abstractmethod
    def unpack(self, packed: Any, private: bool) -> Any:
        """The value of an answer that came with a receipt.

        Args:
            packed: the receipt's value.
            private: whether it must be in memory that nobody else has; else it is only looked at, to be joined.
        """

    @abstractmethod
    def open_cause(self, packed: Any) -> BaseException | None:
        """A failure's exception; None if it does not unpickle here."""

    @abstractmethod
    def deaths(self) -> dict[int, str]:
        """rank -> reason, of the ranks whose process has ended. Does not disturb the others at their work."""

    @abstractmethod
    def kill(self) -> None:
        """End all workers, without waiting for them, and set `ended`. May be called again."""
