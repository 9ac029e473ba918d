"""RowOrder: which row of which source comes at a position of a run. Pure, and the same in every process and version.

Positions count the rows of a run from 0. The row at a position follows from the sizes of the sources, their weights and
the seed alone, so a run needs to remember nothing but its position to continue, and no order is kept in memory.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from workers.seeds import mixed_seed

BLOCK = 1000
"""With weights: the most rows in which each source has its exact share."""

_ROUNDS = 8
_MASK = 2**64 - 1


def shuffled(index: int, size: int, key: int) -> int:
    """Return the element at ``index`` of a random permutation of ``range(size)``, without the other elements.

    A generalized Feistel cipher, repeated until its result is below ``size`` (Black and Rogaway 2002, Ciphers with
    Arbitrary Finite Domains). Its round function is the finalizer of SplitMix64 (Steele et al. 2014).

    Args:
        index: from 0 to ``size - 1``.
        size: number of elements.
        key: chooses the permutation; 64 bits.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(index, columns)
        for turn in range(0, _ROUNDS, 2):
            row = (row + _hash(key, turn, column)) % rows
            column = (column + _hash(key, turn + 1, row)) % columns
        index = row * columns + column
        if index < size:  # else outside of the elements; the cycle that it is on leads back to one of them
            return index


def _hash(key: int, turn: int, value: int) -> int:
    mixed = (key + 0x9E3779B97F4A7C15 * (turn + 1 + _ROUNDS * value)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


class RowOrder:
    """The order of the rows of several sources.

    Without weights the sources are one: each epoch has every row once, in an order of its own. With weights, each
    source is repeated in epochs of its own, as often as its share needs, and each `BLOCK` positions (or fewer, if the
    weights allow it) have exactly its share of rows.

    Args:
        sizes: number of rows of each source, at least 1.
        weights: of each source, in any unit; None for their sizes. Shares are rounded to 1 / `BLOCK`.
        shuffle: shuffle each epoch; otherwise rows come in their order, and with weights the sources alternate evenly.
        seed: of the shuffling.
        epochs: number of epochs; None for no end. Not with weights, with which sources have different epochs.

    Attributes:
        total: number of rows of all sources.
        length: number of positions; None for no end.
        block: for each position of a block, (source, how many rows of that source come before it in the block), without
            shuffling. Empty without weights.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
    ) -> None:
        self.sizes = list(sizes)
        self.ends = list(itertools.accumulate(sizes))
        self.total = self.ends[-1]
        self.shuffle, self.seed = shuffle, seed
        self.length = None if epochs is None else epochs * self.total
        self.shares = [] if weights is None else _shares(weights, len(sizes))
        if weights is not None and epochs is not None:
            raise ValueError(
                f"epochs={epochs} and weights={list(weights)} are both set, but with weights each source has epochs of "
                "its own; leave out one of them"
            )
        self.block = _spread(self.shares)
        self._key = functools.lru_cache(maxsize=64)(lambda *numbers: mixed_seed(seed, *numbers))
        self._sources_of_block = functools.lru_cache(maxsize=8)(self._shuffled_block)

    def at(self, position: int) -> tuple[int, int]:
        """Return (number of the source, number of the row in it); an `IndexError` after the last epoch."""
        if position < 0 or (self.length is not None and position >= self.length):
            raise IndexError(f"position {position}: the rows have {self.length} positions")
        if not self.block:
            epoch, index = divmod(position, self.total)
            if self.shuffle:
                index = shuffled(index, self.total, self._key(epoch))
            source = bisect.bisect_right(self.ends, index)
            return source, index - (self.ends[source] - self.sizes[source])
        number, place = divmod(position, len(self.block))
        source, before = self._sources_of_block(number)[place]
        epoch, index = divmod(number * self.shares[source] + before, self.sizes[source])
        return source, shuffled(index, self.sizes[source], self._key(epoch, source)) if self.shuffle else index

    def _shuffled_block(self, number: int) -> list[tuple[int, int]]:
        if not self.shuffle:
            return self.block
        size = len(self.block)
        drawn = [self.block[shuffled(place, size, self._key(number, -1))][0] for place in range(size)]
        return _numbered(drawn)

    def epoch(self, position: int) -> float:
        """Return how many epochs a position is; with weights, of the source that is repeated most."""
        if not self.block:
            return position / self.total
        blocks = position / len(self.block)
        return max(blocks * share / size for share, size in zip(self.shares, self.sizes, strict=True))


def _shares(weights: Sequence[float], sources: int) -> list[int]:
    """Return how many rows of a block each source has."""
    if len(weights) != sources:
        raise ValueError(f"weights={list(weights)}: there are {sources} sources, and each needs a weight")
    if wrong := [one for one in weights if not (isinstance(one, (int, float)) and math.isfinite(one) and one > 0)]:
        raise ValueError(f"weights={list(weights)}: {wrong[0]!r} is not a number above 0")
    simple = [Fraction(one).limit_denominator(BLOCK) for one in weights]  # 0.7 is not 7 / 10, but almost
    if all(simple):
        block = math.lcm(*((one / sum(simple)).denominator for one in simple))
        shares = [one / sum(simple) for one in simple]
        near = all(abs(a - b / math.fsum(weights)) < 0.5 / BLOCK for a, b in zip(shares, weights, strict=True))
        if block <= BLOCK and near:  # weights that are small themselves are not near to such fractions
            return [int(block * share) for share in shares]
    return [max(1, round(BLOCK * one / math.fsum(weights))) for one in weights]


def _spread(shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return the sources of a block, each spread evenly over it."""
    places = sorted(((rank + 0.5) / share, source) for source, share in enumerate(shares) for rank in range(share))
    return _numbered([source for _, source in places])


def _numbered(sources: Sequence[int]) -> list[tuple[int, int]]:
    """Return each source with the number of its occurrences before."""
    counts = [0] * (max(sources, default=0) + 1)
    numbered = []
    for source in sources:
        numbered.append((source, counts[source]))
        counts[source] += 1
    return numbered
