"""Functions of the user's that a configuration names by dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from workers.train.read_args import TrainArgsError


def function_at(path: str, key: str) -> Callable[..., Any]:
    """The function ``package.module.name``.

    Args:
        path: its dotted path.
        key: the configuration's key, for the message.

    Raises:
        TrainArgsError: there is no such module, or no such function in it.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise TrainArgsError(f"args.{key}={path!r}: it is a dotted path such as 'my_package.my_module.my_function'")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TrainArgsError(f"args.{key}={path!r} cannot be had: {error}") from error
    if not callable(found):
        raise TrainArgsError(f"args.{key}={path!r} is {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function
