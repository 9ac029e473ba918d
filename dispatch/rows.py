"""Which rows of a batch belong to which shard. Arithmetic on row numbers only."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple, get_args

from dispatch.errors import BatchError

Uneven = Literal["error", "pad", "ragged"]
UNEVEN: tuple[str, ...] = get_args(Uneven)


class Share(NamedTuple):
    """The rows of one shard.

    Attributes:
        ranges: half-open ranges of row numbers, in order; more than one only with padding.
        real: number of rows without padding. The padding is at the end and repeats earlier rows.
        rows: number of rows with padding.
    """

    ranges: tuple[tuple[int, int], ...]
    real: int
    rows: int


def share_rows(rows: int, shards: int, uneven: str = "error") -> list[Share]:
    """Divide ``rows`` over ``shards``, in order.

    Args:
        rows: rows of the whole batch.
        shards: number of shards, at least 1.
        uneven: what to do if the rows do not divide. ``"error"`` raises; ``"pad"`` repeats rows from the start until
            they do; ``"ragged"`` makes shards whose sizes differ by at most one, larger ones first.

    Raises:
        BatchError: the rows do not divide and ``uneven`` is ``"error"``.
    """
    size, rest = divmod(rows, shards)
    if rest == 0:
        return [Share(((k * size, (k + 1) * size),), size, size) for k in range(shards)]
    if uneven == "ragged":
        starts = [k * size + min(k, rest) for k in range(shards + 1)]
        return [Share(((a, b),), b - a, b - a) for a, b in itertools.pairwise(starts)]
    if uneven == "pad":
        size += 1
        return [_padded_share(rows, k * size, (k + 1) * size) for k in range(shards)]
    raise BatchError(f"{rows} rows do not divide over {shards}")


def _padded_share(rows: int, start: int, stop: int) -> Share:
    """Rows ``start:stop`` of the batch repeated endlessly."""
    real = max(0, min(stop, rows) - start)
    padded = stop - start
    ranges: list[tuple[int, int]] = []
    while start < stop:
        first = start % rows
        last = min(rows, first + stop - start)
        ranges.append((first, last))
        start += last - first
    return Share(tuple(ranges), real, padded)
