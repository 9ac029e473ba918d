"""Errors of groups and pools. Errors about the shape of a call are in `dispatch.errors`.

All of them pickle: the message is ``args[0]``, and everything else is a plain attribute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

from dispatch.errors import ResultError, SingleControllerError


class PlacementError(SingleControllerError):
    """A pool or group can never be placed, or was not within its timeout. The message has a table per node."""


class _RankError(SingleControllerError):
    """An error of one rank.

    Attributes:
        rank: the rank, or None if none was assigned yet.
        host: the host that it ran on, if that is known.
        method: name of the method, without parentheses.
        ranks: all ranks to which the same has happened, as far as that was known when the error was made.
        role: role of the worker, if several share the process (`colocate`); otherwise None.
    """

    role: str | None = None

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        method: str | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.method = method
        self.ranks = tuple(ranks)


class WorkerError(_RankError):
    """A method raised on a rank. The message names the first cause, with the remote traceback below.

    ``__cause__`` is the exception itself, if it could be sent to the driver. The error is then an instance of that
    exception's class too, so ``except KeyError`` catches a KeyError of a method. Not so for classes that cannot be
    subclassed, this library's errors about a call, StopIteration, and exceptions such as KeyboardInterrupt that do not
    derive from Exception. Attributes of the exception are on ``__cause__``.

    Attributes:
        cause_type: qualified name of the exception's type.
        remote_traceback: the traceback on the worker, as text.
        results: rank -> value, of the collecting ranks that had returned when the call failed. Empty for a constructor.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        method: str | None = None,
        cause_type: str | None = None,
        remote_traceback: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message, rank=rank, host=host, method=method, ranks=ranks)
        self.cause_type = cause_type
        self.remote_traceback = remote_traceback
        self.results: Mapping[int, Any] = {}


class StartError(WorkerError):
    """A worker's constructor raised, its class could not be loaded, or its own Python (``python=``) cannot run it. The
    group was shut down."""


class WorkerDiedError(_RankError):
    """A worker's process ended. The group is broken."""


class ResultLostError(ResultError):
    """A rank is alive, but its result was lost, because contact with it was lost for a while.

    The rank may have run the call or not. The group can be used, unless other ranks have not ended the call within its
    ``error_grace``: they may wait in a collective for the rank that never got the call.

    Attributes:
        role: role of the worker, if several share the process; otherwise None.
    """

    role: str | None = None


class CallTimeoutError(SingleControllerError, TimeoutError):
    """A call, or a wait for one, took longer than its timeout.

    Attributes:
        method: name of the method, without parentheses.
        ranks: the ranks that had not finished.
        call_goes_on: True if only the wait ended (``future.result(timeout)``): the call continues, and a later wait
            gets its result. False if the call's own timeout passed: the group is broken.
        stacks: rank -> its Python stack when the call's timeout passed, as text. The message shows them too, equal
            ones once.
    """

    def __init__(
        self,
        message: str,
        *,
        method: str | None = None,
        ranks: Sequence[int] = (),
        call_goes_on: bool = False,
        stacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.method = method
        self.ranks = tuple(ranks)
        self.call_goes_on = call_goes_on
        self.stacks = dict(stacks or {})


class GroupBrokenError(SingleControllerError):
    """The group lost a worker, or a call exceeded its timeout, earlier. Call ``group.restart()``."""


class GroupClosedError(SingleControllerError):
    """The group, or the pool under it, is closed."""


class LocalGroupError(SingleControllerError):
    """A `LocalWorkerGroup`, whose ranks share the driver's process, was asked for something that needs processes."""


class ForkedProcessError(SingleControllerError):
    """A group, a pool or a future was used in a fork of the process that made it.

    A fork has none of its parent's threads, so Ray and the threads of a `LocalWorkerGroup` would never answer.
    """

    @classmethod
    def of(cls, what: str) -> Self:
        """From what was used."""
        return cls(
            f"{what} was used in process {os.getpid()}, a fork of the process that made it. A fork has neither the "
            "threads nor the connection to Ray of its parent. Use it in the process that made it; or start this "
            "process with multiprocessing.get_context('spawn'), and create a group or attach() to a detached one here"
        )


def ranks_text(ranks: Sequence[int], limit: int = 16) -> str:
    """Ranks as text, three or more in a row as a range: ``rank 3``, ``ranks 0, 2, 5-7``.

    Args:
        ranks: the ranks, in increasing order.
        limit: number of ranges and single ranks that are listed.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown: list[str] = []
    begin = 0
    for end in range(1, len(ranks) + 1):
        if end == len(ranks) or ranks[end] != ranks[end - 1] + 1:
            run = ranks[begin:end]
            shown += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            if len(shown) >= limit and end < len(ranks):
                return f"ranks {', '.join(shown[:limit])} and more, {len(ranks)} in all"
            begin = end
    return f"ranks {', '.join(shown)}"


def hosts_text(hosts: Sequence[str], limit: int = 4) -> str:
    """Hosts as text, each once.

    Args:
        hosts: the hosts, in any number.
        limit: how many are listed.
    """
    distinct = list(dict.fromkeys(hosts))
    more = f" and {len(distinct) - limit} more" if len(distinct) > limit else ""
    return "; ".join(distinct[:limit]) + more
