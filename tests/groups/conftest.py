"""Groups that several test files share; none of them changes its worker's processes.

A test of what any group does runs on every engine: Ray, and the driver's own process with and without threads. Which
ones, its file says in ENGINES, or the test with ``@pytest.mark.engines``; without either it is a test of Ray.
"""

import group_workers as workers
import pytest
import ray

from single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


def pytest_generate_tests(metafunc):
    if "engine" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("engines")
        names = mark.args if mark else getattr(metafunc.module, "ENGINES", ("ray",))
        metafunc.parametrize("engine", names, indirect=True, scope="session")


class Engine:
    """Makes groups."""

    def make(self, cls, *args, world_size=4, group_options=None, **kwargs):
        """A group of one class; it is closed by whoever asked for it."""
        return self.group(RayClassWithInitArgs(cls, *args, **kwargs), world_size, **(group_options or {}))


class OnRay(Engine):
    """Groups on the shared pool of four slots, or on pools of their own."""

    def __init__(self, pool):
        self.pool = pool
        self.pools = []

    def group(self, made, world_size=4, **options):
        pool = self.pool
        if world_size != 4:
            pool = RayResourcePool([world_size], use_gpu=False)
            self.pools.append(pool)
        return RayWorkerGroup(pool, made, **options)

    def get(self, refs):
        return ray.get(refs)

    def close(self):
        while self.pools:
            self.pools.pop().close()


class InThisProcess(Engine):
    """Groups in the test's own process."""

    def __init__(self, threads):
        self.threads = threads

    def group(self, made, world_size=4, **options):
        return LocalWorkerGroup(world_size, made, threads=self.threads, **options)

    def get(self, refs):
        return [ref.get() for ref in refs] if isinstance(refs, list) else refs.get()

    def close(self):
        pass


@pytest.fixture(scope="session")
def engine(request):
    """What makes the groups of a test, and opens their references."""
    if request.param == "ray":
        kit = OnRay(request.getfixturevalue("pool"))
    else:
        kit = InThisProcess(threads=request.param == "local-threads")
    kit.name = request.param
    yield kit
    kit.close()


@pytest.fixture(scope="session")
def pool(ray_cluster):
    """Four CPU slots, for the whole session."""
    with RayResourcePool([4], use_gpu=False) as pool:
        yield pool


@pytest.fixture(scope="session")
def counters(engine):
    """Four counters. Tests leave their values as they found them."""
    with engine.make(workers.Counter, start=100) as group:
        yield group


@pytest.fixture
def make_group(engine):
    """Makes groups of four that are closed after the test."""
    groups = []

    def make(cls, *args, **kwargs):
        group = engine.make(cls, *args, **kwargs)
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.close()
