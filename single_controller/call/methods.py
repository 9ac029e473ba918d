"""The registered methods of a group: RemoteMethod, its options, and the lookup of methods by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Generic, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast, overload

from dispatch.checks import check_seconds
from dispatch.errors import DispatchError
from dispatch.move import check_device
from dispatch.register import MethodSpec, method_spec, registered_methods
from dispatch.rows import UNEVEN, Uneven
from single_controller.call.future import WorkerFuture
from single_controller.call.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")
Called = TypeVar("Called")


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


Invoke = Callable[[MethodSpec, tuple[Any, ...], dict[str, Any], CallOptions], Any]


DECLARED = CallOptions()
"""What the method declared."""


class OtherOptions(TypedDict, total=False):
    """The options of `RemoteMethod.options` that do not change what a call returns, for type checkers."""

    timeout: float | None
    uneven: Uneven | None
    device: str | None


class RemoteMethod(Generic[P, T, Called]):
    """A registered method of a group's workers.

    ``group.m(x)`` calls it, ``group.m.remote(x)`` returns a future, ``group.m.options(timeout=60)(x)`` sets options for
    one call. It has the worker method's name, signature and docstring.

    Type parameters: the parameters, the call's value, and what calling returns: the value or a future of it.
    """

    def __init__(self, spec: MethodSpec, invoke: Invoke, options: CallOptions = DECLARED) -> None:
        self._spec = spec
        self._invoke = invoke
        self._options = options
        self.__name__ = spec.name
        self.__qualname__ = f"{spec.owner}.{spec.name}"
        self.__module__ = spec.function.__module__
        self.__doc__ = spec.function.__doc__

    @property
    def __signature__(self) -> Any:
        return self._spec.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Called:
        """Call the method on the group's workers."""
        return cast(Called, self._invoke(self._spec, args, kwargs, self._options))

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> WorkerFuture[T]:
        """Call the method and return a future at once."""
        future: WorkerFuture[T] = self._invoke(self._spec, args, kwargs, replace(self._options, blocking=False))
        return future

    @overload
    def options(self, *, blocking: None = ..., **others: Unpack[OtherOptions]) -> Self: ...

    @overload
    def options(self, *, blocking: Literal[True], **others: Unpack[OtherOptions]) -> RemoteMethod[P, T, T]: ...

    @overload
    def options(
        self, *, blocking: Literal[False], **others: Unpack[OtherOptions]
    ) -> RemoteMethod[P, T, WorkerFuture[T]]: ...

    @overload
    def options(self, *, blocking: bool | None, **others: Unpack[OtherOptions]) -> RemoteMethod[P, T, Any]: ...

    def options(
        self,
        *,
        timeout: float | None = None,
        blocking: bool | None = None,
        uneven: Uneven | None = None,
        device: str | None = None,
    ) -> Any:
        """Return the same method with options for the calls made through it.

        Args:
            timeout: seconds until the call is late: `CallTimeoutError`, and the group is broken.
            blocking: whether the call waits for its result or returns a future.
            uneven: ``"error"``, ``"pad"`` or ``"ragged"``, as in `register`.
            device: where to put the result's tensors, such as ``"cuda"``. By default they come back as CPU tensors,
                wherever the method had them.

        Raises:
            ValueError: an option has an invalid value.
        """
        given = {"timeout": timeout, "blocking": blocking, "uneven": uneven, "device": device}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return RemoteMethod(self._spec, self._invoke, replace(self._options, **changes))

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        # Makes inspect.isroutine() true, so that help(group.m) shows the method's own page.
        return self

    def __repr__(self) -> str:
        return f"<remote method {self.__qualname__}{self._spec.signature}, {self._spec.registration.mode!r}>"


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
