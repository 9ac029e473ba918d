"""What type checkers know of a registered method. Nothing here does anything at run time.

At run time `register` returns the function it was given. For mypy and pyright the function becomes a
`RegisteredMethod`: on a worker it is the plain method, and ``group.on(Scorer.score)`` learns from it what the group's
method takes and returns. The dispatch mode decides that, so each `DispatchMode` carries two decorator types, for
blocking and for non-blocking methods.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Out_co = TypeVar("Out_co", covariant=True)
Blocking_co = TypeVar("Blocking_co", covariant=True)


class RegisteredMethod(Protocol[P, R_co, Q, Out_co, Blocking_co]):
    """A method under `register`, as its class has it.

    It is a protocol, not a class, so that pyright lets a subclass override the method without repeating `register`.

    Type parameters: the method's own parameters and result; the group's parameters and result; ``Literal[False]`` if a
    call from the group returns a future.
    """

    def __call__(self, worker: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, worker: None, owner: type, /) -> RegisteredMethod[P, R_co, Q, Out_co, Blocking_co]: ...

    @overload
    def __get__(self, worker: object, owner: type | None = None, /) -> Callable[P, R_co]: ...


# In each decorator type the first overload is for ``async def``, whose result is what it returns when awaited.


class ToList(Protocol[Blocking_co]):
    """The decorator of modes that take the method's arguments and return a list."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> RegisteredMethod[P, Coroutine[Any, Any, R], P, list[R], Blocking_co]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], R], /
    ) -> RegisteredMethod[P, R, P, list[R], Blocking_co]: ...


class ItemsToList(Protocol[Blocking_co]):
    """The decorator of modes that take a list for each argument and return a list. Arguments are not checked: the type
    system cannot turn each parameter's type ``T`` into ``list[T]``."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> RegisteredMethod[P, Coroutine[Any, Any, R], ..., list[R], Blocking_co]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], R], /
    ) -> RegisteredMethod[P, R, ..., list[R], Blocking_co]: ...


class ToValue(Protocol[Blocking_co]):
    """The decorator of modes that take the method's arguments and return one value of the method's type."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> RegisteredMethod[P, Coroutine[Any, Any, R], P, R, Blocking_co]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> RegisteredMethod[P, R, P, R, Blocking_co]: ...


class ToAny(Protocol):
    """The decorator of modes that checkers know nothing of."""

    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> RegisteredMethod[P, R, ..., Any, Any]: ...


Blocks = Literal[True]
ReturnsFuture = Literal[False]
