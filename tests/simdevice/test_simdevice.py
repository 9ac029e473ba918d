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
OF_GROUPS = [file for file in ELSEWHERE if file.startswith("tests/train/backends/")]
LONGEST = 200
"""Seconds of one test: the process then prints its stacks, and ends."""
RARE = [f"tests/train/backends/test_{name}.py" for name in ("both_backends", "replace_ranks", "resize")]
"""Run with ``--full``, for HSDP and Megatron on four ranks."""


@pytest.mark.timeout(600)
def test_on_the_simulated_device():
    run_there("tests/simdevice/on_device", f"--ignore={TWO_RANKS}", *(["--full"] if depth.full else []))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "files",
    [
        [TWO_RANKS],
        [file for file in OF_GROUPS if file not in RARE],
        *(["--full", file] for file in RARE),
        [file for file in ELSEWHERE if file not in OF_GROUPS],
    ],
    ids=["two ranks", "train groups", "both backends", "replace", "resize", "others"],
)
@pytest.mark.full("train groups, device memory, engines and batches on the simulated device")
def test_other_tests_on_the_simulated_device(files):
    run_there(*files)


def run_there(*files):
    build()
    environment = os.environ | {
        "SIMDEVICE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE / "boot"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    # A thread that waits for the interpreter's lock and one of the device's is interrupted by no signal.
    stacks = ("-o", f"faulthandler_timeout={LONGEST}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *stacks, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
