"""Groups of ranks of both backends that several files share. A test initialises them as it needs them."""

import pytest
from reference import small_llama
from train_kit import saved

from single_controller import RayResourcePool
from workers.train.group import RayTrainGroup


@pytest.fixture(scope="package")
def train_pool(ray_cluster):
    """Four slots that leave the CPUs of the test cluster to other tests."""
    with RayResourcePool([4], use_gpu=False, num_cpus=0.1) as pool:
        yield pool


@pytest.fixture(scope="package")
def fsdp_groups(train_pool):
    """Groups of one, two and four ranks of FSDP, made when first asked for: ``fsdp_groups(2)``."""
    made = {}

    def of(ranks):
        if ranks not in made:
            made[ranks] = RayTrainGroup({}, 1, ranks, train_pool, num_gpus_per_actor=0.1)
        return made[ranks]

    yield of
    for group in made.values():
        group.close()


@pytest.fixture(scope="package")
def megatron_groups(train_pool):
    """Groups of two and four ranks of Megatron, made when first asked for. Give `begin` the sizes."""
    made = {}

    def of(ranks):
        if ranks not in made:
            made[ranks] = RayTrainGroup({"train_backend": "megatron"}, 1, ranks, train_pool, num_gpus_per_actor=0.1)
        return made[ranks]

    yield of
    for group in made.values():
        group.close()


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A small Llama with random weights, saved."""
    return saved(small_llama(), tmp_path_factory.mktemp("llama"))
