"""The MEGATRON modes on megatron's own groups of real processes, in every order of the axes that it accepts."""

from itertools import permutations

import pytest
import torch
from megatron_workers import AXES, Lab

from single_controller import DispatchError, NVMegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool

ORDERS = [
    "-".join("ep-dp" if axis == "dp" else axis for axis in order) for order in permutations(("tp", "cp", "dp", "pp"))
]
WORLD_4 = {
    "dp2 x tp2": {"dp": 2, "cp": 1, "tp": 2, "pp": 1},
    "tp2 x pp2": {"dp": 1, "cp": 1, "tp": 2, "pp": 2},
    "cp2 x tp2": {"dp": 1, "cp": 2, "tp": 2, "pp": 1},
}
WORLD_8 = {"dp": 2, "cp": 1, "tp": 2, "pp": 2}
ROWS = 3
"""Rows of one shard."""


@pytest.fixture(scope="module")
def eight(ray_cluster):
    with (
        RayResourcePool([8], use_gpu=False) as pool,
        NVMegatronRayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=Lab)) as group,
    ):
        yield group


def arrange(group, sizes, **options):
    """Make megatron's groups anew. Returns each rank's place, as megatron's getters say it on the rank."""
    found = group.set_up(sizes["tp"], sizes["pp"], context_parallel_size=sizes["cp"], **options)
    assert all(reported == sizes for _, reported in found)
    return [place for place, _ in found]


def check_sizes_and_places(group, sizes, places):
    """The group knows what megatron said after this initialisation, not after the one before."""
    assert (group.dp_size, group.cp_size, group.tp_size, group.pp_size) == tuple(sizes[axis] for axis in AXES)
    assert dict(group.layout.axes) == {axis: tuple(place[axis] for place in places) for axis in AXES}
    for rank, place in enumerate(places):
        info = group.get_megatron_rank_info(rank)
        assert {axis: getattr(info, f"{axis}_rank") for axis in AXES} == place


def check_modes(group, sizes, places):
    """Every rank saw the shard of its place; tp 0 / last pp / cp 0 answered, and by dp in order."""
    shards = list(range(sizes["dp"]))
    stages = [(d, c, p) for d in shards for c in range(sizes["cp"]) for p in range(sizes["pp"])]
    answering = {
        place["dp"]: rank
        for rank, place in enumerate(places)
        if place["tp"] == 0 and place["pp"] == sizes["pp"] - 1 and place["cp"] == 0
    }
    stage_answering = {
        (place["dp"], place["cp"], place["pp"]): rank for rank, place in enumerate(places) if place["tp"] == 0
    }
    assert group.items([f"item {d}" for d in shards]) == [(f"item {d}", answering[d]) for d in shards]
    rows = group.rows(torch.arange(ROWS * len(shards)))
    assert rows == [(row, answering[row // ROWS]) for row in range(ROWS * len(shards))]
    assert group.stage_items(stages) == [(stage, stage_answering[stage]) for stage in stages]
    stage_rows = group.stage_rows(torch.arange(ROWS * len(stages)))
    assert stage_rows == [(row, stage_answering[stages[row // ROWS]]) for row in range(ROWS * len(stages))]
    for place, seen in zip(places, group.seen(), strict=True):
        d, stage = place["dp"], stages.index((place["dp"], place["cp"], place["pp"]))
        assert seen == {
            "items": f"item {d}",
            "rows": list(range(ROWS * d, ROWS * (d + 1))),
            "stage_items": stages[stage],
            "stage_rows": list(range(ROWS * stage, ROWS * (stage + 1))),
        }


def check_order(places, sizes, order):
    """What an order means: of its axes that are longer than 1 the first is the one on which ranks 0 and 1 differ."""
    fastest = next(axis for axis in order.split("-") if sizes.get(axis, 1) > 1)
    assert places[1] == {**places[0], fastest: 1}


def check_layout(group, sizes, order):
    places = arrange(group, sizes, order=order)
    check_order(places, sizes, order)
    check_sizes_and_places(group, sizes, places)
    check_modes(group, sizes, places)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", WORLD_4)
def test_four_ranks(four, name, order):
    check_layout(four, WORLD_4[name], order)


@pytest.mark.timeout(240)  # the first of them starts eight processes that import megatron, on two cores
@pytest.mark.parametrize("order", [*ORDERS, "tp-dp-pp", "tp-pp-dp"])
def test_eight_ranks(eight, order):
    check_layout(eight, WORLD_8, order)


def test_the_default_order(four):
    places = arrange(four, WORLD_4["dp2 x tp2"])
    assert [(place["dp"], place["tp"]) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    check_sizes_and_places(four, WORLD_4["dp2 x tp2"], places)


class TestTheWrongLength:
    @pytest.mark.parametrize("items", [["a"], ["a", "b", "c", "d"], [], "ab"])
    def test_a_list_for_each_dp_rank(self, four, items):
        arrange(four, WORLD_4["dp2 x tp2"])
        with pytest.raises(DispatchError, match=r"items\(\): argument 'item'.*list of 2 items.*\(dp_size = 2\)"):
            four.items(items)
        assert four.seen() == [{}] * 4

    def test_rows(self, four):
        arrange(four, WORLD_4["dp2 x tp2"])
        with pytest.raises(DispatchError, match=r"rows\(\): argument 'batch' has 3 rows.*\(dp_size = 2\).*uneven"):
            four.rows(torch.arange(3))

    def test_pipeline_stages_as_data(self, four):
        arrange(four, WORLD_4["tp2 x pp2"])
        with pytest.raises(DispatchError, match=r"list of 2 items.*\(dp_size \* cp_size \* pp_size = 2\)"):
            four.stage_items(["for one"])
        with pytest.raises(DispatchError, match=r"3 rows.*\(dp_size \* cp_size \* pp_size = 2\)"):
            four.stage_rows(torch.arange(3))

    def test_the_size_is_that_of_the_layout_of_now(self, four):
        arrange(four, WORLD_4["tp2 x pp2"])
        assert len(four.items(["for one"])) == 1
        arrange(four, WORLD_4["dp2 x tp2"])
        with pytest.raises(DispatchError, match="dp_size = 2"):
            four.items(["for one"])
