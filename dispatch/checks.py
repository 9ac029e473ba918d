"""Checks of options that several modules share."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def check_seconds(name: str, value: object) -> float:
    """Return a time limit; a `ValueError` unless it is a positive number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} is a positive number of seconds, got {value!r}")
    return float(value)


def is_count(value: object, least: int = 1) -> bool:
    """Whether a value is an integer of at least ``least``. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: Any, least: int = 1, hint: str = "") -> int:
    """Return a number of things; a `ValueError` unless it is an integer of at least ``least``. ``name`` says of which
    option (``world_size``, or ``grow(count)``), and ``hint`` ends the message, if it needs more."""
    if not is_count(value, least):
        raise ValueError(f"{name}={value!r}: expected an integer of at least {least}{hint}")
    return int(value)


def check_amounts(name: str, amounts: object) -> dict[str, float]:
    """Return amounts of resources; a `ValueError` unless they are a dict of names and positive numbers."""
    if not isinstance(amounts, Mapping):
        raise ValueError(f"{name} is a dict of resources and amounts ({{'disk': 1}}), got {amounts!r}")
    for key, amount in amounts.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not isinstance(key, str) or not number or not amount > 0:
            raise ValueError(f"{name}: {key!r}: {amount!r} is not a positive amount of a resource")
    return dict(amounts)


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known name, or all of them."""
    public = [known for known in names if not known.startswith("_")]
    close = difflib.get_close_matches(name, public, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(public) or 'none'}"


def naming_keywords(function: F, of_class: bool = False) -> F:
    """Have a function say which keyword argument may have been meant by a misspelt one. It takes no keywords of other
    names than its parameters'. ``of_class``: it is a constructor, whose class is named in the message."""
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for keyword in [keyword for keyword in kwargs if keyword not in parameters][:1]:
            name = type(args[0]).__name__ if of_class else function.__name__
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{suggestion(keyword, parameters)}")
        return function(*args, **kwargs)

    return cast(F, checked)
