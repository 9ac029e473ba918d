"""Move the tensors of a value to another device."""

from __future__ import annotations

from typing import Any

from dispatch.batch import fields_of, rebuild


def move(value: Any, device: str) -> Any:
    """Return a value with its tensors on a torch device, such as ``"cuda:1"``; a RuntimeError if torch has no such one.

    Calls the ``to`` method of every object that has one (tensors, TensorDicts, verl's DataProto, a tokenizer's
    encoding), also inside dicts, lists, tuples and named tuples. Everything else, arrays included, stays unchanged.
    """
    if callable(getattr(type(value), "to", None)):
        return value.to(device)
    parts = fields_of(value)
    if parts is not None:
        return rebuild(value, {key: move(part, device) for key, part in parts})
    if type(value) in (list, tuple):
        return type(value)(move(part, device) for part in value)
    return value


def check_device_name(what: str, device: str | None) -> None:
    """Raise a `ValueError` unless a device is None or a non-empty string. Whether it exists, only the process that uses
    it knows."""
    if device is not None and (not isinstance(device, str) or not device.strip()):
        raise ValueError(f"{what} is a torch device string like 'cuda', or None; got {device!r}")


def check_device(what: str, device: str | None) -> None:
    """Raise a `ValueError` unless a device is available in this process."""
    check_device_name(what, device)
    if device is not None:
        try:
            import torch

            torch.empty(0, device=device)
        except Exception as error:  # torch raises several types for this, AssertionError among them
            raise ValueError(f"{what}: {device!r} is not available in this process: {error}") from None
