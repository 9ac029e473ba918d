"""Properties of whole calls on random layouts of up to 4,096 ranks and random batches."""

import copy

import torch
from depth import examples, most_ranks
from hypothesis import example, given
from hypothesis import strategies as st
from plan_helpers import (
    arguments,
    batches,
    check_megatron_modes,
    coordinates,
    expected_rows,
    layout_of,
    pick,
    plain_layout,
    plan_of,
    same,
    simulate,
)

from dispatch import Dispatch, Layout, Mesh

AXES = ("tp", "cp", "dp", "pp")
UNEVEN = st.sampled_from(["pad", "ragged"])
big = examples(10, 50)
small = examples(30, 200)


@st.composite
def placed_ranks(draw):
    """(sizes, coordinates of each rank): any sizes, any nesting, and sometimes ranks in random order."""
    sizes, left = {}, draw(st.sampled_from([8, 64, 512, most_ranks()]))
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.integers(1, left))
        left //= sizes[axis]
    places = coordinates(sizes, draw(st.permutations(AXES)))
    if draw(st.booleans()):
        draw(st.randoms(use_true_random=False)).shuffle(places)
    return sizes, places


FULL = {"tp": 8, "cp": 2, "dp": 64, "pp": 4}
LARGEST = (FULL, coordinates(FULL, ("pp", "tp", "dp", "cp")))


def by_shard(places, shard_of):
    """shard -> the ranks that read it."""
    readers = {}
    for rank, place in enumerate(places):
        readers.setdefault(shard_of(place), []).append(rank)
    return readers


def check_rows(plan, rows, uneven, readers):
    """Every row reaches exactly the ranks of its shard, which share one object, and every rank is called once."""
    cut, real = expected_rows(rows, len(readers), uneven)
    assert len(plan.shards) == len(readers)
    assert [entry.real for entry in plan.shards] == real
    called = 0
    for number, ranks in readers.items():
        first = arguments(plan, ranks[0])[0][0]
        assert first.tolist() == cut[number]
        for rank in ranks:
            assert arguments(plan, rank)[0][0] is first
            called += 1
    assert plan.ranks == list(range(called))


@big
@given(placed=placed_ranks(), rows=st.integers(0, 5000), uneven=UNEVEN)
@example(placed=LARGEST, rows=5000, uneven="pad")
@example(placed=LARGEST, rows=100, uneven="ragged")
def test_megatron_rows(placed, rows, uneven):
    sizes, places = placed
    data = [(d, c, p) for d in range(sizes["dp"]) for c in range(sizes["cp"]) for p in range(sizes["pp"])]
    number = {place: k for k, place in enumerate(data)}
    last = sizes["pp"] - 1
    for mode, shard_of, collecting in (
        (
            "MEGATRON_COMPUTE_PROTO",
            lambda place: place["dp"],
            [{"dp": d, "tp": 0, "cp": 0, "pp": last} for d in range(sizes["dp"])],
        ),
        (
            "MEGATRON_PP_AS_DP_PROTO",
            lambda place: number[place["dp"], place["cp"], place["pp"]],
            [{"dp": d, "cp": c, "pp": p, "tp": 0} for d, c, p in data],
        ),
    ):
        plan = plan_of(mode, layout_of(places), torch.arange(rows), uneven=uneven)
        check_rows(plan, rows, uneven, by_shard(places, shard_of))
        assert [places[rank] for rank in plan.collecting] == collecting
        assert same(simulate(plan, lambda rank, x: x), torch.arange(rows))


@big
@given(placed=placed_ranks())
@example(placed=LARGEST)
def test_megatron_items(placed):
    check_megatron_modes(*placed)


@big
@given(world_size=st.integers(1, most_ranks()), rows=st.integers(0, 9000), uneven=UNEVEN)
@example(world_size=4096, rows=9000, uneven="pad")
@example(world_size=4096, rows=9000, uneven="ragged")
def test_flat_groups(world_size, rows, uneven):
    plan = plan_of("DP_COMPUTE_PROTO", plain_layout(world_size), torch.arange(rows), uneven=uneven)
    check_rows(plan, rows, uneven, {rank: [rank] for rank in range(world_size)})
    assert plan.collecting == tuple(range(world_size))
    assert same(simulate(plan, lambda rank, x: x), torch.arange(rows))


@small
@given(data=st.data(), world_size=st.integers(1, 200), rows=st.integers(0, 300), uneven=UNEVEN)
def test_named_meshes_over_one_group(data, world_size, rows, uneven):
    meshes, reported = {}, {}
    for name in ("train", "infer"):
        shards = data.draw(st.integers(1, world_size))
        ranks = data.draw(st.permutations(range(world_size))) if world_size < 50 else list(range(world_size))
        dp_rank, collects = [0] * world_size, [False] * world_size
        for position, rank in enumerate(ranks):
            dp_rank[rank] = position % shards
            collects[rank] = position < shards
        reported[name] = (shards, dp_rank, collects)
        meshes[name] = Mesh(name, tuple(dp_rank), tuple(collects))
    layout = Layout({}, meshes)
    for name, (shards, dp_rank, collects) in reported.items():
        plan = plan_of(Dispatch.mesh(name), layout, torch.arange(rows), uneven=uneven)
        readers = {k: [rank for rank in range(world_size) if dp_rank[rank] == k] for k in range(shards)}
        check_rows(plan, rows, uneven, readers)
        assert all(collects[rank] for rank in plan.collecting)
        assert [dp_rank[rank] for rank in plan.collecting] == list(range(shards))


parts = st.sampled_from(["tensor", "ndarray", "TensorDict", "list", "tuple", "namedtuple", "registered"])
trees = st.recursive(parts, lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, min_size=1), max_leaves=8)


def grow(tree, rows):
    if isinstance(tree, dict):
        return {key: grow(part, rows) for key, part in tree.items()}
    return batches(rows)[tree]


@small
@given(tree=trees, rows=st.integers(0, 20), shards=st.integers(1, 8), uneven=UNEVEN, as_keyword=st.booleans())
def test_calls_with_random_trees_of_batches(tree, rows, shards, uneven, as_keyword):
    value = grow(tree, rows)
    before = copy.deepcopy(value)
    cut, _ = expected_rows(rows, shards, uneven)
    args, kwargs = ((), {"key": value}) if as_keyword else ((value,), {})
    plan = plan_of("DP_COMPUTE_PROTO", plain_layout(shards), *args, uneven=uneven, **kwargs)
    for rank in range(shards):
        given_args, given_kwargs = arguments(plan, rank)
        assert same([*given_args, *given_kwargs.values()], [pick(value, cut[rank])])
    assert same(simulate(plan, lambda rank, x=None, key=None: key if as_keyword else x), value)
    assert same(value, before)


@small
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=6), rows=st.integers(1, 30), shards=st.integers(1, 9))
def test_several_result_rows_per_row_lose_only_the_padding(counts, rows, shards):
    plan = plan_of("DP_COMPUTE_PROTO", plain_layout(shards), torch.arange(rows), uneven="pad")
    for times in counts:
        result = simulate(plan, lambda rank, x, m=times: x.repeat_interleave(m))
        assert torch.equal(result, torch.arange(rows).repeat_interleave(times))
