"""Order rows so that shards with equal numbers of rows have about equal numbers of tokens."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import Any

from dispatch.batch import share_rows
from workers.data.rollout_data import rows_of

_EXCHANGES = 4  # per part; the greedy assignment is already good, and more exchanges gain little


def balanced_order(lengths: Sequence[int], parts: int) -> list[int]:
    """Order rows so that "ragged" sharding into ``parts`` gives each shard about as many tokens.

    Longest first, each row goes to the shard with the fewest tokens that has room. Then rows of the largest shard are
    exchanged with others while that helps. The largest shard never has more tokens than in the given order; if nothing
    better is found, that order is kept. The result is deterministic.

    Args:
        lengths: number of tokens of each row.
        parts: number of shards.

    Returns:
        A permutation of the rows. Rows of one shard keep their order.

    Raises:
        ValueError: ``parts`` is less than 1.
    """
    if parts < 1:
        raise ValueError(f"balanced_order: parts={parts!r}; expected at least 1")
    lengths = [int(length) for length in lengths]
    shares = share_rows(len(lengths), parts, "ragged")
    as_they_are = [list(range(*share.ranges[0])) for share in shares]
    spread = _exchange(lengths, _fill(lengths, [share.rows for share in shares]))
    if _fullest(lengths, as_they_are) <= _fullest(lengths, spread):
        spread = as_they_are
    return [row for part in spread for row in sorted(part)]


def balanced_rows(data: Any, parts: int) -> Any:
    """Return rollout data in the order of `balanced_order`, counting the real tokens of each row."""
    return rows_of(data, balanced_order(data["attention_mask"].bool().sum(1).tolist(), parts))


def _fullest(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> int:
    return max(sum(lengths[row] for row in part) for part in parts)


def _fill(lengths: Sequence[int], room: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in room]
    open_parts = [(0, k) for k, size in enumerate(room) if size]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens, k = heapq.heappop(open_parts)
        parts[k].append(row)
        if len(parts[k]) < room[k]:
            heapq.heappush(open_parts, (tokens + lengths[row], k))
    return parts


def _exchange(lengths: Sequence[int], parts: list[list[int]]) -> list[list[int]]:
    """Exchange rows between the largest and the smallest part while that reduces their difference."""
    tokens = [sum(lengths[row] for row in part) for part in parts]
    for _ in range(_EXCHANGES * len(parts)):
        high = max(range(len(parts)), key=lambda k: (tokens[k], -k))
        low = min(range(len(parts)), key=lambda k: (tokens[k], k))
        gap = tokens[high] - tokens[low]
        theirs = sorted((lengths[row], row) for row in parts[low])
        best = (gap, -1, -1)
        for row in parts[high]:
            at = bisect.bisect_left(theirs, (lengths[row] - gap / 2, -1))
            for length, other in theirs[max(0, at - 1) : at + 1]:
                best = min(best, (abs(gap - 2 * (lengths[row] - length)), row, other))
        left, row, other = best
        if left == gap:
            break
        parts[high][parts[high].index(row)] = other
        parts[low][parts[low].index(other)] = row
        tokens[high] -= lengths[row] - lengths[other]
        tokens[low] += lengths[row] - lengths[other]
    return parts
