"""Megatron in a one-rank group of the in-process engine. Runs in a task's process of its own, because megatron's state
and the patches for the CPU are global to a process."""

import ray
import torch
from lm_configs import LLAMA

from single_controller import ClassWithInitArgs, LocalWorkerGroup


def train_in_this_process():
    from workers.megatron.cpu import CpuMegatronLMWorker

    made = ClassWithInitArgs(CpuMegatronLMWorker, LLAMA, None, {"lr": 1e-2}, micro_batch_size=2)
    ids = torch.arange(64).reshape(4, 16)
    for threads in (False, True):
        with LocalWorkerGroup(1, made, threads=threads) as group:
            before = group.compute_log_prob(ids)
            assert before.shape == (4, 15) and group.dp_size == 1
            for _ in range(3):
                group.train_step(ids)
            assert group.compute_log_prob(ids).mean() > before.mean()
            group.restart()
            assert torch.equal(group.compute_log_prob(ids), before)
        assert not torch.distributed.is_initialized()
    return "fine"


def test_megatron_worker_in_the_drivers_process(ray_cluster):
    there = ray.remote(num_cpus=0, max_calls=1)(train_in_this_process)
    assert ray.get(there.remote(), timeout=100) == "fine"
