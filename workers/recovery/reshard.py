"""Which rows of whose shard become which rows of whose shard, when state is sharded over another number of ranks. Pure
functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor -> its shape in one shard."""


class Move(NamedTuple):
    """Rows of a tensor that go from one shard to another.

    Attributes:
        name: the tensor.
        source: number of the shard before.
        target: number of the shard now.
        source_row: first row in the former.
        target_row: first row in the latter.
        rows: how many; None for a tensor that is not sharded, which is copied whole.
    """

    name: str
    source: int
    target: int
    source_row: int
    target_row: int
    rows: int | None


def moves(before: Sequence[Shapes], after: Sequence[Shapes]) -> Iterator[Move]:
    """Yield what to move, by tensor.

    A tensor is sharded along dim 0 if its shards have as many rows in all before and after. Shards may be empty. Other
    tensors must have the same shape in all shards.

    Args:
        before: by shard, the shapes of all tensors.
        after: likewise, of the same tensors.

    Raises:
        ValueError: the tensors differ, or cannot be made of the former shards.
    """
    for name, shape in before[0].items():
        if any(name not in shapes for shapes in (*before, *after)) or len(after[0]) != len(before[0]):
            raise ValueError(f"not all ranks have the same tensors: {name!r}, for example")
        old, new = [shapes[name] for shapes in before], [shapes[name] for shapes in after]
        if shape and sum(one[0] for one in old) == sum(one[0] for one in new):
            if {one[1:] for one in (*old, *new)} != {shape[1:]}:
                raise ValueError(f"the shards of {name!r} have different shapes: {old} before, {new} now")
            for source, target, source_row, target_row, rows in _overlaps([s[0] for s in old], [s[0] for s in new]):
                yield Move(name, source, target, source_row, target_row, rows)
        elif set(old) | set(new) == {shape}:
            yield from (Move(name, target % len(old), target, 0, 0, None) for target in range(len(new)))
        else:
            raise ValueError(f"{name!r} is not sharded along dim 0: {old} before, {new} now")


def _overlaps(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (shard before, shard now, row in the former, row in the latter, rows) from the numbers of rows."""
    old, new = [0, *accumulate(before)], [0, *accumulate(after)]
    source = 0
    for target in range(len(after)):
        row = new[target]
        while row < new[target + 1]:
            while old[source + 1] <= row:
                source += 1
            end = min(old[source + 1], new[target + 1])
            yield source, target, row - old[source], row - new[target], end - row
            row = end
