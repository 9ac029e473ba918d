"""RankResult: what a rank sends back when a call on it has ended, whatever the outcome."""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import re
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import dispatch
from dispatch.errors import ResultError, SingleControllerError
from dispatch.register import label
from single_controller.call.codec import Encoded, can_encode, encode
from single_controller.call.errors import ResultLostError, StartError, WorkerError, ranks_text

logger = logging.getLogger(__name__)

LOST_PEER_SIGNS = (
    "gloo",
    "NCCL",
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

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")

MAX_INLINE_BYTES = 96 * 1024
"""Arguments and results up to this size travel inside their message. Larger ones are stored once and referred to.
Measured with four ranks on Ray 2.60 at 96 KiB: 4.2 ms inside against 6.4 ms stored for an argument that all ranks read,
4.7 against 9.6 ms for shards. From 100 KiB on, Ray itself stores a message, once for every rank."""


@dataclass(slots=True)
class Failure:
    """An exception on a rank, in parts that always pickle.

    Attributes:
        rank: the rank.
        host: its host.
        method: the method.
        cause_type: qualified name of the exception's type.
        message: its message.
        remote_traceback: its traceback, as text.
        when: seconds since the epoch, by the worker's clock.
        cause: the exception and its causes, each encoded, in an encoded list; the exception itself in one process; None
            if it cannot be pickled.
        ours: whether this library raised it, about the call itself. It then reaches the user unwrapped.
        role: role of the worker, if several share the process.
        lost: whether the method may have returned, but its result cannot be fetched.
        alike: whether every rank of the call fails alike, before its method begins, so that no rank waits for another.
        no_contact: whether the rank is alive, but its result was lost on the way. There is no exception then.
    """

    rank: int
    host: str
    method: str
    cause_type: str
    message: str
    remote_traceback: str = ""
    when: float = 0.0
    cause: Encoded | BaseException | None = None
    ours: bool = False
    role: str | None = None
    lost: bool = False
    alike: bool = False
    no_contact: bool = False

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
        text, trace = _shorten(_message_of(error)), _shorten(remote_traceback(error))
        return cls(rank, host, method, name, text, trace, time.time(), cause, ours, role)

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
        """The exception that the driver raises for this failure; a new one each time.

        Args:
            starting: whether the worker's constructor raised.
            failures: those of all ranks, if others have failed in the same call. The error names them too.
        """
        cause = self.exception()
        if self.ours and isinstance(cause, SingleControllerError):
            again = copy.copy(cause)
            again.__cause__ = cause.__cause__
            return again
        where = "__init__" if starting else self.method
        if self.no_contact:
            lost = ResultLostError(
                f"the result of {label(self.role, where)}() on rank {self.rank} ({self.host}) was lost, because "
                f"the connection to the rank was lost: {self.message}. The rank is alive. It may have run the call",
                rank=self.rank,
                host=self.host,
                method=where,
            )
            lost.role = self.role
            return lost
        if self.lost and not starting:
            result = f"the result of rank {self.rank} ({self.host}), or an argument of the call,"
            text = f"{label(self.role, where)}(): {result} {self.message}"
            return ResultError(text, method=where, rank=self.rank, host=self.host)
        by_cause = _by_cause(failures or [self])
        ranks = [failure.rank for failure in by_cause.pop(self._what)]
        place = f"rank {self.rank}" if len(ranks) == 1 else f"{ranks_text(ranks)}; first: rank {self.rank}"
        error = (StartError if starting else WorkerError)(
            f"{label(self.role, where)}() raised {self.cause_type} on {place} ({self.host}): "
            f"{self.message}{_others(by_cause.values())}\n\n{self.remote_traceback.rstrip()}",
            rank=self.rank,
            host=self.host,
            method=where,
            cause_type=self.cause_type,
            remote_traceback=self.remote_traceback,
            ranks=ranks,
        )
        error.role = self.role
        error = catchable_as(error, type(cause))
        error.__cause__ = cause
        return error

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
        both = _derived_from(ours, kind)
        # The first built-in class knows how to make an instance. No __init__ runs: the exception's own may need
        # arguments that nobody here has.
        builtin: Any = next(base for base in both.__mro__ if base.__module__ == "builtins")
        made: WorkerError = builtin.__new__(both, *error.args)
        made.args = error.args
        vars(made).update(vars(error))
        return made
    except Exception:  # a class that cannot be subclassed, or refuses to be
        logger.debug("no error can be an instance of %r too", kind, exc_info=True)
        return error


@functools.lru_cache(maxsize=256)
def _derived_from(ours: Any, kind: Any) -> Any:
    def __reduce__(self: WorkerError) -> Any:
        return _unpickled, (ours, encode(kind), self.args, vars(self))

    def __copy__(self: WorkerError) -> WorkerError:
        builtin: Any = next(base for base in type(self).__mro__ if base.__module__ == "builtins")
        made: WorkerError = builtin.__new__(type(self), *self.args)
        made.args = self.args
        vars(made).update(vars(self))
        return made

    members = {
        "__module__": ours.__module__,
        "__qualname__": ours.__qualname__,
        "__doc__": ours.__doc__,
        "__init__": lambda self, *args, **kwargs: None,
        "__str__": Exception.__str__,  # some classes make their text of attributes that are missing here
        "__repr__": Exception.__repr__,
        "__copy__": __copy__,
        "__reduce__": __reduce__,
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
    while cause is not None and cause not in errors and can_encode(cause):
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


def _shorten(text: str) -> str:
    half = MAX_TEXT // 2
    return (
        text
        if len(text) <= MAX_TEXT
        else f"{text[:half]}\n... (shortened; {len(text):,} characters in total) ...\n{text[-half:]}"
    )


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


_DISPATCH = os.path.dirname(os.path.abspath(dispatch.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class RankResult(NamedTuple):
    """How a call ended on one rank. A frame has it as a plain tuple, whose pickle names no class.

    Attributes:
        rank: the rank.
        layout_version: version of the worker's `LayoutReport` after the call.
        value: the encoded result, if this rank collects. None also stands for a result of None.
        rows: rows of the result, if it is a batch.
        not_rows: why the result cannot be cut into rows.
        empty: whether all rows of this rank's shard were padding, so that there is nothing to join.
        nbytes: bytes of the encoded result.
        clock: the fields of a `Clock`; None if the method raised.
        failure: the exception that the method raised.
        kept: whether the value stays on the rank until somebody asks for it.
        died: why the rank's process has ended, if it did before the call ended.
    """

    rank: int
    layout_version: int = 0
    value: Encoded | None = None
    rows: int | None = None
    not_rows: str | None = None
    empty: bool = False
    nbytes: int = 0
    clock: tuple[float, float, float, float] | None = None
    failure: Failure | None = None
    kept: bool = False
    died: str | None = None
