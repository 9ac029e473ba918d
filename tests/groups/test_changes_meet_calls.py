"""Calls of other threads, results and errors while a group changes its ranks, and changes that fail halfway."""

import asyncio
import itertools
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
from replace_workers import Lone, Member
from waits import existing, in_fork, wait_gone, wait_until, within

from single_controller import (
    CallTimeoutError,
    Dispatch,
    GroupBrokenError,
    GroupClosedError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    StartError,
    Worker,
    WorkerDiedError,
    WorkerError,
    register,
)
from single_controller.ray import group as ray_group
from single_controller.ray.transport import RayTransport
from single_controller.wire import link
from single_controller.wire.handshake import Kind
from workers.distributed import initialize_distributed


class Loaded(Worker):
    """Has to load something before it is of any use. ``load`` fails while ``fail`` exists."""

    def __init__(self, fail):
        super().__init__()
        self.fail, self.value = Path(fail), None

    @register(Dispatch.ONE_TO_ALL, replay=True)
    def load(self, value):
        if self.fail.exists():
            raise OSError("the checkpoint cannot be read")
        self.value = value

    @register(Dispatch.ONE_TO_ALL)
    def get(self, argument=None):
        return self.value

    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return self.rank, self.world_size, os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, x):
        return torch.tensor([[self.rank, self.world_size]] * len(x))

    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, path):
        while not os.path.exists(path):
            time.sleep(0.01)

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    def wait_beside(self, path):
        self.wait_for(path)

    @register(Dispatch.ONE_TO_ALL)
    def wait(self, seconds, fail=None):
        if self.rank == fail:
            raise KeyError(f"rank {fail}")
        time.sleep(seconds)
        return bytes(2_000_000)


class Dying(Worker):
    """A driver that dies in the middle of a call."""

    @register(Dispatch.ONE_TO_ALL)
    def call(self, group):
        if self.rank == 0:
            RayTransport._give = lambda *_: threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            group.get(bytes(2_000_000))
        else:
            group.get.remote(group.wait.remote(0.5))
            os.kill(os.getpid(), signal.SIGKILL)


class Meeting(Worker):
    """While a file exists, ``meet`` fails on rank 3, and rank 1 waits in it for rank 0, which never sends."""

    def __init__(self):
        super().__init__()
        self.on_membership_change(0)

    def on_membership_change(self, generation):
        initialize_distributed(self, "gloo")

    @register(Dispatch.ONE_TO_ALL, replay=True)
    def meet(self, path):
        if os.path.exists(path):
            if self.rank == 3:
                time.sleep(0.5)
                raise OSError("the checkpoint cannot be read")
            if self.rank == 1:  # it waits for one that stays
                torch.distributed.recv(torch.zeros(1), src=0)

    @register(Dispatch.ONE_TO_ALL)
    def total(self):
        value = torch.tensor([self.rank + 1.0])
        torch.distributed.all_reduce(value)
        return float(value)


class Slow(Lone):
    """Of two that are replaced, rank 2 dies in its constructor, once, while that of rank 1 runs, which then fails."""

    def __init__(self, folder):
        super().__init__()
        if not (Path(folder) / "slow").exists():
            return
        if self.rank == 1:
            while not (Path(folder) / "died").exists():
                time.sleep(0.01)
            if not (Path(folder) / "failed").exists():
                time.sleep(1.0)
                (Path(folder) / "failed").touch()
                raise RuntimeError("no device")
        elif not (Path(folder) / "died").exists():
            (Path(folder) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def fail(folder):
    return folder / "fail"


@pytest.fixture(scope="module")
def loaded(pool, fail):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Loaded, str(fail))) as group:
        group.load(7)
        yield group


@pytest.fixture
def three(loaded):
    """The group with three ranks, and room for one."""
    if loaded.broken is not None:
        loaded.restart()
    if loaded.world_size < 3:
        loaded.grow(1)
    elif loaded.world_size > 3:
        loaded.shrink([3])
    return loaded


def kill(group, rank):
    os.kill(group.status().ranks[rank].process.pid, signal.SIGKILL)
    with pytest.raises((WorkerDiedError, GroupBrokenError)):
        group.wait(0.2)


CALLS = {
    "method": lambda group: [place[:2] for place in group.place()],
    "execute": lambda group: [place[:2] for place in group.execute_all_sync("place")],
    "map": lambda group: list(dict.fromkeys(map(tuple, next(group.map("rows", [torch.zeros(12, 2)])).tolist()))),
}


WAITING = ("method", "grow"), ("execute", "restart"), ("map", "shrink")
OTHERS = [pair for pair in itertools.product(CALLS, ("shrink", "grow", "restart")) if pair not in WAITING]


@pytest.mark.parametrize(
    ("how", "change"),
    [*WAITING, *(pytest.param(*pair, marks=pytest.mark.full("each call in each change of ranks")) for pair in OTHERS)],
)
def test_call_that_waited_for_a_change_reaches_the_ranks_that_there_are_now(three, how, change):
    size = {"shrink": 2, "grow": 4, "restart": 4}[change]
    with ThreadPoolExecutor(1) as others:
        with three._state.sending:
            waiting = others.submit(CALLS[how], three)
            time.sleep(0.3)  # it is planned for three ranks
            getattr(three, change)(*([[2]] if change == "shrink" else []))
        assert waiting.result(20) == [(rank, size) for rank in range(size)]
    assert three.get() == [7] * size


def test_call_while_the_group_waits_for_running_calls_to_grow(three, tmp_path):
    running = three.wait_for.remote(str(tmp_path / "go"))
    with ThreadPoolExecutor(2) as others:
        grown = others.submit(three.grow)
        wait_until(lambda: len(three._state.running()) == 2, 60)  # of which one is how it waits
        place = others.submit(three.place)
        time.sleep(0.3)
        (tmp_path / "go").touch()
        assert [one[:2] for one in place.result(20)] == [(rank, 4) for rank in range(4)]
        assert grown.result(20) == (3,) and running.result() == [None] * 3


def test_growth_waits_for_calls_that_run_beside_others(three, tmp_path, monkeypatch):
    def add_while_it_runs(self, recruits, encoded, end):
        threading.Timer(0.5, (tmp_path / "go").touch).start()
        return add(self, recruits, encoded, end)

    add = RayWorkerGroup._add
    monkeypatch.setattr(RayWorkerGroup, "_add", add_while_it_runs)
    running = three.wait_beside.remote(str(tmp_path / "go"))
    assert three.grow() == (3,)
    assert running.result(0) == [None] * 3 and three.get() == [7] * 4


@pytest.mark.parametrize("change", ["replace", "shrink"])
def test_ranks_that_wait_for_an_argument_are_free_for_a_change(pool, three, fail, change):
    with RayWorkerGroup(pool[:1], RayClassWithInitArgs(Loaded, str(fail))) as producer:
        waiting = three.get.remote(producer.wait.remote(300.0))
        kill(three, 1)
        with within(60):
            getattr(three, change)()
        with pytest.raises((WorkerDiedError, GroupBrokenError)):
            waiting.result(5)
        assert three.get() == [7] * (3 if change == "replace" else 2)


def test_ranks_whose_repeated_calls_failed_get_them_in_the_next_change(three, fail):
    with existing(fail), pytest.raises(WorkerError, match="cannot be read"):
        three.restart()
    three.replace()  # no rank has died, but none has loaded anything
    assert three.get() == [7] * 4
    kill(three, 2)
    with existing(fail), pytest.raises(WorkerError, match="cannot be read"):
        three.replace()
    assert three.shrink([3]) == (3,)
    assert three.get() == [7] * 3


def test_start_whose_arguments_are_lost_is_an_error(pool, monkeypatch):
    def lose(self, rank, beside, session, number):
        if rank == 1:
            threading.Timer(0.5, self._links[rank].tell, (Kind.CANCEL, number)).start()
        else:
            give(self, rank, beside, session, number)

    give = RayTransport._give
    monkeypatch.setattr(RayTransport, "_give", lose)
    told = "raised ConnectionError on rank 1 .*: the constructors' arguments, or rank 0's address, have been lost"
    with within(90), pytest.raises(StartError, match=told) as error:
        RayWorkerGroup(pool, RayClassWithInitArgs(Lone))
    assert error.value.rank == 1


def test_results_of_calls_that_have_ended_do_not_wait_for_running_ones(three):
    first = three.wait.remote(0.5)
    second = three.get.remote(first)
    refs = [three.execute_all_async("place") for _ in range(20)]
    assert second.result(20) == [7] * 3
    assert [len(ray.get(one, timeout=20)) for one in refs] == [3] * 20


def test_calls_outlive_a_growth_that_did_not_wait_long_enough(three, tmp_path, monkeypatch):
    def add_soon(self, recruits, encoded, end):
        return add(self, recruits, encoded, time.monotonic() + 0.5)

    add = RayWorkerGroup._add
    monkeypatch.setattr(RayWorkerGroup, "_add", add_soon)  # the start of the process must not take the time
    running = three.wait_for.remote(str(tmp_path / "go"))
    with pytest.raises(CallTimeoutError) as error:
        three.grow()
    assert "the group is as before" in error.value.__notes__[0]
    monkeypatch.undo()
    (tmp_path / "go").touch()
    assert running.result(20) == [None] * 3 and three.broken is None
    assert three.grow() == (3,) and three.get() == [7] * 4


def test_close_while_ranks_are_replaced_leaves_no_process(pool, fail, monkeypatch):
    def closing(*args, **kwargs):
        filled = fill(*args, **kwargs)
        made.extend(rank.location.pid for rank in filled.ranks)
        closer = threading.Thread(target=group.close)
        closer.start()
        closer.join()
        return filled

    made, fill = [], ray_group.fill
    group = RayWorkerGroup(pool[:2], RayClassWithInitArgs(Loaded, str(fail)))
    kill(group, 1)
    monkeypatch.setattr(ray_group, "fill", closing)
    with pytest.raises(GroupClosedError):
        group.replace()
    wait_gone(made)


def test_references_in_an_event_loop_of_a_group_that_recovers(pool, fail):
    async def twice():
        return [ref for _ in range(2) for ref in group.execute_all_async("wait", 0.2)]

    with RayWorkerGroup(pool[:2], RayClassWithInitArgs(Loaded, str(fail)), on_death="replace") as group:
        assert [len(one) for one in ray.get(asyncio.run(twice()), timeout=20)] == [2_000_000] * 4


def test_error_without_collectives_leaves_the_other_ranks_alone(pool, fail):
    made = RayClassWithInitArgs(Loaded, str(fail))
    with RayWorkerGroup(pool[:2], made, collectives=False, error_grace=0.3) as group:
        with pytest.raises(KeyError, match="rank 0"):
            group.wait(0.6, fail=0)
        assert group.get() == [None] * 2 and group.broken is None
        assert pickle.loads(pickle.dumps(group)).collectives is False
        assert RayWorkerGroup.from_detached(worker_handles=group.workers).collectives is False


def test_retry_does_not_replace_a_rank_again(pool, tmp_path, monkeypatch):
    """Rank 2 dies before rank 1 has joined."""

    def killing(*args, **kwargs):
        filled = fill(*args, **kwargs)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        return filled

    fill, hold = ray_group.fill, {"HOLD_STANDBY": str(tmp_path / "hold")}
    monkeypatch.setattr(ray_group, "fill", killing)
    with (
        RayResourcePool([5], use_gpu=False) as small,
        RayWorkerGroup(small, RayClassWithInitArgs(Member, str(tmp_path)), standby=2, worker_env=hold) as group,
    ):
        wait_until(lambda: [bool(one.memory) for one in group.standbys()] == [True] * 2, 60)
        standbys = {one.location().pid for one in group._transport.standbys}
        with existing(tmp_path / "hold"):  # no standby follows them
            victim = group.status().ranks[2].process.pid
            with pytest.raises(WorkerDiedError):
                group.total(kill=1)
            assert set(group.replace()) == {1, 2}
            assert {one["pid"] for one in group.me()} > standbys


def test_driver_that_dies_while_it_sends_does_not_keep_the_ranks(pool, three):
    """Two have sent a call, and die before they have sent what goes beside it."""

    def wait_for_drivers(seconds):
        three.execute_with_func_generator(lambda worker: setattr(link, "RETURN_SECONDS", seconds))

    wait_for_drivers(0.5)
    with RayWorkerGroup(pool[:2], RayClassWithInitArgs(Dying), collectives=False) as drivers:
        with pytest.raises(WorkerDiedError):
            drivers.call(three)
        wait_until(lambda: not any(drivers.alive()), 30)
        with within(30):
            assert three.get() == [7] * 3
    wait_for_drivers(link.RETURN_SECONDS)


def test_ranks_stuck_in_a_repeated_call_are_freed_by_the_next_change(pool, tmp_path):
    """Of four new ranks, one raises in a repeated call, in which another one waits for a third."""
    with RayWorkerGroup(pool, RayClassWithInitArgs(Meeting)) as group:
        group.meet(str(tmp_path / "fail"))
        with existing(tmp_path / "fail"), pytest.raises(OSError, match="cannot be read"):
            group.restart()
        with within(60):
            assert group.shrink([3]) == (3,)
        assert group.total() == [6.0] * 3


def test_second_try_waits_for_the_constructors_of_the_first(pool, tmp_path):
    """Without collectives: rank 2 dies again while the constructor of rank 1 runs, which then fails."""
    with RayWorkerGroup(pool[:3], RayClassWithInitArgs(Slow, str(tmp_path)), collectives=False) as group:
        (tmp_path / "slow").touch()
        for rank in (1, 2):
            os.kill(group.status().ranks[rank].process.pid, signal.SIGKILL)
        wait_until(lambda: not any(group.alive()[1:]), 30)  # rank 1, replaced alone, would wait for rank 2
        try:
            group.replace()
        except StartError:  # on a slow machine the constructor fails before the death is known, and that is told
            group.replace()
        assert group.rank_and_size() == [(rank, 3) for rank in range(3)]


def test_close_in_a_fork_waits_for_no_lock(three):
    with three._registration._writing:
        assert in_fork(lambda: str(three.close()), 10) == "None"
    assert three.get() == [7] * 3
