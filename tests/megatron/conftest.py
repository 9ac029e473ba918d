"""Megatron processes shared by all files in this folder.

Importing torch and megatron costs seconds of CPU per process, so there is one group of four processes and one of eight.
Each test initializes megatron in them with the sizes that it needs.
"""

import pytest
import torch
from devices import ON_DEVICE
from folder_scope import shared
from megatron_workers import Lab
from transformers import AutoModelForCausalLM

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


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """(Hugging Face model with random weights, norms and biases included; the folder that it is saved in)."""
    made, home = {}, tmp_path_factory.mktemp("models")

    def of(config, kind=AutoModelForCausalLM, seed=0, sharp=False):
        key = config.to_json_string(), kind.__name__, seed, sharp
        if key not in made:
            torch.manual_seed(seed)
            model = kind.from_config(config).float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.1)
                    elif sharp:  # without it, attention is nearly uniform, and positions hardly matter
                        parameter.mul_(8)
            made[key] = home / str(len(made))
            model.save_pretrained(made[key])
        return kind.from_pretrained(made[key]).float().eval(), str(made[key])

    return of
