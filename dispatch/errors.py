"""Errors about the shape of a call: arguments that cannot be sharded, and results that cannot be joined."""

from __future__ import annotations


class SingleControllerError(Exception):
    """Base class of every error that this library raises on purpose.

    Every subclass pickles: the message is ``args[0]``, and everything else is a plain attribute.
    """


class DispatchError(SingleControllerError, ValueError):
    """The arguments of a call cannot be sharded over the ranks. Nothing was sent.

    Attributes:
        method: name of the worker method, without parentheses.
        argument: name of the offending parameter, or None if no single parameter is at fault.
    """

    def __init__(self, message: str, *, method: str | None = None, argument: str | None = None) -> None:
        super().__init__(message)
        self.method = method
        self.argument = argument


class ResultError(SingleControllerError):
    """The ranks returned, but their results cannot be joined, or their padding cannot be removed.

    Attributes:
        method: name of the worker method, without parentheses.
    """

    def __init__(self, message: str, *, method: str | None = None) -> None:
        super().__init__(message)
        self.method = method


class BatchError(ValueError):
    """A value cannot be measured, cut or joined. Callers turn it into a `DispatchError` or a `ResultError`."""
