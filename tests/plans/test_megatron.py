"""The MEGATRON modes on made-up layouts: every way to cut up to 64 ranks, in every nesting of the axes."""

from collections import Counter

import pytest
from plan_helpers import FakeGroup, coordinates, declare, factorizations, layout_of, orders

from dispatch.plan import plan_call

AXES = ("tp", "cp", "dp", "pp")
SPECS = {
    mode: declare(mode)
    for mode in ("MEGATRON_COMPUTE", "MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP", "MEGATRON_PP_AS_DP_PROTO")
}


def layouts(world_size):
    """(sizes, per rank its place) of every factorization in every nesting."""
    for factors in factorizations(world_size, 4):
        sizes = dict(zip(AXES, factors, strict=True))
        for order in orders(sizes):
            yield sizes, coordinates(sizes, order)


def check_by_dp(group, sizes, places, per_shard=2):
    """The rows modes and the items modes by dp: reference by each rank's own place."""
    dp = sizes["dp"]
    items = [f"item {k}" for k in range(dp)]
    by_item = plan_call(SPECS["MEGATRON_COMPUTE"], group, (items,), {})
    by_rows = plan_call(SPECS["MEGATRON_COMPUTE_PROTO"], group, (list(range(per_shard * dp)),), {})
    assert len(by_item.shards) == len(by_rows.shards) == dp
    answering = {}
    readers = Counter()
    first_seen = {}
    for rank, place in enumerate(places):
        d = place["dp"]
        assert by_item.arguments(rank)[0] == (items[d],)
        (rows,) = by_rows.arguments(rank)[0]
        assert rows == list(range(per_shard * d, per_shard * (d + 1)))
        assert first_seen.setdefault(d, rows) is rows, "ranks that share a shard share the object"
        readers.update(rows)
        if place["tp"] == 0 and place["cp"] == 0 and place["pp"] == sizes["pp"] - 1:
            answering[d] = rank
    assert set(readers) == set(range(per_shard * dp))
    assert set(readers.values()) == {len(places) // dp}, "each row at all tp, cp and pp ranks of its dp rank, once"
    assert by_item.answers == by_rows.answers == tuple(answering[d] for d in range(dp))


def check_pp_as_dp(group, sizes, places):
    """pp and cp count as data: dp-major, then cp, then pp; tp 0 answers."""
    data = [(d, c, p) for d in range(sizes["dp"]) for c in range(sizes["cp"]) for p in range(sizes["pp"])]
    answering = {(place["dp"], place["cp"], place["pp"]): rank for rank, place in enumerate(places) if place["tp"] == 0}
    for mode in ("MEGATRON_PP_AS_DP", "MEGATRON_PP_AS_DP_PROTO"):
        made = plan_call(SPECS[mode], group, (data,), {})
        assert len(made.shards) == len(data)
        for rank, place in enumerate(places):
            own = (place["dp"], place["cp"], place["pp"])
            assert made.arguments(rank)[0] == ((own,) if mode == "MEGATRON_PP_AS_DP" else ([own],))
        assert made.answers == tuple(answering[place] for place in data)


@pytest.mark.parametrize("world_size", range(1, 65))
def test_every_layout_in_every_nesting(world_size):
    count = 0
    for sizes, places in layouts(world_size):
        group = FakeGroup(world_size, layout_of(places))
        check_by_dp(group, sizes, places)
        check_pp_as_dp(group, sizes, places)
        count += 1
    assert count
