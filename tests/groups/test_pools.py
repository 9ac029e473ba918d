"""Pools on Ray: sizes, sharing, waiting, release; slices and merged pools; external placement groups; managers.

Tests that need no Ray are in `test_feasibility`. A worker costs 1.4 CPU seconds, so tests share the session's pool.
"""

import enum
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import depth
import pytest
import ray
from group_workers import Counter, Fragile
from placed_workers import Placed
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from waits import wait_until, within

from single_controller import (
    GroupClosedError,
    PlacementError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    WorkerDiedError,
    merge_resource_pool,
    split_resource_pool,
)
from single_controller.ray import group as ray_group
from single_controller.ray.placement import manager as manager_module
from single_controller.ray.placement import reservation as placement_module


def counter(**kwargs):
    return RayClassWithInitArgs(Counter, **kwargs)


CRATES = 8
CRATE = {"crate": 1}
"""One of the cluster's crates for each worker. Only this file's pools use crates, so they can be counted: other
resources may become free at any time, when an earlier test's workers end."""


def free_crates():
    return ray.available_resources().get("crate", 0)


def wait_free(expected):
    wait_until(lambda: free_crates() == expected, 10, f"{expected} free crates")


@pytest.fixture
def crates(ray_cluster):
    """Waits for all crates, of which an earlier test's pools may still have some."""
    wait_free(CRATES)


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


def test_merged_pools(crates):
    with (
        RayResourcePool([2], use_gpu=False, resources=CRATE) as first,
        RayResourcePool([1, 1], use_gpu=False, resources=CRATE) as second,
    ):
        merged = merge_resource_pool(first, second)
        assert merged.world_size == 4 and merged.store == [2, 1, 1]
        with RayWorkerGroup(merged, counter(start=3)) as group:
            assert group.execute_all_sync("add", x=[0] * 4) == [3, 4, 5, 6]
            assert [place[2:4] for place in group.place()] == [(0, 2), (1, 2), (0, 1), (0, 1)]
        merged.close()
        with RayWorkerGroup(first[0], counter()) as group:  # closing the merged pool freed nothing
            assert group.add(0) == [0]
            wait_free(CRATES - 4)
    wait_free(CRATES)


def test_two_pools_and_two_groups_with_one_prefix(ray_cluster):
    with (
        RayResourcePool([1], use_gpu=False, name_prefix="same_") as first,
        RayResourcePool([1], use_gpu=False, name_prefix="same_") as second,
        RayWorkerGroup(first, counter(start=1), name_prefix="same_") as one,
        RayWorkerGroup(second, counter(start=2), name_prefix="same_") as two,
    ):
        assert (one.add(0), two.add(0)) == ([1], [2])
        assert not set(one.worker_names) & set(two.worker_names)
        assert all(name.startswith("same_Counter_") for name in one.worker_names)


def test_closing_a_pool_frees_its_slots_and_closes_its_groups(crates):
    pool = RayResourcePool([1, 1], use_gpu=False, resources=CRATE)
    assert free_crates() == CRATES  # nothing is reserved before it is needed
    group = RayWorkerGroup(pool, counter())
    wait_free(CRATES - 2)
    pool.close()
    pool.close()
    with pytest.raises(GroupClosedError):
        group.add(0)
    with pytest.raises(GroupClosedError, match="closed"):
        RayWorkerGroup(pool, counter())
    wait_free(CRATES)


def test_dropped_pool_frees_its_slots(crates):
    for _ in range(20 if depth.full else 5):  # Ray can leak a placement group that is removed while being reserved
        pool = RayResourcePool([2], use_gpu=False, resources=CRATE)
        pool.place()
        wait_free(CRATES - 2)
        del pool
        wait_free(CRATES)


def test_plan_of_a_pool_while_a_group_starts_on_it(pool, monkeypatch):
    plans = []

    def start(*args):
        plans.append(pool.plan())  # as another thread may ask
        raise OSError("no more")

    monkeypatch.setattr("single_controller.ray.group.start", start)
    with pytest.raises(OSError, match="no more"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Counter))
    assert [(plan.what, plan.standbys) for plan in plans] == [(repr(pool), ())]


def test_group_on_a_slice_that_is_closed_while_it_starts(pool, monkeypatch):
    def closed_before(*args):
        part.close()
        raise WorkerDiedError("a worker died before it was started")  # as those of a closed pool do

    def closed_after(*args):
        started = start(*args)
        part.close()
        return started

    start = ray_group.start
    for how in (closed_before, closed_after):
        part = pool[:1]
        monkeypatch.setattr(ray_group, "start", how)
        with pytest.raises(GroupClosedError):
            RayWorkerGroup(part, counter(), name_prefix="closing_")
    wait_until(lambda: not [name for name in ray.util.list_named_actors() if name.startswith("closing_")])


def test_error_of_a_full_pool_names_its_groups(ray_cluster):
    with RayResourcePool([1], use_gpu=False, max_colocate_count=1) as pool:
        with RayWorkerGroup(pool, counter(), name_prefix="first_"):
            with within(1), pytest.raises(PlacementError, match=r"full.*max_colocate_count=1.*first_Counter"):
                RayWorkerGroup(pool, counter())
        with RayWorkerGroup(pool, counter()) as group:  # possible again once that group is closed
            assert group.add(0) == [0]


@pytest.mark.parametrize(
    ("pool", "missing"),
    [
        ({"process_on_nodes": [64], "use_gpu": False}, r"missing: 48 CPU \(asked 64, there are 16\)"),
        ({"process_on_nodes": [4]}, r"missing: 4 GPU \(asked 4, there are 0\)"),
        ({"process_on_nodes": [1], "use_gpu": False, "resources": {"disk": 2}}, r"missing: 2 disk"),
        ({"process_on_nodes": [1], "use_gpu": False, "accelerator_type": "H100"}, r"accelerator_type:H100"),
    ],
)
def test_impossible_placement_is_rejected_at_once(ray_cluster, pool, missing):
    with within(2), pytest.raises(PlacementError, match=missing) as caught:
        RayWorkerGroup(RayResourcePool(**pool), counter())
    assert "node" in str(caught.value) and "free/total" in str(caught.value)


def test_busy_resources_are_awaited_until_they_are_free_or_the_timeout(crates, caplog, monkeypatch):
    monkeypatch.setattr("single_controller.ray.placement.reservation.SAY_SECONDS", 0.2)
    all_of_it = RayResourcePool([4], use_gpu=False, resources={"crate": 2})
    all_of_it.place()
    wait_free(0)
    begin = time.monotonic()
    with RayResourcePool([1], use_gpu=False, resources=CRATE, placement_timeout=0.8) as late:
        words = r"(?s)not placed within 0\.8 s.*crate free/total.*0/8.*Ray says: PENDING, NO_RESOURCES \(1 of"
        with pytest.raises(PlacementError, match=words):
            RayWorkerGroup(late, counter())
    assert 0.7 < time.monotonic() - begin < 4
    assert any("waiting to be placed" in message for message in caplog.messages)
    threading.Timer(0.5, all_of_it.close).start()
    with RayResourcePool([1], use_gpu=False, resources=CRATE, placement_timeout=20) as second:
        with RayWorkerGroup(second, counter()) as group:
            assert group.add(0) == [0]


@pytest.fixture(scope="module")
def pair(pool):
    """Two slots of the session's pool."""
    return pool[0:2]


def test_groups_sharing_a_slot_have_separate_environments(pair):
    early = {"FLAVOUR": "plum", "MALLOC_ARENA_MAX": "2", "LD_HOME": "${HOME}/lib"}  # Ray knows HOME
    with (
        RayWorkerGroup(pair, counter(), worker_env={"FLAVOUR": "mint"}) as one,
        RayWorkerGroup(pair, counter(start=10), worker_env=early) as two,
    ):
        assert (one.add(0), two.add(0)) == ([0, 1], [10, 11])
        assert len({process["pid"] for group in (one, two) for process in group.process()}) == 4
        assert one.environment("FLAVOUR") == [{"FLAVOUR": "mint"}] * 2
        assert two.environment(*early) == [early | {"LD_HOME": f"{os.environ.get('HOME', '')}/lib"}] * 2


def test_ports_never_clash(pair):
    made = RayClassWithInitArgs(Fragile)
    with RayWorkerGroup(pair, made) as one, RayWorkerGroup(pair, made) as other:
        assert one.master_port != other.master_port
        joining = [group.join_process_group.remote() for group in (one, other)]
        assert [future.result() for future in joining] == [[(rank, 2) for rank in range(2)]] * 2


def test_custom_master_address_and_port(pair):
    with RayWorkerGroup(pair, counter(), master_addr="localhost", master_port=29717) as group:
        assert {place[4:] for place in group.place()} == {("localhost", 29717)}
        assert (group.master_address, group.master_port) == ("localhost", 29717)
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29717"}
        assert group.environment("MASTER_ADDR", "MASTER_PORT") == [variables] * 2
        assert "Counter" in repr(group.workers[0])  # Ray's logs tell actors apart by their class
        group._start_plan = replace(group._start_plan, home="elsewhere")  # as if rank 0 had moved since
        for change in (lambda: group.replace([1]), group.restart):
            change()
            assert group.master_address == group._ray.ranks[0].location.address


@pytest.mark.parametrize("key", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT"])
def test_worker_env_cannot_set_rank_variables(pair, key):
    with pytest.raises(ValueError, match=key):
        RayWorkerGroup(pair, counter(), worker_env={key: "1"})


def test_additional_resource_of_one_class_is_reserved(ray_cluster):
    made = counter()
    made.set_additional_resource({"disk": 1})
    with RayResourcePool([1], use_gpu=False) as pool:
        with pytest.raises(PlacementError, match="1 disk"):
            RayWorkerGroup(pool, made)
    with RayResourcePool([1], use_gpu=False) as pool, RayWorkerGroup(pool, counter()):
        with pytest.raises(PlacementError, match=r"without .*disk"):
            RayWorkerGroup(pool, made)


def test_update_options(pair):
    made = counter()
    made.update_options({"num_cpus": 0.25, "runtime_env": {"env_vars": {"EARLY": "yes"}}})
    with RayWorkerGroup(pair[0], made) as group:
        assert group.environment("EARLY") == [{"EARLY": "yes"}]
        assert any("CPU" in key and value == 0.25 for key, value in group.process()[0]["group_free"].items())
    with pytest.raises(ValueError):
        made.update_options({"num_cpu": 1})


def test_resources_of_options_are_added_to_the_additional_resource(crates):
    made, head = counter(), {"node:__internal_head__": 0.001}
    made.update_options({"resources": head})
    made.set_additional_resource({"crate": 1})
    with (
        RayResourcePool([1], use_gpu=False, resources={"crate": 1, **head}) as pool,
        RayWorkerGroup(pool, made) as group,
    ):
        taken = group.process()[0]["group_free"]
        assert all(any(key.startswith(name) for key in taken) for name in ("crate", "node:__internal_head__"))


def test_merge_keeps_the_accelerator_type(ray_cluster):
    pools = [RayResourcePool([1], use_gpu=False, accelerator_type="H100") for _ in range(2)]
    merged = merge_resource_pool(*pools)
    assert merged.accelerator_type == "H100" and "accelerator_type:H100" in merged.bundle
    with pytest.raises(ValueError, match="accelerator_type"):
        merge_resource_pool(pools[0], RayResourcePool([1], use_gpu=False))


class TestPlan:
    """Plans of real pools, compared with where Ray places them."""

    def test_plan_starts_nothing_and_matches_the_placement(self, crates):
        with RayResourcePool([2, 1], use_gpu=False, resources=CRATE) as pool:
            before = pool.plan()
            assert before.state == "fits" and [r.entry for r in before.ranks] == [0, 0, 1]
            assert before.nodes[0].total["crate"] == CRATES and "crate free/total" in str(before)
            assert free_crates() == CRATES and not pool.reservations[0].reserved
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

    def test_two_pools_that_only_fit_alone(self, crates):
        first, second = (RayResourcePool([6], use_gpu=False, resources=CRATE) for _ in range(2))
        merged = merge_resource_pool(first, second)
        assert (first.plan().state, second.plan().state, merged.plan().state) == ("fits", "fits", "impossible")
        with pytest.raises(
            PlacementError, match=r"RayResourcePool\(\[6, 6\]\) can never[\s\S]*4 crate \(asked 12, there are 8"
        ):
            RayWorkerGroup(merged, counter())
        assert free_crates() == CRATES
        with first:
            first.place()
            wait_free(CRATES - 6)
            plan = second.plan()
            assert plan.state == "waits" and "4 crate\n" in str(plan)


def bundles(group):
    """By rank: (placement group, bundle), as Ray reports them."""
    return [(where["group"], where["bundle"]) for where in group.where()]


def slot_bundles(pool):
    """By slot: its placement group and bundle."""
    return [(slot.placement_group.id.hex(), slot.bundle) for slot in pool.slots()]


def placed():
    return RayClassWithInitArgs(Placed)


@pytest.fixture(scope="class")
def six(ray_cluster):
    with RayResourcePool([4, 2], use_gpu=False) as pool:
        yield pool


@pytest.fixture(scope="class")
def whole(six):
    """By rank of a group on the whole pool: its placement group and bundle."""
    with RayWorkerGroup(six, placed()) as group:
        return bundles(group)


class TestSlices:
    """Slices, split and merged pools use the slots of other pools."""

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
    def test_slots_are_those_of_the_whole_pool(self, six, whole, cut, ranks):
        part = cut(six)
        assert part.world_size == len(part) == len(ranks)
        assert slot_bundles(part) == [whole[rank] for rank in ranks]

    def test_local_ranks_follow_the_remaining_entries(self, six, whole):
        for part, ranks in ((six[2:5], [2, 3, 4]), (merge_resource_pool(six[5], six[::-1][3:5])[:2], [5, 2])):
            with RayWorkerGroup(part, placed()) as group:
                assert bundles(group) == [whole[rank] for rank in ranks]
                assert [said["rank"] for said in group.said()] == list(range(len(ranks)))
                local = [(0, 2), (1, 2), (0, 1)] if part.world_size == 3 else [(0, 1), (0, 1)]
                assert [said["local"] for said in group.said()] == local
        assert (six[2:5].local_ranks(), six[2:5].local_world_sizes()) == ([0, 1, 0], [2, 2, 1])
        assert (six[2:5].store, repr(six[2:5])) == ([2, 1], "RayResourcePool([2, 1])")
        assert merge_resource_pool(six[0:2], six[5], six[2]).store == [3, 1]

    def test_iterating_yields_every_slot(self, six):
        assert [part.world_size for part in six] == [1] * 6

    def test_slice_reserves_the_whole_pool_and_frees_nothing(self, crates):
        with RayResourcePool([2, 2], use_gpu=False, resources=CRATE) as pool:
            first, second = split_resource_pool(pool, 2)
            assert free_crates() == CRATES
            group = RayWorkerGroup(first, counter())
            wait_free(CRATES - 4)  # the whole pool is reserved at once
            part = first[0:1]
            inner = RayWorkerGroup(part, counter())
            first.close()
            first.close()
            assert group.closed and inner.closed and part.closed and not second.closed and not pool.closed
            with pytest.raises(GroupClosedError, match=r"RayResourcePool\(\[2\]\) is closed"):
                RayWorkerGroup(first, counter())
            with pytest.raises(GroupClosedError):
                _ = first[0:1]
            with RayWorkerGroup(second, counter()) as other:
                assert other.add(0) == [0, 1] and free_crates() == CRATES - 4
        assert second.closed
        with pytest.raises(GroupClosedError):
            RayWorkerGroup(second, counter())
        wait_free(CRATES)

    def test_closing_a_pool_closes_the_groups_on_its_slices(self, ray_cluster):
        pool = RayResourcePool([2], use_gpu=False)
        group = RayWorkerGroup(merge_resource_pool(pool)[0:1], counter())
        pool.close()
        with pytest.raises(GroupClosedError):
            group.add(0)

    def test_slot_counts_the_groups_of_all_pools(self, ray_cluster):
        with RayResourcePool([3], use_gpu=False, max_colocate_count=1) as pool:
            with RayWorkerGroup(pool[0:2], counter(), name_prefix="left_"), RayWorkerGroup(pool[2], counter()):
                with pytest.raises(
                    PlacementError, match=r"RayResourcePool\(\[2\]\) is full.*already has group left_Counter"
                ):
                    RayWorkerGroup(pool[1:3], counter())
            with RayWorkerGroup(pool[1:3], counter()) as group:
                assert group.add(0) == [0, 1]

    def test_waiting_slice_ends_with_its_pool(self, crates):
        with RayResourcePool([4], use_gpu=False, resources={"crate": 2}) as all_of_it:
            all_of_it.place()
            wait_free(0)
            late = RayResourcePool([2], use_gpu=False, resources=CRATE, placement_timeout=60)
            begin = time.monotonic()
            threading.Timer(0.5, late.close).start()
            with pytest.raises(GroupClosedError):
                RayWorkerGroup(late[0], counter())
            assert 0.4 < time.monotonic() - begin < 3

    def test_groups_started_concurrently_agree_on_the_order(self, ray_cluster):
        with RayResourcePool([1, 1], use_gpu=False) as pool:
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
            (lambda pool: split_resource_pool(pool, 4), ValueError, r"6 slots, which is not a multiple of 4.*\[4, 2\]"),
            (lambda pool: split_resource_pool(pool, [4, 1]), ValueError, r"6 slots; the parts \[4, 1\] have 5"),
            (lambda pool: split_resource_pool(pool, [6, 0]), ValueError, r"positive integer.*\[6, 0\]"),
            (lambda pool: split_resource_pool(pool, []), ValueError, r"positive integer"),
            (lambda pool: split_resource_pool(pool, 2.0), ValueError, r"positive integer"),
            (lambda pool: split_resource_pool([4, 2], 2), TypeError, r"takes a RayResourcePool"),
            (lambda pool: merge_resource_pool(pool[0:3], pool[2:4]), ValueError, r"share a slot: slot 2 of"),
            (lambda pool: merge_resource_pool(pool, pool[0]), ValueError, r"slot 0 of RayResourcePool"),
        ],
    )
    def test_invalid_slices_are_rejected(self, six, wrong, error, words):
        with pytest.raises(error, match=words):
            wrong(six)


@pytest.fixture(scope="class")
def pg(ray_cluster):
    group = placement_group([{"CPU": 1, "crate": 0.25}] * 3 + [{"CPU": 2}], name="theirs")
    yield group
    remove_placement_group(group)


class TestExternalPlacementGroup:
    """A pool on a placement group that somebody else created."""

    def test_rank_order_follows_the_bundle_indices(self, pg):
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

    def test_gpu_ids_are_shown_in_the_plan(self, pg):
        pool = RayResourcePool.from_placement_group((pg, [1, 0], [7, "5"]))
        assert [(rank.bundle, rank.device) for rank in pool.plan().ranks] == [(1, "7"), (0, "5")]
        every = RayResourcePool.from_placement_group(pg)
        assert [rank.bundle for rank in every.plan().ranks] == [0, 1, 2, 3]

    def test_pools_that_share_a_bundle_cannot_be_merged(self, pg):
        first, second = (RayResourcePool.from_placement_group((pg, given)) for given in ([0, 1], [2, 1]))
        with pytest.raises(ValueError, match="share a slot: slot 1 of the placement group theirs"):
            merge_resource_pool(first, second)
        assert merge_resource_pool(first, second[0]).world_size == 3

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
            ([0, 1], {"max_colocate_count": 0}, ValueError, r"max_colocate_count=0"),
        ],
    )
    def test_invalid_options_are_rejected(self, pg, given, options, error, words):
        with pytest.raises(error, match=words):
            RayResourcePool.from_placement_group((pg, given), **options)

    def test_other_types_are_rejected(self, ray_cluster):
        with pytest.raises(TypeError, match=r"takes a placement group.*got 'theirs'"):
            RayResourcePool.from_placement_group("theirs")

    def test_unplaced_group_is_awaited_until_the_timeout(self, ray_cluster):
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


@pytest.fixture
def meanwhile(monkeypatch):
    """What another thread does while a manager that creates its pools asks Ray for the nodes. Returns what it got."""
    nodes = manager_module.nodes

    def meanwhile(action):
        got = []

        def nodes_afterwards():
            monkeypatch.setattr(manager_module, "nodes", nodes)
            got.append(action())
            return nodes()

        monkeypatch.setattr(manager_module, "nodes", nodes_afterwards)
        return got

    return meanwhile


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

    def test_without_a_mapping_each_pool_has_one_role(self, ray_cluster):
        manager = ResourcePoolManager({"main": [2], "side": [1]}, use_gpu=False)
        assert (manager.get_resource_pool("main").store, manager.get_resource_pool("side").store) == ([2], [1])

    def test_another_thread_that_creates_the_pools_meanwhile(self, ray_cluster, meanwhile):
        with ResourcePoolManager({"a": [1]}, use_gpu=False) as manager:
            first = meanwhile(lambda: manager.get_resource_pool("a"))
            assert manager.get_resource_pool("a") is first[0]

    def test_another_thread_that_closes_the_manager_meanwhile(self, ray_cluster, meanwhile):
        manager = ResourcePoolManager({"a": [1]}, use_gpu=False)
        meanwhile(manager.close)
        with pytest.raises(GroupClosedError):
            manager.get_resource_pool("a")

    def test_error_of_a_misspelt_name_suggests_the_closest(self):
        with pytest.raises(ValueError, match=r"ACTOR.*'global_pol'.*did you mean 'global_pool'"):
            ResourcePoolManager({"global_pool": [1]}, {Role.ACTOR: "global_pol"})
        manager = ResourcePoolManager({"a": [1]}, {"actor": "a"}, use_gpu=False)
        with pytest.raises(ValueError, match=r"role actr; did you mean 'actor'"):
            manager.get_resource_pool("actr")
        with pytest.raises(ValueError, match=r"role REF; known are actor"):
            manager.get_resource_pool(Role.REF)
        with pytest.raises(TypeError, match="resource_pool_spec"):
            ResourcePoolManager([8], {})

    def test_pools_that_never_fit_together_are_rejected_at_once(self, ray_cluster):
        manager = ResourcePoolManager({"a": [9], "b": [9]}, {"x": "a"}, use_gpu=False)
        with pytest.raises(
            PlacementError, match=r"a \[9\], b \[9\].*side by side, can never be placed[\s\S]*2 CPU \(asked 18"
        ):
            manager.get_resource_pool("x")
        with pytest.raises(PlacementError, match=r"pool 'a' can never be placed[\s\S]*1 GPU \(asked 1, there are 0\)"):
            ResourcePoolManager({"a": [1]}, {"x": "a"}).create_resource_pool()


def test_workers_share_the_cpus_and_memory_of_their_slot(ray_cluster):
    megabyte = 2**20
    with RayResourcePool([1], use_gpu=False, num_cpus=3, memory=90 * megabyte, max_colocate_count=3) as pool:
        assert pool.bundle == {"CPU": 3, "memory": 90 * megabyte}
        groups = [RayWorkerGroup(pool, placed()) for _ in range(3)]
        for group in groups:
            assert group.where()[0]["assigned"] == {"CPU": 1.0, "memory": 30.0 * megabyte}
        assert "0.08789 GiB memory" in str(pool.plan())


@pytest.mark.parametrize("detached", [False, True])
def test_ctrl_c_between_two_placement_groups_leaves_none(crates, monkeypatch, detached):
    made = []

    def interrupted(*args, **kwargs):
        group = placement_group(*args, **kwargs)
        made.append(group)
        if len(made) == 2:
            raise KeyboardInterrupt  # the group exists, but the caller never got it
        return group

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


def test_pool_is_freed_although_the_control_store_does_not_answer(ray_cluster, silent_store, caplog):
    pool = RayResourcePool([1, 1], use_gpu=False)
    pool.wait()
    groups = [slot.placement_group for slot in pool.slots()]
    answer = silent_store()
    with within(30):
        pool.close()
    answer()
    assert "without knowing its state" in caplog.text
    wait_until(lambda: all(placement_group_table(one)["state"] == "REMOVED" for one in groups), 10)
