"""Errors of groups and pools. Failure: an exception on a rank, on its way to becoming one of them on the driver.

Errors about the shape of a call are in `dispatch.errors`. All errors pickle: the message is ``args[0]``, and everything
else is a plain attribute.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Self

import dispatch
from dispatch.errors import ResultError, SingleControllerError
from dispatch.register import label
from single_controller.call.codec import Encoded, can_encode, encode

logger = logging.getLogger(__name__)

LOST_PEER_SIGNS = (
    "gloo",
    "CCL",  # the collectives of accelerators: NCCL, HCCL, XCCL
    "Connection reset by peer",
    "Connection closed by peer",
    "Connection refused",
    "Broken pipe",
)
"""Text in errors that may be mere consequences of another rank's death."""

MAX_TEXT = 20_000
"""Characters of an exception's message, and of its traceback, that are sent."""

MAX_OTHER_CAUSES = 3
"""Causes besides the first one that an error names."""

MAX_STACKS = 8
"""Distinct stacks that one message shows."""

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_DISPATCH = os.path.dirname(os.path.abspath(dispatch.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class PlacementError(SingleControllerError):
    """A pool or group can never be placed, or was not placed within its timeout. The message has a table of the
    nodes."""


class ControlStoreError(SingleControllerError):
    """Ray's control store has not answered a request."""


class _RankError(SingleControllerError):
    """An error of one rank.

    Attributes:
        rank: the rank, or None if none was assigned yet.
        host: the host that it ran on, if that is known.
        method: name of the method, without parentheses.
        ranks: all ranks that have failed in the same way, as far as this was known when the error was created.
        role: role of the worker, if several share the process (`colocate`); otherwise None.
    """

    rank: int | None = None
    host: str | None = None
    method: str | None = None
    ranks: tuple[int, ...] = ()
    role: str | None = None


class WorkerError(_RankError):
    """A method raised on a rank. The message names the first cause, with the remote traceback below.

    ``__cause__`` is the exception itself, if it could be sent to the driver. The error is then an instance of that
    exception's class too, so ``except KeyError`` catches a KeyError of a method. This does not apply to classes that
    cannot be subclassed, to exception groups (an asyncio.TaskGroup raises one), to this library's errors about a call,
    to StopIteration, or to exceptions such as KeyboardInterrupt that do not derive from Exception. Attributes of the
    exception are on ``__cause__``.

    Attributes:
        cause_type: qualified name of the exception's type.
        remote_traceback: the traceback on the worker, as text.
        results: rank -> value, of the collecting ranks that had returned when the call failed. Empty for a constructor.
    """

    cause_type: str | None = None
    remote_traceback: str = ""
    results: Mapping[int, Any] = MappingProxyType({})

    def __init__(self, message: str = "", **about: Any) -> None:
        # Not the default of the class, which cannot be pickled or written as JSON
        super().__init__(message, **{"results": {}} | about)


class StartError(WorkerError):
    """A worker's constructor raised, its class could not be loaded, or its own Python (``python=``) cannot run it. The
    group was shut down. Or this process has as many threads as it may have, and one more was needed."""


def start_thread(start: Callable[[], None], what: str) -> None:
    """Call what starts a thread; a `StartError` that says ``what`` the thread does if the process has as many as it
    may have."""
    try:
        start()
    except RuntimeError as error:
        raise StartError(f"the thread that {what} could not be started: {error}") from error


class WorkerDiedError(_RankError):
    """A worker's process ended. The group is broken."""

    @classmethod
    def during(cls, label: str, rank: int, host: str, reason: str) -> Self:
        """From the label of the call that the rank was running, and why its process has ended."""
        message = f"rank {rank} died during {label}() ({host}): {reason}"
        return cls(message, rank=rank, host=host, method=label, ranks=(rank,))


class ResultLostError(ResultError):
    """A rank is alive, but its result was lost, because it could not be reached for too long.

    The rank may or may not have run the call. You can continue to use the group, unless other ranks have not ended the
    call within its ``error_grace``: they may wait in a collective for a rank that never got the call.

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
        stacks: rank -> its Python stack when the call's timeout passed, as text. The message also shows them, each
            distinct stack once.
    """

    method: str | None = None
    ranks: tuple[int, ...] = ()
    call_goes_on: bool = False
    stacks: Mapping[int, str] = MappingProxyType({})

    def __init__(self, message: str = "", **about: Any) -> None:
        super().__init__(message, **{"stacks": {}} | about)  # as above

    @classmethod
    def of_wait(cls, label: str, seconds: float | None, ranks: Sequence[int] = ()) -> Self:
        """From a wait for a call, by its label, that ended before the call did, and the ranks that are running it."""
        running = f"; still running: {ranks_text(ranks)}" if ranks else ""
        message = f"{label}() has not finished after a wait of {seconds:g} s{running}. It continues; wait again"
        return cls(message, method=label, ranks=tuple(ranks), call_goes_on=True)


class GroupBrokenError(SingleControllerError):
    """The group takes no calls, for example because a worker has died or a call has exceeded its timeout. Call
    ``group.restart()``, ``replace()`` or ``shrink()``."""


class GroupClosedError(SingleControllerError):
    """The group, or the pool under it, is closed."""


class LocalGroupError(SingleControllerError):
    """A feature that a `LocalWorkerGroup` does not have, because its ranks share the driver's process."""


class ForkedProcessError(SingleControllerError):
    """A group, a pool or a future was used in a fork of the process that created it.

    A fork has none of its parent's threads, so Ray and the threads of a `LocalWorkerGroup` would never respond.
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
    """Ranks, in increasing order, as text, three or more in a row as a range: ``rank 3``, ``ranks 0, 2, 5-7``. At most
    ``limit`` ranges and single ranks are listed."""
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
    """Hosts as text, each once, and at most ``limit`` of them."""
    distinct = list(dict.fromkeys(hosts))
    more = f" and {len(distinct) - limit} more" if len(distinct) > limit else ""
    return "; ".join(distinct[:limit]) + more


@dataclass(slots=True)
class Failure:
    """An exception on a rank, in parts that always pickle."""

    rank: int
    host: str
    method: str
    cause_type: str  # qualified name of the exception's type
    message: str  # its message
    remote_traceback: str = ""  # its traceback, as text
    when: float = 0.0  # seconds since the epoch, by the worker's clock
    # The exception and its causes, each encoded, in an encoded list; the exception itself in one process; None if it
    # cannot be pickled
    cause: Encoded | BaseException | None = None
    ours: bool = False  # whether this library raised it, about the call itself. It then reaches the user unwrapped.
    role: str | None = None  # role of the worker, if several share the process
    lost: bool = False  # whether the method may have returned, but its result cannot be fetched
    # Whether every rank of the call fails alike, before its method begins, so that no rank waits for another
    alike: bool = False
    # Whether the rank is alive, but its result was lost on the way. There is no exception then.
    no_contact: bool = False
    # Of ``cause``, in one process: each time that the exception is raised, its own traceback gets further frames
    trace: TracebackType | None = None

    @classmethod
    def lost_contact(cls, rank: int, host: str, reason: str) -> Failure:
        """The result of a rank was lost, and the rank is alive. Errors on other ranks count first."""
        return cls(rank, host, "", "", reason, when=math.inf, no_contact=True)

    @classmethod
    def of(
        cls, error: BaseException, rank: int, host: str, method: str, role: str | None, *, in_process: bool
    ) -> Failure:
        """From an exception that was just caught; ``in_process`` keeps the exception itself."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        cause: Encoded | BaseException | None = error
        ours = isinstance(error, SingleControllerError) and _raised_by_library(error)
        if not in_process:
            try:
                # Each by itself: the driver may lack the class of a cause, but never that of our own error.
                cause = encode(_encoded_chain(error) if ours else [encode(error)])
            except Exception:
                cause = None
        text, trace = shortened(_message_of(error)), shortened(remote_traceback(error))
        failure = cls(rank, host, method, name, text, trace, time.time(), cause, ours, role)
        failure.trace = error.__traceback__ if in_process else None
        return failure

    @property
    def may_be_echo(self) -> bool:
        """Whether this may be the effect of a rank's death: a collective that lost its peers, or a lost result."""
        if self.lost or self.alike or self.no_contact:
            return self.lost
        frames = [line for line in self.remote_traceback.splitlines() if line.lstrip().startswith('File "')]
        in_collective = bool(frames) and "torch/distributed/" in frames[-1]
        return in_collective or any(sign in self.message for sign in LOST_PEER_SIGNS)

    def exception(self) -> BaseException | None:
        """The original exception, with those of its causes that arrive; None if it does not arrive in this process."""
        if not isinstance(self.cause, Encoded):
            return self.cause
        errors: list[BaseException] = []
        try:
            for encoded in self.cause.decode():
                error = encoded.decode()
                if errors:
                    errors[-1].__cause__ = error
                errors.append(error)
        except Exception:
            logger.debug("an exception of rank %d cannot be unpickled here", self.rank, exc_info=True)
        return errors[0] if errors and isinstance(errors[0], BaseException) else None

    def error(self, *, starting: bool = False, failures: Sequence[Failure] = ()) -> Exception:
        """The exception that the driver raises for this failure; a new one each time. ``starting``: whether a
        constructor raised. ``failures`` are those of all ranks in the same call, which the error names too."""
        cause = self.exception()
        if self.ours and isinstance(cause, SingleControllerError):
            again = copy.copy(cause)
            again.__cause__ = cause.__cause__
            return again
        where = "__init__" if starting else self.method
        if self.no_contact:
            return ResultLostError(
                f"the result of {label(self.role, where)}() on rank {self.rank} ({self.host}) was lost, because "
                f"the connection to the rank was lost: {self.message}. The rank is alive. It may have run the call",
                rank=self.rank,
                host=self.host,
                method=where,
                role=self.role,
            )
        if self.lost and not starting:
            result = f"the result of rank {self.rank} ({self.host}), or an argument of the call,"
            text = f"{label(self.role, where)}(): {result} {self.message}"
            return ResultError(text, method=where, rank=self.rank, host=self.host)
        error = (StartError if starting else WorkerError)(
            self.text(starting=starting, failures=failures),
            rank=self.rank,
            host=self.host,
            method=where,
            cause_type=self.cause_type,
            remote_traceback=self.remote_traceback,
            ranks=[failure.rank for failure in _by_cause(failures or [self])[self._what]],
            role=self.role,
        )
        error = catchable_as(error, type(cause))
        error.__cause__ = cause
        return error

    @property
    def of_method(self) -> bool:
        """Whether the worker's own code raised, which makes it a `WorkerError`."""
        return not (self.ours or self.no_contact or self.lost)

    def text(self, *, starting: bool = False, failures: Sequence[Failure] = ()) -> str:
        """The message of `error`, of a failure in a worker's own code. Runs no code of the user's exception."""
        by_cause = _by_cause(failures or [self])
        ranks = [failure.rank for failure in by_cause.pop(self._what)]
        place = f"rank {self.rank}" if len(ranks) == 1 else f"{ranks_text(ranks)}; first: rank {self.rank}"
        return (
            f"{label(self.role, '__init__' if starting else self.method)}() raised {self.cause_type} on {place} "
            f"({self.host}): {self.message}{_others(by_cause.values())}\n\n{self.remote_traceback.rstrip()}"
        )

    @property
    def _what(self) -> tuple[str, str]:
        """What two failures with the same cause have in common: numbers in their messages may differ."""
        return self.cause_type, _NUMBERS.sub("", self.message)


def catchable_as(error: WorkerError, kind: Any) -> WorkerError:
    """The error, as an instance of an exception's class too, or unchanged if no class can derive from both."""
    try:
        if not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
            return error  # a generator or an asyncio.Future would turn a StopIteration into a RuntimeError
        if kind.__module__.partition(".")[0] in ("dispatch", "single_controller"):
            return error  # it is about a call that the method made, and must not be taken for one about this call
        if hasattr(kind, "__getattr__"):
            return error  # Ray's task errors, for example, look up fields there that nobody has set here
        ours: Any = type(error)
        return _instance(_derived_from(ours, kind), error)
    except Exception:  # a class that cannot be subclassed, or refuses to be
        logger.debug("no error can be an instance of %r too", kind, exc_info=True)
        return error


def _instance(cls: type, like: WorkerError) -> WorkerError:
    """An instance of a class with the arguments and attributes of another error. No __init__ runs: the exception's own
    may need arguments that nobody here has. The first built-in class knows how to make an instance."""
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    made: WorkerError = builtin.__new__(cls, *like.args)
    made.args = like.args
    vars(made).update(vars(like))
    return made


@functools.lru_cache(maxsize=256)
def _derived_from(ours: Any, kind: Any) -> Any:
    def __reduce_ex__(self: WorkerError, protocol: Any) -> Any:
        return _unpickled, (ours, encode(kind), self.args, vars(self))

    members = {
        "__module__": ours.__module__,
        "__qualname__": ours.__qualname__,
        "__doc__": ours.__doc__,
        "__init__": lambda self, *args, **kwargs: None,
        # Some classes make these of attributes that are missing here; or have a length, and 0 would mean no error
        **{name: getattr(Exception, name) for name in ("__str__", "__repr__", "__eq__", "__hash__")},
        "__bool__": lambda self: True,
        "__copy__": lambda self: _instance(type(self), self),
        "__reduce_ex__": __reduce_ex__,
    }
    metaclass: Any = type(kind)  # its own, if the class has one
    return metaclass(ours.__name__, (ours, kind), members)


def _unpickled(ours: type[WorkerError], kind: Encoded, args: tuple[Any, ...], fields: dict[str, Any]) -> WorkerError:
    error = ours(*args)
    vars(error).update(fields)
    try:
        return catchable_as(error, kind.decode())
    except Exception:  # the process does not have the class
        return error


def _encoded_chain(error: BaseException) -> list[Encoded]:
    """An exception and the chain of its causes, which pickling drops. It ends before the first that cannot be sent."""
    errors, encoded, cause = [error], [encode(error)], error.__cause__
    while cause is not None and all(cause is not one for one in errors) and can_encode(cause):
        errors.append(cause)
        encoded.append(encode(cause))
        cause = cause.__cause__
    return encoded


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others are probably consequences of."""
    return min(failures, key=lambda failure: (failure.may_be_echo, failure.when))


def _by_cause(failures: Iterable[Failure]) -> dict[tuple[str, str], list[Failure]]:
    """Failures by their cause, in order of rank."""
    found: dict[tuple[str, str], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        found.setdefault(failure._what, []).append(failure)
    return found


def _others(causes: Collection[list[Failure]]) -> str:
    """The causes besides the first one, in a line each."""
    lines = []
    for failures in list(causes)[:MAX_OTHER_CAUSES]:
        first = failures[0]
        what = "its result was lost" if first.no_contact else first.cause_type
        text = (first.message.strip().splitlines() or [""])[0][:200]
        lines.append(f"\nalso on {ranks_text([failure.rank for failure in failures])}: {what}: {text}")
    more = len(causes) - len(lines)
    return "".join(lines) + (f"\nother causes, not shown: {more}" if more > 0 else "")


def remote_traceback(error: BaseException) -> str:
    """The traceback as text, from the user's first frame on."""
    trace = error.__traceback__
    while trace is not None and _is_library(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    except Exception:  # an exception whose __str__ raises
        return "".join(traceback.format_tb(trace or error.__traceback__)) + f"{type(error).__qualname__}\n"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__qualname__} without a readable message>"


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """A text, without its middle if it has more than so many characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n... (shortened; {len(text):,} characters in total) ...\n{text[-most // 2 :]}"


def _is_library(filename: str) -> bool:
    return filename.startswith((_PACKAGE, _DISPATCH)) or os.path.join("ray", "util", "tracing", "") in filename


def _raised_by_library(error: BaseException) -> bool:
    """Whether no user code was running, so that the error is about the call itself."""
    trace = error.__traceback__
    while trace is not None:
        if not _is_library(trace.tb_frame.f_code.co_filename):
            return False
        trace = trace.tb_next
    return True


def show_stacks(stacks: Mapping[int, str], most: int = MAX_STACKS) -> str:
    """The stacks of many ranks as text, equal ones once, ``most`` at most. The rarest come first: the one rank for
    which all others wait in a collective is among them."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        by_text.setdefault(stacks[rank], []).append(rank)
    ordered = sorted(by_text.items(), key=lambda item: (len(item[1]), item[1]))
    shown = [(ranks_text(ranks), text) for text, ranks in ordered[:most]]
    parts = [f"{who} {'is' if who.startswith('rank ') else 'are'} at:\n{text}" for who, text in shown]
    rest = [rank for _, ranks in ordered[most:] for rank in ranks]
    if rest:
        parts.append(f"other stacks, not shown: {len(ordered) - most}, of {ranks_text(sorted(rest))}")
    return "\n".join(parts)
