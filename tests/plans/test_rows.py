"""share_rows: which rows belong to which shard."""

import pytest
from plan_helpers import expected_rows

from dispatch.batch import Share, share_rows
from dispatch.errors import BatchError


def numbers(share: Share) -> list[int]:
    return [row for start, stop in share.ranges for row in range(start, stop)]


@pytest.mark.parametrize("uneven", ["error", "pad", "ragged"])
def test_divisible_rows_are_split_equally_by_every_rule(uneven):
    assert share_rows(6, 3, uneven) == [Share(((0, 2),), 2, 2), Share(((2, 4),), 2, 2), Share(((4, 6),), 2, 2)]


@pytest.mark.parametrize("uneven", ["error", "pad", "ragged"])
def test_zero_rows_are_divisible(uneven):
    shares = share_rows(0, 4, uneven)
    assert len(shares) == 4
    assert all(numbers(share) == [] and share.rows == share.real == 0 for share in shares)


@pytest.mark.parametrize(("rows", "shards"), [(1, 2), (5, 2), (7, 8), (9, 8)])
def test_error_rejects_rows_that_do_not_divide(rows, shards):
    with pytest.raises(BatchError, match=f"{rows} rows.*{shards}"):
        share_rows(rows, shards, "error")


def test_error_is_the_default():
    with pytest.raises(BatchError):
        share_rows(3, 2)


def test_pad_repeats_rows_from_the_start():
    shares = share_rows(5, 4, "pad")
    assert [numbers(share) for share in shares] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert [share.real for share in shares] == [2, 2, 1, 0]
    assert {share.rows for share in shares} == {2}


def test_pad_repeats_a_single_row():
    shares = share_rows(1, 3, "pad")
    assert [numbers(share) for share in shares] == [[0], [0], [0]]
    assert [share.real for share in shares] == [1, 0, 0]


def test_ragged_puts_larger_shards_first():
    assert [numbers(share) for share in share_rows(5, 3, "ragged")] == [[0, 1], [2, 3], [4]]


def test_ragged_gives_empty_shards_when_there_are_few_rows():
    shares = share_rows(2, 4, "ragged")
    assert [numbers(share) for share in shares] == [[0], [1], [], []]
    assert [share.real for share in shares] == [1, 1, 0, 0]


@pytest.mark.parametrize("shards", range(1, 14))
def test_small_cases_match_a_reference_that_counts_rows(shards):
    for rows in range(30):
        for uneven in ("pad", "ragged"):
            shares = share_rows(rows, shards, uneven)
            cut, real = expected_rows(rows, shards, uneven)
            assert [numbers(share) for share in shares] == cut
            assert [share.rows for share in shares] == [len(rows_of_shard) for rows_of_shard in cut]
            assert [share.real for share in shares] == real


@pytest.mark.parametrize("shards", range(1, 14))
def test_guarantees_of_each_rule(shards):
    for rows in range(1, 40):
        padded = share_rows(rows, shards, "pad")
        assert len({share.rows for share in padded}) == 1, "all shards of a padded batch have one size"
        assert padded[0].rows * shards - rows < shards, "no more padding than needed"
        assert [row for share in padded for row in numbers(share)[: share.real]] == list(range(rows))
        ragged = [share.rows for share in share_rows(rows, shards, "ragged")]
        assert max(ragged) - min(ragged) <= 1
        assert sum(ragged) == rows
