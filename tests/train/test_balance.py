"""Equal numbers of rows, and about equal numbers of tokens."""

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.batch import share_rows
from workers.data.balance import balanced_order


def fullest(lengths, order, parts):
    return max(
        sum(lengths[row] for row in order[a:b])
        for share in share_rows(len(order), parts, "ragged")
        for a, b in share.ranges
    )


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 9))
def test_order_is_a_permutation_and_never_worse(lengths, parts):
    order = balanced_order(lengths, parts)
    assert sorted(order) == list(range(len(lengths)))
    assert fullest(lengths, order, parts) <= fullest(lengths, range(len(lengths)), parts)
    assert balanced_order(lengths, parts) == order
    for share in share_rows(len(order), parts, "ragged"):
        ((a, b),) = share.ranges
        assert order[a:b] == sorted(order[a:b])


@given(st.lists(st.integers(1, 20), min_size=2, max_size=8), st.integers(2, 3))
def test_order_is_close_to_the_optimum(lengths, parts):
    """Against all orders: at most 1.5 times the optimum; the worst of 30000 such cases was 1.25."""
    best = min(fullest(lengths, order, parts) for order in _splits(len(lengths), parts))
    assert fullest(lengths, balanced_order(lengths, parts), parts) <= best * 1.5


def _splits(rows, parts):
    """One order per way to divide the rows."""
    sizes = [share.rows for share in share_rows(rows, parts, "ragged")]

    def choose(rest, sizes):
        if not sizes:
            yield []
            return
        for chosen in itertools.combinations(rest, sizes[0]):
            for others in choose([row for row in rest if row not in chosen], sizes[1:]):
                yield [*chosen, *others]

    return choose(list(range(rows)), sizes)


def test_long_completions_are_balanced_within_one_percent():
    rng = random.Random(0)
    lengths = [min(8192, int(rng.lognormvariate(6, 1))) for _ in range(512)]
    lengths.sort()  # the worst possible order
    mean = sum(lengths) / 8
    begun = time.process_time()
    order = balanced_order(lengths, 8)
    assert time.process_time() - begun < 2
    assert fullest(lengths, range(512), 8) > 2 * mean
    assert fullest(lengths, order, 8) < 1.01 * mean


def test_no_rows_and_fewer_rows_than_ranks():
    assert balanced_order([], 3) == []
    assert balanced_order([5, 9], 4) == [0, 1]
    with pytest.raises(ValueError, match="parts=0"):
        balanced_order([1], 0)
