"""The data of the cases, and checks that it arrived unchanged. Needs torch, which every contender has."""

from __future__ import annotations

from typing import Any

import torch

ROWS = 1024


def batch(nbytes: int) -> torch.Tensor:
    """Return a float32 batch of 1,024 distinct rows and about ``nbytes`` bytes."""
    return shard(nbytes, 0, 1)


def shard(nbytes: int, k: int, of: int) -> torch.Tensor:
    """Return shard ``k`` of ``of`` of that batch, in its own memory."""
    rows = ROWS // of
    columns = nbytes // 4 // ROWS
    made = torch.empty(rows, columns)
    made.copy_(torch.arange(columns) % 251)
    return made.add_(torch.arange(k * rows, (k + 1) * rows).unsqueeze(1))


def expected(nbytes: int, of: int) -> tuple[list[Any], list[Any]]:
    """Return the `digest` and the `ends` of each shard of that batch."""
    shards = [shard(nbytes, k, of) for k in range(of)]
    return [digest(one) for one in shards], [ends(one) for one in shards]


def by_type(nbytes: int) -> dict[str, Any]:
    """Return the batch in several types, each of the same bytes: as one tensor, as four in a dict and in a TensorDict,
    and with the elements in rows of two lengths."""
    from tensordict import TensorDict

    whole = batch(nbytes)
    columns = {f"column {k}": part.contiguous() for k, part in enumerate(whole.chunk(4, dim=1))}
    ends_of_rows = torch.arange(ROWS + 1) * whole.shape[1]
    ends_of_rows[1::2] += whole.shape[1] // 2
    return {
        "a tensor": whole,
        "a dict": columns,
        "a TensorDict": TensorDict(columns, batch_size=[ROWS]),
        "a jagged tensor": torch.nested.nested_tensor_from_jagged(whole.flatten(), ends_of_rows),
    }


def digest(value: torch.Tensor) -> tuple[tuple[int, ...], float, float]:
    """Return a tensor's shape, its sum, and a sum that depends on the order of its rows. Reads every byte."""
    by_row = value.sum(dim=1, dtype=torch.float64)
    order = torch.arange(1, len(value) + 1, dtype=torch.float64)
    return tuple(value.shape), float(by_row.sum()), float(by_row @ order)


def ends(value: Any) -> tuple[tuple[int, ...], float, float]:
    """Return a tensor's shape and its first and last item. This is all that a timed method reads."""
    return tuple(value.shape), float(value[0, 0]), float(value[-1, -1])


def same(got: Any, wanted: Any) -> None:
    """Raise ValueError unless both are equal: tensors, and those in lists and dicts, by content, other values by
    ``==``."""
    if hasattr(got, "keys"):
        if type(got) is not type(wanted) or set(got.keys()) != set(wanted.keys()):
            raise ValueError(f"wrong result: got {type(got).__name__} with {list(got.keys())}")
        for key in wanted.keys():  # noqa: SIM118  (iterating a TensorDict yields its rows)
            same(got[key], wanted[key])
    elif isinstance(got, torch.Tensor) and got.is_nested:
        same([got.values(), got.offsets()], [wanted.values(), wanted.offsets()])
    elif isinstance(got, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in got):
        shards = wanted.chunk(len(got)) if isinstance(wanted, torch.Tensor) else wanted
        for k, (item, expected) in enumerate(zip(got, shards, strict=True)):
            if not torch.equal(item, expected):
                raise ValueError(f"wrong result: item {k} differs")
    elif isinstance(got, torch.Tensor):
        if not torch.equal(got, wanted):
            raise ValueError("wrong result: the tensors differ")
    elif got != wanted:
        raise ValueError(f"wrong result: got {got!r}, expected {wanted!r}")
