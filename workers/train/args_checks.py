"""Checks of the values of a training run's configuration, and the functions that it names."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import operator
from collections.abc import Callable
from typing import Any

from single_controller import SingleControllerError
from workers.train.registry import path_of


class TrainArgsError(SingleControllerError, ValueError):
    """A key of the configuration does not exist, or its value has the wrong type or is out of range."""


_WITHIN = {"of at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def check_value(name: str, item: dataclasses.Field[Any], value: Any) -> None:
    """Check a value against the choices and limits of its key."""
    choices = item.metadata["choices"]
    if value is None:
        return
    if choices and value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TrainArgsError(f"args.{name}={value!r}: expected one of {', '.join(map(repr, choices))}{hint}")
    limits = {word: limit for word, limit in item.metadata["limits"].items() if limit is not None}
    if not all(_WITHIN[word](value, limit) for word, limit in limits.items()):
        said = " and ".join(f"{word} {limit}" for word, limit in limits.items())
        raise TrainArgsError(f"args.{name}={value!r}: expected a number {said}")


def check_algorithm(args: Any) -> None:
    """Check the keys of the algorithm together. Registered names are replaced by paths, which the ranks can import."""
    for key in ("policy_loss_type", "advantage_estimator"):
        try:
            path = path_of(key, args[key])
        except ValueError as error:
            raise TrainArgsError(f"args.{key}={args[key]!r}: {error}") from None
        if not path.startswith("workers.train."):
            function_at(path, key)
            args[key] = path
    with_kl = ("gae", "reinforce_plus_plus")
    if args.kl_coef and args.advantage_estimator not in with_kl and "." not in args.advantage_estimator:
        raise TrainArgsError(
            f"args.kl_coef={args.kl_coef} needs advantage_estimator={' or '.join(map(repr, with_kl))}. To add the KL "
            "divergence to the loss, set kl_loss_coef"
        )
    if args.overlong_buffer_len > args.rollout_max_response_len:
        raise TrainArgsError(
            f"args.overlong_buffer_len={args.overlong_buffer_len} is more than rollout_max_response_len="
            f"{args.rollout_max_response_len}, the length at whose end it is"
        )
    bounds = ("rollout_correction_low", "rollout_correction_high", "rollout_rejection_low", "rollout_rejection_high")
    if args.rollout_correction is None:
        if given := [name for name in bounds if args[name] is not None]:
            raise TrainArgsError(f"args.{given[0]} needs rollout_correction")
        return
    if args.use_rollout_logprobs:
        raise TrainArgsError(
            "args.rollout_correction compares the rollout's log-probabilities with the trainer's, which "
            "use_rollout_logprobs=True does not compute; set only one of them"
        )
    from workers.train.corrections import correction_of

    try:
        correction_of(args)
    except ValueError as error:
        raise TrainArgsError(f"args.rollout_correction={args.rollout_correction!r}: {error}") from None


def function_at(path: str, key: str) -> Callable[..., Any]:
    """Import the function ``package.module.name``.

    Args:
        path: its dotted path.
        key: the configuration's key, for the message.

    Raises:
        TrainArgsError: there is no such module or function.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise TrainArgsError(f"args.{key}={path!r}: expected a dotted path such as 'my_package.my_module.my_function'")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TrainArgsError(f"args.{key}={path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise TrainArgsError(f"args.{key}={path!r} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def function_of(args: Any, key: str) -> Callable[..., Any]:
    """Return the function that a key names.

    Args:
        args: the configuration.
        key: "policy_loss_type" or "advantage_estimator".
    """
    return function_at(path_of(key, args[key]), key)
