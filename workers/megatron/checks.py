"""Checks of what users hand over: names, and the tensors of a state dict."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check that every name is known.

    Raises:
        ValueError: one is not; the message has the closest.
    """
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{where} does not know {name!r}{hint}")


def check_state_dict(
    where: str,
    state_dict: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    optional: Collection[str] = (),
) -> None:
    """Check that a state dict has exactly the tensors that it should, before any is taken.

    Args:
        where: the function, for the message.
        state_dict: what was given.
        shapes: name -> shape of what should be there.
        optional: names that may be missing.

    Raises:
        ValueError: a name is missing or unknown, or a tensor has another shape.
    """
    if unknown := state_dict.keys() - shapes.keys():
        check_names(where, sorted(unknown), shapes)
    missing = [name for name in shapes if name not in state_dict and name not in optional]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{where}: {missing[0]!r}{more} missing")
    for name in state_dict:
        if (shape := tuple(state_dict[name].shape)) != shapes[name]:
            raise ValueError(f"{where}: {name!r} is {shape}, not {shapes[name]}")
