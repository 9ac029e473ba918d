"""The methods of a worker class by name, and the options of one call."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import FunctionType

from dispatch.batch import UNEVEN, Uneven
from dispatch.checks import check_seconds
from dispatch.errors import DispatchError
from dispatch.move import check_device
from dispatch.register import MethodSpec, method_spec, registered_methods
from single_controller.call.worker import Worker


@dataclass(frozen=True)
class CallOptions:
    """Options of one call. None leaves what the method declared.

    Attributes:
        timeout: seconds until the call is late and the group broken.
        blocking: whether the call waits for its result.
        uneven: what to do with rows that do not divide.
        device: where the tensors of the result are wanted.
    """

    timeout: float | None = None
    blocking: bool | None = None
    uneven: Uneven | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_seconds("timeout", self.timeout)
        if self.blocking is not None and not isinstance(self.blocking, bool):
            raise ValueError(f"blocking is True or False, got {self.blocking!r}")
        if self.uneven is not None and self.uneven not in UNEVEN:
            raise ValueError(f"uneven={self.uneven!r}: known are {', '.join(map(repr, UNEVEN))}")
        check_device("device", self.device)


DECLARED = CallOptions()
"""What the method declared."""


class MethodTable:
    """The methods of one worker class.

    Args:
        cls: the class.
        role: its role, if several classes share a process.

    Attributes:
        registered: name -> method, of those under @register.
    """

    def __init__(self, cls: type[Worker], role: str | None = None) -> None:
        self.cls = cls
        self.role = role
        self.registered = {name: replace(spec, role=role) for name, spec in registered_methods(cls).items()}

    def check_names(self, reserved: Iterable[str]) -> None:
        """Check that no registered method has a reserved name.

        Raises:
            DispatchError: one has.
        """
        clashes = sorted(set(reserved) & set(self.registered))
        if clashes:
            raise DispatchError(
                f"{self.cls.__name__} registers {', '.join(f'{name}()' for name in clashes)}, but the worker "
                "group uses this name itself; rename the method",
                method=clashes[0],
            )

    def any(self, name: str) -> MethodSpec:
        """A method, registered or not.

        Raises:
            AttributeError: the class has no such method.
        """
        spec = self.registered.get(name) or method_spec(self.cls, name)
        if spec is None:
            raise AttributeError(f"{self.cls.__name__} has no method {name!r}{suggestion(name, dir(self.cls))}")
        return replace(spec, role=self.role)

    def name_of(self, method: object) -> str:
        """The name of a method that was given as a function, ``Scorer.score``.

        Functions are compared by module and qualified name: a class that was sent to another process comes back as a
        copy.

        Raises:
            TypeError: it is not a function of a class.
            DispatchError: the class does not have it.
        """
        if not inspect.isfunction(method):
            raise TypeError(
                f"group.on() takes a method of the worker class, as in group.on(Scorer.score); got {method!r}"
            )
        name = method.__name__
        for base in self.cls.__mro__:
            found = vars(base).get(name)
            function = getattr(found, "__func__", found)
            if inspect.isfunction(function) and _identity(function) == _identity(method):
                return name
        raise DispatchError(
            f"{method.__qualname__}() is not a method of the group's worker class {self.cls.__name__}, which registers "
            f"{', '.join(self.registered) or 'no methods'}",
            method=name,
        )

    def missing(self, name: str, others: Iterable[str]) -> AttributeError:
        """The error for a name that is not a registered method. ``others`` are the group's names."""
        owner = self.cls.__name__
        if method_spec(self.cls, name) is not None:
            return AttributeError(
                f"{owner}.{name}() is not registered: put @register(...) on it, or call "
                f"group.execute_all_sync({name!r}, ...)"
            )
        return AttributeError(f"the group has no method {name!r}, and neither has {owner}{suggestion(name, others)}")


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known name, or all of them."""
    public = [known for known in names if not known.startswith("_")]
    found = difflib.get_close_matches(name, public, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; known are {', '.join(public)}"


def _identity(function: FunctionType) -> tuple[str, str]:
    return function.__module__, function.__qualname__
