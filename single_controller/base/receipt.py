"""What a rank sends back when a call on it has ended, whatever the outcome."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass
from typing import Any

import dispatch
from dispatch.errors import SingleControllerError
from dispatch.register import label
from single_controller.base.errors import StartError, WorkerError
from single_controller.base.stats import Clock

LOST_PEER_SIGNS = (
    "gloo",
    "NCCL",
    "Connection reset by peer",
    "Connection closed by peer",
    "Connection refused",
    "Broken pipe",
)
"""Found in the text of an error that may only be the echo of another rank's death."""


LONGEST_TEXT = 20_000
"""Characters of an exception's text, and of its traceback, that travel."""


@dataclass(slots=True)
class Failure:
    """An exception on a rank, in parts that always pickle.

    Attributes:
        rank: the rank.
        host: its host.
        method: the method.
        cause_type: qualified name of the exception's type.
        message: its text.
        remote_traceback: its traceback, as text.
        when: seconds since the epoch, by the worker's clock.
        cause: the exception, packed by the engine, or None when it does not pickle.
        ours: the exception is one of this library's, about the call itself: raised as it is.
        role: of the worker, where several are in the process.
    """

    rank: int
    host: str
    method: str
    cause_type: str
    message: str
    remote_traceback: str
    when: float
    cause: Any = None
    ours: bool = False
    role: str | None = None

    @classmethod
    def of(
        cls, error: BaseException, rank: int, host: str, method: str, cause: Any, role: str | None = None
    ) -> Failure:
        """From an exception that was just caught."""
        kind = type(error)
        return cls(
            rank,
            host,
            method,
            f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__,
            _shortened(_text(error)),
            _shortened(remote_traceback(error)),
            time.time(),
            cause,
            isinstance(error, SingleControllerError) and _raised_by_us(error),
            role,
        )

    @property
    def may_be_echo(self) -> bool:
        """Whether this looks like the effect of another rank's death: a collective that lost its peers."""
        frames = [line for line in self.remote_traceback.splitlines() if line.lstrip().startswith('File "')]
        in_collective = bool(frames) and "torch/distributed/" in frames[-1]
        return in_collective or any(sign in self.message for sign in LOST_PEER_SIGNS)

    def error(self, cause: BaseException | None, *, starting: bool = False) -> Exception:
        """The exception that the driver raises for this failure."""
        if self.ours and isinstance(cause, SingleControllerError):
            return cause
        where = "__init__" if starting else self.method
        kind = StartError if starting else WorkerError
        error = kind(
            f"{label(self.role, where)}() raised {self.cause_type} on rank {self.rank} ({self.host}): "
            f"{self.message}\n\n{self.remote_traceback.rstrip()}",
            rank=self.rank,
            host=self.host,
            method=where,
            cause_type=self.cause_type,
            remote_traceback=self.remote_traceback,
        )
        error.role = self.role
        error.__cause__ = cause
        return error


def remote_traceback(error: BaseException) -> str:
    """The traceback as text, from the user's first frame on: how the call got there is no news to anybody."""
    trace = error.__traceback__
    while trace is not None and _is_plumbing(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    except Exception:  # an exception that cannot even be printed
        return "".join(traceback.format_tb(trace or error.__traceback__)) + f"{type(error).__qualname__}\n"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__qualname__} whose text cannot be had>"


def _shortened(text: str) -> str:
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]}\n... {len(text):,} characters ...\n{text[-half:]}"


def _is_plumbing(filename: str) -> bool:
    return filename.startswith((_OURS, _DISPATCH)) or os.path.join("ray", "util", "tracing", "") in filename


def _raised_by_us(error: BaseException) -> bool:
    """Whether no user code was running: the error is about the call itself."""
    trace = error.__traceback__
    while trace is not None:
        if not _is_plumbing(trace.tb_frame.f_code.co_filename):
            return False
        trace = trace.tb_next
    return True


_DISPATCH = os.path.dirname(os.path.abspath(dispatch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(slots=True)
class Receipt:
    """How a call ended on one rank.

    Attributes:
        rank: the rank.
        standing: version of the worker's `Standing`.
        failure: None when the method returned.
        value: the packed answer, where the driver waits for it and this rank collects.
        rows: rows of the answer, if it is a batch.
        not_rows: why the answer has no rows, if it cannot be cut at all.
        empty: all of this rank's rows were padding, so there is no answer to join.
        returned: bytes of the packed answer.
        clock: when the rank did what.
    """

    rank: int
    standing: int = 0
    failure: Failure | None = None
    value: Any = None
    rows: int | None = None
    not_rows: str | None = None
    empty: bool = False
    returned: int = 0
    clock: Clock | None = None
