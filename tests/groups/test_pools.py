"""Pools: sizes, order, sharing, refusal, release."""

import enum
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

import group_workers as workers
import pytest
import ray
from group_workers import Counter, Fragile
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_workers import Placed
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from single_controller import (
    GroupClosedError,
    PlacementError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from single_controller.ray import placement as placement_module
from single_controller.ray.actor import Location
from single_controller.ray.dry_run import foresee, plan_pool, refuse_impossible
from single_controller.ray.order import Slot, Spot, rank_order, seated
from single_controller.ray.packing import Request, fit, room
from single_controller.ray.pool_options import PoolOptions
from single_controller.ray.runtime import Node, address_key


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
    for _ in range(20):  # Ray loses what is removed amid its reservation
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


@pytest.mark.parametrize("key", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT"])
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

    @settings(max_examples=100, deadline=None)
    @given(
        spots=st.lists(
            st.tuples(st.integers(1, 300), st.sampled_from("ab"), st.integers(0, 20), st.integers(0, 3)),
            min_size=1,
            max_size=12,
            unique=True,
        ),
        seed=st.randoms(use_true_random=False),
    )
    def test_any_places_in_any_order(self, spots, seed):
        """By address, node, device, bundle; whatever order Ray returns them in."""
        shuffled = list(spots)
        seed.shuffle(shuffled)
        places = [Spot(f"10.0.{n // 256}.{n % 256}", "host", node, (str(gpu),)) for n, node, gpu, _ in shuffled]
        slots = [Slot(None, bundle, 0) for *_, bundle in shuffled]
        assert [shuffled[number] for number, _ in rank_order(slots, places)] == sorted(spots)

    def test_two_nodes_of_one_address_do_not_mix(self):
        slots = [Slot(None, k, k // 2) for k in range(4)]
        spots = [
            Spot("10.0.0.1", "host", node, (gpu,)) for node, gpu in (("b", "0"), ("b", "1"), ("a", "0"), ("a", "1"))
        ]
        assert [number for number, _ in rank_order(slots, spots)] == [2, 3, 0, 1]

    def test_entries_across_nodes_are_numbered_by_rank(self):
        slots = [Slot(None, k, k // 2) for k in range(4)]
        spots = [Spot(f"10.0.0.{n}", "host", str(n), ()) for n in (2, 1, 2, 1)]
        assert [(s.slot.bundle, s.slot.entry) for s in seated(slots, spots, [2, 2])] == [(1, 0), (3, 0), (0, 1), (2, 1)]

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

    def test_a_table_names_the_shortage_on_every_node(self):
        cluster = [self.node(f"10.0.0.{k}", CPU=64.0, GPU=2.0, memory=2.0**33) for k in (2, 10)]
        with pytest.raises(PlacementError) as caught:
            refuse_impossible([4], {"CPU": 1, "GPU": 1}, "STRICT_PACK", cluster, "pool")
        assert str(caught.value).splitlines() == [
            "pool can never be placed here.",
            "asked: 4 processes, [4] by node, each with 1 CPU, 1 GPU",
            "node                   CPU free/total  GPU free/total  memory free/total  processes now/at most  lacks",
            "10.0.0.2 (10.0.0.2)    64/64           2/2             8/8 GiB            2/2                    2 GPU",
            "10.0.0.10 (10.0.0.10)  64/64           2/2             8/8 GiB            2/2                    2 GPU",
            "missing: a node for 4 processes; the largest holds 2",
        ]

    def test_nodes_apart(self):
        cluster = [self.node(f"10.0.0.{k}", CPU=8.0) for k in range(3)]
        refuse_impossible([3, 3], {"CPU": 1}, "STRICT_SPREAD", cluster)
        with pytest.raises(PlacementError, match="4 nodes, one for each process; 3 can hold one"):
            refuse_impossible([4], {"CPU": 1}, "STRICT_SPREAD", cluster)

    def test_a_thousand_nodes_take_no_time(self):
        cluster = [self.node(f"10.0.{k // 250}.{k % 250}", CPU=64.0, GPU=8.0) for k in range(1000)]
        begin = time.monotonic()
        refuse_impossible([8] * 1000, {"CPU": 1, "GPU": 1}, "STRICT_PACK", cluster)
        with pytest.raises(PlacementError):
            refuse_impossible([8] * 1000 + [1], {"CPU": 1, "GPU": 1}, "STRICT_PACK", cluster)
        assert time.monotonic() - begin < 1.5

    @settings(max_examples=200, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        rooms=st.lists(st.integers(0, 5), min_size=1, max_size=4),
        strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
    )
    def test_what_fits_is_what_trying_everything_finds(self, sizes, rooms, strategy):
        found = fit(Request(tuple(sizes), {"CPU": 2}, strategy), [{"CPU": 2.0 * left + 1} for left in rooms])
        assert (found is not None) == self.tried(sizes, rooms, strategy)
        if found is not None:
            assert [len(homes) for homes in found] == sizes
            assert all(sum(homes.count(n) for homes in found) <= left for n, left in enumerate(rooms))
            if strategy == "STRICT_PACK":
                assert all(len(set(homes)) == 1 for homes in found)
            if strategy == "STRICT_SPREAD":
                assert all(len(set(homes)) == len(homes) for homes in found)

    def tried(self, sizes, rooms, strategy):
        """Whether one of all arrangements holds, as many slots of each entry on each node as the strategy allows."""
        if not sizes:
            return True

        def shares(size, nodes):
            if not nodes:
                return [[]] if size == 0 else []
            most = {"STRICT_PACK": (0, sizes[0]), "STRICT_SPREAD": (0, 1)}.get(strategy, range(sizes[0] + 1))
            return [[n, *rest] for n in most if n <= min(size, nodes[0]) for rest in shares(size - n, nodes[1:])]

        return any(
            self.tried(sizes[1:], [left - n for left, n in zip(rooms, share, strict=True)], strategy)
            for share in shares(sizes[0], rooms)
        )

    def test_slots_of_a_fraction(self):
        assert room({"GPU": 0.1}, {"GPU": 1.0}) == 10 and room({"GPU": 0.3, "CPU": 1}, {"GPU": 1.0, "CPU": 9}) == 3


class TestDryRun:
    """Plans of nodes that are made up, by arithmetic; and of real pools, compared with where Ray puts them."""

    def node(self, address, total, free=None):
        return Node(f"id-{address}", address, "host", total, free or total)

    def foreseen(self, cluster, entries, strategy="STRICT_PACK", across=False, bundle=None):
        left = [dict(node.free) for node in cluster]
        outlook = foresee(Request(tuple(entries), bundle or {"CPU": 1}, strategy, across), cluster, left)
        return plan_pool("pool", [outlook], outlook.seats, cluster)

    def test_entries_lie_apart_where_they_can_and_ranks_stand_by_node(self):
        cluster = [self.node("10.0.0.2", {"CPU": 4.0}), self.node("10.0.0.10", {"CPU": 4.0})]
        plan = self.foreseen(cluster, [2, 2])
        assert plan.state == "fits"
        assert [(r.address, r.entry, r.bundle) for r in plan.ranks] == [
            ("10.0.0.2", 0, 0),
            ("10.0.0.2", 0, 1),
            ("10.0.0.10", 1, 0),
            ("10.0.0.10", 1, 1),
        ]

    def test_entries_across_nodes_are_filled_in_order_of_rank(self):
        cluster = [self.node("10.0.0.2", {"CPU": 1.0}), self.node("10.0.0.10", {"CPU": 3.0})]
        plan = self.foreseen(cluster, [2, 2], "PACK", across=True)
        assert [(r.address, r.entry) for r in plan.ranks] == [("10.0.0.2", 0), *[("10.0.0.10", e) for e in (0, 1, 1)]]

    def test_what_is_busy_waits_and_says_what_is_missing_where(self):
        busy = self.node("10.0.0.2", {"CPU": 4.0, "disk": 2.0}, {"CPU": 4.0, "disk": 1.0})
        plan = self.foreseen([busy], [2], bundle={"CPU": 1, "disk": 1})
        assert (plan.state, plan.ranks, dict(plan.nodes[0].lacks)) == ("waits", (), {"disk": 1.0})
        assert "has to wait" in str(plan)
        assert "in use now, by other pools of this script or by others: 1 disk (asked 2, free are 1)" in str(plan)

    def test_rays_inside_is_left_out(self):
        inside = {"node:10.0.0.2": 1.0, "object_store_memory": 9.0, "CPU_group_0_0123456789abcdef0123": 1.0}
        plan = self.foreseen([self.node("10.0.0.2", {"CPU": 4.0, "disk_group_x": 1.0, **inside})], [1])
        assert set(plan.nodes[0].total) == {"CPU", "disk_group_x"}

    def test_the_devices_that_come_next_are_expected_where_all_are_free(self):
        cluster = [self.node("10.0.0.2", {"CPU": 9.0, "GPU": 6.0})]
        plan = self.foreseen(cluster, [2, 4], bundle={"CPU": 1, "GPU": 1})
        # The largest entry is made first, and ranks stand in order of devices.
        assert [(r.entry, r.device) for r in plan.ranks] == [*((1, k) for k in "0123"), (0, "4"), (0, "5")]
        assert str(plan).endswith("~5") and self.foreseen(cluster, [2]).ranks[0].devices == ()
        halves = self.foreseen(cluster, [3], bundle={"CPU": 1, "GPU": 0.5})
        assert [r.device for r in halves.ranks] == ["0", "0", "1"]
        pairs = self.foreseen(cluster, [2], bundle={"CPU": 1, "GPU": 2})
        assert [r.devices for r in pairs.ranks] == [("0", "1"), ("2", "3")]
        busy = self.node("10.0.0.2", {"CPU": 9.0, "GPU": 6.0}, {"CPU": 9.0, "GPU": 5.0})
        unknown = self.foreseen([busy], [2], bundle={"CPU": 1, "GPU": 1})
        assert [r.devices for r in unknown.ranks] == [None, None] and str(unknown).endswith("?")

    def test_the_picture_has_every_rank_and_node(self):
        cluster = [self.node("10.0.0.2", {"CPU": 40.0}), self.node("10.0.0.10", {"CPU": 4.0, "<disk>": 2.0})]
        plan = self.foreseen(cluster, [30, 2])
        root = ElementTree.fromstring(plan._repr_svg_())
        words = [element.text for element in root.iter() if element.text]
        rects = [
            [float(r.get(key, 0)) for key in ("x", "y", "width", "height")] for r in root.iter() if "rect" in r.tag
        ]
        assert all(x + w <= rects[0][2] and y + h <= rects[0][3] for x, y, w, h in rects) and len(rects) == 1 + 2 + 32
        assert [word for word in words if word.startswith("rank ")] == [f"rank {rank}" for rank in range(32)]
        assert "10.0.0.10 (host)" in words and any("<disk> 2 of 2" in word for word in words)
        assert self.foreseen([self.node("10.0.0.2", {"CPU": 900.0})], [600])._repr_svg_() is None

    def test_a_pools_plan_starts_nothing_and_then_tells_the_truth(self, ray_cluster):
        wait_free(CRATES)
        with RayResourcePool([2, 1], use_gpu=False, resources=CRATE) as pool:
            before = pool.plan()
            assert before.state == "fits" and [r.entry for r in before.ranks] == [0, 0, 1]
            assert before.nodes[0].total["crate"] == CRATES and "crate free/total" in str(before)
            assert free_crates() == CRATES and pool.placements() == []
            with RayWorkerGroup(pool, RayClassWithInitArgs(Placed)) as group:
                after, truth = pool.plan(), group.where()
                assert after.state == "placed" and "is placed" in str(after)
                assert [(r.node_id, r.bundle) for r in after.ranks] == [(w["node"], w["bundle"]) for w in truth]
                assert [(r.node_id, r.entry, r.bundle, r.devices) for r in group.plan().ranks] == [
                    (r.node_id, r.entry, r.bundle, r.devices) for r in after.ranks
                ]
                taken = pool[1:].plan()
                assert [(r.rank, r.bundle, r.entry) for r in taken.ranks] == [(0, 1, 0), (1, 0, 1)]
            with pytest.raises(GroupClosedError):
                group.plan()
        with pytest.raises(GroupClosedError):
            pool.plan()

    def test_two_pools_that_only_fit_alone(self, ray_cluster):
        wait_free(CRATES)
        first, second = (RayResourcePool([6], use_gpu=False, resources=CRATE) for _ in range(2))
        merged = merge_resource_pool(first, second)
        assert (first.plan().state, second.plan().state, merged.plan().state) == ("fits", "fits", "impossible")
        with pytest.raises(
            PlacementError, match=r"PoolView\(\[6, 6\]\) can never[\s\S]*4 crate \(asked 12, there are 8"
        ):
            RayWorkerGroup(merged, counter())
        assert free_crates() == CRATES
        with first:
            first.place()
            wait_free(CRATES - 6)
            plan = second.plan()
            assert plan.state == "waits" and plan.nodes[0].lacks["crate"] == 4


def test_actors_of_a_class_are_told_apart_in_rays_logs(pool):
    with RayWorkerGroup(pool, RayClassWithInitArgs(workers.Log)) as group:
        assert "Log" in repr(group.workers[0])


def bundles(group):
    """By rank, what Ray says: (placement group, bundle)."""
    return [(where["group"], where["bundle"]) for where in group.where()]


def placed():
    return RayClassWithInitArgs(Placed)


def groups_of(pool):
    """The placement groups that a group on the pool would lie in, and their states."""
    return {slot.group.id.hex(): placement_group_table(slot.group)["state"] for slot in pool.slots()}


@pytest.fixture(scope="class")
def six(ray_cluster):
    with RayResourcePool([4, 2], use_gpu=False) as pool:
        yield pool


@pytest.fixture(scope="class")
def whole(six):
    """By rank of a group on the whole pool, its placement group and bundle."""
    with RayWorkerGroup(six, placed()) as group:
        return bundles(group)


class TestViews:
    """Slices, splits and merged pools share their parents' slots."""

    @pytest.mark.parametrize(
        ("cut", "ranks"),
        [
            (lambda pool: pool[0:4], [0, 1, 2, 3]),
            (lambda pool: pool[::2], [0, 2, 4]),
            (lambda pool: pool[-1], [5]),
            (lambda pool: pool[::-1][0:2], [5, 4]),
            (lambda pool: split_resource_pool(pool, [1, 5])[1][1:3], [2, 3]),
            (lambda pool: split_resource_pool(split_resource_pool(pool, 3)[1], [1, 2])[1], [4, 5]),
            (lambda pool: merge_resource_pool(pool[4:], pool[1:3]), [4, 5, 1, 2]),
            (lambda pool: merge_resource_pool(pool[4:], pool[1:3])[1:3], [5, 1]),
            (lambda pool: merge_resource_pool(pool[5], pool[::-1][3:5]), [5, 2, 1]),
        ],
        ids=["slice", "step", "one", "reversed", "split", "split-of-split", "merged", "slice-of-merged", "given-order"],
    )
    def test_hold_the_ranks_of_the_whole(self, six, whole, cut, ranks):
        view = cut(six)
        assert view.world_size == len(view) == len(ranks)
        with RayWorkerGroup(view, placed()) as group:
            assert bundles(group) == [whole[rank] for rank in ranks]
            assert [said["rank"] for said in group.said()] == list(range(len(ranks)))

    def test_local_ranks_follow_the_entries_that_are_left(self, six, whole):
        with RayWorkerGroup(six[2:5], placed()) as group:
            assert [said["local"] for said in group.said()] == [(0, 2), (1, 2), (0, 1)]
            assert (six[2:5].local_ranks(), six[2:5].local_world_sizes()) == ([0, 1, 0], [2, 2, 1])
            assert (six[2:5].store, repr(six[2:5])) == ([2, 1], "PoolView([2, 1])")
        assert merge_resource_pool(six[0:2], six[5], six[2]).store == [3, 1]

    def test_iterating_gives_every_slot(self, six):
        assert [view.world_size for view in six] == [1] * 6

    def test_a_view_places_its_parent_and_frees_nothing(self, ray_cluster):
        wait_free(CRATES)
        with RayResourcePool([2, 2], use_gpu=False, resources=CRATE) as pool:
            first, second = split_resource_pool(pool, 2)
            assert free_crates() == CRATES
            group = RayWorkerGroup(first, counter())
            wait_free(CRATES - 4)  # the parent's slots are reserved as a whole
            part = first[0:1]
            inner = RayWorkerGroup(part, counter())
            first.close()
            first.close()
            assert group.closed and inner.closed and part.closed and not second.closed and not pool.closed
            with pytest.raises(GroupClosedError, match=r"PoolView\(\[2\]\) is closed"):
                RayWorkerGroup(first, counter())
            with pytest.raises(GroupClosedError):
                _ = first[0:1]
            with RayWorkerGroup(second, counter()) as other:
                assert other.add(0) == [0, 1] and set(groups_of(second).values()) == {"CREATED"}
                assert free_crates() == CRATES - 4
        assert second.closed
        with pytest.raises(GroupClosedError):
            RayWorkerGroup(second, counter())
        wait_free(CRATES)

    def test_closing_the_parent_closes_the_groups_on_views(self, ray_cluster):
        pool = RayResourcePool([2], use_gpu=False)
        group = RayWorkerGroup(merge_resource_pool(pool)[0:1], counter())
        pool.close()
        with pytest.raises(GroupClosedError):
            group.add(0)

    def test_a_slot_counts_its_groups_whichever_pool_they_were_made_on(self, ray_cluster):
        with RayResourcePool([3], use_gpu=False, max_colocate_count=1) as pool:
            with RayWorkerGroup(pool[0:2], counter(), name_prefix="left_"), RayWorkerGroup(pool[2], counter()):
                with pytest.raises(PlacementError, match=r"PoolView\(\[2\]\) is full.*holds group left_Counter"):
                    RayWorkerGroup(pool[1:3], counter())
            with RayWorkerGroup(pool[1:3], counter()) as group:
                assert group.add(0) == [0, 1]

    def test_a_view_that_waits_ends_with_its_parent(self, ray_cluster):
        wait_free(CRATES)
        with RayResourcePool([4], use_gpu=False, resources={"crate": 2}) as all_of_it:
            all_of_it.place()
            wait_free(0)
            late = RayResourcePool([2], use_gpu=False, resources=CRATE, placement_timeout=60)
            begin = time.monotonic()
            threading.Timer(0.5, late.close).start()
            with pytest.raises(GroupClosedError):
                RayWorkerGroup(late[0], counter())
            assert 0.4 < time.monotonic() - begin < 3

    def test_groups_that_start_at_once_agree_on_the_order(self, ray_cluster):
        with RayResourcePool([2, 1], use_gpu=False) as pool:
            with ThreadPoolExecutor() as threads:
                started = [threads.submit(RayWorkerGroup, part, placed()) for part in (pool, pool[1:], pool)]
                groups = [future.result() for future in started]
            assert bundles(groups[0]) == bundles(groups[2]) and bundles(groups[1]) == bundles(groups[0])[1:]
            groups[2].restart()
            assert bundles(groups[2]) == bundles(groups[0])

    @pytest.mark.parametrize(
        ("wrong", "error", "words"),
        [
            (lambda pool: pool[6], IndexError, r"slots 0 to 5, not 6"),
            (lambda pool: pool[4:4], ValueError, r"slots 0 to 5; \[4:4\] leaves none"),
            (lambda pool: pool["0"], TypeError, r"a number or a slice"),
            (lambda pool: split_resource_pool(pool, 4), ValueError, r"6 slots.*parts of 4.*\[4, 2\]"),
            (lambda pool: split_resource_pool(pool, [4, 1]), ValueError, r"6 slots; the parts \[4, 1\] have 5"),
            (lambda pool: split_resource_pool(pool, [6, 0]), ValueError, r"positive integer.*\[6, 0\]"),
            (lambda pool: split_resource_pool(pool, []), ValueError, r"positive integer"),
            (lambda pool: split_resource_pool(pool, 2.0), ValueError, r"positive integer"),
            (lambda pool: split_resource_pool([4, 2], 2), TypeError, r"takes a RayResourcePool"),
            (lambda pool: merge_resource_pool(pool[0:3], pool[2:4]), ValueError, r"share a slot: slot 2 of"),
            (lambda pool: merge_resource_pool(pool, pool[0]), ValueError, r"slot 0 of RayResourcePool"),
        ],
    )
    def test_what_cannot_be_cut_is_said(self, six, wrong, error, words):
        with pytest.raises(error, match=words):
            wrong(six)


@pytest.fixture(scope="class")
def pg(ray_cluster):
    group = placement_group([{"CPU": 1, "crate": 0.25}] * 3 + [{"CPU": 2}], name="theirs")
    yield group
    remove_placement_group(group)


class TestGivenGroup:
    """A pool on a placement group that somebody else made."""

    def test_the_order_of_the_indices_is_the_order_of_the_ranks(self, pg):
        pool = RayResourcePool.from_placement_group((pg, [3, 0, 2]), max_colocate_count=2)
        assert (pool.world_size, pool.store, pool.use_gpu, pool.bundle) == (3, [3], False, {"CPU": 1})
        with RayWorkerGroup(pool, placed()) as group, RayWorkerGroup(pool[::2], placed()) as part:
            assert bundles(group) == [(pg.id.hex(), index) for index in (3, 0, 2)]
            assert bundles(part) == [(pg.id.hex(), index) for index in (3, 2)]
            assert {where["assigned"]["CPU"] for where in group.where()} == {0.5}
            assert [rank.bundle for rank in pool.plan().ranks] == [3, 0, 2]
        pool.close()
        assert group.closed and placement_group_table(pg)["state"] == "CREATED"
        with pytest.raises(GroupClosedError):
            RayWorkerGroup(pool, placed())

    def test_gpu_ids_are_shown_until_a_group_tells(self, pg):
        pool = RayResourcePool.from_placement_group((pg, [1, 0], [7, "5"]))
        assert [(rank.bundle, rank.device) for rank in pool.plan().ranks] == [(1, "7"), (0, "5")]
        every = RayResourcePool.from_placement_group(pg)
        assert [rank.bundle for rank in every.plan().ranks] == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("given", "options", "error", "words"),
        [
            ([0, 4], {}, ValueError, r"bundles 0 to 3, not 4"),
            ([0, -1], {}, ValueError, r"bundles 0 to 3, not -1"),
            ([0, 1, 0], {}, ValueError, r"\[0\] more than once"),
            ([], {}, ValueError, r"empty"),
            ([0, 1], {"gpu_ids": [0]}, ValueError, r"gpu_ids has 1 ids for 2 bundles"),
            ([0, 1], {"use_gpu": True}, ValueError, r"use_gpu=True, but a bundle"),
            ([0, 1], {"bundle_indices": [0]}, ValueError, r"each part once"),
            ([0, 1], {"placement_timeout": 0}, ValueError, r"placement_timeout"),
        ],
    )
    def test_what_does_not_fit_it_is_said(self, pg, given, options, error, words):
        with pytest.raises(error, match=words):
            RayResourcePool.from_placement_group((pg, given), **options)

    def test_something_else_is_said(self, ray_cluster):
        with pytest.raises(TypeError, match=r"takes a placement group.*got 'theirs'"):
            RayResourcePool.from_placement_group("theirs")

    def test_one_that_is_not_placed_is_waited_for_and_then_said(self, ray_cluster):
        never = placement_group([{"crate": 2 * CRATES}], name="never")
        with pytest.raises(PlacementError, match=r"never was not placed within 0\.3 s[\s\S]*missing: 8 crate"):
            RayResourcePool.from_placement_group(never, placement_timeout=0.3)
        remove_placement_group(never)
        with pytest.raises(GroupClosedError, match="removed"):
            RayResourcePool.from_placement_group(never)


class Role(enum.Enum):
    ACTOR = 1
    CRITIC = 2
    REF = 3


class TestManager:
    def test_roles_share_pools_by_name(self, ray_cluster):
        spec, mapping = {"main": [2, 1], "side": [1]}, {Role.ACTOR: "main", Role.REF: "main", Role.CRITIC: "side"}
        with ResourcePoolManager(spec, mapping, use_gpu=False, max_colocate_count=2) as manager:
            assert manager.resource_pool_dict == {} and manager.get_n_gpus() == 0
            pool = manager.get_resource_pool(Role.ACTOR)
            assert pool is manager.get_resource_pool(Role.REF) is manager.resource_pool_dict["main"]
            assert (pool.store, pool.use_gpu, pool.max_colocate_count, pool.name_prefix) == ([2, 1], False, 2, "main")
            assert manager.get_resource_pool(Role.CRITIC).store == [1]
            manager.create_resource_pool()
            assert manager.resource_pool_dict["main"] is pool
            with RayWorkerGroup(pool, counter()) as group:
                assert group.add(0) == [0, 1, 2]
        assert pool.closed
        with pytest.raises(GroupClosedError):
            manager.get_resource_pool(Role.ACTOR)

    def test_gpus_are_counted(self):
        assert ResourcePoolManager({"a": [8, 8], "b": [4]}, {}).get_n_gpus() == 20
        assert ResourcePoolManager({"a": [3]}, {}, num_gpus=0.5).get_n_gpus() == 1.5

    def test_what_is_misspelt_is_said_with_the_closest_name(self):
        with pytest.raises(ValueError, match=r"ACTOR.*'global_pol'.*did you mean 'global_pool'"):
            ResourcePoolManager({"global_pool": [1]}, {Role.ACTOR: "global_pol"})
        manager = ResourcePoolManager({"a": [1]}, {"actor": "a"}, use_gpu=False)
        with pytest.raises(ValueError, match=r"role actr; did you mean 'actor'"):
            manager.get_resource_pool("actr")
        with pytest.raises(ValueError, match=r"role REF; there are actor"):
            manager.get_resource_pool(Role.REF)
        with pytest.raises(TypeError, match="resource_pool_spec"):
            ResourcePoolManager([8], {})

    def test_pools_that_never_fit_side_by_side_are_said_at_once(self, ray_cluster):
        manager = ResourcePoolManager({"a": [9], "b": [9]}, {"x": "a"}, use_gpu=False)
        with pytest.raises(PlacementError, match=r"b \[9\] has no room beside a \[9\]"):
            manager.get_resource_pool("x")
        with pytest.raises(PlacementError, match=r"pool 'a' can never be placed[\s\S]*1 GPU \(asked 1, there are 0\)"):
            ResourcePoolManager({"a": [1]}, {"x": "a"}).create_resource_pool()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_cpus": 0}, r"must reserve something"),
        ({"num_cpus": -1}, r"num_cpus is a number.*got -1"),
        ({"num_cpus": "1"}, r"num_cpus is a number.*got '1'"),
        ({"memory": float("inf")}, r"memory is a number, the bytes"),
        ({"num_gpus": 2}, r"num_gpus=2 with use_gpu=False"),
        ({"use_gpu": True, "num_gpus": 0}, r"use_gpu=False makes CPU-only"),
        ({"use_gpu": True, "num_gpus": 1.5}, r"fraction below 1 or a whole number, got 1\.5"),
        ({"use_gpu": True, "num_gpus": 3, "max_colocate_count": 2}, r"gives each 1\.5 GPUs"),
        ({"use_gpu": True, "num_gpus": 0.001, "max_colocate_count": 20}, r"cannot share num_gpus=0\.001"),
        ({"num_cpus": 0.0005, "max_colocate_count": 6}, r"cannot share num_cpus=0\.0005"),
        ({"resources": {"GPU": 1}}, r"'GPU' is none: use num_gpus="),
        ({"resources": {"memory": 1}}, r"'memory' is none: use memory="),
        ({"strategy": "PCAK"}, r"one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, got 'PCAK'"),
        ({"across_nodes": 1}, r"across_nodes is True .* or False"),
    ],
    ids=str,
)
def test_options_that_are_not_possible_are_said_when_the_pool_is_made(options, words):
    with pytest.raises(ValueError, match=words):
        RayResourcePool([1], **{"use_gpu": False, **options})


def test_workers_share_cpus_and_memory_of_their_slot(ray_cluster):
    megabyte = 2**20
    with RayResourcePool([1], use_gpu=False, num_cpus=3, memory=90 * megabyte, max_colocate_count=3) as pool:
        assert pool.bundle == {"CPU": 3, "memory": 90 * megabyte}
        groups = [RayWorkerGroup(pool, placed()) for _ in range(3)]
        for group in groups:
            assert group.where()[0]["assigned"] == {"CPU": 1.0, "memory": 30.0 * megabyte}
        assert "0.08789 GiB memory" in str(pool.plan())


@settings(max_examples=100, deadline=None)
@given(amount=st.sampled_from([0.25, 0.5, 1, 2, 3.7, 8]), count=st.integers(1, 100))
def test_parts_of_a_slot_are_rounded_down_so_that_all_fit(amount, count):
    """Ray rounds to ten-thousandths."""
    options = PoolOptions(True, "", count, False, None, {"NPU": amount}, amount, 1, 0, None, False, 1.0)
    share = options.share(use_gpu=True)
    for part, whole in ((share["num_cpus"], amount), (share["num_gpus"], 1), (share["resources"]["NPU"], amount)):
        assert 0 <= round(whole * 10_000) - count * round(part * 10_000) < count


@pytest.mark.parametrize("detached", [False, True])
def test_ctrl_c_between_two_placement_groups_leaves_none(ray_cluster, monkeypatch, detached):
    made = []

    def interrupted(*args, **kwargs):
        group = placement_group(*args, **kwargs)
        made.append(group)
        if len(made) == 2:
            raise KeyboardInterrupt  # it exists, and nobody was told
        return group

    wait_free(CRATES)
    monkeypatch.setattr(placement_module, "placement_group", interrupted)
    pool = RayResourcePool([1, 1, 1], use_gpu=False, resources=CRATE, detached=detached)
    with pytest.raises(KeyboardInterrupt):
        pool.place()
    wait_free(CRATES)
    assert {placement_group_table(group)["state"] for group in made} == {"REMOVED"} and len(made) == 2
    monkeypatch.undo()
    with pool:
        pool.place()
        wait_free(CRATES - 3)
