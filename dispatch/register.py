"""@register: what a worker method declares about itself."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from dispatch.modes import Dispatch, DispatchMode, Execute, ExecuteMode, known_execute_mode, known_mode
from dispatch.move import check_device_name
from dispatch.rows import UNEVEN, Uneven

P = ParamSpec("P")
R = TypeVar("R")

Inputs = Literal["copy", "view"]
INPUTS: tuple[str, ...] = get_args(Inputs)

_ATTRIBUTE = "__dispatch_registration__"
_RAY_TRACING = "_ray_trace_ctx"


@dataclass(frozen=True)
class Registration:
    """What `register` was told. See there for each field."""

    mode: DispatchMode
    execute: ExecuteMode = Execute.ALL
    blocking: bool = True
    materialize_futures: bool = True
    uneven: Uneven = "error"
    inputs: Inputs = "copy"
    concurrent: bool = False
    device: str | None = None
    replay: bool = False


def label(role: str | None, method: str) -> str:
    """How messages name a method: with its role, where a process has several workers."""
    return method if role is None else f"{role}.{method}"


@dataclass(frozen=True)
class MethodSpec:
    """One method of one worker class, as a group calls it.

    Attributes:
        owner: name of the worker class.
        name: name of the method.
        function: the function as the user wrote it.
        takes_self: False for a static method.
        registration: what it declared; `UNREGISTERED` for a method called only through ``execute_*``.
        role: which of several workers in one process has it; None where there is one.
    """

    owner: str
    name: str
    function: Callable[..., Any]
    registration: Registration
    takes_self: bool = True
    role: str | None = None

    @property
    def label(self) -> str:
        """How messages name it."""
        return label(self.role, self.name)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The method's signature as a caller sees it: without ``self``."""
        return plain_signature(self.function, skip_first=self.takes_self)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that the arguments fit the method.

        Raises:
            TypeError: they do not; the message is Python's, with the method's name.
        """
        check_arguments(self.label, self.signature, args, kwargs)

    def parameter(self, slot: int | str) -> str:
        """The name of the parameter that a positional index or a keyword fills."""
        if isinstance(slot, str):
            return slot
        for position, parameter in enumerate(self.signature.parameters.values()):
            if parameter.kind is parameter.VAR_POSITIONAL:
                return f"*{parameter.name}[{slot - position}]"
            if position == slot:
                return parameter.name
        return f"argument {slot}"


def register(
    dispatch_mode: DispatchMode | str | dict[str, Any] = Dispatch.ALL_TO_ALL,
    execute_mode: ExecuteMode | str = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    uneven: Uneven = "error",
    inputs: Inputs = "copy",
    concurrent: bool = False,
    device: str | None = None,
    replay: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare how a worker method is called from a group. The method itself is returned unchanged.

    Args:
        dispatch_mode: how the arguments are cut over the ranks and whose answers the driver gets: a member of
            `Dispatch`, its name, or ``{"dispatch_fn": f, "collect_fn": g}`` with
            ``f(group, *args, **kwargs) -> (args, kwargs)`` and ``g(group, answers) -> result``.
        execute_mode: who runs it. With ``Execute.RANK_ZERO`` rank 0 gets the arguments as they are, in every
            dispatch mode, and the driver gets the bare value.
        blocking: whether ``group.m(x)`` waits; if not it returns a future, as ``group.m.remote(x)`` always does.
        materialize_futures: whether a future given as an argument reaches the method as its value. If not,
            the method gets the future itself and asks it for ``.result()``.
        uneven: what to do with a batch whose rows do not divide over the shards. ``"error"``: a
            `DispatchError`; ``"pad"``: rows are repeated, and dropped again from the joined answer;
            ``"ragged"``: shards whose sizes differ by at most one, possibly empty.
        inputs: ``"copy"`` gives the method tensors and arrays of its own. ``"view"`` gives it the memory that
            all ranks of a node share, without a copy. It must then never write into them, in place or through
            a view of them (``x.add_(1)``, ``x[0] = 1``): nothing stops it, and every other reader sees it.
        concurrent: take an ``async def`` method (or a short plain one) out of the order in which calls run on
            a rank: it may begin while an earlier call still runs. The other methods of such a worker then run
            in a thread of their own instead of the process's main thread.
        device: where the method gets its tensors, ``"cuda"`` for example. Wherever they were before, they travel as
            CPU tensors and stay so by default. With ``inputs="view"`` they go to the device without a copy before.
        replay: ``group.restart()`` makes the latest successful call of this method again, after the constructors:
            for what brings a worker into its state, ``init_model`` or ``load_checkpoint``. The driver keeps that call's
            arguments, as they are; with replays of several methods they are made in the order of those calls. Calls
            count that were made by the group which restarts: not by its copies in other processes.

    Raises:
        ValueError: an unknown mode or option (the message lists the known ones), when the class is defined.
        TypeError: what is decorated is no function, or an option has the wrong type.
    """
    if inspect.isfunction(dispatch_mode):
        raise TypeError("write @register() with parentheses: @register(dispatch_mode=Dispatch.ONE_TO_ALL)")
    for name, value, known in (("uneven", uneven, UNEVEN), ("inputs", inputs, INPUTS)):
        if value not in known:
            raise ValueError(f"register({name}={value!r}): known are {', '.join(map(repr, known))}")
    check_device_name("register(device=...)", device)
    for name, flag in (
        ("blocking", blocking),
        ("materialize_futures", materialize_futures),
        ("concurrent", concurrent),
        ("replay", replay),
    ):
        if not isinstance(flag, bool):
            raise TypeError(f"register({name}=...) is True or False, got {flag!r}")
    registration = Registration(
        mode=known_mode(dispatch_mode),
        execute=known_execute_mode(execute_mode),
        blocking=blocking,
        materialize_futures=materialize_futures,
        uneven=uneven,
        inputs=inputs,
        concurrent=concurrent,
        device=device,
        replay=replay,
    )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if not inspect.isfunction(function):
            wrapped = isinstance(function, (staticmethod, classmethod))
            hint = f"; put @register below @{type(function).__name__}" if wrapped else ""
            raise TypeError(f"@register decorates a method of a worker class, got {function!r}{hint}")
        setattr(function, _ATTRIBUTE, registration)
        return function

    return decorate


def plain_signature(function: Callable[..., Any], *, skip_first: bool) -> inspect.Signature:
    """A function's signature as its author wrote it: without ``self``, and without what Ray adds for tracing."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
    return signature.replace(parameters=[p for p in parameters if p.name != _RAY_TRACING])


def check_arguments(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that arguments fit a signature.

    Raises:
        TypeError: they do not; the message is Python's, with the name before and the signature behind.
    """
    parameters = signature.parameters.values()
    if not (parameters or args or kwargs):
        return
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        for keyword in kwargs:  # before what is missing: a misspelt keyword is both
            if keyword not in signature.parameters:
                close = difflib.get_close_matches(keyword, signature.parameters, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise TypeError(
                    f"{name}() got an unexpected keyword argument {keyword!r}; {hint}its signature is {name}{signature}"
                )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}; its signature is {name}{signature}") from None


UNREGISTERED = Registration(Dispatch.ONE_TO_ALL)
"""What holds for a method that is called through ``execute_*`` without being registered."""


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """The registered methods of a class, by name. An override without @register keeps its base's declaration."""
    specs = (method_spec(cls, name) for name in _attribute_names(cls))
    return {spec.name: spec for spec in specs if spec is not None and spec.registration is not UNREGISTERED}


def method_spec(cls: type, name: str) -> MethodSpec | None:
    """The method of a class, registered or not; None when the class has no function of that name."""
    found = inspect.getattr_static(cls, name, None)
    function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    if not inspect.isfunction(function):
        return None
    registration = getattr(function, _ATTRIBUTE, None) or next(
        (inherited for base in cls.__mro__ if (inherited := _declared_in(base, name)) is not None),
        UNREGISTERED,
    )
    return MethodSpec(cls.__name__, name, function, registration, not isinstance(found, staticmethod))


def _declared_in(cls: type, name: str) -> Registration | None:
    found = cls.__dict__.get(name)
    return getattr(getattr(found, "__func__", found), _ATTRIBUTE, None)


def _attribute_names(cls: type) -> list[str]:
    """All attribute names in the order in which the classes define them, bases first; no property is run."""
    return list(dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)))
