"""Megatron processes shared by all files in this folder.

Importing torch and megatron costs seconds of CPU per process, so there is one group of four processes and one of eight.
Each test initializes megatron in them with the sizes that it needs.
"""

import pytest
from devices import ON_DEVICE
from folder_scope import shared
from megatron_workers import Lab

from single_controller import NVMegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool


def processes(count):
    # A fraction of a CPU each: the slots leave the test cluster's CPUs to other tests.
    pool = shared(__file__, ("pool", count), lambda: RayResourcePool([count], use_gpu=ON_DEVICE, num_cpus=0.1))
    return shared(
        __file__,
        ("group", count),
        # On two cores a rank may take long to reach the error that the others already raised.
        lambda: NVMegatronRayWorkerGroup(pool, RayClassWithInitArgs(Lab), error_grace=60),
    )


def whole(group):
    """The group, restarted if an earlier test broke it."""
    if group.broken:
        group.restart()
    return group


def until_the_file_ends(count):
    """The shared group of that many processes. Its process groups are destroyed after the last test of a file: idle
    ones would take a processor away from the tests of other files."""
    group = processes(count)
    yield group
    if not group.broken:
        group.tear_down()


@pytest.fixture(scope="module")
def four_processes(ray_cluster):
    yield from until_the_file_ends(4)


@pytest.fixture
def four(four_processes):
    return whole(four_processes)


@pytest.fixture(scope="module")
def eight_processes(ray_cluster):
    yield from until_the_file_ends(8)


@pytest.fixture
def eight(eight_processes):
    """Use this only where four ranks are not enough: it costs twice as much."""
    return whole(eight_processes)
