"""Drivers written for verl, with only their imports changed. test_detached.py has its detached workers."""

import os
import signal
import textwrap
import warnings

import pytest
import ray
from group_workers import Counter
from test_other_clusters import marked, run_forked
from waits import wait_until

from single_controller import (
    Dispatch,
    DispatchError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_raw_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from single_controller.ray.placement import reservation

every_transport = pytest.mark.transports("ray", "local", "local-threads")

WORKERS = """
import ray
from enum import Enum
from single_controller import (
    ClassWithInitArgs, Dispatch, Execute, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ResourcePoolManager,
    Worker, create_colocated_worker_cls, create_colocated_worker_cls_fused, merge_resource_pool, register,
    split_resource_pool,
)

@ray.remote
class Actor(Worker):
    def __init__(self) -> None:
        super().__init__()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        return data + self.rank

@ray.remote
class Critic(Worker):
    def __init__(self, config) -> None:
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def sub(self, data):
        return data - self.config["b"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sees(self):
        found = self.get_fused_worker_by_name("actor")
        return None if found is None else (type(found).__name__, found.rank)

class Role(Enum):
    Actor = 0
    Critic = 1

def devices(group):
    return group.execute_with_func_generator(lambda worker: os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


def test_pools_roles_and_colocated_workers(pytestconfig, tmp_path):
    code = WORKERS + textwrap.dedent("""
        import torch
        from fork_workers import RANKS_ONLY, forked_workers
        forks = forked_workers(modules=RANKS_ONLY)
        start_server = forks.__enter__()
        ray.init(num_cpus=16, num_gpus=4, include_dashboard=False)
        start_server()
        manager = ResourcePoolManager(
            resource_pool_spec={"global": [2], "other": [2]}, mapping={Role.Actor: "global", Role.Critic: "other"}
        )
        manager.create_resource_pool()
        assert manager.get_n_gpus() == 4
        actor_pool, critic_pool = (manager.get_resource_pool(role) for role in Role)

        actor_cls = RayClassWithInitArgs(cls=Actor)
        critic_cls = RayClassWithInitArgs(cls=Critic, config={"b": 10})
        actor_wg = RayWorkerGroup(resource_pool=actor_pool, ray_cls_with_init=actor_cls)
        critic_wg = RayWorkerGroup(resource_pool=critic_pool, ray_cls_with_init=critic_cls)
        batch = torch.zeros(4)
        expected = critic_wg.sub(actor_wg.add(batch))
        assert expected.tolist() == [-10, -10, -9, -9], expected
        assert sorted([*devices(actor_wg), *devices(critic_wg)]) == ["0", "1", "2", "3"]

        class_dict = {"actor": actor_cls, "critic": critic_cls}
        both_cls = create_colocated_worker_cls(class_dict=class_dict)
        wg_dict = RayWorkerGroup(resource_pool=actor_pool, ray_cls_with_init=both_cls)
        spawn_wg = wg_dict.spawn(prefix_set=class_dict.keys())
        assert spawn_wg["critic"].sub(spawn_wg["actor"].add(batch)).tolist() == expected.tolist()

        fused_cls = create_colocated_worker_cls_fused(class_dict=class_dict)
        fused_wg = RayWorkerGroup(resource_pool=actor_pool, ray_cls_with_init=fused_cls)
        fused_wg.fuse(class_dict.keys())
        assert fused_wg.critic.sub(fused_wg.actor.add(batch)).tolist() == expected.tolist()
        assert fused_wg.critic.sees() == [("Actor", 0), ("Actor", 1)]

        merged = merge_resource_pool(actor_pool, critic_pool)
        halves = split_resource_pool(merged, split_size=2)
        parts = [RayWorkerGroup(resource_pool=half, ray_cls_with_init=actor_cls) for half in halves]
        assert [devices(part) for part in parts] == [["0", "1"], ["2", "3"]]
        print("> the same everywhere")
        forks.__exit__(None, None, None)
    """)
    text = run_forked(pytestconfig, tmp_path, code)
    assert marked(text) == ["> the same everywhere"], text


def test_group_and_pool_in_functions_that_run_elsewhere(counters):
    """A group that a function refers to is attached where the function runs."""
    assert counters.execute_with_func_generator(lambda worker: counters.world_size) == [4] * 4
    assert ray.get(ray.remote(lambda: counters.execute_rank_zero_sync("plain", 1)).remote()) == 101
    pool = counters.resource_pool
    with pytest.raises(DispatchError, match="a pool cannot be sent to another process"):
        counters.execute_with_func_generator(lambda worker: pool.world_size)


class Profiler:
    """A second base class whose constructor needs an argument."""

    def __init__(self, tool):
        self.tool = tool


class Plain:
    """A second base class whose constructor needs none."""

    def __init__(self, tool="plain"):
        self.tool = tool


class Inner(Worker):
    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("train", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 1)


class Outer(Worker, Profiler):
    def __init__(self, cuda_visible_devices=None):
        Worker.__init__(self, cuda_visible_devices)
        Profiler.__init__(self, "nsys")
        self.inner = Inner()
        self.set_dispatch_collect(mesh_name="actor", **self.inner.get_dispatch_collect())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def rows(self, batch):
        return [(self.rank, row) for row in batch]

    @register(Dispatch.ONE_TO_ALL)
    def known(self):
        return (self.tool, self._rank, self._world_size, self.query_collect_info("actor"), self.fused_worker_dict)


@every_transport
def test_worker_that_wraps_another_and_has_a_second_base(make_group):
    group = make_group(Outer)
    assert group._query_dispatch_info("actor") == [0, 0, 1, 1]
    assert group._dispatch_info == {"actor": [0, 0, 1, 1]}
    assert group._query_collect_info("actor") == [False, True, False, True]
    assert group._collect_info == {"actor": [False, True, False, True]}
    assert group.rows([10, 11, 12, 13]) == [(1, 10), (1, 11), (3, 12), (3, 13)]
    assert group.known() == [("nsys", rank, 4, rank % 2 == 1, {}) for rank in range(4)]
    with pytest.raises(DispatchError, match="no mesh 'critic'"):
        group._query_dispatch_info("critic")


def test_worker_outside_a_group():
    assert type("Both", (Worker, Plain), {})().tool == "plain"
    with pytest.raises(TypeError, match="the pool decides which devices"):
        Outer(cuda_visible_devices="0")
    with pytest.raises(LookupError, match=r"no mesh 'actor'.*registered: train"):
        Inner().query_collect_info("actor")
    outer = Outer()
    outer.register_mesh("other", 0)
    taken = outer.get_dispatch_collect()
    inner = Inner()
    inner.set_dispatch_collect("other", **taken)
    assert inner.query_collect_info("other") is True
    with pytest.raises(ValueError, match=r"'critic'.*\['actor', 'other'\].*register_mesh"):
        inner.set_dispatch_collect("critic", **taken)


def counter(start):
    return RayClassWithInitArgs(cls=ray.remote(Counter), start=start)


class Hybrid(create_colocated_worker_raw_cls({"actor": counter(0), "critic": counter(100)})):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def both(self, x):
        return self.critic.add(self.actor.add(x)), list(self.fused_worker_dict)


@every_transport
def test_worker_around_fused_workers(make_group):
    group = make_group(Hybrid)
    group.fuse({"actor", "critic"})
    assert group.critic.add(group.actor.add(0)[1]) == [101, 102, 103, 104]
    roles = ["actor", "critic"]
    assert group.both(1) == [(102, roles), (104, roles), (106, roles), (108, roles)]
    assert group.actor.add(0) == [1, 2, 3, 4]


@every_transport
@pytest.mark.ray_when_full
def test_trace_of_fused_workers_has_their_calls_and_the_ranks(make_group, tmp_path):
    group = make_group(Hybrid)
    group.record_ranks()
    group.both(1)
    group.actor.add(0)
    stats = group.stats()
    assert {name: method.calls for name, method in stats.methods.items()} == {"actor.add": 1, "both": 1}
    assert [(call.method, len(call.ranks)) for call in stats.calls] == [("both", 4), ("actor.add", 4)]
    with warnings.catch_warnings(action="error"):
        group.trace(tmp_path / "trace.json")


def test_role_with_the_name_of_an_attribute():
    with pytest.raises(ValueError, match=r"self\.rank is an attribute of every worker"):
        create_colocated_worker_raw_cls({"rank": counter(0)})


class NeedsConfig(Worker):
    def __init__(self, config):
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, names):
        return {name: os.environ.get(name) for name in names}


def test_options_environment_and_attaching_without_constructor_arguments(pool):
    made = RayClassWithInitArgs(cls=NeedsConfig, config={})
    with pytest.warns(UserWarning, match="device_name='cpu' has no effect: use_gpu= and resources= of the pool"):
        group = RayWorkerGroup(pool, made, name_prefix="verl_", device_name="cpu", profile_steps=None)
    with group:
        expected = {"RAY_LOCAL_WORLD_SIZE": "4", "WG_PREFIX": "verl_", "WG_BACKEND": "ray"}
        assert group.environment(tuple(expected)) == [expected] * 4
        master = (group.master_address, str(group.master_port))
        assert group.execute_all_sync("get_master_addr_port") == [master] * 4
        made = RayClassWithInitArgs(cls=NeedsConfig)
        with pytest.warns(UserWarning, match="device_name='cpu' has no effect"):
            attached = RayWorkerGroup.from_detached(
                worker_handles=group.workers, ray_cls_with_init=made, device_name="cpu", profile_steps=None
            )
        assert attached.pid() == group.pid()

        group.start_worker_aliveness_check(0.1)
        os.kill(group.pid()[2], signal.SIGKILL)
        wait_until(lambda: group.broken is not None, 30)
        assert "rank 2" in group.broken


def test_placement_groups_of_a_pool(ray_cluster, monkeypatch):
    located = reservation.node_locations

    def backwards(slots, label):  # as if the first entry were on the second host
        found = zip(slots, located(slots, label), strict=True)
        return [where._replace(address=f"10.0.0.{2 - slot.entry}") for slot, where in found]

    monkeypatch.setattr(reservation, "node_locations", backwards)
    with RayResourcePool([1, 1], use_gpu=False) as pool:
        assert pool.pgs is None
        groups = pool.get_placement_groups(strategy="PACK", device_name="cpu")
        assert [group.bundle_count for group in groups] == [1, 1]
        assert [slot.entry for slot in pool.slots()] == [1, 0]
        assert groups == pool.pgs == [slot.placement_group for slot in pool.slots()]
        assert pool[1].pgs == groups[1:]
