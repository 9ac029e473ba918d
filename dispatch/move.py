"""move: the tensors of a value, on another device."""

from __future__ import annotations

from typing import Any

from dispatch.batch import fields_of, rebuild


def move(value: Any, device: str) -> Any:
    """The value with its tensors on a device.

    Whatever has a ``to`` method (a tensor, a TensorDict, verl's DataProto, a tokenizer's encoding) is asked for it;
    dicts, lists, tuples and named tuples are gone through. All else is given back as it is, arrays too.

    Args:
        value: anything.
        device: as torch names it: ``"cuda"``, ``"cuda:1"``, ``"cpu"``.

    Raises:
        RuntimeError: torch's, where there is no such device.
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
    """Raise unless a device has a name that torch could know; whether it exists, its process finds out.

    Raises:
        ValueError: it is no string, or an empty one.
    """
    if device is not None and (not isinstance(device, str) or not device.strip()):
        raise ValueError(f"{what} is a device as torch names it, like 'cuda', or None; got {device!r}")


def check_device(what: str, device: str | None) -> None:
    """Raise unless this process has a device.

    Raises:
        ValueError: it has none of that name.
    """
    check_device_name(what, device)
    if device is not None:
        try:
            import torch

            torch.empty(0, device=device)
        except Exception as error:  # torch has several for this, AssertionError among them
            raise ValueError(f"{what}: {device!r} is not to be had in this process: {error}") from None
