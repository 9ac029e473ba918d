"""Calls on one rank run in the order in which they were sent, whichever way each of them goes. All of a rank's ordinary
calls run on one thread."""

import pytest
import ray
from group_workers import Log
from interrupted_waits import Interrupts
from random_call_workers import Journal
from random_calls import lost_references, produce
from ray.exceptions import RayError

from single_controller import RayClassWithInitArgs, RayWorkerGroup, SingleControllerError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def logs(pool):
    """A group of two ranks that record the order of their calls."""
    with RayWorkerGroup(pool[:2], RayClassWithInitArgs(Log)) as group:
        yield group


@pytest.fixture
def log(logs):
    before = [len(entries) for entries in logs.read()]
    logs.new = lambda: [entries[begin:] for begin, entries in zip(before, logs.read(), strict=True)]
    return logs


def failing():
    return produce.remote(10, None, 0.2)


def test_direct_calls_keep_their_own_order_and_wait_for_no_call_that_comes_later(log):
    """They have no place among the calls of the group."""
    sent = [log.workers[1].note.remote(f"direct {number}", 0.05) for number in range(6)]
    for number in range(6):
        log.note(f"group {number}")
    ray.get(sent, timeout=30)
    first, second = log.new()
    assert first == [f"group {number}" for number in range(6)]
    assert [one for one in second if one.startswith("direct")] == [f"direct {number}" for number in range(6)]
    assert [one for one in second if one.startswith("group")] == first


def interrupt_two(log):
    """The first of two interrupted calls runs on the ranks, the second has not begun."""
    with Interrupts() as interrupts:
        for what, seconds in (("running", 0.4), ("queued", 0.0)):
            with pytest.raises(KeyboardInterrupt), interrupts.after(0.05):
                log.note(what, seconds)


@pytest.mark.parametrize("how", ["future", "small", "large"])
def test_call_after_interrupted_ones(log, how):
    interrupt_two(log)
    if how == "future":
        log.note.remote("next").result(timeout=30)
    elif how == "small":
        log.note("next")
    else:
        log.note("next" + "x" * 1_600_000)  # more than a frame has
    assert [[entry[:7] for entry in entries] for entries in log.new()] == [
        ["running", "queued", "next" + "xxx" * (how == "large")]
    ] * 2
    assert log.broken is None


@pytest.mark.parametrize("make", [failing, lambda: lost_references(1)[0]], ids=["failed", "lost"])
def test_small_call_after_one_whose_argument_never_comes(log, make):
    future = log.note.remote(make())
    log.note("small")
    log.note.remote("future")
    log.note("small 2")
    assert log.new() == [["small", "future", "small 2"]] * 2
    with pytest.raises((SingleControllerError, RayError)):
        future.result(timeout=30)


def test_one_thread_runs_all_ordinary_calls(pool):
    with RayWorkerGroup(pool[:2], RayClassWithInitArgs(Journal)) as group:
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
        assert not main
