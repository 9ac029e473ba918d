"""Which ranks are alive, who is notified of a death, and what restart() restores."""

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
from group_workers import Counter, Fragile, Model
from waits import interrupt_first_start, kill_before, refuse_threads, wait_gone, wait_until, within

from single_controller import (
    CallTimeoutError,
    ControlStoreError,
    GroupBrokenError,
    RayClassWithInitArgs,
    RayWorkerGroup,
    StartError,
    WorkerDiedError,
    WorkerError,
)
from single_controller.call.state import GroupState, Monitor
from single_controller.ray import transport
from single_controller.ray.transport import RayTransport
from single_controller.wire.connection import hub
from single_controller.wire.link import Link


def test_alive_by_rank(make_group):
    group = make_group(Fragile)
    assert group.alive() == [True] * 4
    busy = group.sleep.remote(0.6)
    with within(0.5):  # alive() does not ask the busy workers
        assert group.alive() == [True] * 4
    busy.result()
    os.kill(group.pid()[2], signal.SIGKILL)
    wait_until(lambda: group.alive() == [True, True, False, True], 5)
    group.close()
    assert group.alive() == [False] * 4


def test_look_at_living_ranks_asks_the_control_store_nothing(make_group, monkeypatch):
    from ray._private.state import state

    asked = []
    connect = state._connect_and_get_accessor
    monkeypatch.setattr(state, "_connect_and_get_accessor", lambda: asked.append(1) or connect())
    group = make_group(Fragile)
    pids = group.pid()
    asked.clear()
    assert group.alive() == [True] * 4
    many = RayTransport([*group._transport.ranks] * 256)  # 1,024 ranks, without as many processes
    assert many.deaths() == {} and not asked
    os.kill(pids[2], signal.SIGKILL)
    wait_until(lambda: sorted(many.deaths()) == list(range(2, 1024, 4)), 5)
    assert all("exit" in reason for reason in many.deaths().values())
    asked.clear()
    assert len(many.deaths()) == 256 and not asked, "what is dead stays dead"


def test_question_that_the_control_store_never_answers_keeps_nobody(make_group, silent_store, caplog):
    group = make_group(Fragile)
    pids = group.pid()
    silent_store()
    call = group.sleep.remote(60.0)
    os.kill(pids[2], signal.SIGKILL)  # why is asked in vain
    with within(10), pytest.raises(WorkerDiedError, match=r"rank 2 died.*its process has ended"):
        call.result()
    with within(5):
        group.close()
    wait_gone(pids, 5)
    assert "has not answered" in caplog.text and "placement groups of ended workers" in caplog.text


def test_timeout_ends_a_call_while_the_control_store_does_not_answer(make_group, monkeypatch):
    group = make_group(Fragile)

    def fail(actor):
        raise ControlStoreError("no answer")

    monkeypatch.setattr(transport, "death_of", fail)
    with within(5), pytest.raises(CallTimeoutError):
        group.sleep.options(timeout=0.5)(30.0)
    monkeypatch.undo()


def test_looks_of_a_copy_ask_the_control_store_nothing(fragile):
    @ray.remote(num_cpus=0)
    def look(copy):
        from ray._private.state import state

        asked, connect = [], state._connect_and_get_accessor
        state._connect_and_get_accessor = lambda: asked.append(1) or connect()

        def quiet():
            asked.clear()
            return all(copy.alive()) and not asked

        wait_until(quiet, 10)
        return copy.ping()

    assert ray.get(look.remote(fragile)) == [0, 1, 2, 3]


def test_many_ranks_of_lost_hosts_are_told_at_once(fragile, monkeypatch):
    ranks = fragile._transport.ranks
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)).getsockname()
        for _ in range(4):  # further connections get no answer, as from a host without power
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(silent)
        monkeypatch.setattr(transport, "death_of", lambda actor: None)
        monkeypatch.setattr(Link, "gone", lambda self: "silent")
        monkeypatch.setattr(transport, "node_services", lambda: {ranks[0].location.node_id: silent})
        many, other = RayTransport([*ranks] * 2), RayTransport(ranks)
        with within(5):
            assert sorted(many.deaths()) == list(range(8)) and sorted(other.deaths()) == list(range(4))
    assert all("its host is gone" in reason for reason in many.deaths().values())


def test_threads_that_cannot_be_started_are_typed_errors(fragile, monkeypatch):
    ranks = fragile._transport.ranks

    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(StartError, match=r"aborts collectives could not be started: can't start new thread"):
            fragile._transport.leaving([]).__enter__()
        patch.setattr(hub, "_thread", None)
        with pytest.raises(StartError, match="reads connections could not be started"):
            RayTransport(ranks)
    assert fragile.ping() == [0, 1, 2, 3]


def test_interrupted_start_does_not_leave_a_thread_that_aborts_collectives(fragile, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        started = interrupt_first_start(patch, "abort-collectives")
        fragile._transport.leaving([]).__enter__()
    started[0].join(5)
    assert not started[0].is_alive()


def test_rank_that_cannot_be_connected_is_an_error_that_says_why(fragile, monkeypatch):
    monkeypatch.setattr(transport, "OPEN_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank = fragile._transport.ranks[0]
    wire = rank.location.wire._replace(host="127.0.0.1", port=port)
    unreachable = RayTransport([replace(rank, location=rank.location._replace(wire=wire))])
    with pytest.raises(StartError, match=r"rank 0 at port \d+ of 127\.0\.0\.1 .* alive: Connection refused\. If"):
        unreachable.check_reachable([0])


def test_watcher_reports_a_death_while_no_call_runs(make_group):
    group = make_group(Fragile)
    told = []
    watcher = group.watch(on_death=lambda error: told.append((error, threading.current_thread())), interval=0.1)
    victim = group.pid()[1]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: told, 5)
    error, thread = told[0]
    assert isinstance(error, WorkerDiedError) and error.ranks == (1,) and error.host
    assert "rank 1 died" in str(error) and thread is not threading.main_thread()
    with within(0.5), pytest.raises(GroupBrokenError, match="rank 1 died"):
        group.ping()
    group.restart()
    assert group.ping() == [0, 1, 2, 3] and watcher.watching
    os.kill(group.pid()[3], signal.SIGKILL)  # watching continues after a restart
    wait_until(lambda: len(told) == 2, 5)
    assert told[1][0].ranks == (3,)
    time.sleep(0.5)
    assert len(told) == 2  # one notification per death
    group.close()
    wait_until(lambda: not watcher.watching, 2)


def test_watcher_reports_a_death_that_restart_already_repaired(make_group):
    group = make_group(Fragile)
    told = []
    group.watch(told.append, interval=0.7)
    for victim in (2, 0):
        kill_before(group.ping, group.pid()[victim])
        group.restart()
    wait_until(lambda: len(told) == 2, 5)
    assert [error.ranks for error in told] == [(2,), (0,)]
    time.sleep(0.8)
    assert len(told) == 2


def test_watcher_callback_may_restart_the_group_and_may_raise(make_group, caplog):
    group = make_group(Fragile)
    restarted = threading.Event()

    def bring_back(error):
        group.restart()
        restarted.set()
        raise RuntimeError("of the callback's own making")

    with group.watch(bring_back, interval=0.1) as watcher:
        os.kill(group.pid()[0], signal.SIGKILL)
        assert restarted.wait(15)
        assert group.ping() == [0, 1, 2, 3]
        wait_until(lambda: "of the callback's own making" in caplog.text, 2)
        assert watcher.watching
    assert not watcher.watching


def test_watcher_does_not_keep_a_dropped_group(pool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter))
    watcher = group.watch(interval=0.05)
    pids = [process["pid"] for process in group.process()]
    del group
    wait_until(lambda: not watcher.watching, 3)
    wait_gone(pids)


class TestRestart:
    def test_replays_the_latest_call_of_each_method_in_order(self, make_group):
        group = make_group(Model, size=7)
        group.load_checkpoint([1, 2, 3, 4])
        group.init_model("first")
        group.init_model("second")
        group.load_checkpoint.remote([5, 6, 7, 8]).result()
        group.train()
        with pytest.raises(WorkerError):
            group.load_checkpoint([-1] * 4)  # a failed call is not replayed
        before = {pid for _, pid, _ in group.read()}
        kill_before(group.train, min(before))
        group.restart()
        results = group.read()
        assert not before & {pid for _, pid, _ in results}
        for rank, (size, _, log) in enumerate(results):
            assert size == 7 and log == [("init", "second"), ("load", [5 + rank])]
        group.restart()  # again, with a healthy group
        assert [log for _, _, log in group.read()] == [log for _, _, log in results]

    def test_latest_call_is_the_one_sent_last(self, make_group):
        group = make_group(Model, size=1)
        earlier = group.init_model.remote("old")
        group.init_model("new")
        earlier.result()
        later = group.init_model.remote("by future")
        group.execute_all_sync("init_model", "by name")
        later.result()
        group.restart()
        assert [log for _, _, log in group.read()] == [[("init", "by name")]] * 4

    def test_other_threads_wait_and_concurrent_restarts_are_one(self, make_group):
        group = make_group(Model, size=1)
        kill_before(group.train, group.read()[0][1])
        with ThreadPoolExecutor(2) as threads:
            restarts = [threads.submit(group.restart) for _ in range(2)]
            time.sleep(0.2)
            pids = [pid for _, pid, _ in group.read()]  # a call during the restart waits, without an error
            for restart in restarts:
                restart.result(20)
        assert [pid for _, pid, _ in group.read()] == pids

    def test_single_ranks_restart_without_collectives(self, make_group):
        group = make_group(Model, size=3, group_options={"collectives": False})
        group.init_model("a")
        group.load_checkpoint([1, 2, 3, 4])
        group.train()
        before = group.read()
        kill_before(group.train, before[3][1])
        wait_until(lambda: group.alive() == [True, True, True, False], 5)
        group.restart(ranks=[0])  # and rank 3, which has died
        after = group.read()
        assert [old[1] == new[1] for old, new in zip(before, after, strict=True)] == [False, True, True, False]
        assert [after[rank][2] for rank in (0, 3)] == [[("init", "a"), ("load", [row])] for row in (1, 4)]
        assert [log.count(("init", "a")) for _, _, log in after] == [1] * 4
        assert group.load_checkpoint([5, 6, 7, 8]) == [None] * 4
        assert group.read()[3][2][-1] == ("load", [8])

    def test_failed_replay_leaves_the_group_broken_and_is_not_a_death(self, make_group):
        group, told = make_group(Model, size=1), []
        rows = [1, 2, 3, 4]
        group.load_checkpoint(rows)
        rows[:] = [-1] * 4  # the driver keeps the arguments themselves, not a copy
        with group.watch(told.append, interval=0.05):
            with pytest.raises(WorkerError, match=r"load_checkpoint\(\) raised ValueError.*no such checkpoint"):
                group.restart()
            time.sleep(0.5)
            assert told == [] and group.alive() == [True] * 4
        with pytest.raises(GroupBrokenError, match="its restart failed with WorkerError: load_checkpoint"):
            group.train()
        rows[:] = [1, 2, 3, 4]
        group.restart()
        assert group.read()[1][2] == [("load", [2])]


class RunningCall:
    """A call that a rank runs, and its transport."""

    connected, started = True, 0.0

    def __init__(self):
        self.transport = self

    def deaths(self):
        return {}

    def look(self, now, deaths):
        pass


def test_monitor_drops_a_group_without_its_lock():
    monitor, state, free = Monitor(), GroupState("group", 1.0), []

    def watch_another():
        with monitor._changed:  # as `Monitor.watch` does for the call of another group
            free.append(threading.current_thread())

    def end():
        other = threading.Thread(target=watch_another, daemon=True)
        other.start()
        other.join(2)
        ended.append((threading.current_thread().name, list(free)))

    ended = []
    weakref.finalize(state, end)
    calls = state.calls
    calls.add(RunningCall())
    monitor.start()
    monitor.watch(state)
    del state
    calls.clear()  # only the monitor has the group now
    wait_until(lambda: ended, 5)
    ((thread, free_then),) = ended
    assert thread == "call-monitor" and free_then, "another group's call waited for the end of this one"


def test_log_that_raises_keeps_no_call_running_and_the_monitor_looking(monkeypatch):
    monitor, state, call, seen = Monitor(), GroupState("group", 1.0), RunningCall(), []

    def look(now, deaths):
        seen.append("looked")
        raise OSError("too many open files")

    def unwritable(*record, **options):
        raise OSError("no space left on device")

    call.look, call.abandon = look, lambda: seen.append("ended")
    monkeypatch.setattr("single_controller.call.state.logger.log", unwritable)
    state.calls.add(call)
    monitor.start()
    monitor.watch(state)
    wait_until(lambda: len(seen) > 1, 5)
    state.break_("a rank died")
    assert "ended" in seen
    state.calls.clear()
