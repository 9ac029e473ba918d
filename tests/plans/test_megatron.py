"""The MEGATRON modes on all layouts of up to 64 ranks: every factorization, in every nesting of the axes."""

import pytest
from plan_helpers import AXES, check_megatron_modes, coordinates, factorizations, orders

MORE = pytest.mark.full("more world sizes for the layouts of the MEGATRON modes")


@pytest.mark.parametrize("world_sizes", [range(1, 33), (64,), pytest.param(range(33, 64), marks=MORE)], ids=str)
def test_every_layout_in_every_nesting(world_sizes):
    for world_size in world_sizes:
        for factors in factorizations(world_size, 4):
            sizes = dict(zip(AXES, factors, strict=True))
            for order in orders(sizes):
                check_megatron_modes(sizes, coordinates(sizes, order))
