"""@register: what a worker method declares about its calls."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, get_args, overload

from dispatch.batch import UNEVEN, Uneven
from dispatch.checks import naming_keywords
from dispatch.modes import Dispatch, DispatchMode, Execute, ExecuteMode, check_uneven, known_execute_mode, known_mode
from dispatch.move import check_device_name
from dispatch.typed import Blocks, ReturnsFuture, ToAny, ToValue

D = TypeVar("D")

Inputs = Literal["copy", "view"]
INPUTS: tuple[str, ...] = get_args(Inputs)

CALL_OPTIONS = ("timeout", "blocking", "uneven", "device")
"""The options of one call, of `RemoteMethod.options`. They are often passed as arguments by mistake."""

_ATTRIBUTE = "__dispatch_registration__"
_RAY_TRACING = "_ray_trace_ctx"


@dataclass(frozen=True)
class Registration:
    """The arguments of `register`. See there for each field."""

    mode: DispatchMode
    execute: ExecuteMode = Execute.ALL
    blocking: bool = True
    materialize_futures: bool = True
    uneven: Uneven = "error"
    inputs: Inputs = "copy"
    concurrent: bool = False
    device: str | None = None
    replay: bool = False


class RegisterOptions(TypedDict, total=False):
    """The keyword-only options of `register`, for its overloads."""

    uneven: Uneven
    inputs: Inputs
    concurrent: bool
    device: str | None
    replay: bool


def label(role: str | None, method: str) -> str:
    """How messages name a method: ``<role>.<method>`` if several workers share a process."""
    return method if role is None else f"{role}.{method}"


class Attribute(NamedTuple):
    """A step from a dataclass to one of its fields; see `dispatch.plan.Parameter`."""

    name: str


@dataclass(frozen=True)
class MethodSpec:
    """One method of one worker class, as a group calls it."""

    owner: str  # name of the worker class
    name: str
    function: Callable[..., Any]  # the function as the user wrote it
    # What it declared; `UNREGISTERED` for a method that is called only through ``execute_*``
    registration: Registration
    takes_self: bool = True  # False for a static method
    role: str | None = None  # role of the worker, if several share the process; otherwise None
    label: str = field(init=False)  # how messages name the method: with its role, if it has one

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", label(self.role, self.name))

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The method's signature without ``self``."""
        return plain_signature(self.function, skip_first=self.takes_self)

    @property
    def of_library(self) -> bool:
        """Whether the function is not the user's."""
        return self.function.__module__.partition(".")[0] in ("dispatch", "single_controller", "workers")

    def parameter(self, key: Any) -> str:
        """The name of the parameter that a positional index or a keyword fills, or of a part of it."""
        if isinstance(key, str):
            return key
        if isinstance(key, tuple):
            steps = (f".{step.name}" if isinstance(step, Attribute) else f"[{step!r}]" for step in key[1:])
            return self.parameter(key[0]) + "".join(steps)
        for position, parameter in enumerate(self.signature.parameters.values()):
            if parameter.kind is parameter.VAR_POSITIONAL:
                return f"*{parameter.name}[{key - position}]"
            if position == key:
                return parameter.name
        return f"argument {key}"


@overload
def register(
    dispatch_mode: DispatchMode[D, Any],
    execute_mode: ExecuteMode[Literal["all"]] = ...,
    blocking: Blocks = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> D: ...


@overload
def register(
    dispatch_mode: DispatchMode[Any, D],
    execute_mode: ExecuteMode[Literal["all"]] = ...,
    *,
    blocking: ReturnsFuture,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> D: ...


@overload
def register(
    dispatch_mode: DispatchMode[Any, Any] | str | dict[str, Any],
    execute_mode: ExecuteMode[Literal["rank zero"]],
    blocking: Blocks = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ToValue[Blocks]: ...


@overload
def register(
    dispatch_mode: DispatchMode[Any, Any] | str | dict[str, Any],
    execute_mode: ExecuteMode[Literal["rank zero"]],
    blocking: ReturnsFuture,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ToValue[ReturnsFuture]: ...


@overload
def register(
    dispatch_mode: DispatchMode[Any, Any] | str | dict[str, Any] = ...,
    execute_mode: ExecuteMode[Any] | str = ...,
    blocking: bool = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ToAny: ...


@naming_keywords
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
) -> Any:
    """Declare how a worker method is called from a group. Returns the method itself, unchanged.

    Type checkers infer from the decorated method what ``group.on(Scorer.score)`` takes and returns, if
    ``dispatch_mode`` is a member of `Dispatch` and ``blocking`` is a literal; see `typed`.

    Args:
        dispatch_mode: how the arguments are sharded over the ranks and which results the driver gets: a member of
            `Dispatch`, its name, or ``{"dispatch_fn": f, "collect_fn": g}`` with
            ``f(group, *args, **kwargs) -> (args, kwargs)`` and ``g(group, results) -> value``.
        execute_mode: which ranks run the method. With ``Execute.RANK_ZERO`` rank 0 gets the arguments unchanged, in
            every dispatch mode, and the driver gets its bare value.
        blocking: whether ``group.m(x)`` waits. Otherwise it returns a future, as ``group.m.remote(x)`` always does.
        materialize_futures: whether a future among the arguments reaches the method as its value. Otherwise the method
            gets the future itself and asks it for ``.result()``.
        uneven: what to do with a batch whose rows do not divide over the shards. ``"error"`` raises a `DispatchError`;
            ``"pad"`` repeats rows, and removes them again from the joined result; ``"ragged"`` makes shards whose sizes
            differ by at most one, possibly empty.
        inputs: ``"copy"`` gives the method tensors and arrays of its own. ``"view"`` gives it the memory that all ranks
            of a node share, without a copy. The method must never write to it, in place or through a view
            (``x.add_(1)``, ``x[0] = 1``): views are not write-protected, and every other reader sees the write.
        concurrent: whether a call may begin while an earlier call is still running on the rank, in a thread of its own.
            Use it for ``async def`` methods and for short plain ones. A rank runs up to 64 of these calls at once.
        device: the device to which the arguments' tensors are moved before the method runs, such as ``"cuda"``. Tensors
            travel as CPU tensors, wherever they were before, and otherwise stay so. With ``inputs="view"`` they are
            moved to the device without a copy on the host.
        replay: whether the latest successful call of this method is repeated on new workers after their constructors,
            in ``group.restart()``, ``replace()`` and ``grow()``. Use it for methods that create the state of a worker,
            such as ``init_model`` or ``load_checkpoint``. The driver keeps references to the arguments, not copies: do
            not modify them. Pass values instead of futures, because a large result of a future is lost when the rank
            that computed it ends. If several methods have such a call, these calls are repeated in their original
            order. Calls of the group's copies in other processes do not count.

    Raises:
        ValueError: a mode or option is unknown (the message lists the known ones), or ``uneven`` would have no
            effect because calls cut no batch into rows. Raised when the class is defined.
        TypeError: the decorated object is not a function, or an option has the wrong type.
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
    mode, execute = known_mode(dispatch_mode), known_execute_mode(execute_mode)
    check_uneven("register", uneven, mode, execute)
    registration = Registration(
        mode=mode,
        execute=execute,
        blocking=blocking,
        materialize_futures=materialize_futures,
        uneven=uneven,
        inputs=inputs,
        concurrent=concurrent,
        device=device,
        replay=replay,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.isfunction(function):
            wrapped = isinstance(function, (staticmethod, classmethod))
            hint = f"; put @register below @{type(function).__name__}" if wrapped else ""
            raise TypeError(f"@register decorates a method of a worker class, got {function!r}{hint}")
        setattr(function, _ATTRIBUTE, registration)
        return function

    return decorate


def plain_signature(function: Callable[..., Any], *, skip_first: bool) -> inspect.Signature:
    """A function's signature without ``self``, and without the parameter that Ray adds for tracing."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if skip_first and not (parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL):
        parameters = parameters[1:]  # a plain wrapper has no ``self`` to drop: it is in the wrapper's ``*args``
    return signature.replace(parameters=[p for p in parameters if p.name != _RAY_TRACING])


def check_arguments(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a `TypeError`, see `misfit`, unless arguments fit a signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise misfit(name, signature, kwargs, error) from None


def misfit(
    name: str, signature: inspect.Signature, kwargs: dict[str, Any], error: TypeError, options: Collection[str] = ()
) -> TypeError:
    """The error of a call of ``name`` whose arguments do not fit: Python's own, ``error``, with the signature added.
    Names in ``options`` are options of a call, which are not passed as arguments."""
    what = f"{error}; its"
    parameters = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        # A misspelled keyword also makes an argument missing, of which Python tells instead.
        for keyword in [keyword for keyword in kwargs if keyword not in parameters][:1]:
            close = difflib.get_close_matches(keyword, parameters, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            if keyword in options:
                hint = f"as an option it is .options({keyword}=...)(...); "
            what = f"got an unexpected keyword argument {keyword!r}; {hint}its"
    return TypeError(f"{name}() {what} signature is {name}{signature}")


def check_keywords(cls: type) -> None:
    """Have the constructor of a class say which keyword argument may have been meant by a misspelt one."""
    construct = vars(cls).get("__init__")
    if not inspect.isfunction(construct) or issubclass(cls, BaseException) or hasattr(construct, "__wrapped__"):
        return
    parameters = plain_signature(construct, skip_first=True).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return

    setattr(cls, "__init__", naming_keywords(construct, of_class=True))  # noqa: B010  (mypy forbids the assignment)


UNREGISTERED = Registration(Dispatch.ONE_TO_ALL)
"""The registration of a method that is called through ``execute_*`` without being registered."""


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """The registered methods of a class by name, in the order of definition, bases first. Evaluates no property. An
    override without @register keeps its base's declaration."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    specs = (method_spec(cls, name) for name in names)
    return {spec.name: spec for spec in specs if spec is not None and spec.registration is not UNREGISTERED}


def method_spec(cls: type, name: str) -> MethodSpec | None:
    """The method of a class, registered or not; None if the class has no function of that name."""
    found = inspect.getattr_static(cls, name, None)
    function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    if not inspect.isfunction(function):
        return None
    given = (vars(base).get(name) for base in cls.__mro__)
    declared = (getattr(getattr(one, "__func__", one), _ATTRIBUTE, None) for one in given)
    registration = next(filter(None, declared), UNREGISTERED)
    return MethodSpec(cls.__name__, name, function, registration, not isinstance(found, staticmethod))
