"""Several worker classes in one process per rank."""

import os
import pickle
import signal
import time

import pytest
import ray
import torch
from group_workers import Actor, Counter, Critic, Early
from waits import wait_until

from single_controller import (
    DispatchError,
    GroupBrokenError,
    NVMegatronRayWorkerGroup,
    RayClassWithInitArgs,
    RayWorkerGroup,
    StartError,
    WorkerDiedError,
    WorkerError,
    colocate,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)

TRANSPORTS = ("ray", "local", "local-threads")
on_ray = pytest.mark.transports("ray")
"""For a test that depends on processes."""


def both(**actor):
    return {"actor": RayClassWithInitArgs(Actor, start=1, **actor), "critic": RayClassWithInitArgs(Critic, start=100)}


@pytest.fixture(scope="module")
def group(transport):
    with transport.group(colocate(both())) as group:
        yield group


def test_equal_method_names_do_not_clash(group):
    assert group.actor.add(1) == [2] * 4 and group.critic.add(1) == [101] * 4
    assert group.actor.add(0) == [2] * 4 and group.critic.add(0) == [101] * 4
    assert group.roles == ("actor", "critic")


def test_what_another_driver_finds_belongs_to_the_whole_group(group):
    group.actor.takeover_data = "step 3"
    assert group.takeover_data == group.critic.takeover_data == "step 3"
    group.takeover_data = None


@on_ray
def test_roles_share_their_processes(group):
    assert group.actor.pid() == group.critic.pid() and len(set(group.actor.pid())) == 4
    assert group.world_size == group.actor.world_size == 4


def test_worker_reaches_the_other_roles_of_its_process(group):
    value = group.actor.add(0)[0]
    assert group.critic.take() == [(value, True, "Actor")] * 4
    with pytest.raises(WorkerError, match=r"(?s)critic\.missing\(\) raised LookupError.*'aktor'.*actor, critic"):
        group.critic.missing()


def test_batches_async_methods_and_futures(group):
    batch = torch.arange(8)
    assert group.actor.score(batch).tolist() == [10 * row + row // 2 for row in range(8)]
    before = group.critic.add(0)[0]
    assert group.critic.add_later(5) == [before + 5] * 4 and group.critic.add(-5) == [before] * 4
    future = group.actor.score.remote(batch)
    once = [10 * row + row // 2 for row in range(8)]
    assert group.critic.score(future).tolist() == [10 * row + k // 2 for k, row in enumerate(once)]


def test_each_role_has_its_own_layout(group):
    group.actor.set_layout(dp=[0, 0, 1, 1], tp=[0, 1, 0, 1])
    group.critic.set_layout(dp=[0, 1, 2, 3], tp=[0, 0, 0, 0])
    assert group.actor.on_dp(["a", "b"]) == [(0, "a"), (2, "b")]
    assert group.critic.on_dp(list("abcd")) == list(enumerate("abcd"))
    assert (group.actor.dp_size, group.critic.dp_size) == (2, 4)
    group.actor.set_layout(dp=[0, 1, 0, 1], tp=[0, 0, 1, 1])  # one role's new layout does not affect the other
    assert group.actor.on_dp(["a", "b"]) == [(0, "a"), (1, "b")]


@on_ray
def test_megatron_info_of_a_role(group):
    group.actor.set_layout(dp=[0, 0, 1, 1], tp=[0, 1, 0, 1])
    group.critic.set_layout(dp=[0, 1, 2, 3], tp=[0, 0, 0, 0])
    with NVMegatronRayWorkerGroup.from_detached(worker_handles=group.workers) as attached:
        found = [attached.actor.get_megatron_rank_info(rank) for rank in range(4)]
        assert [(info.dp_rank, info.tp_rank) for info in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert attached.critic.get_megatron_global_info().dp_size == 4
    assert not hasattr(group.actor, "get_megatron_rank_info")


def test_errors_name_the_role(group):
    with pytest.raises(
        WorkerError, match=r"critic\.fail\(\) raised ValueError on (ranks .*; first: )?rank \d \(.*the cause in Critic"
    ) as caught:
        group.critic.fail()
    assert (caught.value.role, caught.value.method) == ("critic", "fail")
    assert pickle.loads(pickle.dumps(caught.value)).role == "critic"
    with pytest.raises(
        DispatchError, match=r"actor\.score\(\): argument 'batch' has 7 rows.*group\.actor\.score\.options"
    ):
        group.actor.score(torch.arange(7))
    with pytest.raises(TypeError, match=r"critic\.twice\(\).*'x'"):
        group.critic.twice()


def test_unknown_attributes_are_explained(group):
    with pytest.raises(AttributeError, match=r"several workers per process.*group\.critic\.twice"):
        group.twice(1)
    with pytest.raises(AttributeError, match=r"group\.actor\.execute_\* or group\.critic\.execute_\*"):
        group.execute_all_sync("unregistered")
    with pytest.raises(AttributeError, match="did you mean 'actor'"):
        group.aktor  # noqa: B018
    with pytest.raises(AttributeError, match="has no method 'twyce', and neither has Critic; did you mean 'twice'"):
        group.critic.twyce(1)
    assert {"actor", "critic"} <= set(dir(group)) and "twice" in dir(group.critic)


@on_ray
def test_unregistered_methods_handles_and_stats(group):
    assert group.critic.execute_all_sync("unregistered") == [("Critic", rank) for rank in range(4)]
    assert group.actor.execute_rank_zero_sync("unregistered") == ("Actor", 0)
    assert ray.get(group.workers[2].critic_twice.remote(4)) == 8
    assert group.actor.workers == group.workers and group.actor.resource_pool is group.resource_pool
    calls = group.critic.stats().methods["twice"].calls if "twice" in group.critic.stats().methods else 0
    group.critic.twice(1)
    assert group.critic.stats().methods["twice"].calls == calls + 1
    assert "twice" not in group.actor.stats().methods


def test_stats_and_layout_of_the_whole_group(group):
    group.critic.twice(1)
    assert group.stats().methods["critic.twice"].calls == group.critic.stats().methods["twice"].calls
    assert "critic.twice" in str(group.stats())
    with pytest.raises(DispatchError, match=r"its own layout: use group\.actor\.layout, group\.critic\.layout"):
        group.layout  # noqa: B018
    with pytest.raises(DispatchError, match="its own layout"):
        group.tp_size  # noqa: B018


@on_ray
def test_attaching_with_the_class_of_one_role(group):
    role = RayClassWithInitArgs(Actor)
    with RayWorkerGroup.from_detached(worker_handles=group.workers, ray_cls_with_init=role) as attached:
        with pytest.raises(WorkerError, match="no worker without a role; its roles: actor, critic"):
            attached.add(0)


def test_copied_worker_has_no_other_roles(group):
    def copies(worker):
        import copy
        import pickle

        one, other = pickle.loads(pickle.dumps(worker)), copy.deepcopy(worker)
        return worker.rank == one.rank == other.rank, len(one._role_workers), len(other._role_workers)

    assert group.actor.execute_with_func_generator(copies) == [(True, 0, 0)] * 4


def test_watching_one_role_watches_the_whole_group(pool):
    with RayWorkerGroup(pool, colocate(both())) as group:
        told = []
        watcher = group.critic.watch(told.append, interval=0.05)
        time.sleep(0.3)
        assert watcher.watching
        os.kill(group.actor.pid()[1], signal.SIGKILL)
        wait_until(lambda: told, 5)
        assert told[0].ranks == (1,)


def test_verl_names(group):
    assert isinstance(create_colocated_worker_cls(both()), type(colocate(both())))
    spawned = group.spawn({"actor", "critic"})
    assert set(spawned) == {"actor", "critic"} and spawned["critic"].twice(3) == [6] * 4
    group.fuse(both().keys())
    assert group.actor.add(0) == spawned["actor"].add(0)
    with pytest.raises(DispatchError, match="no role 'reward'"):
        group.spawn({"reward"})
    fused = create_colocated_worker_cls_fused({"a": RayClassWithInitArgs(Actor), "b": RayClassWithInitArgs(Critic)})
    assert tuple(fused.roles) == ("a", "b")


def test_group_of_one_class_has_no_roles(counters):
    with pytest.raises(DispatchError, match=r"has no roles; create the group with colocate"):
        counters.spawn({"actor"})
    assert counters.roles == ()


@pytest.mark.ray_when_full
def test_roles_are_created_in_order(transport):
    late = {"early": RayClassWithInitArgs(Early, "counter"), "counter": RayClassWithInitArgs(Counter)}
    with pytest.raises(
        StartError, match=r"(?s)early\.__init__\(\) raised LookupError.*no worker of the role 'counter'"
    ) as caught:
        transport.group(colocate(late))
    assert caught.value.role == "early"
    with transport.group(colocate(dict(reversed(late.items())))) as group:
        assert group.early.say() == ["Counter"] * 4


@pytest.mark.ray_when_full
def test_error_names_the_role_whose_constructor_raised(transport):
    with pytest.raises(StartError, match=r"actor\.__init__\(\) raised RuntimeError on rank 1.*cannot begin") as caught:
        transport.group(colocate(both(fail=True)))
    assert (caught.value.role, caught.value.rank) == ("actor", 1)


def test_death_ends_all_roles_and_restart_restores_them(pool):
    with RayWorkerGroup(pool, colocate(both())) as group:
        actor, critic = group.actor, group.critic
        critic.add(5)
        with pytest.raises(WorkerDiedError, match=r"rank 2 died during actor\.leave\(\)") as caught:
            actor.leave(2)
        assert (caught.value.role, caught.value.rank) == ("actor", 2)
        with pytest.raises(GroupBrokenError, match=r"rank 2 died during actor\.leave"):
            critic.add(0)
        critic.restart()
        assert critic.add(0) == [100] * 4 and actor.add(0) == [1] * 4
    with pytest.raises(Exception, match="closed"):
        actor.add(0)


@pytest.mark.parametrize(
    ("roles", "error", "message"),
    [
        ([], TypeError, r"takes a dict \{"),
        ({}, ValueError, "at least one role"),
        ({"a b": RayClassWithInitArgs(Actor)}, ValueError, "name must be an identifier"),
        ({"_a": RayClassWithInitArgs(Actor)}, ValueError, "name must be an identifier"),
        ({"a": Actor}, TypeError, "RayClassWithInitArgs"),
    ],
)
def test_invalid_roles_are_rejected(roles, error, message):
    with pytest.raises(error, match=message):
        colocate(roles)


def test_role_name_must_not_hide_a_group_method(transport):
    with pytest.raises(DispatchError, match="'restart' is a name that a worker group uses"):
        transport.group(colocate({"restart": RayClassWithInitArgs(Actor)}))


def test_options_of_the_shared_process():
    roles = both()
    create_colocated_worker_cls(roles).update_options({"num_cpus": 0.5, "lifetime": None, "name": None})
    assert [made.options for made in roles.values()] == [{"num_cpus": 0.5}] * 2


def test_roles_with_conflicting_process_options(pool):
    first, second = RayClassWithInitArgs(Actor), RayClassWithInitArgs(Critic)
    first.update_options({"num_cpus": 0.1})
    second.update_options({"num_cpus": 0.2})
    with pytest.raises(ValueError, match=r"share a process.*'b' asks for num_cpus=0\.2.*0\.1"):
        RayWorkerGroup(pool, colocate({"a": first, "b": second}))
