"""The simulated device itself: it shows the faults that a real one punishes with wrong numbers, or not at all."""

import ctypes
import gc
import multiprocessing
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from workers.device import host_memory

device = torch._simdevice


def test_host_cannot_read_device_memory():
    memory = torch.ones(2, device="cuda")
    with pytest.raises(TypeError, match="can't convert cuda"):
        memory.numpy()
    process = multiprocessing.get_context("fork").Process(target=ctypes.string_at, args=(memory.data_ptr(), 4))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGSEGV


def test_new_memory_has_no_useful_content():
    kept = torch.ones(1000, device="cuda")
    del kept
    assert bool(torch.empty(1000, device="cuda").isnan().all())


def test_tensors_of_two_devices_do_not_mix():
    for other in ("cpu", "cuda:1"):
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device="cuda:0") + torch.ones(2, device=other)
    assert (torch.ones(2, device="cuda") + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_source_that_changes_under_a_copy_is_seen():
    pinned = torch.arange(4.0).pin_memory()
    copy = pinned.to("cuda", non_blocking=True)
    pinned.fill_(9)
    assert copy.tolist() == [9.0] * 4
    plain = torch.arange(4.0)  # not pinned: CUDA stages it before it returns
    copy = plain.to("cuda", non_blocking=True)
    plain.fill_(9)
    assert copy.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_copy_to_the_host_is_not_there_before_it_is_waited_for():
    target = torch.zeros(3).pin_memory()
    target.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    assert target.tolist() == [0.0] * 3
    torch.cuda.synchronize()
    assert target.tolist() == [1.0] * 3


def test_missing_wait_between_streams_is_seen():
    ones = torch.ones(4).pin_memory()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = torch.empty(4, device="cuda")
        made.copy_(ones, non_blocking=True)
    assert made.tolist() != [1.0] * 4
    torch.cuda.current_stream().wait_stream(side)
    assert made.tolist() == [1.0] * 4


def test_pinned_memory_that_is_freed_under_a_copy_is_a_fault():
    before = len(device.faults())
    memory = host_memory(4000, pinned=True)
    assert memory.is_pinned()
    torch.empty(4000, dtype=torch.uint8, device="cuda").copy_(memory, non_blocking=True)
    del memory
    gc.collect()
    torch.cuda.synchronize()
    assert len(device.faults()) == before + 1 and "freed before the copy" in device.faults()[-1]


def test_host_reads_and_copies_are_counted():
    device.counts(True)
    x = torch.ones(3, device="cuda")
    x.sum().item()
    x.nonzero()
    x.cpu()
    counts = device.counts(True)
    assert counts["host read: item()"] == 1 and counts["host read: aten::nonzero"] == 1 and counts["copy:d2h sync"] == 1


def test_indexing_that_waits_is_counted():
    """As in torch's `TensorAdvancedIndexing`: masks are searched, indices and numbers in host memory are copied."""
    x, on_cpu = torch.zeros(4, device="cuda"), torch.tensor([0, 2])
    index, mask = on_cpu.to("cuda"), x == 0
    for waits, call in (
        ({}, lambda: x[index]),
        ({}, lambda: x.masked_fill_(mask, 1.0)),
        ({}, lambda: x.__setitem__(mask, 1.0)),
        ({}, lambda: x.index_put_((index,), x[index])),
        ({"copy:h2d sync": 1}, lambda: x[on_cpu]),
        ({"copy:h2d sync": 1}, lambda: x.__setitem__(index, 1.0)),
        ({"host read: aten::nonzero": 1}, lambda: x[mask]),
        ({"host read: index_put by a mask": 1}, lambda: x.__setitem__(mask, torch.ones(4, device="cuda"))),
    ):
        device.counts(True)
        call()
        assert {name: n for name, n in device.counts(True).items() if name != "kernels"} == waits


def test_random_numbers_belong_to_the_device():
    torch.manual_seed(0)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert not torch.equal(first, torch.rand(3, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def test_memory_is_counted_and_ends():
    gc.collect()
    torch.cuda.empty_cache()
    before, (free, total) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + (1 << 20) and torch.cuda.mem_get_info()[0] == free - (1 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def test_processes_share_the_memory_of_a_device(monkeypatch):
    """What another process has is not free, and is free once that process was killed."""
    gc.collect()
    torch.cuda.empty_cache()
    mine = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    monkeypatch.setenv("SIMDEVICE_BYTES", str(total - free + (64 << 20)))
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=take_memory, args=(theirs,))
    process.start()
    assert ours.poll(100) and ours.recv() == 64 << 20
    assert ours.poll(100) and "Tried to allocate 96 MiB" in ours.recv()
    assert ours.poll(100) and ours.recv() == 32 << 20
    assert torch.cuda.mem_get_info()[0] == free - (32 << 20)
    process.kill()
    process.join(60)
    assert torch.cuda.mem_get_info()[0] == free
    del mine


def take_memory(pipe):
    pipe.send(torch.cuda.mem_get_info()[0])
    try:
        torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        pipe.send(str(error))
    kept = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    pipe.send(torch.cuda.mem_get_info()[0])
    pipe.poll(100)
    del kept


def unordered(use):
    """What a use of two streams adds to the faults."""
    before = len(device.faults())
    use()
    return device.faults()[before:]


@pytest.mark.parametrize("waits", ["not", "for the stream", "for an event", "by the host"])
def test_missing_wait_between_kernels_of_two_streams_is_a_fault(waits):
    side, target = torch.cuda.Stream(), torch.zeros(8).pin_memory()

    def two_streams():
        x = torch.zeros(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
            event = torch.cuda.Event()
            event.record()
        if waits == "for the stream":
            torch.cuda.current_stream().wait_stream(side)
        elif waits == "for an event":
            torch.cuda.current_stream().wait_event(event)
        elif waits == "by the host":
            side.synchronize()
        target.copy_(x, non_blocking=True)
        torch.cuda.synchronize()
        assert target.tolist() == [1.0] * 8  # kernels happen at once: the numbers do not show it

    found = unordered(two_streams)
    if waits != "not":
        assert found == []
    else:
        assert len(found) == 1 and "a copy to the host" in found[0] and "aten::add" in found[0]


def test_uses_that_need_no_order_are_no_faults():
    """Of different parts, and reads by both streams. What one waits for includes what the other has waited for."""
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def apart():
        x = torch.ones(8, device="cuda")
        for stream, part in ((one, x[:4]), (other, x[4:])):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                part.mul_(2)
        other.wait_stream(one)
        torch.cuda.current_stream().wait_stream(other)
        with torch.cuda.stream(one):
            one.wait_stream(other)
            x.sum()
        x.sum()
        torch.cuda.synchronize()

    assert unordered(apart) == []


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_allocated_again_under_a_kernel_is_a_fault(recorded):
    side = torch.cuda.Stream()

    def freed_too_early():
        x = torch.ones(5000, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if recorded:
            x.record_stream(side)
        del x
        torch.empty(5000, device="cuda")
        torch.cuda.synchronize()

    found = unordered(freed_too_early)
    assert found == [] if recorded else len(found) == 1 and "an allocation" in found[0]


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_missing_wait_for_a_collective_is_seen(one_rank):
    total, gathered = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    works = [
        dist.all_reduce(total, async_op=True),
        dist.all_gather_into_tensor(gathered, torch.full((3,), 2.0, device="cuda"), async_op=True),
    ]
    before = len(device.faults())
    assert bool(total.isnan().all()) and bool(gathered.isnan().all())
    assert len(device.faults()) > before
    for work in works:
        work.wait()
    assert (total.tolist(), gathered.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_end_of_a_tensor_waits_for_no_thread_that_waits_for_the_device(one_rank):
    """Python drops the tensor first. The collective keeps it until it ends, and to destroy it then needs the
    interpreter's lock."""
    ended = threading.Event()

    def ask():
        while not ended.is_set():
            device.counts(False)

    thread = threading.Thread(target=ask)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(1000):
            dist.all_reduce(torch.ones(3, device="cuda"), async_op=True).wait()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_source_that_changes_under_a_collective_is_a_fault(one_rank):
    before = len(device.faults())
    for changes in (False, True):
        source, target = torch.ones(3, device="cuda"), torch.empty(3, device="cuda")
        work = dist.all_gather_into_tensor(target, source, async_op=True)
        if changes:
            source.zero_()
        work.wait()
        assert len(device.faults()) == before + changes
    assert "aten::zero_" in device.faults()[-1] and "a collective" in device.faults()[-1]
