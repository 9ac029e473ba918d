"""Which device tensors arrive on: the CPU, unless another device is requested."""

import os

import group_workers as workers
import numpy as np
import pytest
import torch

from single_controller import (
    Broadcast,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    WorkerError,
    register,
)

TRANSPORTS = ("ray", "local", "local-threads")


@pytest.fixture(scope="module")
def group(transport):
    with transport.make(workers.OnDevices) as group:
        yield group


@pytest.fixture
def batch():
    return {"x": torch.ones(8, 3), "y": np.ones(8)}


def test_arguments_are_moved_to_the_methods_device(group, batch):
    whole = Broadcast(torch.ones(2))
    assert group.arrive(batch, whole=whole) == [("meta", (2, 3), "ndarray", "meta")] * 4


def test_futures_are_moved_to_the_methods_device(group, batch):
    future = group.make.remote(batch)
    assert group.arrive(future) == [("meta", (2, 3), "ndarray", "")] * 4


def test_results_arrive_on_the_cpu_unless_requested_otherwise(group, batch):
    here, there = group.make(batch), group.make.options(device="meta")(batch)
    assert here["x"].device.type == "cpu" and bool((here["x"] == 2).all())
    assert there["x"].device.type == "meta" and there["x"].shape == (8, 3)
    assert isinstance(there["y"], np.ndarray)
    assert group.make.options(device="meta").remote(batch).result()["x"].device.type == "meta"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_missing_on_the_worker_is_an_error_of_that_rank(group):
    with pytest.raises(WorkerError, match=r"on_cuda\(\)"):
        group.on_cuda(torch.ones(2))
    assert group.make({"x": torch.ones(4, 1), "y": np.ones(4)})["x"].shape == (4, 1)


@pytest.mark.parametrize("device", ["", 0, torch.device("cpu")], ids=repr)
def test_device_must_be_a_string(device):
    with pytest.raises(ValueError, match="is a torch device string"):
        register(Dispatch.ONE_TO_ALL, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_cuda_tensors_are_sent_and_returned(group, batch):
    batch["x"] = batch["x"].cuda()
    assert group.make(batch)["x"].device.type == "cpu"
    assert group.make.options(device="cuda")(batch)["x"].device.type == "cuda"


class Sees(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def lists(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("HIP_VISIBLE_DEVICES")


@pytest.mark.usefixtures("ray_cluster")
def test_worker_without_a_gpu_sees_none():
    """Ray shows such a worker all GPUs of the node, although none is reserved for it."""
    pool = RayResourcePool([1], use_gpu=False)
    for given, found in (({}, ("", "")), ({"CUDA_VISIBLE_DEVICES": "3"}, ("3", ""))):
        with RayWorkerGroup(pool, RayClassWithInitArgs(Sees), worker_env=given) as group:
            assert group.lists() == [found]
    pool.close()
