"""Transport: what a group needs from whatever runs its workers.

A group plans calls, tracks deadlines and joins results. The transport starts workers and carries calls and results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.call.executor import RunningCall
from single_controller.call.joining import CallResults
from single_controller.call.result import RankResult

Token = Hashable
"""Stands for one rank's result that was not read yet."""


MAX_STACK_SECONDS = 2.0
"""How long ranks may take to say where they are. An error or a log line that shows it waits for that."""


class RankProcess(NamedTuple):
    """The process of a rank.

    Attributes:
        host: name of its host.
        address: address of its host.
        pid: the process.
        node: the transport's id of the host; empty without one.
    """

    host: str
    address: str
    pid: int
    node: str = ""


class Death(NamedTuple):
    """The death of a rank's process.

    Attributes:
        at: when it was noticed, in seconds since the epoch.
        reason: why it died.
        generation: how often the group had been restarted or replaced by then.
    """

    at: float
    reason: str
    generation: int


@dataclass(frozen=True)
class Sent:
    """A call that was sent.

    Attributes:
        tokens: token -> rank, for every called rank.
        results: makes what fetches the collecting ranks' results; None if they all come inside the `RankResult`s.
        nbytes: rank -> bytes of arguments sent to it, for `stats`.
        waiting: what waits for the deferred arguments on behalf of all ranks; None if each rank waits itself.
    """

    tokens: dict[Token, int]
    results: Callable[[], CallResults] | None = None
    nbytes: dict[int, int] = field(default_factory=dict)
    waiting: Token | None = None


class PartlySentError(Exception):
    """`Transport.send` failed after some ranks had been sent the call. ``__cause__`` is the exception.

    Args:
        reached: the ranks that have the call.
        failed: the rank that the exception is about. Ranks behind it have not been tried.
    """

    def __init__(self, reached: Sequence[int], failed: int) -> None:
        super().__init__(f"sent to {len(reached)} ranks, but not to rank {failed}")
        self.reached = tuple(reached)
        self.failed = failed


class Transport(ABC):
    """The workers of one group. `send` is called by one thread at a time, all other methods by any thread.

    Attributes:
        world_size: number of ranks.
        synchronous: whether `send` itself runs the call, rank after rank, in the caller's thread. Nothing interrupts
            such a call: its timeout is checked afterwards against the time that each rank took.
        ended: whether `kill` was called, so that the workers' end is expected.
        restarted: ranks that were ended to be restarted; their end is expected too.
        death_seconds: how long `deaths` may take to know of a death, at most.
    """

    world_size: int
    synchronous = False
    ended = False
    restarted: frozenset[int] = frozenset()
    death_seconds = 0.0

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether the system that runs the workers can still be asked. Once False, it stays False."""

    @abstractmethod
    def host(self, rank: int) -> str:
        """The host of a rank, for messages."""

    @abstractmethod
    def send(self, spec: MethodSpec, plan: CallPlan, *, future: bool) -> Sent:
        """Send a call to the ranks of its plan without waiting. Each distinct shard is sent once.

        Args:
            spec: the method.
            plan: which rank gets what.
            future: whether results may stay where they were computed until somebody asks for them. Otherwise they come
                inside the `RankResult`s.

        Raises:
            DispatchError: an argument cannot be sent. No rank has seen the call.
            PartlySentError: some ranks have it, and others do not. Only a synchronous transport, which runs the ranks
                one after the other, lets the exception itself through.
            Exception: any other exception means that no rank has seen the call.
        """

    @abstractmethod
    def collect(self, tokens: Mapping[Token, int], timeout: float) -> dict[Token, RankResult]:
        """Wait until all results have arrived, at most ``timeout`` seconds, and return those that have.

        A rank whose process has ended has a result that says so: this method never raises for a dead rank. A rank with
        which contact was lost has none until it is known whether it is dead: see `probe`.

        Args:
            tokens: token -> rank.
            timeout: seconds.
        """

    def withdraw(self, tokens: Iterable[Token]) -> None:  # noqa: B027  (nothing to do where ranks can see it)
        """Tell ranks that wait for deferred arguments that these will not come, so that they end their call.

        Args:
            tokens: `Sent.waiting`, or the tokens of the ranks.
        """

    @abstractmethod
    def when_arrived(self, tokens: Sequence[Token], callback: Callable[[], None]) -> None:
        """Call a short function, in any thread, once all results have arrived or are lost.

        Args:
            tokens: the results.
            callback: kept until then, even if nobody waits any longer.
        """

    @abstractmethod
    def deaths(self) -> dict[int, str]:
        """rank -> reason, of the ranks whose process has ended. Must not disturb the other ranks' work."""

    def probe(self, ranks: Collection[int]) -> dict[int, str | None]:
        """Find out whether ranks are alive that may be dead although `deaths` does not say so yet. Does not wait.

        Returns:
            rank -> why it is dead, or None if it is alive. A rank of which nothing is known yet is missing: ask again.
        """
        deaths = self.deaths()
        return {rank: deaths.get(rank) for rank in ranks}

    @abstractmethod
    def stacks(self, ranks: Sequence[int], seconds: float = MAX_STACK_SECONDS) -> dict[int, str]:
        """Where some ranks are now.

        Args:
            ranks: the ranks.
            seconds: how long they may take to answer.

        Returns:
            rank -> the Python stack of each thread that runs a call, taken in the rank's process while it runs, or why
            it could not be taken. Ranks that could not be asked in time may be missing.
        """

    @property
    @abstractmethod
    def processes(self) -> tuple[RankProcess, ...]:
        """Each rank's process, dead or alive."""

    @abstractmethod
    def running(self, ranks: Sequence[int], seconds: float) -> dict[int, tuple[RunningCall, ...] | str]:
        """What some ranks run now.

        Args:
            ranks: the ranks.
            seconds: how long they may take to answer.

        Returns:
            rank -> its calls, the oldest first, or why they are unknown. Ranks that could not be asked in time may be
            missing.
        """

    @abstractmethod
    def kill(self) -> None:
        """End all workers without waiting, and set `ended`. May be called again."""
