"""Errors about the shape of a call: arguments that cannot be sharded, and results that cannot be joined."""

from __future__ import annotations

import copy
from typing import Any


class SingleControllerError(Exception):
    """Base class of every error that this library raises on purpose.

    Every subclass pickles: the message is ``args[0]``, and everything else is a plain attribute.

    Args:
        message: the text.
        about: attributes that the class declares; its own defaults otherwise.

    Attributes:
        consumer: the method whose call failed only because another call, which computes one of its arguments, failed
            with this error. The group of the consumer is not broken by it. None for a call's own error.
    """

    consumer: str | None = None

    def __init__(self, message: str = "", **about: Any) -> None:
        super().__init__(message)
        for name, value in about.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
            setattr(self, name, tuple(value) if isinstance(value, list) else value)  # not the caller's own list

    def of_consumer(self, consumer: str) -> SingleControllerError:
        """The error of a call of the method ``consumer`` that needs the result of the call that raised this one, which
        becomes its cause. It has the same type, message and attributes, which say where the first error was. A note
        says what did not run."""
        error = copy.copy(self)
        error.add_note(f"{consumer}() did not run, because this error failed its deferred argument")
        error.consumer = consumer
        error.__cause__ = self
        return error

    def add_note(self, note: str) -> None:
        self.__notes__ = [*getattr(self, "__notes__", ())]  # its own: the copies of an error share a list
        super().add_note(note)


class DispatchError(SingleControllerError, ValueError):
    """The arguments of a call cannot be sharded over the ranks. Nothing was sent.

    Attributes:
        method: name of the worker method, without parentheses.
        argument: name of the offending parameter, or None if no single parameter is at fault.
    """

    method: str | None = None
    argument: str | None = None


class ResultError(SingleControllerError):
    """The ranks returned, but a result is lost, or the results cannot be joined or freed of their padding.

    Attributes:
        method: name of the worker method that computed the result, without parentheses.
        rank: the rank whose result it is, if one rank's result is at fault.
        host: the host of that rank, if it is known.
    """

    method: str | None = None
    rank: int | None = None
    host: str | None = None


class BatchError(ValueError):
    """A value cannot be measured, cut or joined. Callers turn it into a `DispatchError` or a `ResultError`."""
