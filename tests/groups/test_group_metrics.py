"""GroupMetrics: what groups do, as Ray's metrics, and Grafana's dashboard of them."""

import contextlib
import json
import re
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from group_workers import Counter, Fragile
from ray.util import metrics as ray_metrics
from waits import kill_before, refuse_threads, wait_until

import single_controller
from single_controller import GroupMetrics, LocalWorkerGroup, RayClassWithInitArgs, RayWorkerGroup, StartError, colocate
from single_controller.ray import group_metrics
from workers import RunLog


@pytest.fixture
def told(monkeypatch):
    """name -> tags -> what Ray was told: the sum of a counter, the last value of a gauge."""
    found = defaultdict(lambda: defaultdict(float))

    def spy(cls, method, add):
        real = getattr(cls, method)

        def call(self, value=1.0, tags=None):
            real(self, value, tags)
            values = found[self.info["name"].removeprefix("single_controller_")]
            key = tuple((tags or {}).values())
            values[key] = values[key] * add + value

        monkeypatch.setattr(cls, method, call)

    spy(ray_metrics.Counter, "inc", 1)
    spy(ray_metrics.Gauge, "set", 0)
    return found


def test_calls_bytes_and_deaths(pool, told):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="told_") as group:
        with GroupMetrics(group, interval=0.05) as metrics:
            for _ in range(3):
                group.ping()
            with pytest.raises(ValueError):
                group.fail([1])
            name = group.name
            # Those of a method are counted one after the other, and returned_bytes last.
            wait_until(lambda: told["calls"][name, "ping"] == 3 and told["returned_bytes"][name, "fail"] > 0)
            assert told["failed_calls"][name, "fail"] == 1
            stats = group.stats().methods["ping"]
            assert told["returned_bytes"][name, "ping"] == stats.returned > 0 == told["failed_calls"][name, "ping"]
            assert told["sent_bytes"][name, "fail"] == group.stats().methods["fail"].sent > 0
            assert told["call_seconds"][name, "ping"] == pytest.approx(sum(stats.seconds.values()))
            running = group.sleep_on.remote([2], 0.8)
            wait_until(lambda: told["running_calls"][(name,)] == 1 and told["oldest_call_seconds"][(name,)] > 0.2)
            running.result()
            wait_until(lambda: told["running_calls"][(name,)] == 0)
            assert told["alive_ranks"][(name,)] == told["ranks"][(name,)] == 4 and told["broken"][(name,)] == 0
            kill_before(lambda: group.sleep(5), group.status().ranks[3].process.pid)
            wait_until(lambda: told["deaths"][name, ""] == 1 and told["broken"][(name,)] == 1)
            assert told["alive_ranks"][(name,)] == 3
            thread = metrics._thread
        assert not thread.is_alive()


@pytest.mark.full("late ranks in the metrics of groups, and what a look costs")
def test_late_ranks(pool, told, monkeypatch):
    monkeypatch.setattr(group_metrics, "LATE_LOG_SECONDS", 0.2)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="late_") as group:
        metrics = GroupMetrics(group, interval=60)
        running = group.sleep_on.remote([1, 2], 1.0)
        wait_until(lambda: metrics.look() or told["late_ranks"][(group.name,)] == 2)
        running.result()
        metrics.look()
        assert told["late_ranks"][(group.name,)] == 0
        metrics.close()


def test_metrics_of_a_run(ray_cluster, told, tmp_path):
    """As the logger "ray" of `RunLog` has them. What one log has told of a group, another one does not tell again."""
    group = LocalWorkerGroup(2, RayClassWithInitArgs(Counter))
    for where in ({"run_dir": tmp_path / "a"}, {"run_dir": None, "name": "a"}):  # it needs no folder
        told.clear()
        with RunLog(**where, loggers=["ray"]) as log:
            log.watch(group)
            group.add(1)
            log.log(7, {"buffer/ready": 3.0, "loss": float("nan")})
        assert told["run_step"] == {("a",): 7} and told["run_metric"] == {("a", "buffer/ready"): 3}
        assert told["calls"][group.name, "add"] == 1 and told["alive_ranks"][(group.name,)] == 2
    group.close()


def test_gauges_are_set_again_as_long_as_there_is_something_to_tell(told):
    """Ray drops a gauge that was not set for 20 s."""
    group = LocalWorkerGroup(2, RayClassWithInitArgs(Counter))
    with GroupMetrics(group, interval=0.02) as metrics:
        metrics.log(3, {"loss": 0.5}, "mine")
        told.clear()
        wait_until(lambda: told["run_metric"] == {("mine", "loss"): 0.5} and told["run_step"] == {("mine",): 3})
        wait_until(lambda: told["ranks"] == {(group.name,): 2})
        metrics.log(4, {"kl": 0.1}, "mine")
        told.clear()
        wait_until(lambda: told["run_metric"] == {("mine", "kl"): 0.1})  # of the last step alone
        group.add(1)
        group.close()
        wait_until(lambda: told["calls"][group.name, "add"] == 1)
        metrics.look()
        told.clear()
        metrics.look()
        assert told["ranks"] == {} and told["run_step"] == {("mine",): 4}
    assert GroupMetrics(interval=3600)._interval == group_metrics.LONGEST_INTERVAL < 10
    with pytest.raises(TypeError, match="pass a RayTrainGroup's worker_group"):
        GroupMetrics(object())


@pytest.mark.full("late ranks in the metrics of groups, and what a look costs")
def test_look_costs_little(pool):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="cheap_") as group:
        for _ in range(5):
            group.add(1)
        metrics = GroupMetrics(group, interval=60)
        metrics.look()
        begin = time.process_time()
        for _ in range(100):
            metrics.look()
        assert (time.process_time() - begin) / 100 < 0.005  # of the 10 s between two
        metrics.close()


def test_dashboard_has_the_metrics_of_the_code():
    dashboard = json.loads((Path(single_controller.__file__).parent / "view" / "grafana.json").read_text())
    used = set(re.findall(r"\bray_\w+", json.dumps(dashboard)))
    counters = {f"ray_single_controller_{name}_total" for name in group_metrics.COUNTERS}
    gauges = {f"ray_single_controller_{name}" for name in (group_metrics.GAUGES | group_metrics.RUN_GAUGES)}
    assert used == counters | gauges
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_groups_of_one_name_are_added_up(told):
    made = RayClassWithInitArgs(Counter)
    with LocalWorkerGroup(2, made) as one, LocalWorkerGroup(2, made) as two:
        with GroupMetrics(one, two, interval=60) as metrics:
            for group in (one, one, one, two):
                group.add(1)
            metrics.look()
        assert one.name == two.name and told["calls"][one.name, "add"] == 4


def test_looks_in_two_threads_count_each_call_once(told, monkeypatch):
    count = ray_metrics.Counter.inc

    def count_slowly(self, value=1.0, tags=None):
        time.sleep(0.05)
        count(self, value, tags)

    monkeypatch.setattr(ray_metrics.Counter, "inc", count_slowly)
    with LocalWorkerGroup(1, RayClassWithInitArgs(Counter)) as group, GroupMetrics(group, interval=60) as metrics:
        group.add(1)
        group.close()  # both looks find that, too
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: metrics.look(), range(2)))
        assert told["calls"] == {(group.name, "add"): 1}


def test_thread_that_cannot_be_started_is_started_later(told, monkeypatch):
    with LocalWorkerGroup(1, RayClassWithInitArgs(Counter)) as group, GroupMetrics(interval=60) as metrics:
        with monkeypatch.context() as patch, pytest.raises(StartError, match="reports the metrics of groups"):
            refuse_threads(patch)
            metrics.add(group)
        metrics.add(group)
        assert metrics._thread.is_alive()


def test_groups_that_two_threads_add_are_looked_at_by_one(told, monkeypatch):
    start, started, both = threading.Thread.start, [], threading.Barrier(2)

    def start_slowly(thread):
        if thread.name == "group-metrics":
            started.append(thread)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    with LocalWorkerGroup(1, RayClassWithInitArgs(Counter)) as group, GroupMetrics(interval=60) as metrics:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(metrics.add, [group] * 2))
        assert len(started) == 1


def test_role_stands_for_its_group(told):
    made = {"actor": RayClassWithInitArgs(Counter), "critic": RayClassWithInitArgs(Counter)}
    with LocalWorkerGroup(2, colocate(made)) as group, GroupMetrics(group.actor, interval=60) as metrics:
        group.actor.add(1)
        metrics.look()
        assert told["ranks"] == {(group.name,): 2} and told["calls"][group.name, "actor.add"] == 1


def test_death_counts_once_whatever_becomes_of_its_rank(told):
    with LocalWorkerGroup(3, RayClassWithInitArgs(Counter)) as group, GroupMetrics(group, interval=60) as metrics:
        group._state.note_deaths({2: "killed"})
        metrics.look()
        group._state.restarts += 1  # the rank was replaced,
        group._state.renumber([1, 2])  # and has another number since another one was dropped
        metrics.look()
        assert told["deaths"] == {(group.name, ""): 1}
        group._state.note_deaths({0: "killed"})
        group._state.renumber([1])  # before the next look
        metrics.look()
        assert told["deaths"] == {(group.name, ""): 2}
