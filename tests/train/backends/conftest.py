"""Train groups of both backends, shared by several files. Each test initializes them as it needs."""

import pytest
from devices import DEVICES, ON_DEVICE, need
from folder_scope import shared
from mixtures import small_mixture
from reference import small_llama
from train_helpers import rollout, saved

from single_controller import RayResourcePool
from workers.train.train_group import RayTrainGroup


@pytest.fixture(scope="module")
def train_pool(ray_cluster):
    """Four slots that leave the CPUs of the test cluster to other tests; fewer on a machine with fewer devices."""
    slots = min(DEVICES, 4) if ON_DEVICE else 4
    return shared(__file__, "pool", lambda: RayResourcePool([slots], use_gpu=ON_DEVICE, num_cpus=0.1))


@pytest.fixture(scope="module")
def fsdp_groups(train_pool):
    """FSDP groups of one, two and four ranks, created on first use: ``fsdp_groups(2)``."""
    return groups_of("fsdp", train_pool)


@pytest.fixture(scope="module")
def megatron_groups(train_pool):
    """Megatron groups of two and four ranks, created on first use. Pass the parallel sizes to `begin`."""
    from megatron_rank import MegatronRank

    return groups_of("megatron", train_pool, MegatronRank)


def groups_of(backend, pool, actor_cls=None):
    def of(ranks):
        need(ranks)
        args = {"train_backend": backend}
        return shared(__file__, (backend, ranks), lambda: RayTrainGroup(args, 1, ranks, pool, 0.1, actor_cls=actor_cls))

    return of


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """The folder of a small Llama with random weights."""
    return saved(small_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def mixture_folder(tmp_path_factory):
    """The folder of a small mixture of experts with random weights."""
    return saved(small_mixture(), tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="session")
def data():
    """A ragged rollout of that model."""
    return rollout(small_llama())
