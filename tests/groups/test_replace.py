"""Ranks that die are replaced; the others keep their processes and what they hold."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from replace_workers import Lone, Member, Sulky
from torch.distributed import TCPStore
from waits import existing, wait_gone, wait_until, within

from single_controller import (
    CallTimeoutError,
    GroupBrokenError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    SingleControllerError,
    WorkerDiedError,
)
from single_controller.ray import group as ray_group
from single_controller.ray import start
from single_controller.ray.compat import death_of
from single_controller.ray.rank.collectives import end_collectives
from workers.distributed import initialize_distributed

RANKS = 4
TOTAL = 10.0 * RANKS * RANKS


@pytest.fixture(scope="module")
def wide(pool):
    with RayResourcePool([RANKS + 1], use_gpu=False) as pool:
        yield pool


@pytest.fixture(scope="module")
def members(wide, folder):
    """Four ranks with process groups, and a standby."""
    hold = {"HOLD_STANDBY": str(folder / "hold")}
    with RayWorkerGroup(wide, RayClassWithInitArgs(Member, str(folder)), standby=1, worker_env=hold) as group:
        group.configure("first")
        group.configure("second")
        yield group


def die(group, *args, **kwargs):
    with pytest.raises(WorkerDiedError) as error, within(5):
        group.total(*args, **kwargs)
    return error.value


def check_replaced(group, before, replaced):
    """Only those ranks have new processes; the collectives work; the rendezvous is new on all ranks."""
    after = group.me()
    assert [one["pid"] != two["pid"] for one, two in zip(before, after, strict=True)] == [
        rank in replaced for rank in range(RANKS)
    ]
    assert group.total() == [TOTAL] * RANKS
    assert {one["port"] for one in after} == {group.master_port} != {before[0]["port"]}
    assert [one["environment"] for one in after] == [
        [str(rank), str(RANKS), str(rank), str(group.master_port)] for rank in range(RANKS)
    ]
    return [one["history"] for one in after]


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.full("deaths of other ranks than the first"))])
def test_dead_rank_is_replaced_and_the_others_keep_what_they_hold(members, victim):
    before, generation = members.me(), members.generation
    assert members.total() == [TOTAL] * RANKS
    # Rank 3 takes no part, so the others wait for it too, and no connection to it breaks by itself.
    assert die(members, kill=victim, absent=[3]).ranks == (victim,)
    with within(10):
        assert members.replace() == (victim,)
    assert members.generation == generation + 1 and members.broken is None
    histories = check_replaced(members, before, {victim})
    told = f"generation {generation + 1}"
    for rank, history in enumerate(histories):
        kept = before[rank]["history"] if rank != victim else ["constructed", "configured second"]
        assert history == [*kept, told]


def test_death_of_which_nothing_is_known_yet_is_found(members):
    before = members.me()
    os.kill(before[1]["pid"], signal.SIGKILL)
    assert members.replace() == (1,)  # at once: Ray does not know of the death
    check_replaced(members, before, {1})


def test_call_that_had_not_begun_is_not_run_by_the_survivors(members, monkeypatch):
    def slow(*args, **kwargs):
        time.sleep(1.2)
        return fill(*args, **kwargs)

    before = members.me()
    fill = ray_group.fill
    monkeypatch.setattr(ray_group, "fill", slow)  # the survivors have slept long before the new process is there
    dying = members.sleep_on.remote([0, 2, 3], 0.8, kill=1)
    waiting = [members.note.remote("late") for _ in range(3)]
    with pytest.raises(WorkerDiedError):
        dying.result(10)
    assert members.replace() == (1,)
    for call in waiting:
        with pytest.raises((GroupBrokenError, WorkerDiedError)):
            call.result(5)
    assert not any("late" in history for history in check_replaced(members, before, {1}))


@pytest.mark.parametrize("second", [1, 3], ids=["survivor", "replacement"])
def test_another_death_while_ranks_are_replaced(members, folder, second):
    before = members.me()
    die(members, kill=3)
    (folder / f"die-{second}").touch()
    with within(20):
        replaced = members.replace()
    assert set(replaced) == {second, 3}
    check_replaced(members, before, {second, 3})


def test_dead_standby_is_no_obstacle_and_is_started_again(members):
    wait_until(lambda: members.standbys() and members.standbys()[0].memory, 20)
    (standby,) = members._transport.standbys
    os.kill(standby.location().pid, signal.SIGKILL)
    wait_until(lambda: not members.standbys(), 5)
    before = members.me()
    die(members, kill=2)
    assert members.replace() == (2,)
    check_replaced(members, before, {2})
    wait_until(lambda: members.standbys() and members.standbys()[0].memory, 20)


def test_standby_that_cannot_be_prepared_is_ended_and_started_again(wide):
    with RayWorkerGroup(wide[:3], RayClassWithInitArgs(Sulky), standby=1, collectives=False) as group:
        (first,) = group._transport.standbys
        with pytest.raises(ray.exceptions.RayError):
            first.location()
        assert group.replace([0]) == (0,)
        wait_until(lambda: death_of(first.actor) is not None, 10)  # the handle here would keep it alive
        assert [one is not first for one in group._transport.standbys] == [True]


def test_ranks_wait_together_for_a_standby(members, folder, monkeypatch):
    monkeypatch.setattr(start, "STANDBY_SECONDS", 1.5)
    wait_until(lambda: members.standbys() and members.standbys()[0].memory, 20)
    with existing(folder / "hold"):
        members.replace([1])  # takes the standby; the next one is held
        with within(2.9 * start.STANDBY_SECONDS):  # otherwise three times as long, and what it takes besides
            members.replace([0, 1, 2])


def test_standby_that_dies_before_it_is_ready_is_started_again(members, folder):
    wait_until(lambda: members.standbys() and members.standbys()[0].memory, 20)
    before = members.me()
    die(members, kill=1)
    with existing(folder / "hold"):
        members.replace()
        (first,) = members._transport.standbys
        ray.kill(first.actor)  # as if Ray had put it on a host that is gone
        wait_until(lambda: members._transport.standbys not in ([first], []), 10)
    wait_until(lambda: members.standbys() and members.standbys()[0].memory, 20)
    check_replaced(members, before, {1})


def test_plans_show_what_a_standby_costs(members, wide):
    (standby,) = members.plan().standbys
    assert standby.bundle not in {rank.bundle for rank in members.plan().ranks}
    wait_until(lambda: members.standbys()[0].memory, 20)
    assert wide.plan().standbys == tuple(members.standbys())
    assert members.standbys()[0].memory > 50e6
    assert "standby of" in str(wide.plan()) and "MiB" in str(wide.plan())


def test_replacement_that_cannot_be_constructed_is_an_error_and_can_be_tried_again(members, folder):
    before = members.me()
    die(members, kill=1)
    with existing(folder / "refuse"), pytest.raises(SingleControllerError, match="no device"):
        members.replace()
    with pytest.raises(GroupBrokenError):
        members.total()
    assert members.replace() == (1,)
    check_replaced(members, before, {1})


def test_rank_that_hangs_is_named_and_can_be_replaced_too(members):
    before = members.me()
    with pytest.raises(CallTimeoutError):
        members.sleep_on.options(timeout=0.2)([1], 60.0)
    with pytest.raises(CallTimeoutError, match=r"rank 1.*\n.*sleep_on") as error:
        members.replace(timeout=1.5)
    assert error.value.ranks == (1,)
    with pytest.raises(GroupBrokenError, match="its restart failed"):
        members.total()
    assert members.replace(ranks=[1]) == (1,)
    check_replaced(members, before, {1})


def test_nothing_to_replace(members):
    before, generation = members.me(), members.generation
    assert members.replace() == ()
    assert members.me() == before and members.generation == generation
    for ranks in ([], [9], [1, 1], 1):
        with pytest.raises(ValueError, match=r"replace\(ranks="):
            members.replace(ranks=ranks)
    with pytest.raises(ValueError, match="timeout"):
        members.replace(timeout=0)


def test_policy_replaces_at_the_next_call_once_for_all_threads(wide):
    with RayWorkerGroup(wide[:3], RayClassWithInitArgs(Lone), collectives=False, on_death="replace") as group:
        assert group.add(1) == [1, 1, 1]
        port = group.master_port
        with pytest.raises(WorkerDiedError):
            group.add(1, kill=1)
        begun = threading.Barrier(3)

        def call(_):
            begun.wait()
            return group.add(0)

        with ThreadPoolExecutor(3) as threads, within(20):
            results = list(threads.map(call, range(3)))
        assert results == [[2, 0, 2]] * 3, "the others keep their state, and are told nothing"
        assert group.generation == 1 and group.master_port == port


def test_two_groups_are_replaced_at_once(wide):
    made = RayClassWithInitArgs(Lone)
    with RayWorkerGroup(wide[:2], made) as one, RayWorkerGroup(wide[2:4], made) as two:
        for group in (one, two):
            with pytest.raises(WorkerDiedError):
                group.add(1, kill=1)
        with ThreadPoolExecutor(2) as threads, within(20):
            assert list(threads.map(lambda group: group.replace(), (one, two))) == [(1,), (1,)]
        assert one.rank_and_size() == two.rank_and_size() == [(0, 2), (1, 2)]


def test_attached_group_and_bad_options_are_refused(wide, members):
    attached = RayWorkerGroup.from_detached(worker_handles=members.workers)
    with pytest.raises(GroupBrokenError, match="attached"):
        attached.replace()
    for options in ({"standby": 5}, {"standby": -1}, {"standby": True}, {"on_death": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            RayWorkerGroup(wide, RayClassWithInitArgs(Lone), **options)


def test_closed_group_ends_its_standby(wide):
    with RayWorkerGroup(wide[:2], RayClassWithInitArgs(Lone), standby=1) as group:
        assert group.world_size == 1
        location = group._transport.standbys[0].location()
        assert group.add(1) == [1]
    wait_gone([location.pid])


class Lonely:
    """What `initialize_distributed` needs of a worker of rank 1, whose other rank does not come."""

    rank, world_size, master_addr = 1, 2, "127.0.0.1"
    _leaving = False

    def _check_collectives(self, method):
        pass

    def _prepare_thread(self):
        pass


def test_a_rank_gives_up_a_process_group_in_which_another_one_is_missing():
    worker = Lonely()
    store = TCPStore("127.0.0.1", 0, world_size=2, is_master=True, wait_for_workers=False)
    worker.master_port = store.port
    threading.Timer(0.5, setattr, (worker, "_leaving", True)).start()
    with pytest.raises(GroupBrokenError, match="rank 1 was told to give up"), within(5):
        initialize_distributed(worker, "gloo", timeout_minutes=10)
    end_collectives()


def test_a_rank_gives_up_a_rendezvous_whose_first_rank_dies_while_it_connects():
    """Rank 0 listened, and died before it answered: whoever connects to its store would try for ten minutes."""
    worker = Lonely()

    def answer_nobody(listening):
        for _ in range(3):
            listening.accept()[0].close()
        listening.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        worker.master_port = listening.getsockname()[1]
        threading.Thread(target=answer_nobody, args=(listening,), daemon=True).start()
        threading.Timer(0.5, setattr, (worker, "_leaving", True)).start()
        with pytest.raises(GroupBrokenError, match="rank 1 was told to give up"), within(8):
            initialize_distributed(worker, "gloo", timeout_minutes=10)
