"""The MEGATRON modes on megatron's own groups in real processes, in different orders of the axes.

tests/plans/test_megatron_orders.py proves for every order that only the nesting of the axes longer than 1 matters. Here
real processes have each nesting.
"""

import pytest
import torch
from megatron_workers import AXES

from single_controller import DispatchError

ORDERS = ["tp-cp-ep-dp-pp", "pp-ep-dp-cp-tp"]
"""Megatron's default and its reverse: both nestings of any two axes."""

OTHER_NESTINGS = ["tp-cp-pp-ep-dp", "cp-ep-dp-tp-pp", "cp-ep-dp-pp-tp", "pp-tp-cp-ep-dp"]
"""Orders of three axes."""

WORLD_4 = {
    "dp2 x tp2": {"dp": 2, "cp": 1, "tp": 2, "pp": 1},
    "tp2 x pp2": {"dp": 1, "cp": 1, "tp": 2, "pp": 2},
    "cp2 x tp2": {"dp": 1, "cp": 2, "tp": 2, "pp": 1},
}
WORLD_8 = {"dp": 2, "cp": 1, "tp": 2, "pp": 2}
ROWS = 3
"""Rows per shard."""


def arrange(group, sizes, **options):
    """Initialize megatron again. Returns each rank's coordinates from megatron's getters."""
    found = group.set_up(sizes["tp"], sizes["pp"], context_parallel_size=sizes["cp"], **options)
    assert all(reported == sizes for _, reported in found)
    return [coordinates for coordinates, _ in found]


def check_sizes_and_coordinates(group, sizes, by_rank):
    """The group has the layout of this initialization, not of the previous one."""
    assert (group.dp_size, group.cp_size, group.tp_size, group.pp_size) == tuple(sizes[axis] for axis in AXES)
    info = group.get_megatron_global_info()
    assert {axis: getattr(info, f"{axis}_size") for axis in AXES} == sizes
    assert dict(group.layout.axes) == {axis: tuple(coordinates[axis] for coordinates in by_rank) for axis in AXES}
    for rank, coordinates in enumerate(by_rank):
        info = group.get_megatron_rank_info(rank)
        assert {axis: getattr(info, f"{axis}_rank") for axis in AXES} == coordinates


def check_modes(group, sizes, by_rank):
    """Every rank got the shard of its coordinates; tp 0 / last pp / cp 0 collected the results, in dp order."""
    shards = list(range(sizes["dp"]))
    stages = [(d, c, p) for d in shards for c in range(sizes["cp"]) for p in range(sizes["pp"])]
    collecting = {
        coordinates["dp"]: rank
        for rank, coordinates in enumerate(by_rank)
        if coordinates["tp"] == 0 and coordinates["pp"] == sizes["pp"] - 1 and coordinates["cp"] == 0
    }
    stage_collecting = {
        (coordinates["dp"], coordinates["cp"], coordinates["pp"]): rank
        for rank, coordinates in enumerate(by_rank)
        if coordinates["tp"] == 0
    }
    assert group.items([f"item {d}" for d in shards]) == [(f"item {d}", collecting[d]) for d in shards]
    rows = group.rows(torch.arange(ROWS * len(shards)))
    assert rows == [(row, collecting[row // ROWS]) for row in range(ROWS * len(shards))]
    assert group.stage_items(stages) == [(stage, stage_collecting[stage]) for stage in stages]
    stage_rows = group.stage_rows(torch.arange(ROWS * len(stages)))
    assert stage_rows == [(row, stage_collecting[stages[row // ROWS]]) for row in range(ROWS * len(stages))]
    for coordinates, seen in zip(by_rank, group.seen(), strict=True):
        d, stage = coordinates["dp"], stages.index((coordinates["dp"], coordinates["cp"], coordinates["pp"]))
        assert seen == {
            "items": f"item {d}",
            "rows": list(range(ROWS * d, ROWS * (d + 1))),
            "stage_items": stages[stage],
            "stage_rows": list(range(ROWS * stage, ROWS * (stage + 1))),
        }


def check_order(by_rank, sizes, order):
    """Of the axes longer than 1, ranks 0 and 1 differ on the first one in the order."""
    fastest = next(axis for axis in order.split("-") if sizes.get(axis, 1) > 1)
    assert by_rank[1] == {**by_rank[0], fastest: 1}


def check_layout(group, sizes, order):
    by_rank = arrange(group, sizes, order=order)
    check_order(by_rank, sizes, order)
    check_sizes_and_coordinates(group, sizes, by_rank)
    check_modes(group, sizes, by_rank)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", WORLD_4)
def test_four_ranks(four, name, order):
    check_layout(four, WORLD_4[name], order)


@pytest.mark.full("Megatron on eight ranks")
@pytest.mark.timeout(240)  # the first of these tests may start the eight processes
@pytest.mark.parametrize("order", [*ORDERS, *OTHER_NESTINGS, "tp-dp-pp"])
def test_eight_ranks(eight, order):
    check_layout(eight, WORLD_8, order)


def test_default_order(four):
    by_rank = arrange(four, WORLD_4["dp2 x tp2"])
    assert [(coordinates["dp"], coordinates["tp"]) for coordinates in by_rank] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    check_sizes_and_coordinates(four, WORLD_4["dp2 x tp2"], by_rank)


class TestWrongLength:
    @pytest.mark.parametrize("items", [["a"], ["a", "b", "c", "d"], [], "ab"])
    def test_list_with_one_item_per_dp_rank(self, four, items):
        four.have_tp(2)
        with pytest.raises(DispatchError, match=r"items\(\): argument 'item'.*list of 2 items.*\(dp_size = 2\)"):
            four.items(items)
        assert four.seen() == [{}] * 4

    def test_rows(self, four):
        four.have_tp(2)
        with pytest.raises(DispatchError, match=r"rows\(\): argument 'batch' has 3 rows.*\(dp_size = 2\).*uneven"):
            four.rows(torch.arange(3))

    def test_pipeline_stages_as_data(self, four):
        arrange(four, WORLD_4["tp2 x pp2"])
        with pytest.raises(DispatchError, match=r"list of 2 items.*\(dp_size \* cp_size \* pp_size = 2\)"):
            four.stage_items(["for one"])
        with pytest.raises(DispatchError, match=r"3 rows.*\(dp_size \* cp_size \* pp_size = 2\)"):
            four.stage_rows(torch.arange(3))

    def test_size_is_that_of_the_current_layout(self, four):
        arrange(four, WORLD_4["tp2 x pp2"])
        assert len(four.items(["for one"])) == 1
        arrange(four, WORLD_4["dp2 x tp2"])
        with pytest.raises(DispatchError, match="dp_size = 2"):
            four.items(["for one"])
