"""The errors of a call's shape: what went in wrongly, and answers that do not fit together."""

from __future__ import annotations


class SingleControllerError(Exception):
    """Base class of every error that this library raises on purpose.

    Every subclass pickles: the message is ``args[0]``, and whatever else an error knows stands in plain
    attributes.
    """


class DispatchError(SingleControllerError, ValueError):
    """A call cannot be cut over the ranks. Nothing was sent.

    Attributes:
        method: name of the worker method, without parentheses.
        argument: name of the parameter at fault, or None when no single one is.
    """

    def __init__(self, message: str, *, method: str | None = None, argument: str | None = None) -> None:
        super().__init__(message)
        self.method = method
        self.argument = argument


class UnknownLayoutError(DispatchError):
    """The workers have not said where they stand, or not on that mesh."""


class ResultError(SingleControllerError):
    """The ranks answered, but the answers cannot be joined (or freed of padding) as the mode promises.

    Attributes:
        method: name of the worker method, without parentheses.
    """

    def __init__(self, message: str, *, method: str | None = None) -> None:
        super().__init__(message)
        self.method = method


class BatchError(ValueError):
    """A value cannot be measured, cut or joined. Callers turn it into Dispatch- or ResultError, with names."""
