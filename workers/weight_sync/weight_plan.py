"""The plan of an update: who sends which part of which tensor to whom, in which order. Pure arithmetic, no torch.

Both sides say what they hold as boxes of the whole tensors: the train ranks' shards, and the slices that the rollout
workers' engines need. Receivers with the same slices are a *class*: they get the same bytes. The plan cuts the tensors
into ranges of rows of at most a bucket, deals these out to rounds of at most a bucket, and gives every part of a range
that a class needs to one of the ranks that hold it. Then no rank ever needs memory for more than its own shards and a
round.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, int], ...]
"""Part of a tensor: (begin, end) by dim."""


@dataclass(frozen=True)
class Shard:
    """A rank's part of a weight: a box of the whole tensor.

    Attributes:
        name: as in the Hugging Face model's ``state_dict()``.
        shape: of the whole tensor.
        begin: index of the box's first element, by dim.
        size: of the box, by dim; a rank has no shard of a tensor of which it has no element.
        dtype: of `read`'s result.
        read: returns the box as it is now, a tensor of shape ``size`` on its device. It may be a view of live memory,
            so it is valid until the weights change.
    """

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def box(self) -> Box:
        """Where it is in the whole tensor."""
        return tuple((begin, begin + size) for begin, size in zip(self.begin, self.size, strict=True))

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Shard:
        """Return the shard of a rank that has the whole tensor."""
        shape = tuple(tensor.shape)
        return cls(name, shape, (0,) * len(shape), shape, tensor.dtype, tensor.detach)


class Held(NamedTuple):
    """A tensor, as train ranks hold it.

    Attributes:
        shape: of the whole tensor.
        itemsize: bytes of an element.
        boxes: each part once, with the ranks that have it. They are disjoint, and together the whole tensor.
    """

    shape: tuple[int, ...]
    itemsize: int
    boxes: Mapping[Box, Sequence[int]]


class Piece(NamedTuple):
    """What one train rank sends of one tensor to one class of receivers in one round."""

    name: str
    box: Box


Round = dict[tuple[int, int], list[Piece]]
"""(train rank, class) -> what is sent. Pairs without pieces are left out."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def size_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(end - begin for begin, end in box)


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(end - begin for begin, end in box)


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes share; None if it has no elements."""
    shared = []
    for pair, (first, last) in zip(one, other, strict=True):
        begin, end = pair
        if begin < first or last < end:
            pair = begin, end = max(begin, first), min(end, last)
        if begin >= end:
            return None
        shared.append(pair)  # the same object where nothing is cut off: a plan makes millions of them
    return tuple(shared)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of a box in the tensor of the box around it."""
    return tuple(slice(begin - zero, end - zero) for (begin, end), (zero, _) in zip(box, outer, strict=True))


def check_cover(name: str, held: Held) -> None:
    """Raise a `ValueError` unless the boxes of a tensor are disjoint and leave nothing out."""
    boxes = list(held.boxes)
    missing = math.prod(held.shape) - sum(map(volume, boxes))
    if missing > 0:
        raise ValueError(f"the train ranks do not have {missing} of the {math.prod(held.shape)} elements of {name!r}")
    # Sorted by rows, only boxes that begin before this one ends can overlap it. Shards of rows form a chain, so few do.
    boxes.sort()
    for index, box in enumerate(boxes):
        for after in range(index + 1, len(boxes)):
            other = boxes[after]
            if box and other[0][0] >= box[0][1]:
                break
            if overlap(box, other) is not None:
                raise ValueError(f"train ranks hold overlapping parts of {name!r}: {box} and {other}")
    if missing:
        raise ValueError(f"parts of {name!r} reach beyond its shape {held.shape}")


def make_plan(held: Mapping[str, Held], classes: Sequence[Mapping[str, Box]], bucket_bytes: int) -> list[Round]:
    """Plan an update.

    Args:
        held: the tensors, in any order.
        classes: the slices of each class, by name; tensors that are not listed are needed whole.
        bucket_bytes: how much of the tensors a round has at most, unless a single row has more. (A tensor with the
            matrices of several experts is cut between them, or if one is larger, between its rows.)

    Returns:
        The rounds, in order. Each class gets each element that it needs exactly once.

    Raises:
        ValueError: see `check_cover`.
    """
    for name, one in held.items():
        check_cover(name, one)
    rounds: list[Round] = []
    left = 0
    turns: Counter[int] = Counter()  # by the first of the ranks with the same shard, so that they share the work
    for name, rows, nbytes in _ranges(held, bucket_bytes):
        if not rounds or nbytes > left:
            rounds.append({})
            left = bucket_bytes
        left -= nbytes
        for box, ranks in _overlapping(held[name], rows):
            turn = turns[ranks[0]]
            turns[ranks[0]] += 1
            for index, slices in enumerate(classes):
                part = overlap(box, slices[name]) if name in slices else box
                if part is not None:
                    rounds[-1].setdefault((ranks[(turn + index) % len(ranks)], index), []).append(Piece(name, part))
    return [one for one in rounds if one]


def divide_among_ranks(rounds: Sequence[Round], ranks: int) -> list[list[Round]]:
    """Return what each train rank sends, in as many rounds."""
    parts: list[list[Round]] = [[{} for _ in rounds] for _ in range(ranks)]
    for number, one in enumerate(rounds):
        for (rank, index), pieces in one.items():
            parts[rank][number][rank, index] = pieces
    return parts


def _ranges(held: Mapping[str, Held], bucket_bytes: int) -> Iterator[tuple[str, Box, int]]:
    """Cut the tensors into ranges of rows. The tensors of different ranks, such as pipeline stages, come in turn, so
    that all ranks have something to send in each round."""
    queues: dict[int, list[str]] = {}
    for name, one in held.items():
        if math.prod(one.shape):  # there is nothing to send of an empty tensor
            queues.setdefault(min(min(ranks) for ranks in one.boxes.values()), []).append(name)
    for names in itertools.zip_longest(*queues.values()):
        for name in names:
            if name is not None:
                shape, itemsize, _ = held[name]
                for box in _divided(whole(shape), itemsize, bucket_bytes):
                    yield name, box, volume(box) * itemsize


def _divided(box: Box, itemsize: int, bucket_bytes: int, dim: int = 0) -> Iterator[Box]:
    """Divide a box along its first dim; then each of the experts in it that is still too large, along its rows."""
    nbytes = volume(box) * itemsize
    if nbytes <= bucket_bytes or dim >= max(len(box) - 1, min(len(box), 1)):
        yield box
        return
    first, last = box[dim]
    rows = max(1, bucket_bytes * (last - first) // nbytes)
    for begin in range(first, last, rows):
        part = (*box[:dim], (begin, min(begin + rows, last)), *box[dim + 1 :])
        yield from _divided(part, itemsize, bucket_bytes, dim + 1) if rows == 1 else (part,)


def _overlapping(one: Held, rows: Box) -> Iterator[tuple[Box, Sequence[int]]]:
    """Yield the parts of a range of rows, with the ranks that have them."""
    for box, ranks in one.boxes.items():
        part = overlap(box, rows) if rows else box
        if part is not None:
            yield part, ranks
