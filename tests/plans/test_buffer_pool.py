"""The buffer pool reuses returned buffers, and never a buffer that is still referenced."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from single_controller.call import buffer_pool as module
from single_controller.call.buffer_pool import MIN_BYTES, BufferPool, buffer_pool, cat_tensors


@pytest.fixture
def pool():
    return BufferPool()


def address(array):
    return array.__array_interface__["data"][0]


def test_dropped_buffer_is_reused_for_the_same_size(pool):
    first = pool.take(3 * MIN_BYTES)
    place = address(first)
    del first
    assert pool.idle_bytes >= 3 * MIN_BYTES
    again = pool.take(3 * MIN_BYTES)
    assert address(again) == place
    assert pool.idle_bytes == 0


def test_buffer_with_a_live_view_is_not_reused(pool):
    array = pool.take(2 * MIN_BYTES)
    place = address(array)
    row = torch.from_numpy(array).view(torch.float32).reshape(-1, 1024)[3]
    del array
    gc.collect()
    other = pool.take(2 * MIN_BYTES)
    assert address(other) != place
    row.fill_(7.0)
    other.fill(0)
    assert row.eq(7.0).all()


def test_buffer_has_the_requested_size_and_is_writable(pool):
    for nbytes in (0, 1, MIN_BYTES - 1, MIN_BYTES, MIN_BYTES + 1, 5 * MIN_BYTES + 17):
        array = pool.take(nbytes)
        assert array.nbytes == nbytes and array.dtype == np.uint8 and array.flags.writeable


@pytest.mark.parametrize("nbytes", [MIN_BYTES, MIN_BYTES + 1, 100_000_007, 2**31 + 5])
def test_at_most_an_eighth_is_wasted(nbytes):
    size = module._size_class(nbytes)
    assert nbytes <= size <= 1.125 * nbytes


def test_idle_bytes_are_limited(pool, monkeypatch):
    monkeypatch.setattr(module, "MAX_IDLE_BYTES", 4 * MIN_BYTES)
    held = [pool.take(MIN_BYTES) for _ in range(10)]
    del held
    assert pool.idle_bytes == 4 * MIN_BYTES
    pool.clear()
    assert pool.idle_bytes == 0


def test_old_idle_buffers_are_freed(pool, monkeypatch):
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    del (held := [pool.take(MIN_BYTES)])[:]
    del held
    assert pool.idle_bytes == MIN_BYTES
    pool.take(2 * MIN_BYTES)
    assert pool.idle_bytes <= 2 * MIN_BYTES
    for _ in range(3):
        pool.idle_bytes  # noqa: B018 - each read lets time pass
    assert pool.idle_bytes == 0


def test_threads_never_share_a_buffer(pool):
    wrong = []

    def work(number):
        for _ in range(300):
            array = pool.take(MIN_BYTES)
            array[:] = number
            if (array[:: MIN_BYTES // 7] != number).any():
                wrong.append(number)
            del array

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_cat_tensors_equals_torch_cat(dtype):
    parts = [
        torch.randint(0, 2, (rows, 700), generator=torch.Generator().manual_seed(rows)).to(dtype)
        for rows in (900, 0, 1200)
    ]
    joined = cat_tensors(parts)
    assert torch.equal(joined, torch.cat(parts)) and joined.dtype == dtype and joined.is_contiguous()
    parts[0].zero_()
    assert joined[:900].any(), "the joined tensor must have its own memory"


def test_cat_tensors_along_another_dim_uses_a_pooled_buffer():
    parts = [torch.arange(4.0 * n * 2**18).reshape(4, -1) for n in (1, 2)]
    buffer_pool.clear()
    joined = cat_tensors(parts, 1)
    assert torch.equal(joined, torch.cat(parts, 1))
    del joined
    assert buffer_pool.idle_bytes >= 12 * 2**20


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
def test_unsuitable_tensors_are_left_to_torch(parts):
    values = parts()
    joined, expected = cat_tensors(values), torch.cat(values)
    assert joined.dtype == expected.dtype and joined.layout == expected.layout
    assert torch.equal(joined.to_dense(), expected.to_dense())


def test_incompatible_tensors_raise_as_in_torch():
    with pytest.raises(RuntimeError):
        cat_tensors([torch.ones(2**20, 2), torch.ones(2**20, 3)])
