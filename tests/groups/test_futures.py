"""Futures: waiting, passing them to other groups, resharding, failures."""

import asyncio
import contextlib
import gc
import itertools
import os
import pickle
import signal
import statistics
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import depth
import numpy as np
import pytest
import ray
import torch
from group_workers import Counter, Fragile, Grid, Own, SlowToJoin
from ray.exceptions import RayError
from tensordict import TensorDict
from test_failure import errors_of
from waits import in_fork, interrupt_first_start, kill_before, wait_collected, within

from single_controller import (
    Broadcast,
    CallTimeoutError,
    ClassWithInitArgs,
    Dispatch,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    LocalWorkerGroup,
    ResultError,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerFuture,
    collect_all_to_all,
    register,
    register_batch_type,
)
from single_controller.call.future import ComputedFuture, ReferencedFuture

TRANSPORTS = ("ray", "local", "local-threads")
overlapping = pytest.mark.transports("ray", "local-threads")
"""For a test whose ranks or calls must run at the same time."""


@pytest.fixture(scope="module")
def smaller(transport):
    """Groups of two, three and five ranks."""
    groups = {size: transport.make(Counter, world_size=size) for size in (2, 3, 5)}
    yield groups
    for group in groups.values():
        group.close()
    transport.close()


def test_future_keeps_its_value(transport, counters):
    future = counters.add.remote(0)
    assert future.result() == [100, 101, 102, 103]
    assert future.get() is future.result()
    assert future.done() and future.exception() is None
    assert transport.get(future.refs) == [100, 101, 102, 103]


@pytest.mark.ray_when_full
def test_await_joins_outside_the_event_loop(make_group):
    group = make_group(SlowToJoin)

    async def main():
        late = []

        async def tick():
            while True:
                begin = time.monotonic()
                await asyncio.sleep(0.01)
                late.append(time.monotonic() - begin)

        ticking = asyncio.ensure_future(tick())
        thread, ranks = await group.ranks.options(blocking=False)()
        ticking.cancel()
        return thread, ranks, max(late)

    thread, ranks, longest = asyncio.run(main())
    assert ranks == [0, 1, 2, 3] and thread != threading.current_thread().name
    assert longest < 0.4, "the join, of half a second, ran in the event loop"


def test_two_awaits_of_one_future_return_the_same_object(counters):
    future = counters.add.remote(0)

    async def main():
        return await asyncio.gather(_value(future), _value(future))

    first, second = asyncio.run(main())
    assert first is second and first == [100, 101, 102, 103] and future.result() is first


@pytest.mark.ray_when_full
@overlapping
def test_await_that_was_given_up_leaves_nothing_behind(fragile):
    """A driver that waits in steps, for a call that takes hours."""
    future = fragile.sleep.remote(0.5)

    async def main():
        tasks = weakref.WeakSet()
        for _ in range(30):
            task = asyncio.ensure_future(_value(future))
            tasks.add(task)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task, 0.01)
            del task
        gc.collect()
        left = len(tasks)
        return left, await asyncio.wait_for(_value(future), 10)

    assert asyncio.run(main()) == (0, [0, 1, 2, 3])


@pytest.mark.transports("ray")
def test_await_in_another_process(counters, smaller):
    futures = [counters.add.remote(0) for _ in range(40)]  # more than the threads of a loop's executor
    assert smaller[2].await_futures(futures) == [[[100, 101, 102, 103]] * 40] * 2


@pytest.mark.transports("ray")
def test_await_that_failed_does_not_keep_a_dropped_group(transport):
    """Ray keeps what it was told to call when the results arrive, which here is never."""
    group = transport.make(Fragile)
    pids, kept = group.pid(), weakref.ref(group._transport)
    try:
        with pytest.raises(CallTimeoutError):
            asyncio.run(_value(group.sleep.options(timeout=0.3).remote(60)))
        del group
        wait_collected(lambda: kept() is None, 5, "the end of the handles of the dropped group's workers")
    finally:
        for pid in pids:  # Ray ends a worker without handles only after its call
            os.kill(pid, signal.SIGKILL)


@pytest.mark.ray_when_full
@overlapping
def test_slow_look_at_one_group_delays_no_result(make_group, counters, monkeypatch):
    """The monitor's thread asks for the deaths of a group, which takes long."""
    slow = make_group(Fragile)
    looking, looked = threading.Event(), threading.Event()
    deaths = slow._transport.deaths

    def deaths_slowly():
        if threading.current_thread().name == "call-monitor":
            looking.set()
            looked.wait(5)
        return deaths()

    monkeypatch.setattr(slow._transport, "deaths", deaths_slowly)
    later = slow.sleep.remote(0.5)
    other = counters.add.remote(0)
    assert looking.wait(5)
    with within(2):
        assert other.result() == [100, 101, 102, 103]
        assert asyncio.run(_value(counters.add.remote(0))) == [100, 101, 102, 103]
        assert later.result() == [0, 1, 2, 3]
    looked.set()


@pytest.mark.ray_when_full
@overlapping
def test_result_timeout_ends_only_the_wait(fragile):
    future = fragile.sleep_on.remote([2], 0.8)
    told = r"after a wait of 0\.3 s; still running: rank 2.*call continues.*options\(timeout="
    with pytest.raises(CallTimeoutError, match=told) as caught:
        future.result(timeout=0.3)
    with pytest.raises(CallTimeoutError, match="has not finished"):
        future.result(timeout=0)
    assert caught.value.call_goes_on and caught.value.ranks == (2,)
    assert isinstance(caught.value, TimeoutError)
    assert not future.done()
    assert future.result() == [0, 1, 2, 3]
    assert fragile.ping() == [0, 1, 2, 3]


def test_chain_between_groups_of_different_sizes(counters, smaller):
    for rows, group in itertools.product((30, 60), smaller.values()):
        batch = torch.arange(rows).reshape(rows, 1)
        there = counters.ragged.remote(batch)
        here = group.double.remote(there)
        back = counters.ragged(here)
        assert torch.equal(back, batch * 2), (rows, group.world_size)


def test_chain_with_rows_that_do_not_divide(counters, smaller):
    for uneven, rows in itertools.product(("pad", "ragged"), (0, 1, 7)):
        batch = torch.arange(rows)
        first = counters.double.options(uneven=uneven).remote(batch)
        second = smaller[3].double.options(uneven=uneven).remote(first)
        assert torch.equal(second.result(), batch * 4), (uneven, rows)
        assert torch.equal(counters.padded(second), batch * 4), (uneven, rows)


def test_dicts_tensordicts_and_lists(counters, smaller):
    batch = {"a": torch.arange(8), "b": torch.ones(8, 2)}
    out = smaller[2].double(counters.double.remote(batch))
    assert torch.equal(out["a"], batch["a"] * 4) and torch.equal(out["b"], batch["b"] * 4)
    table = TensorDict({"x": torch.arange(6)}, [6])
    assert torch.equal(smaller[3].ragged(counters.ragged.remote(table))["x"], table["x"])
    assert smaller[3].ragged(counters.ragged.remote(list("abcdef"))) == list("abcdef")


def test_list_results_are_split_by_items(counters, smaller):
    by_rank = counters.add.remote(0)
    assert counters.times_rank(by_rank) == [0, 101, 204, 309]
    assert smaller[2].ragged(by_rank) == [100, 101, 102, 103]
    with pytest.raises(DispatchError, match=r"list of 4.*2 items"):
        smaller[2].times_rank(by_rank)


def test_future_is_sent_whole_where_arguments_are(counters, smaller):
    joined = counters.double.remote(torch.arange(4))
    assert all(torch.equal(value, torch.arange(4) * 2) for value in smaller[3].echo(joined))
    assert smaller[3].first(joined)[1].tolist() == [0, 2, 4, 6]
    assert smaller[2].echo(counters.first.remote("x")) == [(0, "x")] * 2
    assert smaller[2].echo(counters.add.remote(0)) == [[100, 101, 102, 103]] * 2
    nothing = counters.apply.remote(lambda worker, rows: None, [1, 2, 3, 4])
    seen = smaller[2].execute_with_func_generator(lambda worker, rows, one: [one] * len(rows), [1, 2], nothing)
    assert nothing.result() is None and seen == [None] * 2


@pytest.mark.ray_when_full
def test_group_with_tp_between_two_groups(make_group, counters):
    grid = make_group(Grid, {"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]})
    mid = grid.compute_rows.remote(counters.double.remote(torch.arange(8)))
    assert torch.equal(counters.double(mid), torch.arange(8) * 40)
    assert [t.tolist() for t in grid.last_seen()] == [[0, 2, 4, 6], [0, 2, 4, 6], [8, 10, 12, 14], [8, 10, 12, 14]]


@pytest.mark.ray_when_full
def test_pipeline_producer_collects_from_the_last_stage(make_group, smaller):
    grid = make_group(Grid, {"dp": [0, 0, 1, 1], "pp": [0, 1, 0, 1]})
    mid = grid.compute_rows.remote(torch.arange(8))
    assert len(mid.refs) == 2
    assert torch.equal(smaller[2].double(mid), torch.arange(8) * 20)


def test_materialize_futures_false_passes_the_future(counters, smaller):
    got = smaller[2].take_future(counters.add.remote(0))
    assert got == [("WorkerFuture", [100, 101, 102, 103])] * 2


@pytest.mark.transports("ray")
def test_future_as_an_argument_in_another_process(fragile, smaller):
    for threads in (True, False):
        future = fragile.sleep_on.remote([1], 0.3)
        assert smaller[2].pass_on(future, threads) == [[[0, 1, 2, 3]] * 2] * 2
        with pytest.raises(WorkerError, match="the true cause"):
            smaller[2].pass_on(fragile.fail.remote([1]), threads)


def test_producer_error_reaches_the_consumer(transport, fragile, counters):
    failing = fragile.fail.remote([1])
    with pytest.raises(WorkerError, match=r"fail\(\) raised ValueError on rank 1.*the true cause"):
        counters.echo(failing)
    assert isinstance(failing.exception(), WorkerError)
    with pytest.raises(ValueError):
        transport.get(failing.refs[1])
    assert counters.add(0) == [100, 101, 102, 103]
    assert fragile.ping() == [0, 1, 2, 3]


def test_each_raise_is_a_new_exception(fragile):
    """Otherwise its traceback, which grows with each raise, would keep every waiting caller's arguments alive."""
    failing = fragile.fail.remote([1])

    def wait(batch):
        failing.result()

    batch = torch.zeros(3)
    caught = []
    for _ in range(2):
        with pytest.raises(WorkerError, match="the true cause") as one:
            wait(batch)
        caught.append((one.value, str(one.value), one.value.rank, type(one.value.__cause__), len(one.traceback)))
        del one
    assert caught[0][0] is not caught[1][0] and caught[0][1:] == caught[1][1:]

    def ask(batch):
        return failing.exception()

    told = [ask(batch), ask(batch)]
    assert told[0] is not told[1] and told[0].__traceback__ is None and str(told[0]) == caught[0][1]
    freed = weakref.ref(batch)
    del batch, caught
    gc.collect()
    assert freed() is None, "the error that exception() returned keeps its caller's variables"


@pytest.mark.transports("ray")
def test_each_raise_is_a_new_exception_in_another_process(fragile, smaller):
    failing = fragile.fail.remote([1])
    for distinct, (first, second, told), text in smaller[2].take_failed_future(failing):
        assert distinct == 3 and first == second and told == 0
        assert "the true cause on rank 1" in text


@overlapping
def test_timeout_of_the_producer_leaves_the_consumers_as_they_are(transport, make_group, counters):
    """Their ranks wait for results that never come, one of them behind an earlier call, for longer than error_grace."""
    producer, consumer = make_group(Fragile), make_group(Fragile, group_options={"error_grace": 0.2})
    pids, begin = consumer.pid(), time.monotonic()
    late = producer.sleep_on.options(timeout=0.3).remote([3], 60)
    behind = producer.ping.remote()
    busy = consumer.sleep_on.remote([2], 0.9)
    waiting = consumer.fail.remote(late)
    keeping = counters.take_future.remote(behind)
    with pytest.raises(CallTimeoutError, match=r"sleep_on\(\) exceeded.*rank 3") as caught:
        waiting.result()
    error, cause = caught.value, caught.value.__cause__
    assert (error.consumer, error.method, error.ranks) == ("fail", "sleep_on", (3,))
    assert error.__notes__ == ["fail() did not run, because this error failed its deferred argument"]
    assert isinstance(cause, CallTimeoutError) and cause.consumer is None and str(cause) == str(error)
    message, _, where = str(error).partition("\n\n")
    assert message == producer.broken and where.startswith("rank 3 is at:") and "time.sleep" in where
    assert pickle.loads(pickle.dumps(error)).consumer == "fail"
    with pytest.raises(CallTimeoutError, match=r"sleep_on\(\) exceeded"):
        consumer.fail(late)  # after the fact
    if transport.name == "ray":
        with pytest.raises(GroupBrokenError, match=r"sleep_on\(\) exceeded") as caught:
            keeping.result()
        assert caught.value.consumer == "take_future"
        with within(5), pytest.raises(GroupBrokenError, match=r"sleep_on\(\) exceeded"):
            counters.await_futures([behind])
    assert busy.result() == [0, 1, 2, 3] and consumer.pid() == pids and consumer.broken is None
    assert counters.add(0) == [100, 101, 102, 103] and counters.broken is None
    assert time.monotonic() - begin < 10


@overlapping
def test_closed_producer_leaves_the_consumer_as_it_is(make_group, counters):
    producer = make_group(Fragile)
    waiting = counters.echo.remote(producer.sleep.remote(60))
    producer.close()
    with within(5):
        with pytest.raises(GroupClosedError) as caught:
            waiting.result()
        assert caught.value.consumer == "echo"
        assert counters.add(0) == [100, 101, 102, 103] and counters.broken is None


@pytest.mark.transports("ray")
def test_call_that_is_withdrawn_at_once_costs_no_later_call(make_group, counters):
    """Ray loses the number of a task that is cancelled while it is being sent; its actor then waits for that for 30 s,
    and refuses what comes behind."""
    never = make_group(Fragile).sleep.remote(60)
    for _ in range(10 if depth.full else 4):
        waiting = counters.echo.remote(never)
        waiting._call._sent.give(None)
        with within(5):
            assert counters.add(0) == [100, 101, 102, 103]
        assert isinstance(waiting.exception(), ResultError)


def test_future_under_broadcast_and_inside_lists(counters):
    whole = counters.add.remote(0)
    assert counters.items([1, 2, 3, 4], Broadcast(whole)) == [(r, r + 1, [100, 101, 102, 103]) for r in range(4)]
    assert counters.items([whole, 0, 0, 0])[0] == (0, [100, 101, 102, 103], 0)
    assert counters.execute_all_sync("echo", [whole, 1, 2, 3])[0] == [100, 101, 102, 103]


def test_future_used_twice_in_nested_containers(counters, smaller):
    future = counters.double.remote(torch.arange(8))
    inner = {"rows": future}
    doubled = [0, 2, 4, 6, 8, 10, 12, 14]
    for got in counters.echo({"a": inner, "b": inner, "c": [future, inner]}):
        parts = [got["a"]["rows"], got["b"]["rows"], got["c"][0], got["c"][1]["rows"]]
        parts[0].zero_()
        assert [part.tolist() for part in parts[1:]] == [doubled] * 3
    assert smaller[2].echo(future)[0].tolist() == doubled


def test_future_in_a_dict(counters, smaller):
    batch = torch.arange(20).reshape(10, 2)
    double, add = smaller[2].double.remote(batch), smaller[2].add.remote(0)
    found = smaller[5].double({"x": batch, "y": double})
    assert torch.equal(found["x"], 2 * batch) and torch.equal(found["y"], 4 * batch) and list(found) == ["x", "y"]
    assert torch.equal(smaller[5].double({"y": double})["y"], 4 * batch)
    assert smaller[3].padded({"y": smaller[2].padded.remote({"z": [1, 2]}), "x": [5, 6]}) == {
        "x": [5, 6],
        "y": {"z": [1, 2]},
    }
    assert counters.echo({"a": add, "b": 1})[3] == {"b": 1, "a": [0, 1]}
    assert counters.execute_rank_zero_sync("echo", {"a": add}) == {"a": [0, 1]}
    assert smaller[3].padded({"a": {"y": double, "z": {"x": batch}}, "x": [*range(10)]})["a"]["y"].shape == (10, 2)
    with pytest.raises(DispatchError, match=r"argument \"batch\['y'\]\".*10 rows.*5"):
        smaller[5].double({"x": [1, 2, 3, 4, 5], "y": double})
    assert smaller[5].broken is None


@dataclass
class Both:
    """Takes no list, so that a second initialization with the result of a call would fail."""

    x: object
    y: object = 0

    def __post_init__(self):
        if type(self.y) is list:
            raise ValueError("initialized again")


@dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    made: object = field(default=None, init=False)


class Named(NamedTuple):
    a: object
    b: object


@dataclass
class Chunks:
    """A batch of a user's own type, of which every chunk has all of ``about``."""

    rows: list
    about: object

    def __len__(self):
        return len(self.rows)

    def chunk(self, count):
        size = len(self.rows) // count
        return [Chunks(self.rows[k * size : (k + 1) * size], self.about) for k in range(count)]

    @staticmethod
    def concat(chunks):
        return Chunks([row for chunk in chunks for row in chunk.rows], chunks[0].about)


def test_future_in_dataclasses_lists_and_tuples(counters):
    add = counters.add.remote(0)
    value = [100, 101, 102, 103]
    frozen = Frozen(add)
    object.__setattr__(frozen, "made", (add, 1))
    assert counters.echo(Both(1, add))[2].y == value
    given = Both([frozen, {"k": (1, add)}], OrderedDict(n=Named(1, add), m=2))
    for found in (*counters.echo(given), counters.execute_rank_zero_sync("echo", given), counters.first(given)[1]):
        assert type(found) is Both and type(found.y) is OrderedDict and found.y == OrderedDict(n=Named(1, value), m=2)
        assert type(found.x[0]) is Frozen and (found.x[0].x, found.x[0].made) == (value, (value, 1))
        assert found.x[1] == {"k": (1, value)}
    assert given.x[0].x is add and given.x[1] == {"k": (1, add)} and given.y["n"].b is add  # nothing of the caller's
    assert counters.items([Both(add, k) for k in range(4)])[3] == (3, Both(value, 3), 0)
    assert counters.items([0, 0, 0, [[add]]])[3] == (3, [[value]], 0)
    assert counters.echo(Both(1, 2)) == [Both(1, 2)] * 4


def test_future_in_a_dataclass_where_rows_are_cut(smaller):
    group = smaller[2]
    number, rows = group.one_rank_zero.remote(3), group.double.remote([1, 2])
    assert group.apply(lambda worker, rows: rows, [number, 1, [number], 2]) == [3, 1, [3], 2]
    assert group.double(torch.ones(2), factor=number).tolist() == [3.0, 3.0]
    assert group.padded({"x": [1, 2], "s": Both(0.5, number)}) == {"x": [1, 2], "s": Both(0.5, 3)}
    assert group.padded(Chunks([1, 2, 3, 4], number)) == Chunks([1, 2, 3, 4], 3)
    # What has rows is refused in a dataclass, as it is without a future, and nothing breaks.
    with pytest.raises(DispatchError, match=r"argument \"batch\['s'\]\.x\".*double\(\) has \d rows.*Broadcast"):
        group.padded({"x": [1, 2], "s": Both(rows)})
    given = {"x": [1, 2], "s": Broadcast(Both(rows))}
    assert group.apply(lambda worker, part: [part["s"].x] * len(part["x"]), given) == [rows.result()] * 2
    assert group.broken is None


def test_future_that_cannot_be_taken_out_or_that_fails(counters):
    class Box:
        def __init__(self, value):
            self.value = value

    add = counters.add.remote(0)
    sent = counters._state.sent
    for argument, name in ((Box(add), "Box"), ([add, Box(add)], "list"), ({add}, "set"), (lambda: add, "function")):
        with pytest.raises(DispatchError, match=rf"echo\(\): argument 'value', a {name}.*materialize_futures=False"):
            counters.echo(argument)
    assert counters._state.sent == sent
    failing = counters.apply.remote(lambda worker, rows: 1 / 0, [1, 2, 3, 4])
    for given in (Both(1, failing), [[failing]], {"a": {"b": failing}}):
        with pytest.raises(WorkerError, match=r"apply\(\)"):
            counters.echo(given)
    assert counters.echo(Both(add))[0] == Both([100, 101, 102, 103])


def test_future_of_this_process_as_an_argument(counters, smaller):
    def later(value):
        future = ComputedFuture("generate")
        threading.Timer(0.03, future.set_result, [value]).start()
        return future

    batch = torch.arange(20).reshape(10, 2)
    assert torch.equal(smaller[5].double(later(batch)), 2 * batch)
    assert torch.equal(smaller[5].double({"x": later(batch)})["x"], 2 * batch)
    assert counters.echo(Broadcast(later([1])))[0] == [1] and counters.echo(later([1]))[3] == [1]
    assert counters.items(later([5, 6, 7, 8]))[1] == (1, 6, 0)
    assert counters.items([0, later(4), 0, 0])[1] == (1, 4, 0)
    assert counters.take_future(later(3))[0] == ("ComputedFuture", 3)
    assert counters.custom(later([1, 2]), y=later([5, 6])) == [106, 109, 108, 111]
    assert counters.echo(Both([later(1)], later(2)))[3] == Both([1], 2)
    assert counters.custom([later(1), 2], y=[5, later(6)]) == [106, 109, 108, 111]
    with pytest.raises(DispatchError, match=r"Both.*cannot be cut into rows"):
        smaller[5].double(batch, factor=Both(later(batch)))
    failing = ComputedFuture("generate")
    failing.set_exception(ValueError("out of paper"))
    with pytest.raises(ValueError, match="out of paper"):
        counters.echo(failing)
    assert str(failing.failed) == "out of paper" and isinstance(failing.exception(), ValueError)
    waiting = ComputedFuture("generate")
    with pytest.raises(CallTimeoutError, match=r"generate\(\) has not finished after a wait of 0.01 s") as caught:
        waiting.result(0.01)
    assert caught.value.call_goes_on and not waiting.done() and "running" in repr(waiting)
    with pytest.raises(DispatchError, match="no references"):
        _ = waiting.refs
    waiting.cancel()

    async def main():
        return await asyncio.gather(later(1), later(2), counters.first.remote(3))

    assert asyncio.run(main()) == [1, 2, (0, 3)]


def test_custom_mode_gets_the_value_of_a_future(counters):
    assert counters.custom(counters.first.remote(5), y=[5, 6]) == [105, 112, 107, 114]


def test_future_with_a_collect_function_is_rejected(counters):
    future = counters.custom.remote(x=[1, 2], y=[5, 6])
    with pytest.raises(DispatchError, match=r"custom\(\).*future\.result\(\)"):
        counters.echo(future)
    assert future.result() == [106, 109, 108, 111]


@overlapping
def test_failed_producer_rank_does_not_break_the_consumer(make_group, counters):
    """The producer's other ranks are still busy, as they would be in a collective."""
    failing = make_group(Fragile).fail.remote([1], others_sleep=20)
    with within(4), pytest.raises(WorkerError, match="the true cause"):
        counters.echo(failing)
    assert counters.add(0) == [100, 101, 102, 103] and counters.broken is None


def test_chain_does_not_keep_earlier_futures(counters):
    future = counters.double.remote(torch.arange(4), 1)
    first = weakref.ref(future)
    for _ in range(3):
        future = counters.double.remote(future, 1)
    assert future.result().tolist() == [0, 1, 2, 3]
    wait_collected(lambda: first() is None, 5, "the end of the first future")  # the monitor settles the calls between


async def _value(future):
    return await future


@pytest.mark.transports("ray")
def test_consumers_get_references_to_the_large_results_that_they_need(counters, smaller, monkeypatch):
    """To those of all producing ranks, they would cost the square of their number."""
    from single_controller.ray import transport as module

    sent = []
    encode = module.encode_call
    monkeypatch.setattr(module, "encode_call", lambda *given: sent.append(encode(*given)) or sent[-1])
    for columns, wanted in (1, [0] * 5), (1 << 15, [1, 2, 2, 2, 1]):
        future = counters.double.remote(torch.ones(40, columns))
        sent.clear()
        assert torch.equal(smaller[5].double(future), torch.full((40, columns), 4.0))
        assert [len(shard.references) for _, _, _, shard in sent[-1]] == wanted


@pytest.mark.transports("ray")
def test_write_to_a_large_result_does_not_reach_other_readers(counters, smaller):
    future = counters.echo.remote(np.zeros(1 << 17))
    future.result()[0][:] = 7
    assert not any(seen.any() for seen in smaller[2].echo(future)[0])
    assert not any(seen.any() for seen in ray.get(future.refs))


def test_exception_of_results_that_cannot_be_joined(counters):
    future = counters.apply.remote(lambda worker, rows: 1.0, [1, 2, 3, 4])
    assert isinstance(future.exception(), ResultError)


@pytest.mark.transports("ray")
def test_errors_of_ray_are_causes_of_a_lost_result(fragile, counters, smaller):
    """The consumer's ranks meet Ray's error; the driver gets it with the whole chain of causes."""
    lost, failed = counters.echo.remote(bytes(1_600_000)), fragile.execute_rank_zero_async("fail", [0])
    lost.wait()
    entries = lost.source()[0]._entries
    entries[0].kept = ray.put((entries[0].result, [failed]))  # on one host, nothing loses a result
    with pytest.raises(ResultError, match=r"the result of rank 0 of echo\(\)") as caught:
        smaller[2].echo(lost)
    error, original = caught.value, caught.value.__cause__
    assert (error.consumer, error.method, error.rank) == ("echo", "echo", 0)
    assert error.__notes__ == ["echo() did not run, because this error failed its deferred argument"]
    assert isinstance(original, ResultError) and original.consumer is None
    assert isinstance(original.__cause__, RayError)
    with pytest.raises(ResultError, match=r"the result of rank 0 of echo\(\)") as caught:
        lost.result()
    assert isinstance(caught.value.__cause__, RayError)


def test_drivers_batch_type_is_known_to_the_workers(make_group):
    register_batch_type(
        Own,
        length=lambda own: len(own.rows),
        cut=lambda own, start, stop: Own(own.rows[start:stop]),
        join=lambda parts: Own(row for part in parts for row in part.rows),
    )
    group = make_group(Counter)
    assert group.padded(Own(range(5))).rows == list(range(5))
    assert group.padded(group.ragged.remote(Own(range(6)))).rows == list(range(6))
    uncounted = Own(())
    uncounted.rows = None
    assert [own.rows for own in group.echo(uncounted)] == [None] * 4  # whole, so nobody needs its length


# --- event loops ----------------------------------------------------------------------------------------------------


async def longest_pause(work):
    """Await something. Returns its value, and the share of its time for which the event loop was kept from other tasks
    at a stretch; 0 if that was less than 50 ms."""
    pauses = [0.0]

    async def tick():
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            pauses.append(time.monotonic() - last)
            last = time.monotonic()

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    begin = time.monotonic()
    value = await work
    ticking.cancel()
    longest = max(pauses)
    return value, longest / (time.monotonic() - begin) if longest > 0.05 else 0.0


# Tests that run alone are together, because each of them would wait for a test of the other process to end.


@pytest.mark.alone
@overlapping
def test_await_costs_little_more_than_a_blocking_wait(counters):
    """Both calls return futures, so they go the same way. The waits of the two kinds alternate, so a slow machine slows
    both."""

    async def main():
        blocking, awaited = [], []
        for _ in range(20):
            begin = time.perf_counter()
            counters.add.remote(0).result()
            middle = time.perf_counter()
            await counters.add.remote(0)
            blocking.append(middle - begin)
            awaited.append(time.perf_counter() - middle)
        return statistics.median(blocking), statistics.median(awaited)

    blocking, awaited = asyncio.run(main())
    assert awaited < 3 * blocking, f"{awaited * 1e3:.1f} ms against {blocking * 1e3:.1f} ms"


@pytest.mark.alone
@overlapping
def test_groups_overlap(fragile, counters):
    with within(1.15):
        futures = [
            fragile.sleep.remote(0.6),
            counters.execute_with_func_generator.remote(lambda worker: time.sleep(0.6) or worker.rank),
        ]
        assert [future.result() for future in futures] == [[0, 1, 2, 3]] * 2


@pytest.mark.alone
@pytest.mark.transports("ray")
def test_await_can_be_cancelled_and_does_not_queue(fragile, counters):
    async def main():
        slow = [fragile.sleep.remote(seconds) for seconds in (0.6, 0.2)]
        begin = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(slow[0], 0.1)
        waiting = [asyncio.ensure_future(_value(future)) for future in slow]
        assert await counters.add.remote(0) == [100, 101, 102, 103]
        assert time.monotonic() - begin < 0.5
        return await asyncio.gather(*waiting)

    assert asyncio.run(main()) == [[0, 1, 2, 3]] * 2


@pytest.fixture(scope="module")
def replaced(transport):
    """Four ranks that tests may end; those that die are replaced."""
    with transport.make(Fragile, group_options={"on_death": "replace", "collectives": False}) as group:
        yield group


@pytest.mark.alone
@pytest.mark.transports("ray")
def test_event_loop_goes_on_while_ranks_are_replaced(replaced):
    group, pids = replaced, replaced.pid()
    kill_before(lambda: group.sleep(1), pids[1])

    async def calls():
        with pytest.raises(GroupBrokenError, match=r"await group\.areplace\(\)"):
            group.execute_all_async("ping")
        futures = [group.pid.remote() for _ in range(3)]
        assert [future.done() for future in futures] == [False] * 3 and "not sent" in repr(futures[0])
        wrong = group.ping.remote(1, 2, 3)
        with pytest.raises(CallTimeoutError) as caught:
            futures[0].result(0)
        assert caught.value.call_goes_on
        with pytest.raises(TypeError, match=r"ping\(\) too many"):
            await wrong
        return await asyncio.gather(*futures)

    after, pause = asyncio.run(longest_pause(calls()))
    assert [new == old for new, old in zip(after[0], pids, strict=True)] == [True, False, True, True]
    assert after[1:] == after[:1] * 2
    assert pause < 0.3

    async def replace():
        os.kill(group.pid()[2], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            await group.sleep.remote(1)
        replacing = asyncio.create_task(group.areplace())
        await asyncio.sleep(0.05)
        pids = await group.pid.remote()  # waits for the replacement, which another thread runs
        return await replacing, len(pids)

    found, pause = asyncio.run(longest_pause(replace()))
    assert found == ((2,), 4) and pause < 0.3


@pytest.mark.alone
@pytest.mark.transports("ray")
def test_event_loop_goes_on_while_a_group_shrinks(make_group, counters, caplog):
    group = make_group(Fragile, group_options={"on_death": "shrink", "collectives": False})
    pids, large = group.pid(), group.large.remote()
    large.wait()
    kill_before(lambda: group.sleep(1), pids[1])
    try:  # nobody has asked for the value, so it dies with its rank, if not all have it by then
        assert counters.echo(large) == [[bytes(1 << 21)] * 4] * 4
    except (ResultError, WorkerDiedError) as error:
        assert "rank 1" in str(error) and "large()" in str(error)

    async def call():
        return await group.ping.remote()

    found, pause = asyncio.run(longest_pause(call()))
    assert len(found) == 3 and pause < 0.3
    # What is logged of the death does not say that the group is broken, which it is not for its next call.
    said = [one.getMessage() for one in caplog.records if "died during sleep()" in one.getMessage()]
    assert any("the next call first has the group recover" in one for one in said)
    assert not any("is broken" in one for one in said)


@pytest.mark.alone
@pytest.mark.transports("ray")
def test_event_loop_goes_on_while_ranks_leave_and_come(replaced):
    async def change():
        left, come, pids = await replaced.ashrink([3]), await replaced.agrow(1), await replaced.pid.remote()
        await replaced.arestart([0])
        return left, come, pids, await replaced.pid.remote()

    (left, come, before, after), pause = asyncio.run(longest_pause(change()))
    assert (left, come) == ((3,), (3,)) and pause < 0.3
    assert [new == old for new, old in zip(after, before, strict=True)] == [False, True, True, True]


@pytest.mark.alone
@pytest.mark.ray_when_full
@overlapping
def test_event_loop_goes_on_while_a_future_inside_an_argument_is_waited_for(counters):
    async def calls():
        rows = [ComputedFuture("generate") for _ in range(3)]
        for future in rows:
            threading.Timer(0.4, future.set_result, [7]).start()
        given = [[rows[0]]], Both(1, rows[1]), {"a": {"b": rows[2]}}
        return await asyncio.gather(*(counters.echo.remote(value) for value in given))

    found, pause = asyncio.run(longest_pause(calls()))
    assert [each[3] for each in found] == [[[7]], Both(1, 7), {"a": {"b": 7}}] and pause < 0.3


@pytest.mark.alone
@overlapping
def test_event_loop_goes_on_while_busy_ranks_are_asked_for_their_layout(make_group):
    group = make_group(Grid, {"dp": [0, 1, 2, 3]})

    async def calls():
        busy = group.execute_all_async("rest", 0.4)
        rows = group.compute_rows.remote(torch.arange(8))
        later = group.compute_rows.remote(rows)  # its argument has not been sent
        del busy
        return await rows, await later

    (_, later), pause = asyncio.run(longest_pause(calls()))
    assert len(later) == 8 and pause < 0.3


@pytest.mark.ray_when_full
@overlapping
def test_calls_of_an_event_loop_are_sent_in_order(make_group):
    group = make_group(Grid, {"dp": [0, 1, 2, 3]})

    async def calls():
        futures = [group.compute_rows.remote(torch.full((4,), number)) for number in range(20)]
        return await asyncio.gather(*futures)

    assert [int(rows[0]) for rows in asyncio.run(calls())] == [
        int(group.compute_rows(torch.full((4,), number))[0]) for number in range(20)
    ]


class Plain(Worker):
    def __init__(self):
        super().__init__()
        self.seen = []

    @register(Dispatch.ONE_TO_ALL)
    def see(self, value):
        self.seen.append(value)
        return list(self.seen)

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def see_result(self, future):
        return self.see(future.result())


def compute_first(group, rows):
    """A dispatch_fn that calls the group, for one method that needs no layout and one that does."""
    group.last_seen()
    return (group.compute_rows.remote(rows).result(),), {}


class ComputesFirst(Grid):
    kept = None

    @register({"dispatch_fn": compute_first, "collect_fn": collect_all_to_all}, replay=True)
    def keep(self, rows):
        self.kept = rows.tolist()

    def told(self):
        return self.kept


class SlowAgain(Grid):
    """Its second constructor takes time."""

    def __init__(self, axes):
        time.sleep(0.3 if self.generation else 0.0)
        super().__init__(axes)


@pytest.fixture
def plain():
    with LocalWorkerGroup(2, ClassWithInitArgs(Plain), threads=True) as group:
        yield group


def sending_held(group, seconds=0.3):
    """Another thread holds the lock under which calls are sent, as a repair does."""
    held = threading.Event()

    def hold():
        with group._state.sending:
            held.set()
            time.sleep(seconds)

    threading.Thread(target=hold, daemon=True).start()
    held.wait(5)


@pytest.mark.timeout(20)
class TestUnsentCalls:
    """Of an event loop, while another thread holds the lock."""

    def test_blocking_calls_come_after_them(self, plain):
        async def main():
            sending_held(plain)
            assert plain.see.remote(1)._sending is not None
            return plain.see(2)

        assert asyncio.run(main()) == [[1, 2]] * 2

    def test_in_a_fork(self, plain):
        """Which does not have the thread that sends them."""

        async def main():
            sending_held(plain)
            unsent = plain.see.remote(1)
            found = in_fork(lambda: " ".join(errors_of(unsent.result, unsent.wait, lambda: next(unsent.__await__()))))
            assert found.split() == ["ForkedProcessError"] * 3
            return await unsent

        assert asyncio.run(main()) == [[1]] * 2

    def test_blocking_calls_come_after_them_in_a_restart(self):
        with LocalWorkerGroup(2, ClassWithInitArgs(SlowAgain, {"dp": [0, 1]}), threads=True) as group:

            async def main():
                restart = asyncio.create_task(group.arestart())
                while not (group._state.restarting or restart.done()):
                    await asyncio.sleep(0.01)
                rows = group.compute_rows.remote(torch.tensor([1, 2]))  # then the layout is asked for, too
                seen = group.last_seen()
                await restart
                return [*seen, *await rows]

            assert list(map(int, asyncio.run(main()))) == [1, 2, 10, 20]

    def test_blocking_restart_replays_a_call_whose_dispatch_fn_calls_the_group(self):
        with LocalWorkerGroup(2, ClassWithInitArgs(ComputesFirst, {"dp": [0, 1]}), threads=True) as group:

            async def main():
                group.keep(torch.tensor([1, 2]))
                group.move({"dp": [0, 1]})  # the layout has to be asked for again
                group.execute_all_async("rest", 5)  # on workers that the restart abandons
                rows = [group.compute_rows.remote(torch.tensor([3, 4])) for _ in range(2)]
                group.restart()  # which ends the first of them; the second one waits for it
                return (await asyncio.gather(*rows, return_exceptions=True))[1]

            assert asyncio.run(main()).tolist() == [30, 40]
            assert group.execute_all_sync("told") == [[10, 20]] * 2

    def test_dispatch_fn_that_waits_for_a_call_of_its_group(self):
        with LocalWorkerGroup(2, ClassWithInitArgs(ComputesFirst, {"dp": [0, 1]}), threads=True) as group:

            async def main():
                await group.keep.remote(torch.tensor([1, 2]))

            asyncio.run(main())
            assert group.execute_all_sync("told") == [[10, 20]] * 2

    def test_mapped_calls_come_after_them(self):
        """The first one has to wait for the layout, for which busy ranks are asked."""
        with LocalWorkerGroup(2, ClassWithInitArgs(Grid, {"dp": [0, 1]}), threads=True) as group:

            async def main():
                busy = group.execute_all_async("rest", 0.3)
                rows = group.compute_rows.remote(torch.tensor([1, 2]))
                (seen,) = group.map("execute_with_func_generator", [lambda worker: worker.seen])
                del busy
                return [*seen, *await rows]

            assert list(map(int, asyncio.run(main()))) == [1, 2, 10, 20]

    def test_inside_an_argument_of_a_blocking_call(self, plain):
        async def main():
            sending_held(plain)
            return plain.see([plain.see.remote(1)])

        seen = asyncio.run(main())
        assert [len(one) for one in seen] == [2, 2]

    def test_with_references(self, plain):
        async def main():
            sending_held(plain)
            return await ReferencedFuture(plain.see.remote(1), lambda ref: None)

        assert asyncio.run(main()) == [[1]] * 2

    def test_with_references_as_an_argument(self, plain):
        """Which are made for whoever reads them."""
        made = []
        seen = plain.see(ReferencedFuture(plain.see.remote(1), made.append))
        assert seen == [[1, [[1], [1]]]] * 2 and made == []

    def test_references_that_two_threads_ask_for_at_once(self, plain, monkeypatch):
        both, refs = threading.Barrier(2, timeout=10), WorkerFuture.refs.fget

        def refs_for_both(future):
            both.wait()
            return refs(future)

        monkeypatch.setattr(WorkerFuture, "refs", property(refs_for_both))
        sent = ReferencedFuture(plain.see.remote(1), lambda ref: None)
        computed = ComputedFuture("compute", lambda value: both.wait())
        computed.set_result(1)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(len, [sent, sent])) == [2, 2] and len(sent) == 2
            assert [len(found) for found in pool.map(lambda one: one.refs, [computed] * 2)] == [1, 1]

    @pytest.mark.parametrize("method", ["see", "see_result"])
    def test_argument_that_a_call_of_the_same_group_computes(self, plain, method):
        computed = ComputedFuture("compute")

        def compute():
            time.sleep(0.2)
            plain.see(1)
            computed.set_result(5)

        async def main():
            threading.Thread(target=compute, daemon=True).start()
            return await getattr(plain, method).remote(computed)

        assert asyncio.run(main()) == [[1, 5]] * 2

    @pytest.mark.parametrize("method", ["see", "see_result"])
    def test_as_an_argument_when_they_cannot_be_sent(self, plain, method):
        with LocalWorkerGroup(2, ClassWithInitArgs(Plain), threads=True) as consumer:

            async def main():
                sending_held(plain)
                waiting = getattr(consumer, method).remote(plain.see.remote(1))
                plain.close()
                with pytest.raises(GroupClosedError) as caught:
                    await waiting
                return caught.value.consumer

            assert asyncio.run(main()) == method and consumer.see(2) == [[2]] * 2

    def test_interrupted_start_of_their_thread_sends_none_twice(self, plain, monkeypatch):
        async def main():
            sending_held(plain)
            with plain._state.lock:  # another event loop comes before the thread
                with pytest.raises(KeyboardInterrupt):
                    plain.see.remote(1)
                second = plain.see.remote(2)
            return await second

        started = interrupt_first_start(monkeypatch, "send-later")
        assert asyncio.run(main()) == [[2]] * 2
        for thread in started:
            thread.join(5)
        assert plain.see(3) == [[2, 3]] * 2

    def test_error_of_sending_is_told_as_it_is(self, plain, caplog):
        async def main():
            sending_held(plain)
            plain.see.remote(1, 2)  # nobody waits for it
            given_up = plain.see.remote(1, 2)
            with pytest.raises(CallTimeoutError, match="has not been sent"):
                given_up.result(timeout=0)
            del given_up
            with pytest.raises(TypeError, match=r"too many|takes"):
                await plain.see.remote(1, 2)

        asyncio.run(main())
        gc.collect()
        assert caplog.text.count("see(), whose future was dropped, was not sent: TypeError") == 2
