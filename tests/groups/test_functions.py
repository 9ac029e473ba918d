"""Functions of the driver that run on the workers."""

import torch

TRANSPORTS = ("ray", "local", "local-threads")


def rows_and_rank(worker, batch, scale=1):
    return batch * scale + worker.rank


def test_function_runs_on_every_rank_with_its_worker(counters):
    assert counters.execute_with_func_generator(lambda worker: (worker.rank, worker.value)) == [
        (rank, 100 + rank) for rank in range(4)
    ]
    assert counters.execute_with_func_generator(lambda worker, x, y=0: x + y, 1, y=2) == [3] * 4


def test_function_gets_a_shard_and_results_are_joined(counters):
    batch = torch.arange(8)
    expected = [10 * row + row // 2 for row in range(8)]
    assert counters.execute_with_func_generator(rows_and_rank, batch, scale=10).tolist() == expected
    future = counters.execute_with_func_generator.remote(rows_and_rank, batch, scale=10)
    assert counters.double(future).tolist() == [2 * value for value in expected]


def test_rank_zero_gets_the_arguments_unchanged(counters):
    assert counters.execute_func_rank_zero(sorted, [3, 1, 2], reverse=True) == [3, 2, 1]
    assert counters.execute_func_rank_zero(lambda: "no argument") == "no argument"
