"""share_rows: which rows belong to which shard."""

import itertools

import pytest
from plan_helpers import expected_rows

from dispatch.batch import Share, share_rows
from dispatch.errors import BatchError


def numbers(share: Share) -> list[int]:
    return [row for start, stop in share.ranges for row in range(start, stop)]


@pytest.mark.parametrize(("rows", "shards"), [(1, 2), (5, 2), (7, 8), (9, 8)])
def test_rows_that_do_not_divide_are_an_error_by_default(rows, shards):
    with pytest.raises(BatchError, match=f"{rows} rows.*{shards}"):
        share_rows(rows, shards)


@pytest.mark.parametrize(
    ("rows", "shards", "uneven", "expected", "real"),
    [
        (5, 4, "pad", [[0, 1], [2, 3], [4, 0], [1, 2]], [2, 2, 1, 0]),
        (1, 3, "pad", [[0], [0], [0]], [1, 0, 0]),
        (5, 3, "ragged", [[0, 1], [2, 3], [4]], [2, 2, 1]),
        (2, 4, "ragged", [[0], [1], [], []], [1, 1, 0, 0]),
    ],
)
def test_pad_repeats_rows_from_the_start_and_ragged_puts_larger_shards_first(rows, shards, uneven, expected, real):
    shares = share_rows(rows, shards, uneven)
    assert [numbers(share) for share in shares] == expected
    assert [share.real for share in shares] == real


def test_small_cases_match_a_reference_that_counts_rows():
    for rows, shards, uneven in itertools.product(range(40), range(1, 14), ("pad", "ragged")):
        shares = share_rows(rows, shards, uneven)
        cut, real = expected_rows(rows, shards, uneven)
        assert [numbers(share) for share in shares] == cut, (rows, shards, uneven)
        assert [share.rows for share in shares] == [len(rows_of_shard) for rows_of_shard in cut]
        assert [share.real for share in shares] == real
        assert rows % shards or shares == share_rows(rows, shards, "error")
