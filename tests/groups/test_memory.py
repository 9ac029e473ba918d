"""What a loop of large calls leaves behind: nothing, in the store and in the driver; and whose memory a result is."""

import gc
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch

from single_controller.ray import transport


def stored_bytes():
    """Bytes that Ray's store holds."""
    return ray.cluster_resources()["object_store_memory"] - ray.available_resources().get("object_store_memory", 0)


def settled(at_most, seconds=10.0):
    """The store's bytes, once they are no more than that or the time is over."""
    end = time.monotonic() + seconds
    while (held := stored_bytes()) > at_most and time.monotonic() < end:
        time.sleep(0.1)
    return held


def reached(at_least, seconds=10.0):
    """The same for a growth: Ray tells what its store holds a little late."""
    end = time.monotonic() + seconds
    while (held := stored_bytes()) < at_least and time.monotonic() < end:
        time.sleep(0.1)
    return held


@pytest.mark.slow
def test_two_hundred_calls_with_64_mb_hold_store_and_driver_flat(counters):
    gc.collect()
    before = settled(0)
    batch = torch.ones(16, 1 << 20)
    driver = psutil.Process()
    sizes = []
    for step in range(200):
        result = counters.double(batch)
        if step in (20, 199):
            sizes.append(driver.memory_full_info().uss)
    assert result.eq(2).all()
    assert sizes[1] - sizes[0] < 32 << 20
    del result
    assert settled(before + (1 << 20)) <= before + (1 << 20)


def test_a_dropped_future_frees_its_answers(counters):
    before = settled(0)
    futures = [counters.echo.remote(torch.ones(1 << 20)) for _ in range(5)]
    for future in futures:
        future.result()
    assert reached(before + (20 << 20)) >= before + (16 << 20)
    del futures, future
    gc.collect()
    assert settled(before + (1 << 20)) <= before + (1 << 20)


def test_results_are_the_drivers_own_to_write_into(counters):
    """They lie in the store, where nobody else refers to them."""
    value = torch.ones(1 << 20)
    first, second, *_ = counters.echo(value)
    first.fill_(5)
    assert second.eq(1).all() and value.eq(1).all()
    assert all(answer.eq(1).all() for answer in counters.echo(value))


def in_store(tensor):
    """Whether its memory is Ray's store's, which this process has mapped from /dev/shm."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return "/dev/shm/" in line
    return False


def test_results_that_hold_much_of_the_store_are_copied_out_of_it(counters, monkeypatch):
    assert not in_store(torch.ones(1 << 20))
    kept = counters.echo(torch.ones(1 << 20))
    assert all(map(in_store, kept))
    monkeypatch.setattr(transport, "MOST_HELD", 25 << 20)
    some = counters.echo(torch.ones(1 << 20))
    assert sum(map(in_store, some)) == 2, "16 MB are held already, 8 more may be"
    assert all(answer.eq(1).all() for answer in (*kept, *some))
    del kept
    assert all(map(in_store, counters.echo(torch.ones(1 << 20))))


def test_a_joined_result_is_in_the_drivers_own_memory(counters):
    assert not in_store(counters.double(torch.ones(4, 1 << 20)))
