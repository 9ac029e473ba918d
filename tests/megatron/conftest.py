"""Four megatron processes that several test files share; megatron's groups in them are made anew as tests need them."""

import pytest
from folder_scope import shared
from megatron_workers import Lab

from single_controller import NVMegatronRayWorkerGroup, RayClassWithInitArgs, RayResourcePool


@pytest.fixture(scope="module")
def four_processes(ray_cluster):
    """On four slots that leave the CPUs of the test cluster to other tests."""
    pool = shared(__file__, "pool", lambda: RayResourcePool([4], use_gpu=False, num_cpus=0.1))
    made = RayClassWithInitArgs(cls=Lab)
    return shared(__file__, "group", lambda: NVMegatronRayWorkerGroup(resource_pool=pool, ray_cls_with_init=made))


@pytest.fixture
def four(four_processes):
    """The four, whole again if another test has broken them. A test sets up the axes that it needs."""
    if four_processes.broken:
        four_processes.restart()
    return four_processes
