"""Transport: what a group needs from whatever runs its workers.

A group plans calls, tracks deadlines and joins results. The transport carries calls and results, and ends the
workers. The group starts them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from dispatch.plan import CallPlan
from dispatch.register import MethodSpec
from single_controller.call.joining import CallResults, RankResult

MAX_STACK_SECONDS = 2.0
"""How long ranks may take to say where they are. An error or a log line that shows it waits for that."""


class RankProcess(NamedTuple):
    """The process of a rank."""

    host: str  # name of its host
    address: str  # address of its host
    pid: int  # the process
    node: str = ""  # the transport's id of the host; empty without one


RESULT_OF = "the result of "
"""How `RunningCall.waits` begins if the rank waits for another call; behind it are the calls, such as "generate()"."""


class RunningCall(NamedTuple):
    """A call that a rank runs."""

    method: str  # its label: the method, or ``<role>.<method>``
    seconds: float  # how long it has been running, the wait for its arguments included
    waits: str = ""  # the deferred argument for which it waits, in words; empty if it waits for none


class Death(NamedTuple):
    """The death of a rank's process."""

    at: float  # when it was noticed, in seconds since the epoch
    reason: str  # why it died
    generation: int  # how often the group had been restarted or replaced by then


Outcome = Future[Callable[[], Exception] | None]
"""Done once a call has an outcome: None, or what returns its error, the same each time."""


class Receiver(Protocol):
    """A call that was sent: what a transport tells results to."""

    outcome: Outcome

    def arrive(self, result: RankResult) -> None:
        """A rank has ended, was lost, or its reply was. Any thread may call this, holding no lock of a transport; only
        the first result of a rank counts. It is short, and does not wait."""


class Sent(NamedTuple):
    """A call that was sent."""

    results: Callable[[], CallResults]  # makes what fetches the collecting ranks' results, wherever they are
    nbytes: Mapping[int, int]  # rank -> bytes of arguments sent to it, for `stats`
    # Tells the ranks what they fetch of the deferred arguments: see `Inputs`; with None, that these will not come
    give: Callable[[CallPlan | None], None] | None = None


class PartlySentError(Exception):
    """`Transport.send` failed after some ranks had been sent the call. ``__cause__`` is the exception, which is about
    the rank ``failed``; ranks behind it have not been tried."""

    def __init__(self, reached: Sequence[int], failed: int) -> None:
        super().__init__(f"sent to {len(reached)} ranks, but not to rank {failed}")
        self.reached = tuple(reached)
        self.failed = failed


class Resized(Exception):
    """A call was planned before another thread changed the ranks. Nothing was sent: plan it again."""


class Transport(ABC):
    """The workers of one group. `send` is called by one thread at a time, all other methods by any thread."""

    world_size: int  # number of ranks
    # Whether `send` itself runs the call, rank after rank, in the caller's thread. Nothing interrupts such a call: its
    # timeout is checked afterwards against the time that each rank took.
    synchronous = False
    in_process = False  # whether the ranks are in the driver's process
    ended = False  # whether `kill` was called, so that the workers' end is expected
    restarted: frozenset[int] = frozenset()  # ranks that were ended to be restarted; their end is expected too
    death_seconds = 0.0  # how long `deaths` may take to know of a death, at most

    @property
    def connected(self) -> bool:
        """Whether the system that runs the workers can still be asked. Once False, it stays False."""
        return True

    @abstractmethod
    def host(self, rank: int) -> str:
        """The host of a rank, for messages."""

    @abstractmethod
    def send(self, spec: MethodSpec, plan: CallPlan, call: Receiver) -> Sent:
        """Send a call to the ranks of its plan without waiting. Each distinct shard is sent once. ``call`` is told each
        rank's result, possibly before this method returns. It is kept weakly: the group keeps it as long as its results
        matter.

        Raises:
            DispatchError: an argument cannot be sent. No rank has seen the call.
            PartlySentError: some ranks have it, and others do not. Only a synchronous transport, which runs the ranks
                one after the other, lets the exception itself through.
            Exception: any other exception means that no rank has seen the call.
        """

    @abstractmethod
    def deaths(self) -> dict[int, str]:
        """rank -> reason, of the ranks whose process has ended. Must not disturb the other ranks' work."""

    def probe(self, ranks: Collection[int]) -> dict[int, str | None]:
        """Find out whether ranks are alive that may be dead although `deaths` does not say so yet. Does not wait.
        Returns rank -> why it is dead, or None if it is alive. A rank of which nothing is known yet is missing: ask
        again."""
        deaths = self.deaths()
        return {rank: deaths.get(rank) for rank in ranks}

    @abstractmethod
    def stacks(self, ranks: Sequence[int], seconds: float = MAX_STACK_SECONDS) -> dict[int, str]:
        """Where some ranks are now, which may take some seconds to answer: rank -> the Python stack of each thread that
        runs a call, taken in the rank's process while it runs, or why it could not be taken. Ranks that could not be
        asked in time may be missing."""

    @property
    @abstractmethod
    def processes(self) -> tuple[RankProcess, ...]:
        """Each rank's process, dead or alive."""

    @abstractmethod
    def running(self, ranks: Sequence[int], seconds: float) -> dict[int, tuple[RunningCall, ...] | str]:
        """What some ranks run now: rank -> its calls, the oldest first, or why they are unknown. Otherwise as
        `stacks`."""

    @abstractmethod
    def kill(self) -> None:
        """End all workers without waiting, and set `ended`. May be called again."""
