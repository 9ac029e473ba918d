"""Pools: sizes, order, sharing, refusal, release."""

import itertools
import time

import group_workers as workers
import pytest
import ray
from group_workers import Counter, Fragile

from single_controller import (
    GroupClosedError,
    PlacementError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    merge_resource_pool,
)
from single_controller.ray.actor import Location
from single_controller.ray.placement import Slot, refuse_impossible
from single_controller.ray.runtime import Node, address_key
from single_controller.ray.start import rank_order


def counter(**kwargs):
    return RayClassWithInitArgs(Counter, **kwargs)


CRATES = 8
CRATE = {"crate": 1}
"""One of the cluster's crates for each worker. Only pools of this file take them, so that they can be counted: what
earlier tests held of anything else may become free at any time."""


def free_crates():
    return ray.available_resources().get("crate", 0)


def wait_free(expected):
    end = time.monotonic() + 10
    while free_crates() != expected:
        assert time.monotonic() < end, f"{free_crates()} crates are free, not {expected}"
        time.sleep(0.05)


def test_local_ranks_follow_the_entries(ray_cluster):
    with RayResourcePool([2, 1], use_gpu=False) as pool, RayWorkerGroup(pool, counter()) as group:
        places = group.place()
        assert [place[:4] for place in places] == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]
        assert pool.local_world_sizes() == [2, 2, 1] and pool.local_ranks() == [0, 1, 0]
        variables = group.environment("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        assert variables[1] == {
            "RANK": "1",
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_PORT": str(group.master_port),
        }


def test_merged_pools(ray_cluster):
    wait_free(CRATES)
    with (
        RayResourcePool([4], use_gpu=False, resources=CRATE) as first,
        RayResourcePool([2, 2], use_gpu=False, resources=CRATE) as second,
    ):
        merged = merge_resource_pool(first, second)
        assert merged.world_size == 8 and merged.store == [4, 2, 2]
        with RayWorkerGroup(merged, counter(start=3)) as group:
            assert group.execute_all_sync("add", x=[0] * 8) == list(range(3, 11))
            assert [place[2:4] for place in group.place()] == [
                *((local, 4) for local in range(4)),
                *((local, 2) for local in (0, 1, 0, 1)),
            ]
        merged.close()
        with RayWorkerGroup(first, counter()) as group:  # the parents keep their slots
            assert group.add(0) == [0, 1, 2, 3]
            wait_free(0)
    wait_free(CRATES)


def test_two_pools_and_two_groups_of_one_prefix(ray_cluster):
    with (
        RayResourcePool([1], use_gpu=False, name_prefix="same_") as first,
        RayResourcePool([1], use_gpu=False, name_prefix="same_") as second,
        RayWorkerGroup(first, counter(start=1), name_prefix="same_") as one,
        RayWorkerGroup(second, counter(start=2), name_prefix="same_") as two,
    ):
        assert (one.add(0), two.add(0)) == ([1], [2])
        assert not set(one.worker_names) & set(two.worker_names)
        assert all(name.startswith("same_Counter_") for name in one.worker_names)


def test_closing_a_pool_frees_its_slots_and_closes_its_groups(ray_cluster):
    wait_free(CRATES)
    pool = RayResourcePool([3], use_gpu=False, resources=CRATE)
    assert free_crates() == CRATES  # nothing is reserved before it is needed
    group = RayWorkerGroup(pool, counter())
    wait_free(CRATES - 3)
    pool.close()
    pool.close()
    with pytest.raises(GroupClosedError):
        group.add(0)
    with pytest.raises(GroupClosedError, match="closed"):
        RayWorkerGroup(pool, counter())
    wait_free(CRATES)


def test_a_dropped_pool_frees_its_slots(ray_cluster):
    wait_free(CRATES)
    pool = RayResourcePool([2], use_gpu=False, resources=CRATE)
    pool.place()
    wait_free(CRATES - 2)
    del pool
    wait_free(CRATES)


def test_a_full_pool_says_who_is_in_it(ray_cluster):
    with RayResourcePool([2], use_gpu=False, max_colocate_count=1) as pool:
        with RayWorkerGroup(pool, counter(), name_prefix="tenant_"):
            begin = time.monotonic()
            with pytest.raises(PlacementError, match=r"full.*max_colocate_count=1.*tenant_Counter"):
                RayWorkerGroup(pool, counter())
            assert time.monotonic() - begin < 1
        with RayWorkerGroup(pool, counter()) as group:  # and again when it has left
            assert group.add(0) == [0, 1]


@pytest.mark.parametrize(
    ("pool", "missing"),
    [
        ({"process_on_nodes": [64], "use_gpu": False}, r"missing: 48 CPU \(asked 64, there are 16\)"),
        ({"process_on_nodes": [4]}, r"missing: 4 GPU \(asked 4, there are 0\)"),
        ({"process_on_nodes": [1], "use_gpu": False, "resources": {"disk": 2}}, r"missing: 2 disk"),
        ({"process_on_nodes": [1], "use_gpu": False, "accelerator_type": "H100"}, r"accelerator_type:H100"),
    ],
)
def test_what_can_never_be_placed_is_said_at_once(ray_cluster, pool, missing):
    begin = time.monotonic()
    with pytest.raises(PlacementError, match=missing) as caught:
        RayWorkerGroup(RayResourcePool(**pool), counter())
    assert time.monotonic() - begin < 2
    assert "node" in str(caught.value) and "free/total" in str(caught.value)


def test_what_is_only_busy_is_waited_for_and_then_said(ray_cluster, caplog, monkeypatch):
    monkeypatch.setattr("single_controller.ray.placement.SAY_SECONDS", 0.4)
    wait_free(CRATES)
    with RayResourcePool([4], use_gpu=False, resources={"crate": 2}) as all_of_it:
        all_of_it.place()
        wait_free(0)
        begin = time.monotonic()
        with RayResourcePool([1], use_gpu=False, resources=CRATE, placement_timeout=1.5) as late:
            with pytest.raises(PlacementError, match=r"not placed within 1\.5 s[\s\S]*crate free/total[\s\S]*0/8"):
                RayWorkerGroup(late, counter())
        assert 1.4 < time.monotonic() - begin < 4
        assert any("waiting to be placed" in message for message in caplog.messages)
    wait_free(CRATES)


def test_what_becomes_free_is_taken(ray_cluster):
    wait_free(CRATES)
    first = RayResourcePool([4], use_gpu=False, resources={"crate": 2})
    first.place()
    wait_free(0)
    import threading

    threading.Timer(1.0, first.close).start()
    with RayResourcePool([1], use_gpu=False, resources=CRATE, placement_timeout=20) as second:
        with RayWorkerGroup(second, counter()) as group:
            assert group.add(0) == [0]


def test_several_groups_share_a_slot(pool):
    groups = [RayWorkerGroup(pool, counter(start=10 * number)) for number in range(2)]
    try:
        assert [group.add(0) for group in groups] == [[0, 1, 2, 3], [10, 11, 12, 13]]
        assert len({process["pid"] for group in groups for process in group.process()}) == 8
    finally:
        for group in groups:
            group.close()


def test_ports_never_clash(pool):
    groups = [RayWorkerGroup(pool, RayClassWithInitArgs(Fragile)) for _ in range(2)]
    try:
        assert groups[0].master_port != groups[1].master_port
        joining = [group.join_process_group.remote() for group in groups]
        assert [future.result() for future in joining] == [[(rank, 4) for rank in range(4)]] * 2
    finally:
        for group in groups:
            group.close()


def test_master_address_and_port_of_the_users(pool):
    with RayWorkerGroup(pool, counter(), master_addr="localhost", master_port=29717) as group:
        assert {place[4:] for place in group.place()} == {("localhost", 29717)}
        assert (group.master_address, group.master_port) == ("localhost", 29717)
        assert (
            group.environment("MASTER_ADDR", "MASTER_PORT")
            == [{"MASTER_ADDR": "localhost", "MASTER_PORT": "29717"}] * 4
        )


def test_worker_env_is_the_groups_own(pool):
    with (
        RayWorkerGroup(pool, counter(), worker_env={"FLAVOUR": "mint"}) as one,
        RayWorkerGroup(pool, counter(), worker_env={"FLAVOUR": "plum", "MALLOC_ARENA_MAX": "2"}) as two,
    ):
        assert one.environment("FLAVOUR") == [{"FLAVOUR": "mint"}] * 4
        assert two.environment("FLAVOUR", "MALLOC_ARENA_MAX") == [{"FLAVOUR": "plum", "MALLOC_ARENA_MAX": "2"}] * 4


@pytest.mark.parametrize("key", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_worker_env_cannot_set_the_ranks_variables(pool, key):
    with pytest.raises(ValueError, match=key):
        RayWorkerGroup(pool, counter(), worker_env={key: "1"})


def test_a_single_additional_resource_counts(ray_cluster):
    made = counter()
    made.set_additional_resource({"disk": 1})
    with RayResourcePool([1], use_gpu=False) as pool:
        with pytest.raises(PlacementError, match="1 disk"):
            RayWorkerGroup(pool, made)
    with RayResourcePool([1], use_gpu=False) as pool, RayWorkerGroup(pool, counter()):
        with pytest.raises(PlacementError, match=r"lack.*disk"):
            RayWorkerGroup(pool, made)


def test_update_options(pool):
    made = counter()
    made.update_options({"num_cpus": 0.25, "runtime_env": {"env_vars": {"EARLY": "yes"}}})
    with RayWorkerGroup(pool, made) as group:
        assert group.environment("EARLY") == [{"EARLY": "yes"}] * 4
        assert any("CPU" in key and value == 0.25 for key, value in group.process()[0]["group_free"].items())
    with pytest.raises(ValueError):
        made.update_options({"num_cpu": 1})


def test_merge_keeps_the_accelerator_type(ray_cluster):
    pools = [RayResourcePool([1], use_gpu=False, accelerator_type="H100") for _ in range(2)]
    merged = merge_resource_pool(*pools)
    assert merged.accelerator_type == "H100" and "accelerator_type:H100" in merged.bundle
    with pytest.raises(ValueError, match="accelerator_type"):
        merge_resource_pool(pools[0], RayResourcePool([1], use_gpu=False))


class TestOrder:
    """Ranks stand in order of (node, device) as numbers, whatever Ray returns. Only what Ray reports is made up."""

    def test_addresses_are_numbers(self):
        addresses = ["10.0.0.10", "10.0.0.2", "9.255.0.1", "fe80::1", "host-b", "host-a"]
        assert sorted(addresses, key=address_key) == [
            "9.255.0.1",
            "10.0.0.2",
            "10.0.0.10",
            "fe80::1",
            "host-a",
            "host-b",
        ]

    def test_nodes_then_devices(self):
        spots = [("10.0.0.10", "2"), ("10.0.0.10", "10"), ("10.0.0.2", "10"), ("10.0.0.2", "2")]
        for order in itertools.permutations(range(4)):
            slots = [Slot(None, bundle, 0) for bundle in range(4)]
            locations = [Location(spots[k][0], "host", 1, (spots[k][1],)) for k in order]
            ranked = [(where.address, where.devices[0]) for _, where in rank_order(slots, locations)]
            assert ranked == [("10.0.0.2", "2"), ("10.0.0.2", "10"), ("10.0.0.10", "2"), ("10.0.0.10", "10")]

    def test_entries_on_one_node_stay_together(self):
        slots = [Slot(None, 0, 1), Slot(None, 0, 0), Slot(None, 1, 0)]
        locations = [Location("10.0.0.1", "host", 1, ())] * 3
        assert [place for place, _ in rank_order(slots, locations)] == [1, 2, 0]


class TestImpossible:
    """Which entries fit on which nodes, by arithmetic."""

    def node(self, name, **total):
        return Node(name, name, name, total, total)

    @pytest.mark.parametrize(
        ("entries", "gpus", "possible"),
        [
            ([8, 8], [8, 8], True),
            ([8, 4], [4, 8], True),
            ([16], [8, 8], False),
            ([4, 4, 4], [6, 6], False),
            ([3, 3, 2, 2, 2], [6, 6], True),
            ([4], [2, 2], False),
        ],
    )
    def test_entries(self, entries, gpus, possible):
        cluster = [self.node(f"10.0.0.{k}", CPU=64.0, GPU=float(count)) for k, count in enumerate(gpus)]
        bundle = {"CPU": 1, "GPU": 1}
        if possible:
            refuse_impossible(entries, bundle, "STRICT_PACK", cluster)
        else:
            with pytest.raises(PlacementError, match=r"missing: (?!nothing)"):
                refuse_impossible(entries, bundle, "STRICT_PACK", cluster)
        if sum(entries) <= sum(gpus):
            refuse_impossible(entries, bundle, "PACK", cluster)


def test_actors_of_a_class_are_told_apart_in_rays_logs(pool):
    with RayWorkerGroup(pool, RayClassWithInitArgs(workers.Log)) as group:
        assert "Log" in repr(group.workers[0])
