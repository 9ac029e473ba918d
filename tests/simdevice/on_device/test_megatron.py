"""Megatron's own code for CUDA, without what `workers.megatron.cpu` replaces, on one simulated device."""

from contextlib import contextmanager

import pytest
import torch
from host_waits import waits_of_any_number_of_micro_batches
from reference import ReferenceGRPO, small_llama
from train_helpers import assert_seeds_decide, rollout, saved

from single_controller import LocalWorkerGroup, RayClassWithInitArgs
from workers.fsdp.fsdp_worker import FSDPTrainWorker
from workers.megatron.megatron_train_worker import MegatronTrainWorker

simulated = torch._simdevice


@pytest.fixture(scope="module")
def data():
    return rollout(small_llama())


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folder = saved(small_llama(), tmp_path_factory.mktemp("llama"))
    return {"train_backend": "megatron", "hf_checkpoint": folder, "lr": 3e-3, "max_tokens_per_micro_batch": 50}


def worker(cls=MegatronTrainWorker):
    return LocalWorkerGroup(1, RayClassWithInitArgs(cls))


def steps(group, data):
    return [{**group.train(step, data)[0], "seconds": 0.0} for step in range(2)]


def test_log_probs_and_steps_are_those_of_fsdp(args, data):
    """The FSDP backend is compared with the CPU in test_training.py."""
    with worker() as group:
        group.init(args, "actor")
        assert group.execute_with_func_generator(where) == [{"cuda"}]
        found = group.compute_log_prob(data).cpu()
        metrics = steps(group, data)
    torch.testing.assert_close(found, ReferenceGRPO(small_llama()).log_probs(data), atol=1e-5, rtol=1e-4)
    with worker(FSDPTrainWorker) as group:
        group.init(args | {"train_backend": "fsdp"}, "actor")
        expected = steps(group, data)
    for one, other in zip(metrics, expected, strict=True):
        del other["computed_ratio"]  # Megatron does not pack, and so does not report it
        assert {name: one[name] for name in other} == pytest.approx(other, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_close(args, data, dtype):
    with worker() as group:
        group.init(args | {"param_dtype": dtype}, "actor")
        found = group.compute_log_prob(data).cpu()
        metrics = steps(group, data)
    plain = ReferenceGRPO(small_llama(), lr=3e-3)
    torch.testing.assert_close(found, plain.log_probs(data), atol=0.1, rtol=0.1)
    for one in metrics:
        assert one["grad_norm"] == pytest.approx(plain.step(data)["grad_norm"], rel=0.1)


def test_the_host_waits_as_often_for_many_micro_batches_as_for_one(args, data):
    @contextmanager
    def start(most):
        with worker() as group:
            group.init(args | {"max_tokens_per_micro_batch": most}, "actor")
            yield lambda: group.train(0, data), lambda: group.compute_log_prob(data)

    waits_of_any_number_of_micro_batches(start)


def where(worker):
    return {tensor.device.type for tensor in worker.model.tensors()}


def test_offloaded_weights_come_back_and_their_memory_is_freed(args, data):
    faults = simulated.faults()
    with worker() as group:
        group.init(args, "actor")
        expected = steps(group, data)
        group.init(args, "actor")
        found = []
        for step in range(2):
            before = torch.cuda.memory_allocated()
            freed = group.sleep()[0]
            assert freed > 0 and before - torch.cuda.memory_allocated() >= freed * 0.9
            group.wake_up()
            found.append({**group.train(step, data)[0], "seconds": 0.0})
    assert found == expected and simulated.faults() == faults


def test_random_numbers_of_the_tensor_parallel_region_depend_on_the_seed(args):
    """Dropout there draws from a generator of megatron's, whose state is in device memory."""
    with worker() as group:
        group.init(args, "actor")
        assert_seeds_decide(group, drawn)


def drawn(worker):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        return torch.rand(4, device=worker.device).cpu()
