"""A future cut again: each rank of the consumer brings the answers that overlap its rows, and no other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.modes import Join
from single_controller.base.later import LaterPart
from single_controller.base.receipt import Receipt


class Recorded:
    """Answers of ranks that lie in this process, and what was asked for."""

    method = "produce"

    def __init__(self, parts):
        self.parts = parts
        self.asked = []

    def receipts(self, timeout=None):
        return [Receipt(rank, rows=len(part)) for rank, part in enumerate(self.parts)]

    def values(self, which, *, private):
        self.asked += which
        return [self.parts[k].clone() if private else self.parts[k] for k in which]


def taken(parts, consumers):
    """By consumer: its rows, and the producers that it asked."""
    for index in range(consumers):
        answers = Recorded(parts)
        part = LaterPart(answers, Join.ROWS, "rows", index, consumers, "ragged").take(private=True)
        yield part.value, set(answers.asked)


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    consumers=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_every_consumer_brings_what_overlaps_its_rows(lengths, consumers):
    rows = np.arange(sum(lengths))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    parts = [torch.from_numpy(part.copy()) for part in np.split(rows, np.cumsum(lengths)[:-1])]
    wanted = np.array_split(rows, consumers)
    for (value, asked), mine in zip(taken(parts, consumers), wanted, strict=True):
        assert value.tolist() == mine.tolist()
        # Without rows one answer is looked at, for the type of an empty shard.
        assert asked == set(owner[mine].tolist()) if len(mine) else len(asked) == 1


@pytest.mark.parametrize(
    ("producers", "consumers", "each"),
    [(4, 4, [1, 1, 1, 1]), (4, 2, [2, 2]), (2, 4, [1, 1, 1, 1]), (3, 5, [1, 2, 1, 2, 1])],
)
def test_how_many_answers_each_rank_brings(producers, consumers, each):
    parts = list(torch.arange(60).reshape(60, 1).chunk(producers))
    assert [len(asked) for _, asked in taken(parts, consumers)] == each


def test_what_is_taken_is_the_consumers_own():
    parts = [torch.zeros(4), torch.zeros(4)]
    for value, _ in taken(parts, 2):
        value.fill_(1)
    assert not any(part.any() for part in parts)
