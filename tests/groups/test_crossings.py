"""Where features meet: roles and recovery, abandoned large results and changes of ranks, busy ranks and shrink()."""

import gc
import os
import signal
import threading
import time
from concurrent.futures import Future

import pytest
from group_workers import Actor, Critic, Fragile
from replace_workers import Lone
from waits import refuse_threads, stopped, wait_until, within

from dispatch.register import register
from single_controller import (
    CallTimeoutError,
    Dispatch,
    RayClassWithInitArgs,
    RayWorkerGroup,
    StartError,
    Worker,
    WorkerDiedError,
    WorkerError,
    colocate,
)
from single_controller.ray import replicas
from single_controller.wire.link import Link, Session


class Heavy(Worker):
    """Returns much, after another rank has died."""

    @register(Dispatch.ONE_TO_ALL)
    def large(self, dies, seconds):
        if self.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        return bytes(2_000_000)

    @register(Dispatch.ONE_TO_ALL)
    def kept(self):
        sessions = [one for one in gc.get_objects() if isinstance(one, Session)]
        return sum(len(one.kept) for one in sessions)

    @register(Dispatch.ONE_TO_ALL)
    def _under(self, x):
        return self.rank + x

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank):
        if self.rank == rank:
            time.sleep(0.05)  # the others return first
            raise KeyError(f"rank {rank}")
        return f"rank {self.rank}"


@pytest.fixture(scope="module")
def heavy(pool):
    """No test ends its processes."""
    with RayWorkerGroup(pool, RayClassWithInitArgs(Heavy)) as group:
        yield group


@pytest.mark.parametrize("on_death", ["replace", "shrink"])
def test_roles_and_what_happens_on_death(pool, on_death):
    roles = {"actor": RayClassWithInitArgs(Actor, start=1), "critic": RayClassWithInitArgs(Critic, start=100)}
    with RayWorkerGroup(pool, colocate(roles), on_death=on_death) as group:
        victim = group.status().ranks[3].process.pid
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerDiedError), within(10):
            group.actor.add(1)
        left = 3 if on_death == "shrink" else 4
        with within(60):
            assert len(group.critic.add(1)) == left
        assert len(group.actor.add(1)) == group.world_size == left


@pytest.mark.parametrize(
    "change",
    [
        "replace",
        *(pytest.param(of, marks=pytest.mark.full("results of ranks that have ended")) for of in ("shrink", "restart")),
    ],
)
def test_abandoned_large_results_do_not_outlive_a_change_of_ranks(pool, change):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Heavy)) as group:
        with pytest.raises(WorkerDiedError), within(5):
            group.large(dies=2, seconds=0.5)
        getattr(group, change)()
        assert group.kept() == [0] * group.world_size
        assert [len(value) for value in group.large(dies=-1, seconds=0.0)] == [2_000_000] * group.world_size


def test_shrink_waits_for_a_busy_rank_instead_of_ending_it(pool, monkeypatch):
    monkeypatch.setattr(replicas, "MAX_STACK_SECONDS", 0.5)  # of one look
    with RayWorkerGroup(pool, RayClassWithInitArgs(Lone), collectives=False) as group:
        pids = [rank.process.pid for rank in group.status().ranks]
        with stopped(pids[1]):  # as busy as a host can be
            with pytest.raises(CallTimeoutError, match="rank 1 did not say"), within(20):
                group.shrink(ranks=[3], timeout=1.0)
            again = threading.Timer(0.7, os.kill, (pids[1], signal.SIGCONT))
            again.start()
            assert group.shrink(ranks=[3], timeout=60.0) == (3,)
        assert [rank.process.pid for rank in group.status().ranks] == pids[:3] and all(group.alive())


def test_ranks_that_were_not_asked_in_time_are_not_dead(pool, monkeypatch):
    monkeypatch.setattr(replicas, "MAX_STACK_SECONDS", 0.5)
    with RayWorkerGroup(pool, RayClassWithInitArgs(Lone), collectives=False) as group:
        ask, asked = Link.ask, []

        def ask_not_always(link, command):
            asked.append(command)
            lost = command == "replicas" and asked.count(command) <= 3  # lost with a connection
            return Future() if lost else ask(link, command)

        monkeypatch.setattr(Link, "ask", ask_not_always)
        assert group.shrink(ranks=[0], timeout=60.0) == (0,)
        assert group.world_size == 3 and all(group.alive()) and asked.count("replicas") > 3


def test_method_whose_name_begins_with_an_underscore(heavy):
    assert heavy._under(1) == [1, 2, 3, 4]
    with pytest.raises(AttributeError, match="_over"):
        heavy._over(1)


def test_error_has_what_the_other_ranks_returned_and_is_the_methods_own(heavy):
    with pytest.raises(KeyError) as caught:
        heavy.fail_on(2)
    error = caught.value
    assert isinstance(error, WorkerError) and error.ranks == (2,) and error.__cause__.args == ("rank 2",)
    assert error.results == {rank: f"rank {rank}" for rank in (0, 1, 3)}
    with pytest.raises(KeyError) as caught:
        heavy.fail_on.remote(1).result()
    assert caught.value.results == {rank: f"rank {rank}" for rank in (0, 2, 3)} and caught.value.ranks == (1,)
    assert heavy.fail_on(-1) == [f"rank {rank}" for rank in range(4)]


def test_group_in_a_process_that_can_start_no_thread(pool, monkeypatch):
    """The thread that looks for deaths is started before anything is sent; calls start none."""
    from single_controller.call.state import monitor

    with monkeypatch.context() as patch:
        refuse_threads(patch)
        patch.setattr(monitor, "_thread", None)
        with pytest.raises(StartError, match="looks for dead workers could not be started: can't start new thread"):
            RayWorkerGroup(pool, RayClassWithInitArgs(Fragile))
    with RayWorkerGroup(pool, RayClassWithInitArgs(Fragile)) as group:
        with monkeypatch.context() as patch:
            refuse_threads(patch)
            assert len(group.pid.remote().result()) == len(group.pid()) == 4


def test_watcher_names_many_ranks_in_a_short_message(make_group):
    from single_controller.ray.transport import RayTransport

    group, told = make_group(Fragile), []
    pids, transport = group.pid(), group._transport
    group._state.transport = RayTransport([*transport.ranks] * 256)  # 1,024 ranks, without as many processes
    try:
        with group.watch(on_death=told.append, interval=0.1):
            for pid in pids[:3]:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: told and len(told[-1].ranks) + len(told[0].ranks) >= 256, 10)
        assert all(len(str(error)) < 600 for error in told), [len(str(error)) for error in told]
    finally:
        group._state.transport = transport
