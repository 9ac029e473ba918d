"""Warm memory: what comes back is used again, what is referred to never is."""

import gc
import threading

import numpy as np
import pytest
import torch

from dispatch import warm as module
from dispatch.warm import SMALLEST, WarmMemory, cat_tensors


@pytest.fixture
def memory():
    return WarmMemory()


def address(array):
    return array.__array_interface__["data"][0]


def test_a_dropped_buffer_is_given_to_the_next_of_its_size(memory):
    first = memory.take(3 * SMALLEST)
    place = address(first)
    del first
    assert memory.idle_bytes >= 3 * SMALLEST
    again = memory.take(3 * SMALLEST)
    assert address(again) == place
    assert memory.idle_bytes == 0


def test_a_buffer_that_anything_refers_to_is_not_given_again(memory):
    array = memory.take(2 * SMALLEST)
    place = address(array)
    row = torch.from_numpy(array).view(torch.float32).reshape(-1, 1024)[3]
    del array
    gc.collect()
    other = memory.take(2 * SMALLEST)
    assert address(other) != place
    row.fill_(7.0)
    other.fill(0)
    assert row.eq(7.0).all()


def test_it_is_as_long_as_asked_for_and_writable(memory):
    for nbytes in (0, 1, SMALLEST - 1, SMALLEST, SMALLEST + 1, 5 * SMALLEST + 17):
        array = memory.take(nbytes)
        assert array.nbytes == nbytes and array.dtype == np.uint8 and array.flags.writeable


@pytest.mark.parametrize("nbytes", [SMALLEST, SMALLEST + 1, 100_000_007, 2**31 + 5])
def test_little_is_wasted(nbytes):
    size = module._size_class(nbytes)
    assert nbytes <= size <= 1.125 * nbytes


def test_no_more_is_kept_than_allowed(memory, monkeypatch):
    monkeypatch.setattr(module, "MOST_IDLE", 4 * SMALLEST)
    held = [memory.take(SMALLEST) for _ in range(10)]
    del held
    assert memory.idle_bytes == 4 * SMALLEST
    memory.clear()
    assert memory.idle_bytes == 0


def test_what_is_old_is_let_go(memory, monkeypatch):
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    del (held := [memory.take(SMALLEST)])[:]
    del held
    assert memory.idle_bytes == SMALLEST
    memory.take(2 * SMALLEST)
    assert memory.idle_bytes <= 2 * SMALLEST
    for _ in range(3):
        memory.idle_bytes  # noqa: B018 - each look lets time pass
    assert memory.idle_bytes == 0


def test_threads_never_share_a_buffer(memory):
    wrong = []

    def work(number):
        for _ in range(300):
            array = memory.take(SMALLEST)
            array[:] = number
            if (array[:: SMALLEST // 7] != number).any():
                wrong.append(number)
            del array

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_joined_tensors_are_those_of_torch(dtype):
    parts = [
        torch.randint(0, 2, (rows, 700), generator=torch.Generator().manual_seed(rows)).to(dtype)
        for rows in (900, 0, 1200)
    ]
    joined = cat_tensors(parts)
    assert torch.equal(joined, torch.cat(parts)) and joined.dtype == dtype and joined.is_contiguous()
    parts[0].zero_()
    assert joined[:900].any(), "the joined batch is not the parts' memory"


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda: [torch.ones(2, 3), torch.ones(1, 3)], id="small"),
        pytest.param(lambda: [torch.ones(2, 3, requires_grad=True)] * 2, id="gradient"),
        pytest.param(lambda: [torch.ones(2**20), torch.ones(2**20, dtype=torch.float64)], id="types"),
        pytest.param(lambda: [torch.ones(2**20, 2).t(), torch.ones(1, 2**20)], id="strides"),
        pytest.param(lambda: [torch.eye(3).to_sparse()] * 2, id="sparse"),
    ],
)
def test_what_warm_memory_does_not_suit_is_left_to_torch(parts):
    values = parts()
    joined, expected = cat_tensors(values), torch.cat(values)
    assert joined.dtype == expected.dtype and joined.layout == expected.layout
    assert torch.equal(joined.to_dense(), expected.to_dense())


def test_parts_that_do_not_fit_raise_as_torch_does():
    with pytest.raises(RuntimeError):
        cat_tensors([torch.ones(2**20, 2), torch.ones(2**20, 3)])
