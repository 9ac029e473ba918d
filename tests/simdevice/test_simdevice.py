"""Runs the tests of `on_device` in a process that has a simulated CUDA device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import depth  # noqa: E402
from build import build  # noqa: E402

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device needs a C++ compiler"),
    pytest.mark.skipif(os.environ.get("SIMDEVICE") == "1", reason="these run the tests below on it anyway"),
]


TWO_RANKS = "tests/simdevice/on_device/test_two_ranks.py"
ELSEWHERE = (HERE / "files.txt").read_text().split()[1:]
"""Those of ``make test-device`` that are not in `on_device`."""
RARE = {
    "both_backends": [
        "grpo_steps_match_a_plain_loop",
        "output_layer_in_float32_under_bfloat16",
        "critic_learns_the_expected_values",
        "checkpoint_resumes_with_another_layout",
        "offload_frees_all_memory_and_onload_restores_it",
        "steps_with_a_sampling_mask_match_a_plain_loop[tp2]",
        "kl_coef_approaches_the_target[fsdp2]",
        "no_number_is_read_per_micro_batch[fsdp2]",
        "bfloat16_is_close[tp2]",
        "old_log_probs_use_the_version_that_generated_each_token[pp2]",
    ],
    "replace_ranks": [
        *(
            f"training_continues_bit_for_bit[{way}]"
            for way in ("fsdp2-lora", "hsdp4", "dp2-distributed-bf16", "ep2-distributed", "tp2-ep2-dp4", "dp2-fp16")
        ),
        "without_complete_snapshots_all_ranks_begin_at_the_checkpoint",
        "weights_of_older_versions_are_restored_too",
    ],
    "resize": [
        f"training_goes_on_with_fewer_ranks_and_with_all_again[{way}]"
        for way in ("fsdp4", "hsdp4", "tp2-dp2", "ep2-dp4", "pp2-dp2")
    ],
}
"""Tests in `tests/train/backends` that hold other tensors on a device, or move them otherwise, in ways that only
``--full`` has: HSDP, Megatron's critic, experts, Megatron on four ranks, and what `make test` has on the other backend
alone."""
LONGEST = 200
"""Seconds of one test: the process then prints its stacks, and ends."""


@pytest.mark.timeout(600)
def test_on_the_simulated_device():
    run_there("tests/simdevice/on_device", "--full" if depth.full else f"--ignore={TWO_RANKS}")


@pytest.mark.timeout(1250)
@pytest.mark.parametrize(
    "tests",
    [
        ELSEWHERE,
        ["--full", *(f"tests/train/backends/test_{file}.py::test_{name}" for file in RARE for name in RARE[file])],
    ],
    ids=["others", "rare"],
)
@pytest.mark.full("train groups, device memory, engines and batches on the simulated device")
def test_other_tests_on_the_simulated_device(tests):
    run_there(*tests)


def run_there(*tests):
    build()
    environment = os.environ | {
        "SIMDEVICE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE / "boot"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    # A thread that waits for the interpreter's lock and one of the device's is interrupted by no signal.
    stacks = ("-o", f"faulthandler_timeout={LONGEST}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *stacks, *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
