"""Two ranks of FSDP on a device each, and two rollout workers, each in a process of its own on one of these devices."""

from contextlib import nullcontext

import pytest
import torch
from devices import need
from host_waits import simulated, waits, waits_of_any_number_of_micro_batches
from reference import ReferenceGRPO, small_llama
from train_helpers import begin, distance, learn, rollout, saved, whole_weights

from single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from workers import RolloutManager, SamplingParams
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.rollout_worker import RolloutWorker
from workers.train.train_group import RayTrainGroup


@pytest.fixture(scope="module")
def pool(ray_cluster):
    need(2)
    with RayResourcePool([2], use_gpu=True, num_cpus=0.1) as pool:
        yield pool


@pytest.fixture(scope="module")
def train(pool):
    with RayTrainGroup({"train_backend": "fsdp"}, 1, 2, pool, 0.4) as group:
        yield group


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folder = saved(small_llama(), tmp_path_factory.mktemp("llama"))
    # A broadcast that not all ranks take part in ends soon.
    return {"hf_checkpoint": folder, "lr": 3e-3, "max_tokens_per_micro_batch": 50, "distributed_timeout_minutes": 0.5}


@pytest.fixture(scope="module")
def data():
    return rollout(small_llama())


def places(worker):
    """This rank's device, where its tensors are, and its buffers."""
    buffers = {name: (str(buffer.device), buffer.cpu()) for name, buffer in worker.model.module.named_buffers()}
    return str(worker.device), {str(tensor.device) for tensor in worker.model.tensors()}, buffers


def test_steps_are_those_of_a_plain_loop(train, args, data):
    begin(train, args)
    (*_, expected), _ = found = train.worker_group.execute_with_func_generator(places)
    assert expected, "rotary frequencies are buffers"
    for here, tensors, buffers in found:
        assert here.startswith("cuda:") and tensors == {here} and buffers.keys() == expected.keys()
        for name, (device, buffer) in buffers.items():
            assert device == here and torch.equal(buffer, expected[name][1])
    plain = ReferenceGRPO(small_llama(), lr=3e-3)
    for step in range(2):
        assert learn(train, step, data)["loss"] == pytest.approx(plain.step(data)["loss"], abs=1e-4)
    assert distance(whole_weights(train), plain.weights()) < 1e-4


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
def test_weights_reach_workers_on_the_same_devices(train, pool, args, data, delta):
    """In several rounds, each in memory that both ranks fill and both workers open. Afterwards none is open, and the
    trainers have it no more."""
    begin(train, {**args, "update_weights_transport": "device", "update_weights_bucket_bytes": 40_000,
                  "update_weights_delta": delta})  # fmt: skip
    made = RayClassWithInitArgs(RolloutWorker, HFEngine, small_llama().config)
    with RayWorkerGroup(pool, made, name_prefix="two_ranks_", collectives=False) as workers:
        train.set_rollout_manager(RolloutManager(workers, SamplingParams(4), lambda *_: 0.0))
        learn(train, 0, data)
        whole_weights(train)  # reshards the model
        before = train.worker_group.execute_with_func_generator(allocated)
        for version in (1, 2, 3):
            learn(train, version, data)
            assert train.update_weights() == train.weight_version
            expected = whole_weights(train)
            for held, opened in workers.execute_with_func_generator(received):
                assert distance(held, expected) == 0.0 and opened == 0
        assert train.worker_group.execute_with_func_generator(allocated) == before
        train.set_rollout_manager(None)


def allocated(worker):
    torch.accelerator.synchronize()
    return torch.cuda.memory_allocated()


def received(worker):
    """The engine's weights, and how much memory of other processes is open."""
    held = {name: tensor.cpu() for name, tensor in worker.engine.model.state_dict().items()}
    return held, simulated().opened()


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "sampling masks"])
@pytest.mark.parametrize("how", [{}, {"sequence_parallel_size": 2}], ids=["packed", "sequence parallel"])
def test_the_host_waits_as_often_for_many_micro_batches_as_for_one(train, args, how, masked):
    """With packed rows, of which some share a prefix, and on two ranks, which may share each sequence."""
    left = (lambda log_probs: log_probs.topk(9).indices.tolist()) if masked else None
    data = rollout(small_llama(), left=left)

    def start(most):
        begin(train, {**args, **how, "max_tokens_per_micro_batch": most})
        return nullcontext((lambda: learn(train, 0, data), lambda: train.worker_group.compute_log_prob(data)))

    waits_of_any_number_of_micro_batches(start, lambda: train.worker_group.execute_with_func_generator(waits))
