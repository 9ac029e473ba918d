"""Groups go on with fewer ranks, and take ranks back."""

import contextlib
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from replace_workers import Lone, Member, Replica
from waits import existing, repeated, wait_until, within

from single_controller import (
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    PlacementError,
    RayClassWithInitArgs,
    RayWorkerGroup,
    StartError,
    WorkerDiedError,
)
from single_controller.call.state import GroupState
from single_controller.ray import group as ray_group
from single_controller.ray.compat import death_of
from single_controller.ray.replicas import complete_replicas, number_to_add
from single_controller.ray.start import recruit
from single_controller.wire.link import Answer


@pytest.fixture(scope="module")
def members(pool, folder):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Member, str(folder)), on_death="shrink") as group:
        group.configure("first")
        yield group


@pytest.fixture
def four(members):
    """The group with all of its ranks."""
    if members.broken is not None:
        members.restart()
    if members.world_size < 4:
        members.grow()
    return members


def check_ranks(group, size):
    """The group has that many ranks, which know it, and their collectives work."""
    assert group.world_size == size and group.broken is None
    assert group.total() == [size**2 * sum(range(1, size + 1))] * size
    found = group.me()
    assert [one["environment"][:2] for one in found] == [[str(rank), str(size)] for rank in range(size)]
    assert {one["environment"][3] for one in found} == {str(group.master_port)}
    return found


def kill(group, *ranks):
    for rank in ranks:
        os.kill(group.status().ranks[rank].process.pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.full("deaths of other ranks than the first"))])
def test_group_goes_on_without_a_dead_rank_and_takes_it_back(four, victim, pool):
    before, generation = four.me(), four.generation
    with pytest.raises(WorkerDiedError), within(5):
        four.total(kill=victim, absent=[3])
    with within(10):
        assert four.shrink() == (victim,)
    found = check_ranks(four, 3)
    kept = [one for rank, one in enumerate(before) if rank != victim]
    told = f"generation {generation + 1}"
    assert [one["pid"] for one in found] == [one["pid"] for one in kept]
    assert [one["history"] for one in found] == [[*one["history"], told] for one in kept]
    assert four.shrink() == ()  # nothing to do
    four.configure("second")
    known = pool.slots()[victim].location
    pool.reservations[0].update_location(victim, known._replace(hostname="lost"))  # from which Ray has moved the slot
    assert four.grow() == (3,)
    assert [rank.hostname for rank in pool.plan().ranks] == [known.hostname] * 4
    again = check_ranks(four, 4)
    assert [one["pid"] for one in again[:3]] == [one["pid"] for one in found]
    told = f"generation {generation + 2}"
    assert [one["history"][-1] for one in again] == [told] * 4
    assert again[3]["history"] == ["constructed", "configured second", told]
    assert four.grow() == ()  # no room
    with pytest.raises(PlacementError, match="room for 0 ranks"):
        four.grow(1)


def test_two_deaths_and_another_while_the_group_shrinks(four, folder):
    before = four.me()
    (folder / "die-1").touch()
    kill(four, 1, 3)
    with pytest.raises(WorkerDiedError):
        four.total()
    with within(20):
        dropped = four.shrink()
    assert len(dropped) == 3 and {1, 3} < set(dropped)
    (left,) = check_ranks(four, 1)
    assert left["pid"] == before[min({0, 1, 2, 3} - set(dropped))]["pid"]
    four.restart()
    check_ranks(four, 4)


def test_living_rank_can_be_dropped_and_calls_that_run_end_before_the_group_grows(four):
    assert four.shrink(ranks=[0]) == (0,)
    running = four.sleep_on.remote([0, 1, 2], 0.5)
    assert four.grow(1) == (3,)
    assert running.result(0) == [None] * 3
    check_ranks(four, 4)
    with pytest.raises(GroupBrokenError, match="each of its data-parallel replicas"):
        four.shrink(ranks=[0, 1, 2, 3])
    check_ranks(four, 4)  # a refusal leaves it as it was


def test_copies_of_before_a_change_of_size_are_refused(four):
    four.shrink(ranks=[0])
    copy = pickle.loads(pickle.dumps(four))
    assert copy.total() == four.total()
    four.grow(1)
    with within(10), pytest.raises(GroupBrokenError, match="ranks of the group have changed since"):
        copy.total()
    check_ranks(four, 4)


def test_copies_of_before_a_replacement_are_refused_where_the_death_is_not_known(four, monkeypatch):
    """The others would wait in a collective for the process that has taken the rank."""
    copy = pickle.loads(pickle.dumps(four))
    assert four.replace(ranks=[1]) == (1,)
    deaths, told = copy._transport.deaths, time.monotonic() + 1
    monkeypatch.setattr(copy._transport, "deaths", lambda: deaths() if time.monotonic() > told else {})
    with within(10), pytest.raises(GroupBrokenError, match="ranks of the group have changed since"):
        copy.total()
    with within(10):
        check_ranks(four, 4)
    assert pickle.loads(pickle.dumps(four)).total() == four.total()


def test_standby_is_used_before_the_group_shrinks_and_is_there_when_it_has_grown(pool, monkeypatch):
    with RayWorkerGroup(pool[:3], RayClassWithInitArgs(Lone), collectives=False, standby=1, on_death="shrink") as group:
        with pytest.raises(WorkerDiedError):
            group.add(1, kill=1)
        assert group.add(0) == [1, 0] and group.world_size == 2
        os.kill(group._ray.standbys[0].location().pid, signal.SIGKILL)
        wait_until(lambda: not group.standbys())
        with pytest.raises(WorkerDiedError):
            group.add(1, kill=0)
        assert group.add(0) == [1]
        assert group.grow() == (1,)  # although two slots are free
        assert group.add(0) == [1, 0] and len(group.standbys()) == 1
        os.kill(group._ray.standbys[0].location().pid, signal.SIGKILL)
        wait_until(lambda: not group.standbys())
        monkeypatch.setattr(ray_group, "recruit", lambda *args: group.close() or recruit(*args))
        assert group.grow() == ()
        wait_until(lambda: death_of(group._ray.standbys[0].actor) is not None)


def test_group_without_collectives_grows_while_calls_run(pool):
    with RayWorkerGroup(pool[:3], RayClassWithInitArgs(Lone), collectives=False) as group:
        assert group.add(1) == [1, 1, 1]
        with pytest.raises(WorkerDiedError):
            group.add(1, kill=0)
        assert group.shrink() == (0,)
        assert group.add(0) == [2, 2]
        results = []
        with repeated(lambda: results.append(group.add(0))):
            assert group.grow() == (2,)
            time.sleep(0.1)
        assert results[0] == [2, 2] and results[-1] == [2, 2, 0]
        assert group.rank_and_size() == [(0, 3), (1, 3), (2, 3)]


def test_process_that_will_be_a_rank_replaces_no_other(pool, tmp_path):
    """A rank dies while the constructor of another one runs, which takes long."""
    made = RayClassWithInitArgs(Lone, hold=str(tmp_path))
    with RayWorkerGroup(pool[:3], made, collectives=False) as group:
        assert group.shrink(ranks=[2]) == (2,)
        (tmp_path / "hold").touch()
        with ThreadPoolExecutor() as threads:
            growing = threads.submit(group.grow)
            wait_until(lambda: list(tmp_path.glob("held-*")))
            kill(group, 1)
            wait_until(lambda: not group.alive()[1])
            restarting = threads.submit(group.restart, ranks=[1])
            with contextlib.suppress(AssertionError):
                wait_until(lambda: len(list(tmp_path.glob("held-*"))) == 2, 5)
            (tmp_path / "hold").unlink()
            restarting.result(30)
            assert growing.result(30) == (2,)
        assert group.rank_and_size() == [(0, 3), (1, 3), (2, 3)] and not group.standbys()


def test_new_rank_whose_constructor_fails_leaves_the_group_as_it_was(pool, tmp_path, monkeypatch):
    def close_first(*args):
        group.close()
        wait_started(*args)

    ended = []
    made = RayClassWithInitArgs(Lone, str(tmp_path / "fail"))
    with RayWorkerGroup(pool[:2], made, collectives=False) as group:
        group.give([0, 5])  # which does not fit one rank
        assert group.shrink(ranks=[1]) == (1,)
        with existing(tmp_path / "fail"):
            with monkeypatch.context() as patch, pytest.raises(StartError, match="told to fail"):
                patch.setattr(ray_group, "remove_pools_of", ended.extend)
                group.grow()
            assert len(ended) == 1  # the pools that the constructor has made end with it
            assert group.add(1) == [1] and group.broken is None
        assert group.grow() == (1,)
        assert group.add(1) == [2, 6]
        assert group.shrink(ranks=[1]) == (1,)
        wait_started = ray_group.wait_started
        monkeypatch.setattr(ray_group, "wait_started", close_first)
        with pytest.raises(GroupClosedError):
            group.grow()


def test_new_rank_whose_constructor_fails_does_not_disturb_collectives(four, folder):
    assert four.shrink(ranks=[3]) == (3,)
    before = [one["pid"] for one in check_ranks(four, 3)]
    with existing(folder / "refuse"):
        with pytest.raises(StartError, match="no device"):
            four.grow()
        assert [one["pid"] for one in check_ranks(four, 3)] == before
    assert four.grow() == (3,)
    assert [one["pid"] for one in check_ranks(four, 4)][:3] == before


def test_growth_in_which_a_call_could_not_be_repeated_is_refused(four):
    assert four.shrink(ranks=[3]) == (3,)
    before = [one["pid"] for one in check_ranks(four, 3)]
    four.execute_all_sync("configure", ["a", "b", "c"])
    with pytest.raises(DispatchError, match=r"configure\(\): argument 'value' is a list of length 3") as caught:
        four.grow()
    assert "the group is as before" in caught.value.__notes__[0]
    assert [one["pid"] for one in check_ranks(four, 3)] == before
    four.configure("first")
    assert four.grow() == (3,)
    assert [one["pid"] for one in check_ranks(four, 4)][:3] == before


def test_whole_replicas_are_dropped_and_added(pool, tmp_path):
    with RayWorkerGroup(pool, RayClassWithInitArgs(Replica, str(tmp_path))) as group:
        assert group.rows([1, 2]) == [(0, 1), (2, 2)]
        with pytest.raises(WorkerDiedError):
            group.total(kill=0)
        assert group.shrink() == (0, 1)
        check_ranks(group, 2)
        assert group.rows([1, 2]) == [(0, 1), (0, 2)]
        with pytest.raises(ValueError, match="positive multiple of 2"):
            group.grow(1)
        assert group.grow() == (2, 3)
        check_ranks(group, 4)
        assert group.rows([1, 2]) == [(0, 1), (2, 2)]
        group.load([1, 2])
        kill(group, 1, 2)
        with pytest.raises(WorkerDiedError):
            group.total()
        with pytest.raises(GroupBrokenError, match="each of its data-parallel replicas has lost a rank"):
            group.shrink()
        (tmp_path / "die-3").touch()  # while the others are replaced
        assert group.replace() == (1, 2, 3)
        found = check_ranks(group, 4)
        assert [one["history"][1] for one in found[1:]] == ["loaded [1]", "loaded [2]", "loaded [2]"]


def test_replicas_are_complete_in_all_roles():
    assert complete_replicas({0: [(0, 4)], 1: [(1, 4)], 3: [(3, 4)]}, 4) == [0, 1, 3]
    assert complete_replicas({0: [(0, 2)], 1: [(0, 2)], 3: [(1, 2)]}, 4) == [0, 1]
    assert complete_replicas({0: [(0, 2)], 3: [(1, 2)]}, 4) == []
    # One role has replicas of ranks (0, 1) and (2, 3), the other one of (0, 2) and (1, 3).
    of = {rank: [(rank // 2, 2), (rank % 2, 2)] for rank in range(4)}
    assert complete_replicas(of, 4) == [0, 1, 2, 3]
    assert complete_replicas({rank: of[rank] for rank in (0, 1, 2)}, 4) == []
    assert complete_replicas({0: [], 1: [(1, 2)]}, 2) == [1]  # a process without workers


def test_whole_replicas_of_all_roles_are_added():
    """Of six ranks, one role has two replicas, and the other one three."""
    answer = Answer("[[0, 2], [0, 3]]")
    transport = SimpleNamespace(world_size=6, deaths=dict, ask=lambda *_: {0: answer})
    add = partial(number_to_add, GroupState("group", 5.0), transport, end=0.0)
    assert [add(None, vacant=vacant) for vacant in (5, 6, 11)] == [0, 6, 6] and add(6, vacant=6) == 6
    with pytest.raises(ValueError, match="positive multiple of 6"):
        add(3, vacant=6)
