"""Fetching a deferred argument: each consumer fetches only the results that overlap its rows. Joining copies once."""

import copy

import numpy as np
import pytest
import torch
from depth import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from dispatch.batch import Deferred
from dispatch.modes import Join
from dispatch.plan import DeferredArgument
from single_controller.call.buffer_pool import buffer_pool
from single_controller.call.joining import RankResult, join_results, locate


class RecordedResults:
    """Results in this process, and a record of which were fetched."""

    label = "produce"

    def __init__(self, made):
        self.made = made
        self.fetched = []

    def wait(self, timeout=None):
        return [RankResult(rank, rows=rows_of(one)) for rank, one in enumerate(self.made)]

    def values(self, which, *, private):
        self.fetched += which
        return [copy.deepcopy(self.made[k]) if private else self.made[k] for k in which]


def rows_of(value):
    return len(value["x"] if isinstance(value, dict) else value)


class Producer(Deferred):
    """A future used as an argument. Its results are passed to `locate` directly."""


def fetch(tensors, consumers):
    """For each consumer: its rows, and which results it fetched."""
    results = RecordedResults(tensors)
    for located in locate(results, Join.ROWS, DeferredArgument(Producer(), "rows", 0, consumers, "ragged")):
        results.fetched = []
        value = located.fetch(results, private=True)
        assert (located.total, located.rows, located.real) == (sum(map(len, tensors)), len(value), len(value))
        yield value, set(results.fetched)


@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any), consumers=st.integers(1, 8))
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


def test_fetched_values_belong_to_the_consumer():
    tensors = [torch.zeros(4), torch.zeros(4)]
    for value, _ in fetch(tensors, 2):
        value.fill_(1)
    assert not any(tensor.any() for tensor in tensors)


MB = 1 << 20


def table(first, rows):
    return TensorDict(
        {"x": torch.full((rows, MB // 4), float(first)), "in": TensorDict({"y": torch.ones(rows)}, [rows])}, [rows]
    )


def jagged_table(first, rows):
    offsets = torch.arange(rows + 1) * (MB // 4)
    jagged = torch.nested.nested_tensor_from_jagged(torch.full((rows * MB // 4,), float(first)), offsets)
    return TensorDict({"x": jagged, "note": NonTensorData("n")}, [rows])


def mixed_dict(first, rows):
    x = torch.full((rows, MB // 4), float(first))
    return {
        "x": x,
        "text": ["t"] * rows,
        "images": [{"pixels": torch.ones(3), "size": np.ones(2)} for _ in range(rows)],
    }


def join_all(results):
    return join_results(results, results.wait(), Join.ROWS)


def join_deferred(results):
    (located,) = locate(results, Join.ROWS, DeferredArgument(Producer(), "rows", 0, 1, "ragged"))
    return located.fetch(results, private=True)


@pytest.mark.parametrize("joined", [join_all, join_deferred])
@pytest.mark.parametrize("make", [table, jagged_table, mixed_dict])
class TestOneCopy:
    """Results with tensors are fetched once, as views, and joined into buffers of the pool."""

    def test_each_result_is_fetched_once(self, make, joined):
        results = RecordedResults([make(0, 2), make(1, 3)])
        value = joined(results)
        assert results.fetched == [0, 1]
        rows = value["x"].unbind()
        assert [float(row[0]) for row in rows] == [0, 0, 1, 1, 1]
        assert all(len(row) == MB // 4 for row in rows)

    def test_rows_are_joined_into_a_reused_buffer(self, make, joined):
        buffer_pool.clear()
        value = joined(RecordedResults([make(0, 2), make(1, 3)]))
        assert buffer_pool.idle_bytes == 0
        del value
        assert buffer_pool.idle_bytes >= 5 * MB

    def test_result_has_memory_of_its_own(self, make, joined):
        made = [make(0, 2), make(1, 3)]
        for array in arrays(joined(RecordedResults(made))):
            array[:] = 777
        assert not any((array == 777).any() for one in made for array in arrays(one))


def arrays(value):
    """Every tensor and array in a value."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [value.values() if isinstance(value, torch.Tensor) and value.is_nested else value]
    if isinstance(value, (dict, TensorDict)):
        value = list(dict(value.items()).values())
    return [array for part in value for array in arrays(part)] if isinstance(value, list) else []


def test_values_without_tensors_are_copied_when_fetched():
    results = RecordedResults([[{"a": 1}], [{"a": 2}, {"a": 3}]])
    value = join_all(results)
    assert value == [{"a": 1}, {"a": 2}, {"a": 3}] and value[0] is not results.made[0][0]


def test_number_without_rows_beside_tensors_is_copied():
    made = [{"x": torch.ones(2), "scale": torch.tensor(3.0)}, {"x": torch.ones(1), "scale": torch.tensor(3.0)}]
    value = join_all(RecordedResults(made))
    value["scale"].fill_(777)
    assert [float(one["scale"]) for one in made] == [3.0, 3.0]
