"""Failures, caused by killing real processes. Every wait here has an upper bound in seconds."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from group_workers import TRACED, Counter, Fragile, Log
from ray.util.placement_group import placement_group_table
from waits import in_fork, kill_before, refuse_threads, stopped, wait_collected, wait_gone, wait_until, within

from single_controller import (
    CallTimeoutError,
    ClassWithInitArgs,
    DispatchError,
    ForkedProcessError,
    GroupBrokenError,
    GroupClosedError,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    WorkerDiedError,
    WorkerError,
    attach,
)
from single_controller.call.buffer_pool import MIN_BYTES, buffer_pool
from single_controller.ray.transport import RayTransport
from single_controller.wire.link import Link

anywhere = pytest.mark.transports("ray", "local", "local-threads")
overlapping = pytest.mark.transports("ray", "local-threads")
"""For a test whose ranks must run at the same time."""


class TestErrorsOfMethods:
    @anywhere
    def test_first_cause_has_rank_host_and_traceback(self, fragile):
        with pytest.raises(WorkerError) as caught:
            fragile.fail([2])
        error = caught.value
        assert (error.rank, error.method, error.cause_type) == (2, "fail", "ValueError")
        assert error.host and error.host in str(error)
        assert "the true cause on rank 2" in str(error) and "group_workers.py" in error.remote_traceback
        assert isinstance(error.__cause__, ValueError)
        assert fragile.ping() == [0, 1, 2, 3]
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.rank, copy.remote_traceback) == (str(error), 2, error.remote_traceback)

    @overlapping
    def test_ranks_that_keep_running_after_an_error_break_the_group(self, make_group):
        group = make_group(Fragile, group_options={"error_grace": 0.3})
        with pytest.raises(WorkerError):
            group.fail([1], others_sleep=60)
        with within(4), pytest.raises(GroupBrokenError, match=r"ranks 0, 2, 3 .*error on rank 1"):
            group.ping()
        assert "ranks 0, 2, 3" in group.broken
        group.restart()
        assert group.ping() == [0, 1, 2, 3]

    @overlapping
    def test_one_error_names_all_ranks_that_failed_with_one_cause(self, fragile):
        for _ in range(5):  # the errors arrive at slightly different times
            with pytest.raises(
                WorkerError, match=r"fail\(\) raised ValueError on ranks 1-3; first: rank [123]"
            ) as caught:
                fragile.fail([1, 2, 3])
            assert caught.value.ranks == (1, 2, 3) and caught.value.rank in (1, 2, 3)
            assert pickle.loads(pickle.dumps(caught.value)).ranks == (1, 2, 3)
        with pytest.raises(WorkerError) as caught:
            fragile.fail_differently([2])
        assert "ranks 0, 1, 3; first: rank" in str(caught.value) and caught.value.ranks == (0, 1, 3)
        assert "also on rank 2: RuntimeError: Connection closed by peer" in str(caught.value)
        assert fragile.ping() == [0, 1, 2, 3]

    def test_raised_error_is_not_logged_again(self, fragile, caplog):
        """Ray logs errors that nobody retrieved, such as that of the second call."""
        with pytest.raises(WorkerError, match=r"rank [13]"):
            fragile.fail.remote([1, 3], others_sleep=0.3).result()
        fragile.fail.remote([2])  # nobody retrieves its result
        wait_collected(lambda: fragile.ping() and "the true cause on rank 2" in caplog.text)
        told = [record.getMessage() for record in caplog.records if "Unhandled error" in record.getMessage()]
        assert len(told) == 1 and "the true cause on rank 2" in told[0]

    @anywhere
    def test_error_that_another_call_has_raised_is_not_logged(self, fragile, caplog):
        with pytest.raises(WorkerError, match="the true cause on rank 1"):
            fragile.sleep(fragile.fail.remote([1]))
        fragile.sleep.remote(fragile.fail.remote([2]))  # nobody retrieves its result
        wait_collected(lambda: fragile.ping() and "the true cause on rank 2" in caplog.text)
        told = [record.getMessage() for record in caplog.records if "Unhandled error" in record.getMessage()]
        assert len(told) == 1 and told[0].startswith("Unhandled error of sleep()") and "rank 2" in told[0]

    @pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
    def test_log_of_a_dropped_error_makes_no_error_of_a_user(self, fragile, caplog, ended):
        """The garbage collector may drop a future in any thread, where a user's code must not run."""
        fragile.sleep.remote(0 if ended else 0.3)
        future = fragile.fail_traced.remote()
        while ended and not future.done():
            time.sleep(0.01)
        TRACED.clear()
        del future
        wait_collected(lambda: "Traced on ranks 0-3" in caplog.text)
        assert "Unhandled error of fail_traced()" in caplog.text and "its class has code" in caplog.text
        assert not TRACED

    def test_error_on_one_rank_wins_over_the_others_collective(self, make_group):
        group = make_group(Fragile, group_options={"error_grace": 1.0})
        group.join_process_group()
        with within(5), pytest.raises(WorkerError, match="beside a collective") as caught:
            group.all_reduce(1, fail=3)
        assert caught.value.rank == 3


class TestDeaths:
    def test_sigkill_during_an_all_reduce(self, make_group):
        """The other ranks wait in the collective: the driver gets the death, not their connection errors."""
        group = make_group(Fragile)
        assert group.join_process_group() == [(rank, 4) for rank in range(4)]
        assert group.all_reduce(3) == [6.0] * 4
        with within(5), pytest.raises(WorkerDiedError, match=r"rank 2 died during all_reduce\(\)") as caught:
            group.all_reduce(5, kill=2)
        assert (caught.value.rank, caught.value.method, caught.value.ranks) == (2, "all_reduce", (2,))
        assert caught.value.host
        assert pickle.loads(pickle.dumps(caught.value)).ranks == (2,)

    def test_next_call_reports_the_death_of_an_idle_rank(self, make_group):
        group = make_group(Fragile)
        os.kill(group.pid()[3], signal.SIGKILL)
        with within(5), pytest.raises(WorkerDiedError, match="rank 3"):
            group.ping()

        def seconds_until_refused():
            begin = time.monotonic()
            with pytest.raises(GroupBrokenError, match=r"rank 3 died.*restart\(\)"):
                group.ping()
            return time.monotonic() - begin

        assert min(seconds_until_refused() for _ in range(3)) < 0.1  # the other processes of the tests take time, too

    def test_death_fails_every_running_call(self, make_group):
        group = make_group(Fragile)
        pids = group.pid()
        futures = [group.sleep.remote(30) for _ in range(3)]
        os.kill(pids[2], signal.SIGKILL)
        with within(6):
            told = [str(future.exception()) for future in futures]
        assert all(isinstance(future.exception(), WorkerDiedError) for future in futures)
        assert len(set(told)) == 1 and told[0].count("rank 2 died during sleep()") == 1, told

    def test_rank_that_may_be_dead_is_found_dead_or_alive(self, make_group):
        """Without its help: rank 0 computes, rank 1 is stopped, rank 2 was killed."""
        group = make_group(Fragile)
        pids = group.pid()
        group.sleep_on.remote([0], 60)
        known = {}
        with stopped(pids[1]):  # until all its threads have, its gRPC server may still respond
            os.kill(pids[2], signal.SIGKILL)
            begin = time.monotonic()
            while (passed := time.monotonic() - begin) < 0.8 or (len(known) < 2 and passed < 10):
                known.update(group._ray.probe([rank for rank in range(3) if rank not in known]))
                time.sleep(0.05)
        assert known[0] is None and known[2]
        assert 1 not in known  # it may be on a host that has lost its power

    def test_rank_whose_connection_was_lost_is_asked_when_it_is_back(self, fragile, monkeypatch):
        """While it is unknown, an error of another rank waits, because it may be the echo of a death."""
        transport = fragile._ray
        to_rank = transport._links[1]
        with monkeypatch.context() as patch:
            patch.setattr(Link, "_dial", lambda self: None)
            to_rank._connection._shut()
            wait_until(lambda: not to_rank.connected)
            assert transport.probe([1]) == {}
        to_rank._dial()
        wait_until(lambda: transport.probe([1]) == {1: None}, 5)

    def test_other_groups_continue_and_restart_creates_new_workers(self, make_group, counters):
        group = make_group(Fragile)
        before = group.pid()
        kill_before(group.ping, before[1])
        assert counters.add(0) == [100, 101, 102, 103]
        group.restart()
        after = group.pid()
        assert not set(before) & set(after)
        wait_gone(before)
        group.join_process_group()
        assert group.all_reduce() == [6.0] * 4

    @pytest.mark.transports("ray")
    def test_death_between_the_start_of_a_process_and_the_connection_to_it(self, make_group, monkeypatch):
        reachable, killed = RayTransport.check_reachable, []

        def kill_first(transport, ranks):
            os.kill(transport.processes[1].pid, signal.SIGKILL)
            killed.append(time.monotonic())
            reachable(transport, ranks)

        group = make_group(Fragile)
        with monkeypatch.context() as patch:
            patch.setattr(Link, "_dial", lambda self: None)
            patch.setattr(RayTransport, "check_reachable", kill_first)
            with pytest.raises(WorkerDiedError, match="rank 1 died"):
                group.restart()
        assert time.monotonic() - killed[0] < 5
        group.restart()
        assert group.ping() == [0, 1, 2, 3]


LARGE = [-1] * 300_000  # 1.5 MB, more than a frame has


class TestPartialSend:
    """Ray refuses a task of an actor that has too many pending ones, here of one rank. Large arguments need one."""

    @pytest.fixture(scope="class")
    def group(self, pool):
        """The last test breaks it."""
        made = RayClassWithInitArgs(Fragile)
        made.update_options({"max_pending_calls": 4})
        with RayWorkerGroup(pool, made) as group:
            yield group

    def test_failure_before_any_rank_was_reached_leaves_the_group_healthy(self, group):
        busy = [group.workers[0].sleep.remote(0.3) for _ in range(4)]
        with pytest.raises(
            DispatchError, match=r"sleep_on\(\) could not be sent: PendingCalls.*No rank received the call"
        ):
            group.sleep_on(LARGE, 0)
        assert group.broken is None
        ray.get(busy)
        assert group.ping() == [0, 1, 2, 3]

    def test_deferred_argument_needs_no_task_of_ray(self, group, counters):
        future = counters.add.remote(0)
        busy = [group.workers[0].sleep.remote(0.15) for _ in range(4)]
        assert len(group.fail(future)) == 4
        ray.get(busy)

    def test_failure_after_a_rank_was_reached_breaks_the_group(self, group):
        busy = [group.workers[2].sleep.remote(60) for _ in range(4)]
        with within(2):
            with pytest.raises(
                GroupBrokenError, match=r"sleep_on\(\) was sent to ranks 0, 1, but not to rank 2: PendingCalls"
            ) as caught:
                group.sleep_on(LARGE, 0)
        assert type(caught.value.__cause__).__name__ == "PendingCallsLimitExceeded"
        with pytest.raises(GroupBrokenError, match=r"restart\(\)"):
            group.sleep_on(LARGE, 0)
        del busy


class TestTimeouts:
    @overlapping
    @pytest.mark.ray_when_full
    def test_call_timeout_names_the_late_ranks(self, make_group):
        group = make_group(Fragile)
        with within(3), pytest.raises(CallTimeoutError, match=r"sleep_on\(\).*0\.5 s.*ranks 1, 3") as caught:
            group.sleep_on.options(timeout=0.5)([1, 3], 60)
        assert caught.value.ranks == (1, 3) and not caught.value.call_goes_on
        # The two ranks are at the same place, which is shown once.
        assert "ranks 1, 3 are at:" in str(caught.value) and str(caught.value).count("in sleep_on\n") == 1
        assert "time.sleep(seconds)" in caught.value.stacks[1] and caught.value.stacks.keys() == {1, 3}
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (str(copy), copy.stacks) == (str(caught.value), caught.value.stacks)
        with pytest.raises(GroupBrokenError, match=r"sleep_on\(\) exceeded its timeout") as caught:
            group.ping()
        assert "time.sleep" not in str(caught.value)

    @pytest.mark.alone
    def test_late_ranks_are_shown_on_a_busy_machine(self, make_group):
        group = make_group(Fragile)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * os.cpu_count())]
        try:
            time.sleep(0.5)
            with pytest.raises(CallTimeoutError, match="ranks 0-3 are at:") as caught:
                group.sleep.options(timeout=0.5)(60)
        finally:
            for process in busy:
                process.kill()
                process.wait()
        assert all("time.sleep(seconds)" in caught.value.stacks[rank] for rank in range(4))

    @overlapping
    @pytest.mark.ray_when_full
    def test_stacks_of_async_methods_and_of_queued_calls(self, make_group):
        group = make_group(Fragile)
        group.sleep_async.remote(60)  # shorter waits than a second have no stacks
        with pytest.raises(CallTimeoutError, match=r"ping\(\) has not finished after a wait of 1 s") as caught:
            group.ping.remote().result(timeout=1)
        assert "ranks 0-3 are at:" in str(caught.value) and "in sleep_async\n" in caught.value.stacks[2]

    def test_stopped_process_is_named_without_a_stack(self, make_group):
        group = make_group(Fragile)
        pid = group.pid()[2]
        unknown = "rank 2 is at:\n  unknown: it did not answer"
        with stopped(pid), within(6), pytest.raises(CallTimeoutError, match=unknown) as caught:
            group.sleep_on.options(timeout=0.3)([0], 60)
        assert "in sleep_on\n" in caught.value.stacks[0] and f"--pid {pid}" in caught.value.stacks[2]

    @overlapping
    @pytest.mark.ray_when_full
    def test_one_log_for_all_late_calls_of_a_group(self, fragile, caplog, monkeypatch):
        monkeypatch.setattr("single_controller.call.call.LATE_LOG_SECONDS", 0.4)
        calls = [fragile.sleep_on.remote([2], 1.0), *(fragile.ping.remote() for _ in range(20))]
        assert [call.result() for call in calls] == [[0, 1, 2, 3]] * 21
        told = [message for message in caplog.messages if "has been running" in message]
        assert 1 <= len(told) <= 3 and all("sleep_on() has been" in message for message in told)
        assert "later calls that are running: 20" in told[0]
        assert "rank 2" in told[0] and "time.sleep(seconds)" in told[0]

    @overlapping
    @pytest.mark.ray_when_full
    def test_timeout_in_a_process_that_can_start_no_thread(self, make_group, monkeypatch):
        group = make_group(Fragile)
        future = group.sleep_on.options(timeout=0.5).remote([1], 60)
        refuse_threads(monkeypatch, lambda name: name == "late-ranks")
        with within(3), pytest.raises(CallTimeoutError, match=r"rank 1 had not finished \([^)]*\)$") as caught:
            future.result()
        assert caught.value.stacks == {} and not caught.value.call_goes_on

    @overlapping
    @pytest.mark.ray_when_full
    def test_look_that_fails_breaks_nothing(self, make_group, monkeypatch, caplog):
        """The process has too many open files for a while: calls are looked at again."""
        group = make_group(Fragile)
        deaths, failed = group._transport.deaths, []

        def deaths_not_always():
            if threading.current_thread().name == "call-monitor" and len(failed) < 3:
                failed.append(1)
                raise OSError(24, "Too many open files")
            return deaths()

        monkeypatch.setattr(group._transport, "deaths", deaths_not_always)
        with pytest.raises(CallTimeoutError):
            group.sleep.options(timeout=0.6)(60)
        assert len(failed) == 3 and caplog.text.count("could not be looked at") == 1


class TestClose:
    def test_closed_group(self, make_group):
        group = make_group(Fragile)
        pids = group.pid()
        waiting = group.sleep.remote(60)
        group.close()
        group.close()
        for call in (group.ping, lambda: group.execute_all_sync("ping"), waiting.result, group.restart):
            with within(1), pytest.raises(GroupClosedError, match="closed"):
                call()
        wait_gone(pids)

    def test_group_closed_during_restart_leaves_no_workers(self, pool, monkeypatch):
        from single_controller.ray import group as module

        group = RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="restarting_")
        start = module.start

        def start_and_close(*args):
            started = start(*args)
            group.close()
            return started

        monkeypatch.setattr(module, "start", start_and_close)
        with pytest.raises(GroupClosedError):
            group.restart()
        wait_until(lambda: not [n for n in ray.util.list_named_actors() if n.startswith("restarting_")])


def errors_of(*calls):
    """The types of the errors that calls raise, or "returned"."""
    found = []
    for call in calls:
        try:
            call()
            found.append("returned")
        except Exception as error:
            found.append(f"{type(error).__name__}")
    return found


@contextlib.contextmanager
def held_by_another_thread(lock):
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lock.acquire).result()
        try:
            yield
        finally:
            thread.submit(lock.release).result()


class TestFork:
    @overlapping
    def test_group_of_the_parent_is_refused(self, fragile):
        """Ray's threads, and those of local ranks, do not exist in a fork: the calls used to hang."""
        group = fragile
        group.ping()
        running = group.sleep.remote(0.3)
        done = group.ping.remote()
        done.result()

        def use():
            try:
                group.ping()
            except ForkedProcessError as error:
                assert str(os.getpid()) in str(error) and "get_context('spawn')" in str(error)
            calls = [
                group.ping,
                group.ping.remote,
                lambda: group.execute_all_sync("ping"),
                running.result,
                running.done,
                done.result,
                lambda: running.refs,
                lambda: pickle.dumps(done),
                group.alive,
                group.restart,
                group.watch,
                lambda: group.layout,
                lambda: group._query_dispatch_info("dp"),
            ]
            found = errors_of(*calls)
            with group:  # closing leaves the parent's workers alone
                pass
            return " ".join(found)

        with within(10), held_by_another_thread(group._state.lock):
            assert in_fork(use).split() == ["ForkedProcessError"] * 13
        running.result()
        assert group.ping() == [0, 1, 2, 3] and group.alive() == [True] * 4

    def test_pools_and_ray_are_refused(self, pool):
        placed = RayResourcePool([1], use_gpu=False)
        placed.place()

        def use():
            found = errors_of(
                pool.plan,
                lambda: RayWorkerGroup(pool, RayClassWithInitArgs(Counter)),
                lambda: RayResourcePool([1], use_gpu=False),
                lambda: attach("any"),
            )
            with placed:  # closing leaves the placement group to the parent
                pass
            return " ".join(found)

        with within(10):
            assert in_fork(use).split() == ["ForkedProcessError"] * 4
        assert placement_group_table(placed.slots()[0].placement_group)["state"] != "REMOVED"
        placed.close()

    @pytest.mark.transports("local")
    def test_group_without_threads_is_a_copy(self, make_group):
        group = make_group(Counter)

        def use():
            group.close()  # does nothing here: what a worker would end is its parent's
            return str(group.add(1))

        assert in_fork(use) == "[1, 2, 3, 4]"
        assert group.add(0) == [0, 1, 2, 3]

    @pytest.mark.transports("local")
    def test_async_methods_of_a_copy(self, make_group):
        """The thread of the event loop does not exist in a fork: the calls used to hang."""
        group = make_group(Log)
        group.note_async("before")

        def use():
            group.note_async("in the fork")
            return str(group.read()[3])

        with within(10):
            assert in_fork(use) == str(["before", "in the fork"])
        assert group.read()[3] == ["before"]

    def test_memory_is_taken_although_a_thread_of_the_parent_was_taking_some(self):
        def use():
            buffer_pool.count_mapped(8)
            return str(buffer_pool.take(MIN_BYTES).nbytes)

        with within(10), held_by_another_thread(buffer_pool._lock):
            assert in_fork(use) == str(MIN_BYTES)

    def test_fork_may_have_a_group_with_threads_of_its_own(self, fragile):
        future = fragile.sleep.remote(0.5)  # the monitor watches it

        def use():
            with LocalWorkerGroup(2, ClassWithInitArgs(Counter), threads=True) as own:
                return str(own.add.remote(1).result(timeout=5))

        assert in_fork(use) == "[1, 2]"
        future.result()
