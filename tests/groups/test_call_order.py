"""Calls on one rank run in the order in which they were sent, whichever way each of them goes. All of a rank's ordinary
calls run on one thread."""

import socket
import threading
import time

import depth
import pytest
import ray
from group_workers import Log
from interrupted_waits import Interrupts
from random_call_workers import Journal
from random_calls import lost_references, produce
from ray.exceptions import RayError
from test_random_calls import on_lane_and_without, start

from single_controller import RayResourcePool, SingleControllerError

pytestmark = [on_lane_and_without, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def logs(ray_cluster):
    """lane -> a group of two ranks that record the order of their calls."""
    with RayResourcePool([2], use_gpu=False) as one, RayResourcePool([2], use_gpu=False) as other:
        with start(one, Log, True) as with_lane, start(other, Log, False) as without:
            yield {True: with_lane, False: without}


@pytest.fixture
def log(logs, lane):
    group = logs[lane]
    before = [len(entries) for entries in group.read()]
    group.new = lambda: [entries[begin:] for begin, entries in zip(before, group.read(), strict=True)]
    return group


def failing():
    return produce.remote(10, None, 0.2)


def test_small_call_after_a_future(log):
    log.note.remote("slow", 0.3)
    log.note("small")
    log.note.remote("slow async", 0.1)
    assert log.new() == [["slow", "small", "slow async"]] * 2


def test_futures_after_a_small_call_of_another_thread(log):
    thread = threading.Thread(target=log.note, args=("slow", 0.3))
    thread.start()
    time.sleep(0.1)
    log.note.remote("future")
    log.workers[1].note.remote("direct")
    log.note("small")
    thread.join()
    assert log.new() == [["slow", "future", "small"], ["slow", "future", "direct", "small"]]


def test_small_call_after_a_slow_direct_call(log):
    log.workers[1].note.remote("direct", 0.3)
    log.note("small")
    assert log.new() == [["small"], ["direct", "small"]]


def test_small_call_after_a_large_one(log):
    log.note.remote("x" * 1_000_000, 0.1)
    log.note("small")
    assert [[entry[:5] for entry in entries] for entries in log.new()] == [["xxxxx", "small"]] * 2


def test_small_call_after_an_async_one(log):
    log.note_async.remote("async", 0.3)
    log.note("small")
    log.note_async("async 2", 0.1)
    log.note("small 2")
    assert log.new() == [["async", "small", "async 2", "small 2"]] * 2


def interrupt_two(log):
    """The first of two interrupted calls runs on the ranks, the second has not begun."""
    interrupts = Interrupts()
    try:
        for what, seconds in (("running", 0.4), ("queued", 0.0)):
            with pytest.raises(KeyboardInterrupt), interrupts.after(0.05):
                log.note(what, seconds)
    finally:
        interrupts.close()


@pytest.mark.parametrize("how", ["direct", "future", "small", "large"])
def test_call_after_interrupted_ones(log, how):
    interrupt_two(log)
    if how == "direct":
        ray.get([worker.note.remote("next") for worker in log.workers], timeout=30)
    elif how == "future":
        log.note.remote("next").result(timeout=30)
    elif how == "small":
        log.note("next")
    else:
        log.note("next" + "x" * 200_000)
    assert [[entry[:7] for entry in entries] for entries in log.new()] == [
        ["running", "queued", "next" + "xxx" * (how == "large")]
    ] * 2
    assert log.broken is None


@pytest.mark.parametrize("direct", [False, True] if depth.full else [False])
@pytest.mark.parametrize("make", [failing, lambda: lost_references(1)[0]], ids=["failed", "lost"])
def test_small_call_after_one_whose_argument_never_comes(log, make, direct):
    argument = make()
    if direct:
        references = [worker.note.remote(argument) for worker in log.workers]
    else:
        future = log.note.remote(argument)
    log.note("small")
    log.note.remote("future")
    log.note("small 2")
    assert log.new() == [["small", "future", "small 2"]] * 2
    with pytest.raises((SingleControllerError, RayError)):
        ray.get(references, timeout=30) if direct else future.result(timeout=30)


def test_small_call_after_one_with_the_future_of_a_failed_one(log):
    failed = log.note.remote(failing())
    future = log.note.remote(failed)
    log.note("small")
    assert log.new() == [["small"]] * 2
    with pytest.raises(SingleControllerError):
        future.result(timeout=30)


def test_one_thread_runs_all_ordinary_calls(ray_cluster, lane):
    with RayResourcePool([2], use_gpu=False) as pool, start(pool, Journal, lane) as group:
        found = [
            group.threads(),
            group.threads.remote().result(timeout=30),
            ray.get([worker.threads.remote() for worker in group.workers], timeout=30),
            group.execute_all_sync("threads"),
            group.threads(),
        ]
        asynchronous = group.thread_of_async()
    for rank in range(2):
        threads = {answer[rank] for answer in found}
        assert len(threads) == 1, f"rank {rank}: {threads}"
        ((constructor, now, main),) = threads
        assert constructor == now != asynchronous[rank]
        assert main is not lane


def test_direct_calls_that_another_thread_sends_at_the_same_time(log, monkeypatch):
    """Ray takes them behind a future of the group, before the group has noted the future."""
    method = log._ray._method

    def send_directly():
        for seconds in (0.3, 0.0):
            log.workers[0].note.remote("direct", seconds)

    class Sending:
        def __init__(self, rank, *args, **options):
            self.rank, self.method = rank, method(rank, *args, **options)

        def remote(self, *args, **options):
            sent = self.method.remote(*args, **options)
            if self.rank == 0:
                thread = threading.Thread(target=send_directly)
                thread.start()
                thread.join()
            return sent

    monkeypatch.setattr(log._ray, "_method", Sending)
    future = log.note.remote("future")
    monkeypatch.undo()
    future.result(timeout=30)
    log.note("small")
    assert log.new() == [["future", "direct", "direct", "small"], ["future", "small"]]


def test_call_after_the_connections_were_lost(ray_cluster, lane):
    with RayResourcePool([2], use_gpu=False) as pool, start(pool, Log, lane) as log:
        interrupt_two(log)
        for peer in log._ray.peers:
            peer.connection.sock.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + 20
        while any(peer.connection is not None for peer in log._ray.peers) and time.monotonic() < end:
            time.sleep(0.02)  # until the monitor has found that they are
        log.note("next")
        assert log.read() == [["running", "queued", "next"]] * 2
