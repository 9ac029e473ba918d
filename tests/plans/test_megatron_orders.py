"""The layouts that megatron itself creates, in every order of axes that it accepts, are those of test_megatron.py.

The coordinates come from megatron's own `RankGenerator`: a rank's coordinate is its position in its group.
"""

from itertools import permutations

import pytest
from megatron.core.parallel_state import RankGenerator
from plan_helpers import AXES, coordinates, factorizations

EP_BEFORE_DP = [
    tuple(token for axis in order for token in (("ep", "dp") if axis == "dp" else (axis,)))
    for order in permutations(AXES)
]
"""The 24 orders in which ep comes directly before dp, as in megatron's default ``tp-cp-ep-dp-pp``."""


def megatron_places(sizes, order):
    """The coordinates of each rank, from megatron's groups along each axis."""
    made = RankGenerator(**sizes, ep=1, order=order)
    places = [{} for _ in range(made.world_size)]
    for axis in AXES:
        for group in made.get_ranks(axis):
            for position, rank in enumerate(group):
                places[rank][axis] = position
    return places


def factorized(world_size):
    """The axis sizes of every factorization of a world size."""
    return [dict(zip(AXES, factors, strict=True)) for factors in factorizations(world_size, len(AXES))]


def nesting(sizes, order):
    """The meaning of an order: how the axes longer than 1 are nested."""
    return tuple(axis for axis in order if sizes.get(axis, 1) > 1)


MORE = pytest.mark.full("more world sizes for megatron's orders of axes")


@pytest.mark.parametrize("world_sizes", [range(1, 33), (64,), pytest.param(range(33, 64), marks=MORE)], ids=str)
def test_every_order_of_every_factorization(world_sizes):
    for sizes in (sizes for world_size in world_sizes for sizes in factorized(world_size)):
        for order in {nesting(sizes, order): order for order in EP_BEFORE_DP}.values():
            axes = [axis for axis in order if axis in AXES]
            assert megatron_places(sizes, "-".join(order)) == coordinates(sizes, axes)


@pytest.mark.parametrize("world_size", [1, 8, pytest.param(16, marks=MORE)])
def test_orders_with_one_nesting_give_one_layout(world_size):
    """Why the test above may skip orders: an axis of size 1, here also ep, may be anywhere in the order or missing."""
    for sizes in factorized(world_size):
        first_seen = {}
        for order in permutations((*AXES, "ep")):
            nested = nesting(sizes, order)
            spelled = ["-".join(order), "-".join(order).upper()]
            if nested not in first_seen:
                spelled.append("-".join(nested) or "tp")
            for written in spelled:
                places = megatron_places(sizes, written)
                assert first_seen.setdefault(nested, places) == places


def test_different_nestings_give_different_layouts():
    """Three axes of size 2 can be nested in six ways, and each is a distinct layout."""
    sizes = {"tp": 2, "cp": 1, "dp": 2, "pp": 2}
    made = {tuple(map(str, megatron_places(sizes, "-".join(order)))) for order in EP_BEFORE_DP}
    assert len(made) == 6
