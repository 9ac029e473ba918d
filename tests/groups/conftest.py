"""Groups that several test files share; none of them changes its worker's processes."""

import group_workers as workers
import pytest

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@pytest.fixture(scope="session")
def pool(ray_cluster):
    """Four CPU slots, for the whole session."""
    with RayResourcePool([4], use_gpu=False) as pool:
        yield pool


@pytest.fixture(scope="session")
def counters(pool):
    """Four counters. Tests leave their values as they found them."""
    with RayWorkerGroup(pool, RayClassWithInitArgs(cls=workers.Counter, start=100)) as group:
        yield group


@pytest.fixture
def make_group(pool):
    """Makes groups on the shared pool that are closed after the test."""
    groups = []

    def make(cls, *args, group_options=None, **kwargs):
        group = RayWorkerGroup(pool, RayClassWithInitArgs(cls, *args, **kwargs), **(group_options or {}))
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.close()
