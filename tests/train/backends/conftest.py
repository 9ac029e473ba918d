"""Train groups of both backends, shared by several files. Each test initializes them as it needs."""

from functools import partial

import pytest
from devices import DEVICES, ON_DEVICE, need
from folder_scope import shared
from mixtures import small_mixture
from reference import small_llama
from train_helpers import begin, rollout, saved

from single_controller import RayResourcePool
from workers.train.train_group import RayTrainGroup


@pytest.fixture(scope="module")
def train_pool(ray_cluster):
    """Four slots that leave the CPUs of the test cluster to other tests; fewer on a machine with fewer devices."""
    slots = min(DEVICES, 4) if ON_DEVICE else 4
    return shared(__file__, "pool", lambda: RayResourcePool([slots], use_gpu=ON_DEVICE, num_cpus=0.1))


@pytest.fixture(scope="module")
def group_of(train_pool):
    """FSDP groups of one, two and four ranks and Megatron groups of two and four, created on first use:
    ``group_of("fsdp", 2)``. Pass Megatron's parallel sizes to `begin`."""

    def of(backend, ranks):
        need(ranks)
        actor_cls = None
        if backend == "megatron":
            from megatron_rank import MegatronRank as actor_cls
        args = {"train_backend": backend}
        make = partial(RayTrainGroup, args, 1, ranks, train_pool, 0.1, actor_cls=actor_cls)
        return shared(__file__, (backend, ranks), make)

    return of


@pytest.fixture(scope="module")
def fsdp_groups(group_of):
    return partial(group_of, "fsdp")


@pytest.fixture(scope="module")
def megatron_groups(group_of):
    return partial(group_of, "megatron")


@pytest.fixture(scope="module")
def start(group_of, llama_folder):
    """``start(way, with_ref=False, **args)``: a group with a freshly initialized model."""

    def of(way, with_ref=False, begins=0, **args):
        group = group_of(way.backend, way.ranks)
        assert begin(group, way.arguments(llama_folder, **args), with_ref) == [begins] * way.ranks
        return group

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
