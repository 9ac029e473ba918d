"""Errors of groups and pools. Errors about the shape of a call are in `dispatch.errors`.

All of them pickle: the message is ``args[0]``, and everything else is a plain attribute.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.errors import ResultError, SingleControllerError


class PlacementError(SingleControllerError):
    """A pool or group can never be placed, or was not within its timeout. The message has a table per node."""


class _RankError(SingleControllerError):
    """An error of one rank.

    Attributes:
        rank: the rank, or None if none was assigned yet.
        host: the host that it ran on.
        method: name of the method, without parentheses.
        role: role of the worker, if several share the process (`colocate`); otherwise None.
    """

    role: str | None = None

    def __init__(
        self, message: str, *, rank: int | None = None, host: str | None = None, method: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.method = method


class WorkerError(_RankError):
    """A method raised on a rank. The message names the first cause, with the remote traceback below.

    ``__cause__`` is the exception itself, if it could be sent to the driver.

    Attributes:
        cause_type: qualified name of the exception's type.
        remote_traceback: the traceback on the worker, as text.
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
    ) -> None:
        super().__init__(message, rank=rank, host=host, method=method)
        self.cause_type = cause_type
        self.remote_traceback = remote_traceback


class StartError(WorkerError):
    """A worker's constructor raised, or its class could not be loaded. The group was shut down."""


class WorkerDiedError(_RankError):
    """A worker's process ended. The group is broken.

    Attributes:
        ranks: all ranks known to be dead when the error was made.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        method: str | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message, rank=rank, host=host, method=method)
        self.ranks = tuple(ranks)


class ResultLostError(ResultError):
    """A rank is alive, but its result was lost, because contact with it was lost for a while.

    The rank may have run the call or not. The group can be used, unless other ranks have not ended the call within its
    ``error_grace``: they may wait in a collective for the rank that never got the call.

    Attributes:
        rank: the rank.
        host: the host that it runs on, if that is known.
        method: name of the method, without parentheses.
        role: role of the worker, if several share the process; otherwise None.
    """

    role: str | None = None

    def __init__(
        self, message: str, *, rank: int | None = None, host: str | None = None, method: str | None = None
    ) -> None:
        super().__init__(message, method=method)
        self.rank = rank
        self.host = host


class CallTimeoutError(SingleControllerError, TimeoutError):
    """A call, or a wait for one, took longer than its timeout.

    Attributes:
        method: name of the method, without parentheses.
        ranks: the ranks that had not ended.
        call_goes_on: True if only the wait ended (``future.result(timeout)``): the call continues, and a later wait
            gets its result. False if the call's own timeout passed: the group is broken.
    """

    def __init__(
        self,
        message: str,
        *,
        method: str | None = None,
        ranks: Sequence[int] = (),
        call_goes_on: bool = False,
    ) -> None:
        super().__init__(message)
        self.method = method
        self.ranks = tuple(ranks)
        self.call_goes_on = call_goes_on


class GroupBrokenError(SingleControllerError):
    """The group lost a worker, or a call exceeded its timeout, earlier. Call ``group.restart()``."""


class GroupClosedError(SingleControllerError):
    """The group, or the pool under it, is closed."""


class LocalEngineError(SingleControllerError):
    """A `LocalWorkerGroup`, whose ranks share the driver's process, was asked for something that needs processes."""
