"""Fetching a deferred argument: each consumer fetches only the results that overlap its rows."""

import numpy as np
import pytest
import torch
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from dispatch.batch import Deferred
from dispatch.modes import Join
from dispatch.plan import DeferredArgument
from single_controller.base.joining import locate
from single_controller.base.result import RankResult


class RecordedResults:
    """Results in this process, and a record of which were fetched."""

    label = "produce"

    def __init__(self, tensors):
        self.tensors = tensors
        self.fetched = []

    def wait(self, timeout=None):
        return [RankResult(rank, rows=len(tensor)) for rank, tensor in enumerate(self.tensors)]

    def values(self, which, *, private):
        self.fetched += which
        return [self.tensors[k].clone() if private else self.tensors[k] for k in which]


class Producer(Deferred):
    """A future used as an argument. Its results are passed to `locate` directly."""

    def check_argument(self):
        pass


def fetch(tensors, consumers):
    """For each consumer: its rows, and which results it fetched."""
    results = RecordedResults(tensors)
    for located in locate(results, Join.ROWS, DeferredArgument(Producer(), "rows", 0, consumers, "ragged")):
        results.fetched = []
        value = located.fetch(results, private=True)
        assert (located.total, located.rows, located.real) == (sum(map(len, tensors)), len(value), len(value))
        yield value, set(results.fetched)


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    consumers=st.integers(1, 8),
)
@examples(50, 200)
def test_each_consumer_fetches_the_results_that_overlap_its_rows(lengths, consumers):
    rows = np.arange(sum(lengths))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    tensors = [torch.from_numpy(tensor.copy()) for tensor in np.split(rows, np.cumsum(lengths)[:-1])]
    wanted = np.array_split(rows, consumers)
    for (value, fetched), mine in zip(fetch(tensors, consumers), wanted, strict=True):
        assert value.tolist() == mine.tolist()
        # Without rows, one result is fetched for the type of the empty shard.
        assert fetched == set(owner[mine].tolist()) if len(mine) else len(fetched) == 1


@pytest.mark.parametrize(
    ("producers", "consumers", "each"),
    [(4, 4, [1, 1, 1, 1]), (4, 2, [2, 2]), (2, 4, [1, 1, 1, 1]), (3, 5, [1, 2, 1, 2, 1])],
)
def test_number_of_results_each_consumer_fetches(producers, consumers, each):
    tensors = list(torch.arange(60).reshape(60, 1).chunk(producers))
    assert [len(fetched) for _, fetched in fetch(tensors, consumers)] == each


def test_fetched_values_belong_to_the_consumer():
    tensors = [torch.zeros(4), torch.zeros(4)]
    for value, _ in fetch(tensors, 2):
        value.fill_(1)
    assert not any(tensor.any() for tensor in tensors)
