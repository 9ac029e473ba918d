"""Megatron in a one-rank group of the in-process engine. Runs in a subprocess, because megatron's state and the patches
for the CPU are global to a process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys
sys.path.insert(0, {here!r})
import torch
from lm_configs import LLAMA
from single_controller import ClassWithInitArgs, LocalWorkerGroup
from workers.megatron.cpu import CpuMegatronLMWorker

made = ClassWithInitArgs(CpuMegatronLMWorker, LLAMA, None, {{"lr": 1e-2}}, micro_batch_size=2)
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
print("fine")
"""


def test_megatron_worker_in_the_drivers_process():
    here = str(Path(__file__).resolve().parent)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE.format(here=here))],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["fine"], done.stderr
