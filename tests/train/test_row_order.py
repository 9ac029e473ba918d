"""RowOrder: which row comes at a position. Permutations are checked as sets and by chi-square, shares by counting."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.data.row_order import BLOCK, RowOrder, shuffled


@pytest.mark.parametrize("size", [*range(1, 40), 64, 100, 997, 1000, 1024, 4097])
def test_shuffled_is_a_permutation(size):
    for key in (0, 1, 2**63):
        assert sorted(shuffled(index, size, key) for index in range(size)) == list(range(size))


def test_all_orders_of_four_rows_are_about_equally_likely():
    orders = Counter(tuple(shuffled(index, 4, key * 0x9E3779B97F4A7C15) for index in range(4)) for key in range(4800))
    assert set(orders) == set(itertools.permutations(range(4)))
    chi_square = sum((count - 200) ** 2 / 200 for count in orders.values())
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


@pytest.mark.parametrize("size", [1000, 12345])
def test_neighbours_are_not_neighbours_any_more(size):
    order = [shuffled(index, size, 5) for index in range(size)]
    kept = sum(b - a == 1 for a, b in itertools.pairwise(order))
    assert kept < 8  # one is expected
    place = Counter(value * 10 // size for value in order[: size // 10])  # the first tenth is from everywhere
    assert max(place.values()) < 1.6 * size / 100 and min(place.values()) > 0.5 * size / 100


def test_order_is_the_same_in_every_version():
    """A run that continues with a newer version must find its rows: these numbers must not change."""
    order = RowOrder([3, 7], seed=1)
    assert [order.at(position) for position in range(10)] == [
        *((1, 1), (0, 0), (1, 5), (1, 3), (0, 1), (1, 4), (1, 2), (0, 2), (1, 0), (1, 6))
    ]


def test_large_sizes_need_no_memory():
    size = 10**12
    order = RowOrder([size], seed=3)
    found = {order.at(position)[1] for position in range(2000)}
    assert len(found) == 2000 and max(found) > 0.9 * size and min(found) < 0.1 * size


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 5), st.booleans())
def test_each_epoch_has_each_row_once(sizes, seed, shuffle):
    order = RowOrder(sizes, seed=seed, shuffle=shuffle, epochs=3)
    every = [(source, row) for source, size in enumerate(sizes) for row in range(size)]
    for epoch in range(3):
        found = [order.at(epoch * len(every) + index) for index in range(len(every))]
        assert sorted(found) == every
        assert shuffle or found == every
    with pytest.raises(IndexError, match=f"{3 * len(every)} positions"):
        order.at(3 * len(every))


def test_epochs_and_seeds_have_orders_of_their_own():
    one, other = RowOrder([50], seed=0), RowOrder([50], seed=1)
    epochs = [tuple(one.at(50 * epoch + index)[1] for index in range(50)) for epoch in range(4)]
    assert len({*epochs, tuple(other.at(index)[1] for index in range(50))}) == 5


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "weights", [[2, 1], [1, 1, 1], [0.7, 0.3], [5, 3, 2], [0.123, 0.877], [1e-9, 1], [0.0006, 0.0014]]
)
def test_each_block_has_the_shares(weights, shuffle):
    sizes = [7, 20, 11][: len(weights)]
    order = RowOrder(sizes, weights=weights, shuffle=shuffle, seed=4)
    block = len(order.block)
    exact = {(2, 1): 3, (1, 1, 1): 3, (0.7, 0.3): 10, (5, 3, 2): 10, (0.123, 0.877): 1000}
    assert block == exact.get(tuple(weights), block) <= BLOCK + len(weights)
    for number in range(3):
        counts = Counter(order.at(number * block + place)[0] for place in range(block))
        for source, weight in enumerate(weights):
            assert counts[source] / block == pytest.approx(weight / sum(weights), abs=2 / BLOCK)
            assert counts[source] >= 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_with_weights_each_source_has_epochs_of_its_own(shuffle):
    sizes = [5, 8]
    order = RowOrder(sizes, weights=[3, 1], shuffle=shuffle, seed=2)
    drawn = [[], []]
    for position in range(400):
        source, row = order.at(position)
        drawn[source].append(row)
    assert [len(rows) for rows in drawn] == [300, 100]
    for rows, size in zip(drawn, sizes, strict=True):
        for begin in range(0, len(rows) - size, size):
            epoch = rows[begin : begin + size]
            assert sorted(epoch) == list(range(size)) and (shuffle or epoch == list(range(size)))
    assert order.epoch(400) == 60  # the small source, which is repeated most


def test_without_shuffling_sources_alternate_evenly():
    order = RowOrder([4, 4], weights=[3, 1], shuffle=False)
    assert [order.at(position)[0] for position in range(8)] in ([0, 0, 1, 0] * 2, [0, 1, 0, 0] * 2)


@pytest.mark.parametrize(
    "weights, said",
    [
        ([1], "2 sources"),
        ([1, 0], "not a number above 0"),
        ([1, float("nan")], "above 0"),
        ([-1, 2], "above 0"),
        (["a", 1], "'a'"),
    ],
)
def test_bad_weights_are_refused(weights, said):
    with pytest.raises(ValueError, match=said):
        RowOrder([3, 3], weights=weights)


def test_epochs_and_weights_together_are_refused():
    with pytest.raises(ValueError, match="both set"):
        RowOrder([3, 3], weights=[1, 1], epochs=1)
