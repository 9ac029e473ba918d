"""Groups of ranks of both backends that several files share. A test initialises them as it needs them."""

import pytest
from folder_scope import shared
from reference import small_llama
from train_kit import rollout, saved

from single_controller import RayResourcePool
from workers.train.group import RayTrainGroup


@pytest.fixture(scope="module")
def train_pool(ray_cluster):
    """Four slots that leave the CPUs of the test cluster to other tests."""
    return shared(__file__, "pool", lambda: RayResourcePool([4], use_gpu=False, num_cpus=0.1))


@pytest.fixture(scope="module")
def fsdp_groups(train_pool):
    """Groups of one, two and four ranks of FSDP, made when first asked for: ``fsdp_groups(2)``."""
    return groups_of("fsdp", train_pool)


@pytest.fixture(scope="module")
def megatron_groups(train_pool):
    """Groups of two and four ranks of Megatron, made when first asked for. Give `begin` the sizes."""
    return groups_of("megatron", train_pool)


def groups_of(backend, pool):
    def of(ranks):
        args = {"train_backend": backend}
        return shared(__file__, (backend, ranks), lambda: RayTrainGroup(args, 1, ranks, pool, num_gpus_per_actor=0.1))

    return of


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A small Llama with random weights, saved."""
    return saved(small_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def data():
    """A rollout of that model: ragged rows."""
    return rollout(small_llama())
