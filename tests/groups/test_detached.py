"""Workers that outlive their driver, and drivers that attach to running workers."""

import os
import pickle
import signal
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import ray
from group_workers import Counter, Drives, Fragile
from replace_workers import Lone
from waits import wait_gone, wait_until, within

from single_controller import (
    CallTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResultError,
    WorkerDiedError,
    attach,
    end_detached,
)
from single_controller.ray import compat, group_records, start


def test_groups_outlive_their_driver_and_are_found_again(run_driver):
    """The driver that started the workers is gone. Another one attaches to each group; of the second one, which is in
    another namespace and has roles, it then ends the workers and removes their bundles."""
    names = run_driver("""
        pool = RayResourcePool([2], use_gpu=False, detached=True, name_prefix="outliving_")
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5), name_prefix="outliving_", detached=True)
        group.add(1)
        others = RayResourcePool([2], use_gpu=False, detached=True, name_prefix="handed_on_", resources={"crate": 1})
        made = colocate({"actor": RayClassWithInitArgs(Actor, 5), "critic": RayClassWithInitArgs(Critic)})
        other = RayWorkerGroup(others, made, name_prefix="handed_on_", detached=True, namespace="trainers")
        other.actor.add(1)
        print("answer", ",".join(group.worker_names))
    """)
    assert names == "outliving_Counter_0,outliving_Counter_1"
    try:
        for how in (
            {"name_prefix": "outliving_"},
            {"worker_names": names.split(",")[::-1]},
            {"worker_names": names.split(","), "ray_cls_with_init": RayClassWithInitArgs(cls=Counter, start=5)},  # verl
            {"worker_handles": [ray.get_actor(name) for name in names.split(",")]},
        ):
            with RayWorkerGroup.from_detached(**how) as group:
                assert group.world_size == 2 and group.worker_names == names.split(",")
                assert group.add(0) == [6, 7]
                assert group.place()[1][0] == 1 and group.place()[0][5] == group.master_port
                with pytest.raises(GroupBrokenError, match="attached"):
                    group.restart()
            with pytest.raises(GroupClosedError):
                group.add(0)
    finally:
        RayWorkerGroup.from_detached(worker_names=names.split(","), own=True).close()
    with pytest.raises(ValueError, match="namespace 'elsewhere'"):
        attach("handed_on_actor_critic", namespace="elsewhere")
    elsewhere = ["handed_on_actor_critic_0", "handed_on_actor_critic_1"]
    assert RayWorkerGroup.from_detached(worker_names=elsewhere).worker_names == elsewhere
    with attach("handed_on_actor_critic") as group:  # found in any namespace if the name is unique
        assert group.actor.add(1) == [7, 7] and group.critic.take() == [(7, True, "Actor")] * 2
        pids = group.actor.pid()
    with pytest.raises(GroupClosedError):
        group.actor.add(1)
    with attach("handed_on_", namespace="trainers", own=True) as group:  # closing the first one did not end the workers
        assert group.actor.add(0) == [7, 7] and group.actor.pid() == pids
    wait_gone(pids)
    wait_until(lambda: ray.available_resources().get("crate") == 8)
    states = {t["state"] for t in ray.util.placement_group_table().values() if t["name"].startswith("handed_on_")}
    assert states <= {"REMOVED"}


LEFT = """
from single_controller.ray import group_records
while not any(record.name == group.name for record in group_records.read().groups.values()):
    time.sleep(0.02)
print("ready", *(rank.process.pid for rank in group.status(0.5).ranks), flush=True)
time.sleep(60)
"""


def left_by_a_killed_driver(start_driver, code):
    """Run a script that makes a detached group of the name `group`, and kill it. Returns the pids of the ranks."""
    driver = start_driver(textwrap.dedent(code) + LEFT)
    pids = next(line for line in driver.stdout if line.startswith("ready ")).split()[1:]  # Ray prints there too
    driver.kill()
    driver.wait()
    return pids


@pytest.mark.timeout(90)
def test_killed_driver_s_group_is_replaced_and_restarted_by_another(start_driver):
    """The driver is killed, and a rank with it. Another driver takes over: it owns the group as the first one did."""
    code = """
        pool = RayResourcePool([4], use_gpu=False, detached=True, resources={"crate": 1})
        made = RayClassWithInitArgs(Counter, 5)
        group = RayWorkerGroup(pool[1:], made, name_prefix="inherited_", detached=True, standby=1)
        group.add(1)
    """
    pids = left_by_a_killed_driver(start_driver, code)
    os.kill(int(pids[1]), signal.SIGKILL)
    wait_gone(pids[1:2])
    names, counter = [f"inherited_Counter_{rank}" for rank in range(3)], RayClassWithInitArgs(Counter, 5)
    group = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=counter, own=True)
    with group:
        wait_until(lambda: not group.alive()[1])
        assert [rank.process.pid for rank in group.status().ranks] == [int(pid) for pid in pids]
        assert group.replace() == (1,) and group.generation == 1
        assert group.add(0) == [6, 6]  # rank 0 keeps its state: 5, and the 1 that the first driver added
        assert group.standbys()  # the standby of the first driver, or one in place of it
        group.restart()
        assert group.generation == 2 and group.add(0) == [5, 6]
        pids = [rank.process.pid for rank in group.status().ranks]
    wait_gone(pids)
    wait_until(lambda: ray.available_resources().get("crate") == 8)
    assert not any(record.name == group.name for record in group_records.read().groups.values())


def test_driver_that_is_killed_while_it_restarts_a_group_leaves_it_to_another(start_driver, tmp_path):
    """The new workers have the names of the old ones, and nothing else tells of them."""
    code = f"""
        import pathlib
        from replace_workers import Lone
        folder = pathlib.Path({str(tmp_path)!r})
        pool = RayResourcePool([2], use_gpu=False, detached=True)
        made = RayClassWithInitArgs(Lone, hold=str(folder))
        group = RayWorkerGroup(pool, made, name_prefix="midway_", detached=True, collectives=False)
        (folder / "hold").touch()
        threading.Thread(target=group.restart, daemon=True).start()
        while len(list(folder.glob("held-*"))) < 2:
            time.sleep(0.02)
    """
    left_by_a_killed_driver(start_driver, code)
    (tmp_path / "hold").unlink()
    with attach("midway_", own=True) as group:
        assert group.broken is not None
        group.restart()
        assert group.add(1) == [1, 1]
        wait_gone([file.name.removeprefix("held-") for file in tmp_path.glob("held-*")])


@pytest.mark.parametrize("name", ["again_Counter_0", "again_Counter_1"], ids=["rank", "standby"])
def test_record_of_a_dead_group_whose_names_are_in_use(monkeypatch, name):
    """By a standby, or by workers with which its driver was restarting it; not by another group."""
    living = compat.ActorInfo(name, "here", True, "", True, 0.0, "", False)
    dead = living._replace(name="again_Counter_0", alive=False, reason="killed")
    rank = group_records.RankRecord("old", dead.name, None)
    record = group_records.GroupRecord("group again_Counter", "job", "driver", None, 0, {}, (rank,))
    other = replace(record, ranks=(rank._replace(actor="new"),))
    written = {"group/old": pickle.dumps(record)}
    monkeypatch.setattr(compat, "read_records", lambda prefix: written)
    monkeypatch.setattr(compat, "all_actors", lambda: {"old": dead, "new": living})
    monkeypatch.setattr(compat, "living_jobs", frozenset)
    deleted = []
    monkeypatch.setattr(compat, "delete_record", lambda key: deleted.append(key) or written.pop(key, None))
    assert list(group_records.read().groups) == ["old"]
    written["group/new"] = pickle.dumps(other)
    assert list(group_records.read().groups) == list(group_records.read().groups) == ["new"]
    assert deleted == ["takeover/old", "group/old"]  # whoever is killed in between leaves nothing for ever


def test_group_of_which_nobody_is_left_is_restarted_by_another_driver(ray_cluster, monkeypatch):
    monkeypatch.setattr(compat, "living_jobs", frozenset)  # as if this driver had ended
    with RayResourcePool([1], use_gpu=False, detached=True) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5), name_prefix="lost_", detached=True)
        group.takeover_data = None  # what is left is written before this returns
        os.kill(group.status().ranks[0].process.pid, signal.SIGKILL)
        wait_until(lambda: group.alive() == [False])
        with attach("lost_", own=True) as heir:
            heir.restart()
            assert heir.add(1) == [6]


def test_survivors_of_another_driver_s_call_are_freed(start_driver):
    """They wait in a collective that no death ends: one for a living rank that does not take part."""
    code = """
        from replace_workers import Member
        pool = RayResourcePool([4], use_gpu=False, detached=True)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Member), name_prefix="waiting_", detached=True)
        group.total()
        group.total.remote(asleep=[2], absent=[3])
        time.sleep(0.5)
    """
    left_by_a_killed_driver(start_driver, code)
    with attach("waiting_", own=True) as group:
        with within(30):
            assert group.shrink(ranks=[2]) == (2,)
        assert group.total() == [54.0] * 3


def test_ranks_stay_in_the_namespace_of_the_group(start_driver):
    """Also those that a driver has started with another one, of which a driver has a random one by default."""
    code = """
        address = ray.get_runtime_context().gcs_address
        ray.shutdown()
        ray.init(address, log_to_driver=False)
        pool = RayResourcePool([2], use_gpu=False, detached=True)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5), name_prefix="apart_", detached=True)
    """
    left_by_a_killed_driver(start_driver, code)
    with attach("apart_", own=True) as group:
        assert group.replace(ranks=[1]) == (1,)
        assert attach("apart_").add(0) == [5, 6]


def test_detached_group_keeps_its_names_on_restart(ray_cluster, monkeypatch):
    with RayResourcePool([2], use_gpu=False, detached=True) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5), name_prefix="stays_", detached=True)
        with group:
            with pytest.raises(ValueError, match=r"'stays_Counter_0' is already running.*attach\('stays_Counter'\)"):
                RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="stays_", detached=True)
            find, interrupts = ray.get_actor, [KeyboardInterrupt]

            def interrupted(name, namespace=None):
                found = find(name, namespace)
                if interrupts:  # as by Ctrl-C, while the name is looked up
                    raise interrupts.pop()
                return found

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(ray, "get_actor", interrupted)
                RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="stays_", detached=True)
            lookups = [ValueError]  # another driver takes the name after it was found to be free

            def first_free(name, namespace=None):
                if lookups:
                    raise lookups.pop()
                return find(name, namespace)

            with monkeypatch.context() as patch, pytest.raises(ValueError, match="is already running"):
                patch.setattr(ray, "get_actor", first_free)
                RayWorkerGroup(pool, RayClassWithInitArgs(Counter), name_prefix="stays_", detached=True)
            group.add(1)
            names = group.worker_names
            group.restart()
            assert group.worker_names == names and group.add(0) == [5, 6]
            counter = RayClassWithInitArgs(Counter)
            with RayWorkerGroup(pool[:1], counter, name_prefix="stays_", detached=True, namespace="elsewhere"):
                wait_until(lambda: [one.name for one in group_records.read().groups.values()].count(group.name) == 2)
                key, record, left = group_records.find_takeover("stays_", None, None, None)  # of its own namespace
                assert [rank.actor for rank in left.ranks] == group.workers
                records = group_records.read()  # with a group of this class and prefix that ends with its driver
                actor = records.actors[record.ranks[0].actor]
                records.actors["other"] = actor._replace(name="stays_Counter_0123abcd_0", detached=False)
                rank = group_records.RankRecord("other", "stays_Counter_0123abcd_0", None)
                records.groups["other"] = replace(record, ranks=(rank,))
                monkeypatch.setattr(group_records, "read", lambda: records)
                assert group_records.find_takeover("stays_Counter", None, None, None)[0] == key


def test_what_is_left_for_another_driver_follows_the_group(ray_cluster, tmp_path, monkeypatch):
    def left():
        return group_records.find_takeover("left_", None, None, None)

    def interrupted(plan):
        def make(slot, name):
            makers(plan)(slot, name)
            raise KeyboardInterrupt  # before there is a handle

        return make

    makers = start._actor_maker

    with RayResourcePool([2], use_gpu=False, detached=True) as pool, ThreadPoolExecutor() as threads:
        made = RayClassWithInitArgs(Lone, hold=str(tmp_path))
        with RayWorkerGroup(pool, made, name_prefix="left_", detached=True, collectives=False) as group:
            assert group.shrink([1]) == (1,)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("single_controller.ray.start.standby_of", Mock(side_effect=KeyboardInterrupt))
                group.grow()  # what it has created must not keep its name
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(start, "_actor_maker", interrupted)
                group.grow()
            (tmp_path / "hold").touch()
            growing = threads.submit(group.grow)
            try:
                wait_until(lambda: list(tmp_path.glob("held-*")))
                assert not left()[2].standbys  # an heir ends the new process, or it could not grow
                assert attach("left_Lone").add(0) == [0]  # without the rank whose constructor runs,
                identify = group._ray.recruits[0].actor._sc_identity.remote
                with group._state.sending:  # for which the growth waits then
                    (tmp_path / "hold").unlink()
                    wait_until(lambda: ray.get(identify()))
                    assert attach("left_Lone").add(0) == [0]  # or has returned
            finally:
                (tmp_path / "hold").unlink(missing_ok=True)
            assert growing.result(30) == (1,)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("single_controller.ray.start.recruit", Mock(side_effect=KeyboardInterrupt))
                group.replace(ranks=[0])
            assert group.replace() == (0,) and group.add(1) == [1, 1]
            group.takeover_data = "new"
            assert left()[2].data == "new"
            group.takeover_data = threading.Lock()  # which cannot be pickled
            assert left() is None  # rather than what was left before
            group.takeover_data = None
            gone = {f"takeover/{left()[0]}": b"cmine\nTrainer\n."}  # a class of a module that is not here
            with monkeypatch.context() as patch, pytest.raises(ResultError, match=r"left_Lone cannot be taken.*'mine'"):
                patch.setattr(compat, "read_records", lambda key, read=compat.read_records: read(key) | gone)
                attach("left_", own=True)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("single_controller.ray.group.join", Mock(side_effect=KeyboardInterrupt))
                group.replace(ranks=[0])  # the new process has not run its constructor
            actors = group.workers
            wait_until(lambda: left()[1].broken and [rank.actor for rank in left()[2].ranks] == actors)
            with attach("left_", own=True) as heir:
                assert heir._ray.started([0, 1]) == [1]  # the other one is not told to leave what it does not run
                heir.replace()
                assert heir.add(1) == [1, 2]


def test_closing_a_group_that_cannot_be_taken_over_ends_its_standby(ray_cluster):
    """Also in a placement group without ranks. A new process would not get what the killed driver has stored."""
    with RayResourcePool([1, 1], use_gpu=False, detached=True) as pool:
        made = RayClassWithInitArgs(Drives, [ray.put(None)])
        group = RayWorkerGroup(pool, made, name_prefix="spare_", detached=True, collectives=False, standby=1)
        group.takeover_data = None  # what is left is written before this returns
        standby = group._ray.standbys[0].location().pid
        with attach("spare_Drives", own=True) as heir:
            with pytest.raises(GroupBrokenError, match="create a new group"):
                heir.restart()  # which would end the workers first
            assert heir.alive() == [True]
        wait_gone([standby])


def test_hanging_detached_workers_are_ended_by_name(run_driver, monkeypatch):
    """The dead rank has a placement group of its own, in which nothing is left."""
    pids = run_driver("""
        pool = RayResourcePool([2, 1], use_gpu=False, detached=True, resources={"crate": 1})
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Fragile), name_prefix="stuck_", detached=True)
        group.takeover_data = None  # what is left is written before this returns
        pids = group.pid()
        group.sleep.remote(600)
        os.kill(pids[2], signal.SIGKILL)
        print("answer", *pids)
    """)
    monkeypatch.setattr("single_controller.ray.attach.IDENTITY_SECONDS", 0.5)
    with pytest.raises((CallTimeoutError, ValueError), match=r"end_detached|all 3 ranks"):
        attach("stuck_Fragile")
    with pytest.raises(ValueError, match="nowhere in this Ray"):
        end_detached("nobody")
    assert end_detached("stuck_Fragile") == 2
    wait_gone(pids.split())
    wait_until(lambda: ray.available_resources().get("crate") == 8)


class TestGroupsInOtherProcesses:
    def test_worker_calls_another_group(self, counters, make_group):
        drivers = make_group(Drives, counters)  # passed to the constructor,
        assert drivers.drive(None, "x") == [[[rank, "x"]] * 4 for rank in range(4)]
        assert drivers.drive(counters, "y") == [[[rank, "y"]] * 4 for rank in range(4)]  # or in a call
        assert counters.add(0) == [100, 101, 102, 103]

    def test_task_calls_a_group(self, counters):
        @ray.remote(num_cpus=0)
        def use(group):
            batch = group.double(list(range(4)), factor=1)
            with group:
                pass  # the copy does not own the workers
            return batch, group.worker_names, type(group).__name__, group.closed

        answer = ray.get(use.remote(counters), timeout=60)
        assert answer == (list(range(4)), counters.worker_names, "RayWorkerGroup", True)
        assert counters.add(0) == [100, 101, 102, 103]

    def test_copy_reports_deaths(self, make_group):
        group = make_group(Fragile)
        copy = ray.cloudpickle.loads(ray.cloudpickle.dumps(group))
        assert copy.ping() == [0, 1, 2, 3] and "attached" in copy.name
        os.kill(group.pid()[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="rank 1"):
            copy.ping()
        wait_until(lambda: copy.broken)
        with pytest.raises(GroupBrokenError, match="Only the driver that started it can restart it"):
            copy.ping()


def test_attaching_requires_all_ranks(counters):
    with pytest.raises(ValueError, match=r"all 4 ranks.*\[0, 1\]"):
        RayWorkerGroup.from_detached(worker_handles=counters.workers[:2])
    with pytest.raises(ValueError, match="is not a worker of a group"):
        RayWorkerGroup.from_detached(worker_handles=[object()])
    with pytest.raises(ValueError, match="takes exactly one of name_prefix"):
        RayWorkerGroup.from_detached()
    with pytest.raises(TypeError, match=r"from_detached\(\) got an unexpected.*did you mean 'worker_handles'"):
        RayWorkerGroup.from_detached(worker_handels=counters.workers)
    # The same for both names of the call.
    for call in (lambda name: RayWorkerGroup.from_detached(name_prefix=name), RayWorkerGroup.attach):
        with pytest.raises(ValueError, match=r"^cannot attach: no actor's name begins with 'nobody_'"):
            call("nobody_")


def test_attaching_to_workers_that_are_called_through_their_handles(counters, tmp_path, monkeypatch):
    path = tmp_path / "go"

    def wait(worker):
        while not path.exists():
            time.sleep(0.01)

    monkeypatch.setattr("single_controller.ray.attach.IDENTITY_SECONDS", 5.0)
    running = counters.workers[0].execute_with_func_generator.remote(wait)
    try:
        assert RayWorkerGroup.from_detached(worker_handles=counters.workers).world_size == 4
    finally:
        path.touch()
    ray.get(running)


def test_detached_group_requires_a_detached_pool(pool):
    with pytest.raises(ValueError, match="detached=True too"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Counter), detached=True)


def test_ambiguous_prefix_is_rejected(pool):
    with (
        RayWorkerGroup(pool[:1], RayClassWithInitArgs(Counter), name_prefix="twin"),
        RayWorkerGroup(pool[:1], RayClassWithInitArgs(Fragile), name_prefix="twin_two"),
    ):
        with pytest.raises(ValueError, match=r"several groups.*twinCounter_.*twin_twoFragile_"):
            RayWorkerGroup.from_detached(name_prefix="twin")
