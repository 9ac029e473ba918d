"""The MEGATRON modes on all layouts of up to 64 ranks: every factorization, in every nesting of the axes."""

import pytest
from plan_helpers import AXES, check_megatron_modes, coordinates, factorizations, orders


def layouts(world_size):
    """(sizes, coordinates of each rank) of every factorization in every nesting."""
    for factors in factorizations(world_size, 4):
        sizes = dict(zip(AXES, factors, strict=True))
        for order in orders(sizes):
            yield sizes, coordinates(sizes, order)


@pytest.mark.parametrize("world_size", range(1, 65))
def test_every_layout_in_every_nesting(world_size):
    count = 0
    for sizes, places in layouts(world_size):
        check_megatron_modes(sizes, places)
        count += 1
    assert count
