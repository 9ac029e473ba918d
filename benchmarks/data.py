"""The data of the cases, and the checks that it arrived whole. Needs torch, which every contender has."""

from __future__ import annotations

from typing import Any

import torch

ROWS = 1024


def batch(nbytes: int) -> torch.Tensor:
    """A float32 batch of 1,024 rows and about ``nbytes`` bytes, different in every row."""
    columns = nbytes // 4 // ROWS
    made = torch.empty(ROWS, columns)
    made.copy_(torch.arange(columns) % 251)
    return made.add_(torch.arange(ROWS).unsqueeze(1))


def shard(nbytes: int, k: int, of: int) -> torch.Tensor:
    """Rows of shard ``k`` of ``of``, in memory of their own."""
    rows = ROWS // of
    columns = nbytes // 4 // ROWS
    made = torch.empty(rows, columns)
    made.copy_(torch.arange(columns) % 251)
    return made.add_(torch.arange(k * rows, (k + 1) * rows).unsqueeze(1))


def digest(value: torch.Tensor) -> tuple[tuple[int, ...], float, float]:
    """What stands for a tensor's content: shape, sum, and a sum that depends on the order of rows. Reads every byte."""
    by_row = value.sum(dim=1, dtype=torch.float64)
    order = torch.arange(1, len(value) + 1, dtype=torch.float64)
    return tuple(value.shape), float(by_row.sum()), float(by_row @ order)


def ends(value: Any) -> tuple[tuple[int, ...], float, float]:
    """Shape, first and last item of a tensor: what a method looks at while the clock runs."""
    return tuple(value.shape), float(value[0, 0]), float(value[-1, -1])


def same(got: Any, wanted: Any) -> None:
    """Raise ValueError unless both are the same: tensors or lists of tensors by content, other values by ``==``."""
    if isinstance(got, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in got):
        pieces = wanted.chunk(len(got)) if isinstance(wanted, torch.Tensor) else wanted
        for k, (item, piece) in enumerate(zip(got, pieces, strict=True)):
            if not torch.equal(item, piece):
                raise ValueError(f"wrong result: item {k} differs")
    elif isinstance(got, torch.Tensor):
        if not torch.equal(got, wanted):
            raise ValueError("wrong result: the tensors differ")
    elif got != wanted:
        raise ValueError(f"wrong result: got {got!r}, wanted {wanted!r}")
