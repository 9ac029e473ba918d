"""The cost of calls as the group records it, and their trace."""

import json
import time

import pytest
import torch

from single_controller import WorkerError

ENGINES = ("ray", "local", "local-threads")
overlapping = pytest.mark.engines("ray", "local-threads")
"""For a test whose ranks or calls must run at the same time."""


@pytest.fixture
def log(make_group):
    from group_workers import Log

    return make_group(Log)


def by_method(group):
    return group.stats().methods


def test_bytes_and_seconds_of_a_call(counters):
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
    assert all(seconds >= 0 for seconds in call.phases().values())


def test_only_ranks_that_collect_return_bytes(make_group):
    from group_workers import Grid

    group = make_group(Grid, axes={"dp": [0, 0, 1, 1], "tp": [0, 1, 0, 1]})
    batch = torch.ones(8, 1000)
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
    from group_workers import Log

    first, second = make_group(Log), make_group(Log)
    futures = []
    for step in range(3):
        made = first.note.remote(f"made {step}", seconds=0.3)
        futures.append(second.note.remote(made, seconds=0.3))
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
        assert all(300_000 <= stop - start < 1_000_000 for start, stop in slices[name]), "times are in microseconds"
    for n in range(2):
        assert slices["first"][n + 1][0] < slices["second"][n][1], f"step {n + 1} began before step {n} had ended"
