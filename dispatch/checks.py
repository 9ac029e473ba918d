"""Checks of options that several modules share."""

from __future__ import annotations

from collections.abc import Mapping


def check_count(name: str, value: object, least: int = 1) -> int:
    """Check a number of things.

    Raises:
        ValueError: the value is not an integer of at least ``least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is an integer >= {least}, got {value!r}")
    return value


def check_seconds(name: str, value: object) -> float:
    """Check a time limit.

    Raises:
        ValueError: the value is not a positive number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} is a positive number of seconds, got {value!r}")
    return float(value)


def check_amounts(name: str, amounts: object) -> dict[str, float]:
    """Check amounts of resources by name.

    Raises:
        ValueError: the value is not a dict of names and positive numbers.
    """
    if not isinstance(amounts, Mapping):
        raise ValueError(f"{name} is a dict of resources and amounts ({{'disk': 1}}), got {amounts!r}")
    for key, amount in amounts.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not isinstance(key, str) or not number or not amount > 0:
            raise ValueError(f"{name}: {key!r}: {amount!r} is not a positive amount of a resource")
    return dict(amounts)
