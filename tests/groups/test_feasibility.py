"""Pure computation about pools: rank order, feasibility, and option validation. No Ray runs here."""

import re
import time

import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st

from single_controller import PlacementError, RayResourcePool, ResourcePoolManager
from single_controller.ray.placement.feasibility import Request, expected_nodes, forecast, shortage, slots_that_fit
from single_controller.ray.placement.options import PoolOptions
from single_controller.ray.placement.plan import plan_pool, refuse_impossible
from single_controller.ray.placement.slots import Slot, assign_ranks
from single_controller.ray.rank.actor import Location
from single_controller.ray.runtime import Node, address_key


class TestRankAssignment:
    """Ranks are ordered by (node, device), compared as numbers, whatever order Ray returns."""

    def test_addresses_are_compared_as_numbers(self):
        addresses = ["9.255.0.1", "10.0.0.2", "10.0.0.10", "fe80::1", "host-a", "host-b"]
        assert sorted(addresses[::-1], key=address_key) == addresses

    @examples(30, 100)
    @given(
        places=st.lists(
            st.tuples(st.integers(1, 300), st.sampled_from("ab"), st.integers(0, 20), st.integers(0, 3)),
            min_size=1,
            max_size=12,
            unique=True,
        ),
        seed=st.randoms(use_true_random=False),
    )
    def test_order_does_not_depend_on_the_input(self, places, seed):
        """Ranks are sorted by address, node, device and bundle. Several nodes may share an address."""
        shuffled = list(places)
        seed.shuffle(shuffled)
        locations = [Location(f"10.0.{n // 256}.{n % 256}", "host", node, (str(g),)) for n, node, g, _ in shuffled]
        ranked = assign_ranks([Slot(None, bundle, 0) for *_, bundle in shuffled], locations)
        expected = [Location(f"10.0.{n // 256}.{n % 256}", "host", node, (str(g),)) for n, node, g, _ in sorted(places)]
        assert [(slot.location, slot.bundle) for slot in ranked] == [
            (where, bundle) for where, (*_, bundle) in zip(expected, sorted(places), strict=True)
        ]

    def test_entries_on_one_node_stay_together(self):
        slots = [Slot(None, 0, 1), Slot(None, 0, 0), Slot(None, 1, 0)]
        ranked = assign_ranks(slots, [Location("10.0.0.1", "host", "n", ())] * 3)
        assert [(slot.entry, slot.bundle) for slot in ranked] == [(0, 0), (0, 1), (1, 0)]


def refuse(entries, bundle, strategy, cluster, what="the pool"):
    refuse_impossible([Request(tuple(entries), bundle, strategy)], cluster, what)


class TestImpossible:
    """A request that exceeds the total resources per node is rejected at once."""

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
            refuse(entries, bundle, "STRICT_PACK", cluster)
        else:
            with pytest.raises(PlacementError, match=r"missing: (?!nothing)"):
                refuse(entries, bundle, "STRICT_PACK", cluster)
        if sum(entries) <= sum(gpus):
            refuse(entries, bundle, "PACK", cluster)

    def test_table_names_the_shortage_on_every_node(self):
        cluster = [self.node(f"10.0.0.{k}", CPU=64.0, GPU=2.0, memory=2.0**33) for k in (2, 10)]
        with pytest.raises(PlacementError) as caught:
            refuse([4], {"CPU": 1, "GPU": 1}, "STRICT_PACK", cluster, "pool")
        assert str(caught.value).splitlines() == [
            "pool can never be placed here.",
            "asked: 4 processes, [4] by node, each with 1 CPU, 1 GPU",
            "node                   CPU free/total  GPU free/total  memory free/total  processes now/at most  lacks",
            "10.0.0.2 (10.0.0.2)    64/64           2/2             8/8 GiB            2/2                    2 GPU",
            "10.0.0.10 (10.0.0.10)  64/64           2/2             8/8 GiB            2/2                    2 GPU",
            "missing: a node for 4 processes; the largest holds 2",
        ]

    def test_strict_spread_needs_different_nodes(self):
        cluster = [self.node(f"10.0.0.{k}", CPU=8.0) for k in range(3)]
        refuse([3, 3], {"CPU": 1}, "STRICT_SPREAD", cluster)
        with pytest.raises(PlacementError, match="4 nodes, one for each process; 3 can hold one"):
            refuse([4], {"CPU": 1}, "STRICT_SPREAD", cluster)

    def test_several_requests_are_compared_side_by_side(self):
        nodes = [{"CPU": 8.0, "GPU": 8.0}] * 2
        gpus, cpus = Request((5,), {"GPU": 1}, "STRICT_PACK"), Request((9,), {"CPU": 1}, "PACK")
        assert not shortage([gpus, gpus, cpus], nodes)
        assert "3 entries have 5 processes or more, room for 2" in shortage([gpus] * 3, nodes)
        assert "2 CPU (asked 18, there are 16)" in shortage([cpus, gpus, cpus], nodes)

    def test_a_thousand_nodes_are_fast(self):
        cluster = [self.node(f"10.0.{k // 250}.{k % 250}", CPU=64.0, GPU=8.0) for k in range(1000)]
        begin = time.process_time()
        refuse([8] * 1000, {"CPU": 1, "GPU": 1}, "STRICT_PACK", cluster)
        with pytest.raises(PlacementError):
            refuse([8] * 1000 + [1], {"CPU": 1, "GPU": 1}, "STRICT_PACK", cluster)
        slots = forecast(Request((8,) * 1000, {"GPU": 1}, "STRICT_PACK"), cluster, [dict(n.free) for n in cluster])
        assert slots is not None and len(slots) == 8000
        assert time.process_time() - begin < 2

    @examples(50, 200)
    @given(
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        rooms=st.lists(st.integers(0, 5), min_size=1, max_size=4),
        strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
    )
    def test_rejected_requests_have_no_arrangement(self, sizes, rooms, strategy):
        """The reference tries every arrangement. The check is exact; for whole entries it is only sound."""
        request = Request(tuple(sizes), {"CPU": 2}, strategy)
        nodes = [{"CPU": 2.0 * left + 1} for left in rooms]
        refused, possible = bool(shortage([request], nodes)), self.tried(sizes, rooms, strategy)
        assert not (refused and possible)
        assert refused or possible or strategy == "STRICT_PACK"
        found = expected_nodes(request, nodes)
        assert possible or found is None
        if found is not None:
            assert [len(homes) for homes in found] == sizes
            assert all(sum(homes.count(n) for homes in found) <= left for n, left in enumerate(rooms))
            if strategy == "STRICT_PACK":
                assert all(len(set(homes)) == 1 for homes in found)
            if strategy == "STRICT_SPREAD":
                assert all(len(set(homes)) == len(homes) for homes in found)

    def tried(self, sizes, rooms, strategy):
        """Whether any arrangement fits, trying every number of slots per entry and node that the strategy allows."""
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

    def test_mixed_entry_sizes_share_nodes(self):
        """Greedy placement, most free slots first, would leave no node for the last entry of two."""
        found = expected_nodes(Request((3, 3, 2, 2, 2), {"GPU": 1}, "STRICT_PACK"), [{"GPU": 6.0}] * 2)
        assert found is not None and sorted(len(homes) for homes in found) == [2, 2, 2, 3, 3]

    def test_fractional_slots(self):
        assert slots_that_fit({"GPU": 0.1}, {"GPU": 1.0}) == 10
        assert slots_that_fit({"GPU": 0.3, "CPU": 1}, {"GPU": 1.0, "CPU": 9}) == 3
        assert slots_that_fit({"GPU": 0.6}, {"GPU": 2.0}) == 2  # Ray takes each part from one GPU
        assert slots_that_fit({"GPU": 0.25}, {"GPU": 1.5}) == 6
        assert shortage([Request((3,), {"GPU": 0.6}, "PACK")], [{"GPU": 2.0}]) == "room for 1 process"


class TestForecast:
    """Plans of pools on made-up nodes."""

    def node(self, address, total, free=None):
        return Node(f"id-{address}", address, "host", total, free or total)

    def plan(self, cluster, entries, strategy="STRICT_PACK", across=False, bundle=None):
        request = Request(tuple(entries), bundle or {"CPU": 1}, strategy, across)
        slots = forecast(request, cluster, [dict(node.free) for node in cluster])
        return plan_pool("pool", [request], [] if slots else [request], slots or [], cluster)

    def test_entries_use_different_nodes_if_possible(self):
        cluster = [self.node("10.0.0.2", {"CPU": 4.0}), self.node("10.0.0.10", {"CPU": 4.0})]
        plan = self.plan(cluster, [2, 2])
        assert plan.state == "fits"
        assert [(r.address, r.entry, r.bundle) for r in plan.ranks] == [
            ("10.0.0.2", 0, 0),
            ("10.0.0.2", 0, 1),
            ("10.0.0.10", 1, 0),
            ("10.0.0.10", 1, 1),
        ]

    def test_entries_across_nodes_are_filled_in_rank_order(self):
        cluster = [self.node("10.0.0.2", {"CPU": 1.0}), self.node("10.0.0.10", {"CPU": 3.0})]
        plan = self.plan(cluster, [2, 2], "PACK", across=True)
        assert [(r.address, r.entry) for r in plan.ranks] == [("10.0.0.2", 0), *[("10.0.0.10", e) for e in (0, 1, 1)]]

    def test_pool_waits_for_busy_resources_and_names_them(self):
        busy = self.node("10.0.0.2", {"CPU": 4.0, "disk": 2.0}, {"CPU": 4.0, "disk": 1.0})
        plan = self.plan([busy], [2], bundle={"CPU": 1, "disk": 1})
        assert (plan.state, plan.ranks) == ("waits", ())
        assert "has to wait" in str(plan) and str(plan).splitlines()[3].split()[-3:] == ["1/2", "1", "disk"]
        assert "in use now, by other pools of this script or by others: 1 disk (asked 2, free are 1)" in str(plan)

    def test_unfound_arrangement_is_not_reported_as_in_use(self):
        cluster = [self.node(f"10.0.0.{k}", {"CPU": 6.0}) for k in (2, 10)]
        plan = self.plan(cluster, [5, 4, 3])
        assert plan.state == "waits" and "whole entries" in plan.missing and "in use" not in plan.missing

    def test_rays_internal_resources_are_left_out(self):
        inside = {"node:10.0.0.2": 1.0, "object_store_memory": 9.0, "CPU_group_0_0123456789abcdef0123": 1.0}
        plan = self.plan([self.node("10.0.0.2", {"CPU": 4.0, "disk_group_x": 1.0, **inside})], [1])
        assert re.findall(r"(\S+) free/total", str(plan)) == ["CPU", "disk_group_x"]

    def test_devices_are_predicted_when_all_are_free(self):
        cluster = [self.node("10.0.0.2", {"CPU": 9.0, "GPU": 6.0})]
        plan = self.plan(cluster, [2, 4], bundle={"CPU": 1, "GPU": 1})
        # The largest entry is created first, and ranks are in device order.
        assert [(r.entry, r.device) for r in plan.ranks] == [*((1, k) for k in "0123"), (0, "4"), (0, "5")]
        assert str(plan).endswith("~5") and self.plan(cluster, [2]).ranks[0].devices == ()
        halves = self.plan(cluster, [3], bundle={"CPU": 1, "GPU": 0.5})
        assert [r.device for r in halves.ranks] == ["0", "0", "1"]
        parts = self.plan(cluster, [3], bundle={"CPU": 1, "GPU": 0.4})
        assert [r.devices for r in parts.ranks] == [("0",), ("0",), ("1",)]
        pairs = self.plan(cluster, [2], bundle={"CPU": 1, "GPU": 2})
        assert [r.devices for r in pairs.ranks] == [("0", "1"), ("2", "3")]
        busy = self.node("10.0.0.2", {"CPU": 9.0, "GPU": 6.0}, {"CPU": 9.0, "GPU": 5.0})
        unknown = self.plan([busy], [2], bundle={"CPU": 1, "GPU": 1})
        assert [r.devices for r in unknown.ranks] == [None, None] and str(unknown).endswith("?")

    def test_parts_of_gpus_that_no_slot_can_use_count_as_taken(self):
        """In the plan of a merged pool, whose slots are alike."""
        cluster, free = [self.node("10.0.0.2", {"GPU": 2.0})], [{"GPU": 2.0}]
        three, two, one = (Request((size,), {"GPU": 0.4}, "PACK") for size in (3, 2, 1))
        assert forecast(three, cluster, free) and forecast(two, cluster, free) is None
        assert [slot.location.devices for slot in forecast(one, cluster, free)] == [("1",)]


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
        ({"use_gpu": True, "num_gpus": 3, "max_colocate_count": 2}, r"gives each worker 1\.5 GPUs"),
        ({"use_gpu": True, "num_gpus": 0.001, "max_colocate_count": 20}, r"cannot share num_gpus=0\.001"),
        ({"num_cpus": 0.0005, "max_colocate_count": 6}, r"cannot share num_cpus=0\.0005"),
        ({"resources": {"GPU": 1}}, r"'GPU' is none: use num_gpus="),
        ({"resources": {"memory": 1}}, r"'memory' is none: use memory="),
        ({"strategy": "PCAK"}, r"one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD, got 'PCAK'"),
        ({"across_nodes": 1}, r"across_nodes is True .* or False"),
    ],
    ids=str,
)
def test_invalid_pool_options_are_rejected(options, words):
    with pytest.raises(ValueError, match=words):
        RayResourcePool([1], **{"use_gpu": False, **options})


@examples(30, 100)
@given(amount=st.sampled_from([0.25, 0.5, 1, 2, 3.7, 8]), count=st.integers(1, 100))
def test_slot_fractions_are_rounded_down_to_fit(amount, count):
    """Ray rounds to ten-thousandths."""
    options = PoolOptions(True, "", count, False, {"NPU": amount}, amount, 1, 0, 1.0)
    share = options.share(use_gpu=True)
    for part, whole in ((share["num_cpus"], amount), (share["num_gpus"], 1), (share["resources"]["NPU"], amount)):
        assert 0 <= round(whole * 10_000) - count * round(part * 10_000) < count


def test_manager_counts_gpus():
    assert ResourcePoolManager({"a": [8, 8], "b": [4]}, {}).get_n_gpus() == 20
    assert ResourcePoolManager({"a": [3]}, {}, num_gpus=0.5).get_n_gpus() == 1.5
