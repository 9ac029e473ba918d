"""The cost of calls as the group records it, and their trace."""

import json
import time
import tracemalloc

import pytest
import torch
from group_workers import Counter, Grid, Log

from dispatch.plan import CallPlan
from dispatch.register import registered_methods
from single_controller import WorkerError
from single_controller.call import call as call_module
from single_controller.call import stats as call_stats
from single_controller.call.call import Call
from single_controller.call.errors import Failure, first_cause
from single_controller.call.joining import RankResult
from single_controller.call.state import GroupState
from single_controller.call.stats import KEPT_CALLS, CallRecord, CallStats, Clock, write_trace
from single_controller.call.transport import Sent, Transport

TRANSPORTS = ("ray", "local", "local-threads")
overlapping = pytest.mark.transports("ray", "local-threads")
"""For a test whose ranks or calls must run at the same time."""


@pytest.fixture
def log(make_group):
    return make_group(Log)


@pytest.fixture
def recorded(counters):
    """The shared counters, with records by rank."""
    counters.record_ranks()
    yield counters
    counters.record_ranks(0)


def by_method(group):
    return group.stats().methods


def test_bytes_and_seconds_of_a_call(recorded):
    counters = recorded
    before = by_method(counters).get("echo")
    calls, sent, returned = (before.calls, before.sent, before.returned) if before else (0, 0, 0)
    value = torch.ones(1_000_000)
    counters.echo(value)
    after = by_method(counters)["echo"]
    assert after.calls == calls + 1
    assert 4 * value.nbytes <= after.sent - sent < 4 * value.nbytes + 10_000, "each of the four ranks receives one copy"
    assert 4 * value.nbytes <= after.returned - returned < 4 * value.nbytes + 10_000
    call = counters.stats().calls[-1]
    assert call.method == "echo" and sorted(call.ranks) == [0, 1, 2, 3] and call.failed is None
    for rank in call.ranks.values():
        assert value.nbytes <= rank.sent < value.nbytes + 3000 and value.nbytes <= rank.returned < value.nbytes + 3000
        received, began, ended, packed = rank.clock
        assert call.begun <= received <= began <= ended <= packed <= rank.arrived <= time.time()
    phases = call.phases()
    assert all(seconds >= 0 for seconds in phases.values())
    # What was added up as the results arrived is what the ranks' records add up to.
    ranks = call.ranks.values()
    assert (call.sent, call.returned) == (sum(r.sent for r in ranks), sum(r.returned for r in ranks))
    assert phases["open"] == max(rank.clock.began - rank.clock.received for rank in ranks)
    assert phases["method"] == max(rank.clock.ended - rank.clock.began for rank in ranks)
    assert phases["return"] == max(rank.arrived - rank.clock.ended for rank in ranks)
    assert phases["queue"] == max(0, *(rank.clock.received - call.dispatched for rank in ranks))


def test_only_ranks_that_collect_return_bytes(make_group):

    group = make_group(Grid, axes={"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]})
    batch = torch.ones(8, 1000)
    group.record_ranks()
    group.compute_rows(batch)
    ranks = group.stats().calls[-1].ranks
    half = batch.nbytes // 2
    assert all(half <= rank.sent < half + 3000 for rank in ranks.values())
    assert [rank for rank in sorted(ranks) if ranks[rank].returned >= half] == [0, 2]
    assert ranks[1].returned == ranks[3].returned == 0


@overlapping
def test_time_is_assigned_to_the_right_phase(log):
    first = log.note.remote("first", seconds=0.5)
    log.note("second")
    first.result()
    slow, fast = log.stats().calls[-2:]
    assert 0.5 <= slow.phases()["method"] < 1.5
    assert fast.phases()["queue"] >= 0.3 and fast.phases()["method"] < 0.3
    assert by_method(log)["note"].calls == 2


def test_failed_call_is_counted_once(counters):
    before = by_method(counters).get("add")
    failed, calls = (before.failed, before.calls) if before else (0, 0)
    with pytest.raises(WorkerError):
        counters.add("text")
    stats = by_method(counters)["add"]
    assert (stats.failed, stats.calls) == (failed + 1, calls + 1)
    assert counters.stats().calls[-1].failed == "WorkerError"


@pytest.mark.ray_when_full
def test_stats_print_as_a_table(log):
    log.note("x")
    log.execute_all_sync("read")
    lines = str(log.stats()).splitlines()
    assert lines[0].split()[:5] == ["method", "calls", "failed", "sent", "returned"]
    assert [line.split()[0] for line in lines[1:-1]] == ["note", "read"]
    assert len({len(line) for line in lines[:-1]}) == 1


@pytest.mark.ray_when_full
def test_rejected_call_is_not_counted(log):
    with pytest.raises(TypeError):
        log.note()
    assert "note" not in by_method(log)


@overlapping
@pytest.mark.ray_when_full
def test_trace_has_a_row_per_rank_and_shows_overlapping_groups(make_group, tmp_path):
    """While the second group works on step n, the first is at step n + 1."""
    first, second = make_group(Log), make_group(Log)
    first.record_ranks(), second.record_ranks()
    futures = []
    for step in range(3):
        made = first.note.remote(f"made {step}", seconds=0.15)
        futures.append(second.note.remote(made, seconds=0.15))
    for future in futures:
        future.result()
    slices = {}
    for name, group in (("first", first), ("second", second)):
        path = tmp_path / f"{name}.json"
        group.trace(path)
        events = json.loads(path.read_text())["traceEvents"]
        rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
        assert list(rows) == ["driver", "rank 0", "rank 1", "rank 2", "rank 3"] and len(set(rows.values())) == 5
        assert all(event["ph"] in "MX" and event.get("dur", 0) >= 0 for event in events)
        on_rank_0 = [event for event in events if event["name"] == "note" and event["tid"] == rows["rank 0"]]
        slices[name] = [(event["ts"], event["ts"] + event["dur"]) for event in on_rank_0]
        assert all(150_000 <= stop - start < 1_000_000 for start, stop in slices[name]), "times are in microseconds"
    for n in range(2):
        assert slices["first"][n + 1][0] < slices["second"][n][1], f"step {n + 1} began before step {n} had ended"


@pytest.mark.ray_when_full
def test_ranks_are_recorded_on_request_and_for_the_latest_calls(log, tmp_path):
    log.note("before")
    path = tmp_path / "trace.json"
    with pytest.warns(UserWarning, match=r"no rows for the ranks.*call group\.record_ranks\(\) before"):
        log.trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["driver"]
    log.record_ranks(calls=2)
    for what in ("first", "second", "third"):
        log.note(what)
    assert [sorted(call.ranks) for call in log.stats().calls] == [[], [], [0, 1, 2, 3], [0, 1, 2, 3]]
    log.record_ranks(calls=1)
    assert [len(call.ranks) for call in log.stats().calls] == [0, 0, 0, 4]
    log.record_ranks(calls=0)
    log.note("after")
    assert not any(call.ranks for call in log.stats().calls) and by_method(log)["note"].calls == 5
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match=r"record_ranks.*calls=.*expected an integer of at least 0"):
            log.record_ranks(wrong)


class At1024Ranks(Transport):
    """1,024 ranks that have returned as soon as they are asked."""

    world_size = 1024

    def host(self, rank):
        return "host"

    def send(self, spec, plan, call):
        now = time.time()
        for rank in range(1024):
            call.arrive(RankResult(rank, clock=Clock(now, now + 1, now + 2 + rank, now + 2000), nbytes=10))
        return Sent(None, dict.fromkeys(range(1024), 100))

    def deaths(self):
        return {}

    def stacks(self, ranks, seconds=0.0):
        return {}

    running = stacks
    processes = ()

    def kill(self):
        pass


def make_calls(stats, number):
    """Send calls to 1,024 simulated ranks and wait for them. Returns the bytes that the statistics keep of each."""
    state = GroupState("simulated", 5.0)
    state.transport = At1024Ranks()
    spec, plan = registered_methods(Counter)["add"], CallPlan.empty(1024)

    def call():
        made = Call(state, spec, plan, state.transport, stats=stats)
        made.sent(state.transport.send(spec, plan, made))

    call()
    tracemalloc.start()
    try:
        for _ in range(number):
            call()
        return tracemalloc.get_traced_memory()[0] / number
    finally:
        tracemalloc.stop()


def test_errors_of_all_ranks_are_not_compared_at_each_of_them(monkeypatch):
    """With thousands of ranks, nobody would read connections meanwhile, nor get the group's lock."""
    compared = []
    monkeypatch.setattr(call_module, "first_cause", lambda of: compared.append(len(of)) or first_cause(of))
    call = Call(GroupState("simulated", 5.0), registered_methods(Counter)["add"], CallPlan.empty(1024), At1024Ranks())
    for rank in range(1024):
        call.arrive(RankResult(rank, failure=Failure(rank, "host", "add", "ValueError", "bad", when=float(rank))))
    assert compared == [1, 1024] and call.error.ranks == tuple(range(1024))


def test_statistics_of_a_call_do_not_grow_with_its_ranks():
    stats = CallStats()
    kept = make_calls(stats, 20)
    print(f"\n{kept:.0f} bytes of each call of 1,024 ranks are kept")
    assert kept < 2000
    assert stats.stats().calls[-1].phases()["method"] == pytest.approx(1 + 1023, abs=1e-3)
    assert (stats.stats().methods["add"].sent, stats.stats().methods["add"].returned) == (21 * 102400, 21 * 10240)


def test_records_of_ranks_are_bounded():
    stats = CallStats()
    stats.record_ranks(5)
    kept = make_calls(stats, 20)
    print(f"\n{kept * 20 / 5 / 1024:.0f} bytes are kept of each rank and call")
    assert 5 * 1024 * 100 < kept * 20 < 5 * 1024 * 600
    assert [len(call.ranks) for call in stats.stats().calls] == [0] * 16 + [1024] * 5


def test_each_call_is_counted_once_while_earlier_ones_are_added_up(monkeypatch):
    """Another thread may ask then, such as that of `GroupMetrics`."""
    stats, add, seen = CallStats(), call_stats._add, []

    def add_and_ask(methods, record):
        monkeypatch.setattr(call_stats, "_add", add)
        add(methods, record)
        seen.append(stats.stats().methods["m"].calls)

    stats.calls.extend(CallRecord("m", 0.0, settled=1.0) for _ in range(2 * KEPT_CALLS))
    monkeypatch.setattr(call_stats, "_add", add_and_ask)
    stats.trim()
    assert seen == [2 * KEPT_CALLS] and len(stats.calls) == KEPT_CALLS
    assert stats.stats().methods["m"].calls == 2 * KEPT_CALLS


def test_trace_is_written_without_building_it_in_memory(tmp_path):
    stats = CallStats()
    stats.record_ranks(5)
    make_calls(stats, 4)
    path = tmp_path / "trace.json"
    tracemalloc.start()
    try:
        write_trace(path, "simulated", stats.stats().calls)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = path.stat().st_size
    print(f"\n{peak / 1e6:.2f} MB to write {size / 1e6:.1f} MB")
    assert peak < size / 5
    events = json.loads(path.read_text())["traceEvents"]
    assert len([event for event in events if event["name"] == "add"]) == 5 * 1024
    assert len([event for event in events if event["name"] == "thread_name"]) == 1 + 1024
