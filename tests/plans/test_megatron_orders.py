"""The MEGATRON modes on the layouts that megatron itself makes, in every order of its axes that it accepts.

Who stands where is asked of megatron's own `RankGenerator`: a rank's coordinate is its position inside its own group.
"""

from itertools import permutations

import pytest
from megatron.core.parallel_state import RankGenerator
from plan_helpers import AXES, check_megatron_modes, factorizations

EP_BEFORE_DP = [
    tuple(token for axis in order for token in (("ep", "dp") if axis == "dp" else (axis,)))
    for order in permutations(AXES)
]
"""The 24 orders in which ep stands directly before dp, as in megatron's default ``tp-cp-ep-dp-pp``."""


def megatron_places(sizes, order):
    """Per rank its place, as megatron's own groups of each axis have it."""
    made = RankGenerator(**sizes, ep=1, order=order)
    places = [{} for _ in range(made.world_size)]
    for axis in AXES:
        for group in made.get_ranks(axis):
            for position, rank in enumerate(group):
                places[rank][axis] = position
    return places


def cuts(world_size):
    """The sizes of every way to cut so many ranks."""
    return [dict(zip(AXES, factors, strict=True)) for factors in factorizations(world_size, len(AXES))]


def nesting(sizes, order):
    """What an order says: how the axes that are longer than 1 lie inside each other."""
    return tuple(axis for axis in order if sizes.get(axis, 1) > 1)


@pytest.mark.parametrize("world_size", range(1, 65))
def test_every_order_of_every_cut(world_size):
    for sizes in cuts(world_size):
        for order in {nesting(sizes, order): order for order in EP_BEFORE_DP}.values():
            check_megatron_modes(sizes, megatron_places(sizes, "-".join(order)))


@pytest.mark.parametrize("world_size", [1, 8, 16])
def test_orders_of_one_nesting_are_one_layout(world_size):
    """What lets the test above leave orders out: an axis of size 1, ep here too, may stand anywhere or be left out."""
    for sizes in cuts(world_size):
        first_seen = {}
        for order in permutations((*AXES, "ep")):
            nested = nesting(sizes, order)
            for written in ("-".join(order), "-".join(order).upper(), "-".join(nested) or "tp"):
                places = megatron_places(sizes, written)
                assert first_seen.setdefault(nested, places) == places


def test_megatrons_orders_differ():
    """Three axes of size 2 lie inside each other in six ways, and each is a layout of its own."""
    sizes = {"tp": 2, "cp": 1, "dp": 2, "pp": 2}
    made = {tuple(map(str, megatron_places(sizes, "-".join(order)))) for order in EP_BEFORE_DP}
    assert len(made) == 6
