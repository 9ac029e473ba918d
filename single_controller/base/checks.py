"""Checks of options that several places take."""

from __future__ import annotations

from collections.abc import Mapping


def check_seconds(name: str, value: object) -> float:
    """A time limit.

    Raises:
        ValueError: the value is no positive number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} is a positive number of seconds, got {value!r}")
    return float(value)


def check_amounts(name: str, amounts: object) -> dict[str, float]:
    """Resources by name.

    Raises:
        ValueError: the value is no dict of names and positive numbers.
    """
    if not isinstance(amounts, Mapping):
        raise ValueError(f"{name} is a dict of resources and amounts ({{'disk': 1}}), got {amounts!r}")
    for key, amount in amounts.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not isinstance(key, str) or not number or not amount > 0:
            raise ValueError(f"{name}: {key!r}: {amount!r} is no positive amount of a resource")
    return dict(amounts)
