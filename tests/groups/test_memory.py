"""A loop of large calls leaks nothing in the store or the driver; and which memory results are in."""

import gc
import time
from pathlib import Path

import depth
import psutil
import ray
import torch
from group_workers import Counter
from waits import wait_until

from single_controller import ClassWithInitArgs, LocalWorkerGroup
from single_controller.call import codec


def stored_bytes():
    """Bytes that Ray's store holds."""
    return ray.cluster_resources()["object_store_memory"] - ray.available_resources().get("object_store_memory", 0)


def settled(at_most, seconds=10.0):
    """The store's bytes, once they are at most `at_most` or the time is over."""
    end = time.monotonic() + seconds
    while (held := stored_bytes()) > at_most and time.monotonic() < end:
        time.sleep(0.1)
    return held


def test_many_64_mb_calls_do_not_grow_store_or_driver(counters):
    """Two hundred calls with --full, else sixteen."""
    calls = 200 if depth.full else 16
    gc.collect()
    before = settled(0)
    batch = torch.ones(16, 1 << 20)
    driver = psutil.Process()
    sizes = []
    for step in range(calls):
        result = counters.double(batch)
        if step in (10, calls - 1):
            sizes.append(driver.memory_full_info().uss)
    assert result.eq(2).all()
    assert sizes[1] - sizes[0] < 32 << 20
    del result
    assert settled(before + (1 << 20)) <= before + (1 << 20)


def test_dropped_future_frees_its_results(counters):
    before = settled(0)
    futures = [counters.echo.remote(torch.ones(1 << 20)) for _ in range(5)]
    for future in futures:
        future.result()
    wait_until(lambda: stored_bytes() >= before + (16 << 20), 10)  # Ray reports its store's size with a delay
    del futures, future
    gc.collect()
    assert settled(before + (1 << 20)) <= before + (1 << 20)


def in_store(tensor):
    """Whether the tensor is in Ray's store, which this process maps from /dev/shm."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return "/dev/shm/" in line
    return False


def test_results_are_copied_out_when_they_hold_too_much_of_the_store(counters, monkeypatch):
    assert not in_store(torch.ones(1 << 20))
    kept = counters.echo(torch.ones(1 << 20))
    assert all(map(in_store, kept))
    monkeypatch.setattr(codec, "MAX_MAPPED_BYTES", 25 << 20)
    some = counters.echo(torch.ones(1 << 20))
    assert sum(map(in_store, some)) == 2, "16 MB are in use already, and 8 more are allowed"
    assert all(result.eq(1).all() for result in (*kept, *some))
    del kept
    assert all(map(in_store, counters.echo(torch.ones(1 << 20))))


def test_copies_do_not_count_as_memory_of_the_store(counters, monkeypatch):
    with LocalWorkerGroup(4, ClassWithInitArgs(Counter)) as local:
        kept = local.echo(torch.ones(1 << 20)), codec.private_copy(torch.ones(4 << 20))
    monkeypatch.setattr(codec, "MAX_MAPPED_BYTES", 25 << 20)
    assert all(map(in_store, counters.echo(torch.ones(1 << 20))))
    assert all(result.eq(1).all() for result in (*kept[0], kept[1]))


def test_joined_result_is_in_the_drivers_memory(counters):
    assert not in_store(counters.double(torch.ones(4, 1 << 20)))
